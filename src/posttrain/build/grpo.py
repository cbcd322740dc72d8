"""GRPO from its config: where rollouts come from, who judges them, and what is made of the rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.build.credit import build_credit, build_objective, build_selection
from posttrain.build.datasets import first_rows
from posttrain.build.turns import build_turns
from posttrain.config import GrpoRunConfig, PolicyConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.sampler import Stream
from posttrain.environments import build_environments
from posttrain.roles import Engine, RolloutSource, ShowProgress, Trainer, WeightSync
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.recorded import RecordedRollouts
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


def uses_record(config: GrpoRunConfig) -> bool:
    """Whether answers come from labelled traces. Nobody knows who gave them: the starting policy is kept to stand in."""
    return any(entry.holds_recorded_groups for entry in config.data.train_sets())


def build_grpo(
    config: GrpoRunConfig,
    stream: Stream,
    validation: Any,
    policy: Trainer,
    engine: Engine,
    weights: WeightSync,
    chat: ChatFormat,
    show_progress: ShowProgress,
    cleanup: ExitStack,
    warn: Callable[[str], None],
) -> Grpo:
    grpo = config.grpo
    end_of_turn_ids = chat.stop_token_ids
    environment = build_environments(environments_in_use(config), base_folder=Path.cwd())
    cleanup.callback(environment.close)
    turns = build_turns(config, environments_in_use(config), chat, warn, cleanup)
    learns_from_record = uses_record(config)
    rollouts = FreshRollouts(
        stream,
        engine,
        environment,
        num_samples=grpo.num_fresh_per_prompt if learns_from_record else grpo.num_generations_per_prompt,
        sampling=_sampling(config.policy, end_of_turn_ids),
        seed=grpo.seed,
        show_progress=show_progress,
    )
    held_out = first_rows(validation, grpo.max_val_samples if grpo.max_val_samples is not None else 0)
    validation_rollouts = FreshRollouts(
        FixedTasks(held_out),
        engine,
        environment,
        num_samples=grpo.val_num_generations_per_prompt,
        sampling=_sampling(config.policy, end_of_turn_ids, validation=True),
        seed=grpo.seed + 1,  # other noise than training's
        show_progress=show_progress,
        label="validation",
    )
    if turns is not None:
        rollouts, validation_rollouts = turns.over(rollouts), turns.over(validation_rollouts)
    source: RolloutSource = rollouts
    if learns_from_record:
        fresh = rollouts if grpo.num_fresh_per_prompt else None
        source = RecordedRollouts(stream, grpo.num_recorded, grpo.seed, fresh)
    return Grpo(
        GrpoSettings(
            num_updates_per_step=grpo.num_samples_per_step // config.policy.train_global_batch_size,
            overlong_filtering=grpo.overlong_filtering,
            seq_logprob_error_threshold=grpo.seq_logprob_error_threshold,
            num_validation_prompts=len(held_out),
        ),
        build_objective(config),
        build_credit(config),
        build_selection(config),
        policy,
        source,
        weights,
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
