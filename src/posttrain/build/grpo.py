"""GRPO from its config: where rollouts come from, who judges them, and what is made of the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.algorithms.advantages import GroupAdvantages
from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.build.datasets import first_rows, options
from posttrain.config import GrpoRunConfig, PolicyConfig
from posttrain.data.sampler import Stream
from posttrain.environments import build_environments
from posttrain.generation.rollouts import FreshRollouts
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.roles import Generator, Policy, ShowProgress
from posttrain.types import Sampling, Task


@dataclass(frozen=True)
class FixedTasks:
    """The same tasks, from the first, every time: for validation."""

    tasks: Sequence[Task]

    def take(self, count: int) -> Sequence[Task]:
        return self.tasks[:count]


def environments_in_use(config: GrpoRunConfig) -> dict[str, Any]:
    """Those that some dataset names: the others need no worker processes. A name without settings is told later."""
    named = {entry.env_name for entry in [*config.data.train_sets(), *config.data.validation_sets()]}
    return {name: settings for name, settings in config.env.items() if name in named} or dict(config.env)


def build_grpo(
    config: GrpoRunConfig,
    stream: Stream,
    validation: Any,
    policy: Policy,
    generator: Generator,
    end_of_turn_ids: Sequence[int],
    show_progress: ShowProgress,
    cleanup: ExitStack,
) -> Grpo:
    grpo, estimator = config.grpo, config.grpo.adv_estimator
    environment = build_environments(environments_in_use(config), base_folder=Path.cwd())
    cleanup.callback(environment.close)
    rollouts = FreshRollouts(
        stream,
        generator,
        environment,
        num_samples=grpo.num_generations_per_prompt,
        sampling=_sampling(config.policy, end_of_turn_ids),
        seed=grpo.seed,
        show_progress=show_progress,
    )
    held_out = first_rows(validation, grpo.max_val_samples if grpo.max_val_samples is not None else 0)
    validation_rollouts = FreshRollouts(
        FixedTasks(held_out),
        generator,
        environment,
        num_samples=grpo.val_num_generations_per_prompt,
        sampling=_sampling(config.policy, end_of_turn_ids, validation=True),
        seed=grpo.seed + 1,  # other noise than training's
        show_progress=show_progress,
        label="validation",
    )
    return Grpo(
        GrpoSettings(
            grpo.num_prompts_per_step,
            grpo.num_generations_per_prompt,
            num_updates_per_step=grpo.num_samples_per_step // config.policy.train_global_batch_size,
            overlong_filtering=grpo.overlong_filtering,
            num_validation_prompts=len(held_out),
        ),
        ClippedPolicyGradient(**options(config.loss_fn, ClippedPolicyGradient)),
        GroupAdvantages(
            estimator.normalize_rewards,
            estimator.use_leave_one_out_baseline,
            grpo.advantage_clip_low,
            grpo.advantage_clip_high,
        ),
        policy,
        rollouts,
        validation_rollouts if held_out else None,
    )


def _sampling(policy: PolicyConfig, end_of_turn_ids: Sequence[int], *, validation: bool = False) -> Sampling:
    generation = policy.generation
    assert generation is not None
    prefix = "val_" if validation else ""
    top_k = getattr(generation, f"{prefix}top_k")
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=getattr(generation, f"{prefix}temperature"),
        top_p=getattr(generation, f"{prefix}top_p"),
        top_k=top_k if top_k and top_k > 0 else 0,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        end_of_turn_ids=tuple(end_of_turn_ids),
        stop_strings=tuple(generation.stop_strings or ()),
        ignore_eos=generation.ignore_eos,
    )
