"""Estimates the memory of one rank from the model's sizes and the run's settings. Nothing here imports torch.

Used by the worker, to decide about activation checkpointing, and by `posttrain plan`.
"""
