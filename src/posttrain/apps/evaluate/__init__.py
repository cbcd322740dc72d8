"""Evaluates a model on problems with known answers. `results.py` defines the format on disk."""
