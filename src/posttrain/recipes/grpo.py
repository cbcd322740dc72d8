"""GRPO: sample answers or read them from labelled traces, score them, and train on group-relative advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.algorithms.token_traces import TokenSampling
from posttrain.config import EnvironmentConfig, GrpoRunConfig, PolicyConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import TaskDataset, load_task_dataset
from posttrain.data.entries import Entries
from posttrain.data.sampler import Stream
from posttrain.environments import build_environments, check_environments
from posttrain.environments.router import ScoringRouter
from posttrain.recipes.grpo_credit import (
    build_credit,
    build_objective,
    build_position,
    with_dynamic_sampling,
    with_rounds,
)
from posttrain.recipes.recipe import Prepared, Recipe, RunParts, first_rows, load_both
from posttrain.reporting.presentation import ChartSpec, Headline, Presentation, ShownMetric
from posttrain.roles import RolloutSource, Stateful
from posttrain.rollouts.fresh import FixedTasks, FreshRollouts
from posttrain.rollouts.pipelined import PipelinedRollouts
from posttrain.rollouts.recorded import RecordedRollouts
from posttrain.rollouts.turn_taking import TurnTaking, build_turns
from posttrain.types import Sampling, Task


@dataclass(frozen=True)
class GrpoRecipe(Recipe):
    config: GrpoRunConfig
    presentation: ClassVar[Presentation] = Presentation(
        "grpo",
        Headline(
            "train/reward",
            "Reward",
            lower_is_better=False,
            chart=ChartSpec(
                "Reward",
                (("train/reward", "training reward"), ("validation/accuracy", "validation accuracy")),
                "Mean reward of the rollouts of each step, and of greedy or sampled answers to held-out prompts.",
            ),
        ),
        (
            ShownMetric("loss", "Loss", "loss"),
            ShownMetric("reward", "Avg Reward", "reward"),
            ShownMetric("filtered_reward", "Avg Reward of Kept Groups", "kept"),
            ShownMetric("dynamic_sampling_num_gen_batches", "Generation Batches"),
            ShownMetric("trajectory_age_mean", "Mean Trajectory Age"),
            ShownMetric("mean_generation_length", "Mean Generation Length", "length"),
            ShownMetric("kl_penalty", "KL", "kl"),
            ShownMetric("gen_kl_error", "Generation KL Error"),
            ShownMetric("grad_norm", "Grad Norm", "grad"),
            ShownMetric("lr", "Learning Rate"),
        ),
    )

    @property
    def unit(self) -> str:
        return "prompts"

    def check(self) -> None:
        check_environments(self.environments(), Path.cwd())

    def environments(self) -> dict[str, EnvironmentConfig]:
        """The environments that a dataset names; others need no worker processes. Unknown names are reported later."""
        data, env = self.config.data, self.config.env
        named = {entry.env_name for entry in [*data.train_sets(), *data.validation_sets()]}
        return {name: settings for name, settings in env.items() if name in named} or dict(env)

    def prepare(self, chat: ChatFormat) -> Prepared:
        config, grpo = self.config, self.config.grpo
        train, validation = load_both(config.data, lambda entries: self.load_tasks(entries, chat))
        held_out = first_rows(validation, grpo.max_val_samples if grpo.max_val_samples is not None else 0)
        stream = Stream(train, grpo.seed, config.data.shuffle)
        position = build_position(config, stream)

        def algorithm(parts: RunParts) -> Grpo:
            source, validation_source = self._rollouts(stream, position, held_out, chat, parts)
            return Grpo(
                GrpoSettings(
                    num_prompts_per_step=grpo.num_prompts_per_step,
                    num_updates_per_step=config.step_sizes().num_updates,
                    overlong_filtering=grpo.overlong_filtering,
                    seq_logprob_error_threshold=grpo.seq_logprob_error_threshold,
                    num_validation_prompts=len(held_out),
                    tokens=TokenSampling(config.logger.token_data_period, config.logger.token_data_groups),
                    kl_period=config.kl_period,
                ),
                build_objective(config),
                build_credit(config),
                parts.policy,
                with_dynamic_sampling(config, source, position),
                source if isinstance(source, PipelinedRollouts) else parts.weights,
                validation_source if held_out else None,
                parts.announce,
            )

        return Prepared(train, validation, position, algorithm)

    def load_tasks(self, entries: Entries, chat: ChatFormat) -> TaskDataset:
        config, length = self.config, self.config.policy.max_total_sequence_length
        return load_task_dataset(
            entries,
            config.data.default,
            chat,
            max_prompt_tokens=min(config.data.max_input_seq_length or length, length - 1),
            seed=config.grpo.seed,
            max_total_tokens=length,
            needs_signal=config.grpo.num_fresh_per_prompt == 0,  # a fresh answer could still differ from equal ones
        )

    def scoring(
        self,
        chat: ChatFormat,
        warn: Callable[[str], None],
        cleanup: ExitStack,
        when_stopped: Callable[[Callable[[], None]], None],
    ) -> tuple[ScoringRouter, TurnTaking | None]:
        """The environments, and their multi-turn counterparts."""
        environments = self.environments()
        environment = build_environments(environments, base_folder=Path.cwd())
        cleanup.callback(environment.close)
        when_stopped(environment.interrupt)
        turns = build_turns(
            environments,
            chat,
            max_turns=self.config.grpo.max_rollout_turns,
            max_total_tokens=self.config.policy.max_total_sequence_length,
            warn=warn,
            cleanup=cleanup,
            when_stopped=when_stopped,
        )
        return environment, turns

    def _rollouts(
        self, stream: Stream[Task], position: Stateful, held_out: Sequence[Task], chat: ChatFormat, parts: RunParts
    ) -> tuple[RolloutSource, RolloutSource]:
        """The rollout sources of training and validation."""
        config, grpo = self.config, self.config.grpo
        environment, turns = self.scoring(chat, parts.warn, parts.cleanup, parts.when_stopped)
        rollouts = FreshRollouts(
            stream,
            parts.engine,
            environment,
            num_samples=config.step_sizes().num_sampled_per_row,
            sampling=sampling_of(config.policy, chat.stop_token_ids),
            seed=grpo.seed,
            show_progress=parts.show_progress,
        )
        validation_rollouts = FreshRollouts(
            FixedTasks(held_out),
            parts.engine,
            environment,
            num_samples=grpo.val_num_generations_per_prompt,
            sampling=sampling_of(config.policy, chat.stop_token_ids, validation=True),
            seed=grpo.seed + 1,  # different noise than training
            show_progress=parts.show_progress,
            label="validation",
            after_step=True,
        )
        if turns is not None:
            rollouts, validation_rollouts = turns.over(rollouts), turns.over(validation_rollouts)
        if not config.uses_recorded_answers:
            return with_rounds(config, rollouts, position, parts), validation_rollouts
        fresh = rollouts if grpo.num_fresh_per_prompt else None
        return RecordedRollouts(stream, grpo.num_recorded, grpo.seed, fresh), validation_rollouts


RECIPE = GrpoRecipe


def sampling_of(policy: PolicyConfig, end_of_turn_ids: Sequence[int], *, validation: bool = False) -> Sampling:
    generation = policy.generation
    assert generation is not None
    top_k = generation.val_top_k if validation else generation.top_k
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature if validation else generation.temperature,
        top_p=generation.val_top_p if validation else generation.top_p,
        top_k=top_k if top_k and top_k > 0 else 0,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        end_of_turn_ids=tuple(end_of_turn_ids),
        stop_strings=tuple(generation.stop_strings or ()),
        ignore_eos=generation.ignore_eos,
    )
