"""Converts checkpoints to Hugging Face folders, and those to GGUF."""
