"""One recipe per kind of run: `recipes/<kind>.py`. This table is where a kind is registered, with its line of help.

Importing this package loads no recipe and no torch: the command line reads the table on every start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.config import RunConfig
    from posttrain.recipes.recipe import Recipe

KINDS = {
    "grpo": "reinforcement learning: sample, score, and prefer what scored better in its group",
    "dpo": "direct preference optimisation on pairs of answers",
    "rm": "reward model: learn a score for answers from pairs of them",
    "sft": "supervised fine-tuning on recorded answers",
}


def recipe_for(kind: str, config: RunConfig) -> Recipe:
    """The recipe of a kind of run, with the config of one run."""
    assert kind in KINDS, f"{kind} is not a kind of training run"
    recipe: Recipe = import_module(f"{__name__}.{kind}").RECIPE(config)
    return recipe
