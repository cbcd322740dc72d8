"""The settings of generation that a model brought, saved as they were loaded.

Many models name a temperature without `do_sample`. transformers loads that with a warning and refuses to save it: a training
would end at its first checkpoint. Nothing of it is ours to change, so it is written as it was.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig


class KeptGenerationConfig(GenerationConfig):
    def validate(self, strict: bool = False, **details: Any) -> None:
        if not strict:  # which is asked for by saving alone
            super().validate(**details)


def keep_generation_config(model: Any) -> None:
    """Let the model be saved with whatever settings of generation it was loaded with; some kinds of model have none."""
    if isinstance(getattr(model, "generation_config", None), GenerationConfig):
        model.generation_config.__class__ = KeptGenerationConfig
