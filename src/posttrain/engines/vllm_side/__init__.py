"""The programs that run inside vLLM's own Python environment: its process, its weight receiver, and their common format.

This folder is all of posttrain that is on that environment's path, so these files import nothing of posttrain by package name.
"""
