"""One recipe per kind of run: `recipes/<kind>.py`. This table is where a kind is registered, or a variant of one, which
is another kind with some settings (`VARIANTS` of config/runs.py).

Importing this package loads no recipe and no torch: the command line reads the table on every start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from posttrain.config import RunConfig
    from posttrain.recipes.recipe import Recipe


class KindOfRun(NamedTuple):
    summary: str  # its line of help
    method: str  # how a model was trained, for its model card
    examples: tuple[str, ...]  # files of examples/ for a config to start from


KINDS = {
    "grpo": KindOfRun(
        "GRPO: sample groups of answers, score them, train on relative advantages",
        "GRPO (reinforcement learning from rewards)",
        ("data/prompts.jsonl", "rewards.py"),
    ),
    "ppo": KindOfRun(
        "PPO: reinforcement learning with a critic that values every token",
        "PPO (reinforcement learning from rewards, with a critic)",
        ("data/prompts.jsonl", "rewards.py"),
    ),
    "distill": KindOfRun(
        "on-policy distillation: match a teacher's distributions on the model's own answers",
        "on-policy distillation",
        ("data/prompts.jsonl", "data/chat.jsonl"),
    ),
    "dpo": KindOfRun(
        "direct preference optimisation on pairs of answers",
        "a preference loss (DPO and relatives)",
        ("data/pairs.jsonl",),
    ),
    "rm": KindOfRun(
        "reward model: learn a score for answers from preference pairs",
        "the Bradley-Terry loss (a reward model)",
        ("data/pairs.jsonl",),
    ),
    "sft": KindOfRun("supervised fine-tuning on recorded answers", "supervised fine-tuning", ("data/chat.jsonl",)),
}


def recipe_for(kind: str, config: RunConfig) -> Recipe:
    """The recipe of a kind of run, with the config of one run."""
    assert kind in KINDS, f"{kind} is not a kind of training run"
    return import_module(f"{__name__}.{kind}").RECIPE(config)
