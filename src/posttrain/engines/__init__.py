"""Engines that sample completions: the native one, and vLLM."""
