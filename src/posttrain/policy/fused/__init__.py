"""Decoder layers of the Llama pattern, run with fused kernels: the same weights, the same numbers, fewer passes over
memory.
"""
