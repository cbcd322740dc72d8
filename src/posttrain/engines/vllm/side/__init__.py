"""The programs that run inside vLLM's own Python environment: its process, its weight receiver, and their common
format.

Only this folder of posttrain is on that environment's path, so these files do not import the package posttrain.
"""
