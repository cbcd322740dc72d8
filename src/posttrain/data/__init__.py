"""Converts rows to tokenised tasks, preference pairs and supervised examples, in a seeded order."""
