"""Models in and out: other formats to a Hugging Face folder."""
