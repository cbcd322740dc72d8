"""posttrain tunes language models from preferences and rewards."""

__version__ = "0.1.0"
