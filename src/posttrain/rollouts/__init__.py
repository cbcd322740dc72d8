"""Rollout sources: fresh, recorded, multi-turn, dynamic sampling. Used by training, validation and evaluation."""
