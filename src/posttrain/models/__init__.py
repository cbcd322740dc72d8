"""Finds, fetches and loads models: a folder, an adapter, a checkpoint, a hub name, a registry name."""
