"""The demo: a small model is created and trained on arithmetic."""
