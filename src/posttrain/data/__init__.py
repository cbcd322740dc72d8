"""Rows become tasks, preference pairs and supervised examples, in tokens and in a seeded order."""
