"""Measuring a model on problems with known answers. `results.py` is the format on disk that everything else reads."""
