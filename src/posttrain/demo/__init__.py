"""The demo: a small model, made and taught here, that gets better at arithmetic while you watch."""
