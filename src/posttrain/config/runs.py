"""The kinds of run, and the config of each: the one registration of a kind in the config layer."""

from __future__ import annotations

from typing import Literal

from posttrain.config.base import Section
from posttrain.config.dpo import DpoRunConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.grpo import GrpoRunConfig
from posttrain.config.rm import RmRunConfig
from posttrain.config.sft import SftRunConfig

Kind = Literal["grpo", "dpo", "rm", "sft", "eval"]
KINDS: tuple[Kind, ...] = ("grpo", "dpo", "rm", "sft")  # those that train
SUPERVISED_KINDS: tuple[Kind, ...] = ("dpo", "rm", "sft")  # those that sample nothing
PAIR_KINDS: tuple[Kind, ...] = ("dpo", "rm")  # those whose rows are pairs of answers
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "eval")

RUN_CONFIGS: dict[Kind, type[Section]] = {
    "grpo": GrpoRunConfig,
    "dpo": DpoRunConfig,
    "rm": RmRunConfig,
    "sft": SftRunConfig,
    "eval": EvalRunConfig,
}
