"""Which code scores which type of reward. The keys of each type are a section of `posttrain.config.rewards`.

Most rewards are scored in worker processes: `WORKER_SCORERS` names, as `module:function`, a function that gets the
setup of a worker (the type's section as plain JSON values under their own keys, and `base_folder`, which paths are
relative to) and returns a function from a `ScoringItem` to a number or a dict of named numbers. It raises `BadSetup`
when the setup cannot work, which ends a run before a model is loaded; for one completion, `Unscored`. It may not import
torch.

A reward that must run in the models' process is `IN_PROCESS`: a function from `RewardSettings` to a
`roles.Environment`.

Imported by every worker, so this module has names only.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from posttrain.files.json_files import JsonMapping

if TYPE_CHECKING:
    from posttrain.environments.item import ScoringItem

WORKER_SCORERS: dict[str, str] = {
    "math": "posttrain.environments.math_answers:math_scorer",
    "math_cosine": "posttrain.environments.math_answers:cosine_math_scorer",
    "multiple_choice": "posttrain.environments.text_rewards:multiple_choice_scorer",
    "exact": "posttrain.environments.text_rewards:exact_scorer",
    "box": "posttrain.environments.text_rewards:box_scorer",
    "regex": "posttrain.environments.text_rewards:regex_scorer",
    "json_schema": "posttrain.environments.text_rewards:json_schema_scorer",
    "length": "posttrain.environments.text_rewards:length_scorer",
    "repetition": "posttrain.environments.text_rewards:repetition_scorer",
    "none": "posttrain.environments.text_rewards:no_scorer",
    "python": "posttrain.environments.python_function:function_scorer",
    "code": "posttrain.environments.code_tests:code_scorer",
    "judge": "posttrain.environments.judge:judge_scorer",
    "turns": "posttrain.environments.turns.worker_side:turn_taker",  # no reward: `env.<name>.turns`
    "agent": "posttrain.environments.agents.runner:agent_runner",  # no reward: `env.<name>.agent`
}

IN_PROCESS = {"reward_model": "posttrain.environments.reward_model:reward_model_environment"}

# Of a worker process, where an answer such as 9^9^9^9, whose digits would exhaust the machine, is computed.
MEMORY_LIMIT_BYTES: dict[str, int] = {"math": 4 << 30, "math_cosine": 4 << 30}


def worker_scorer(setup: JsonMapping) -> Callable[[ScoringItem], object]:
    """The function from an item to its reward."""
    scorer: Callable[[ScoringItem], object] = resolve_name(WORKER_SCORERS[setup["type"]])(setup)
    return scorer
