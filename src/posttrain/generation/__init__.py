"""Sampling: the native engine, and rollouts made with any engine."""
