"""GRPO: sample answers or read them from labelled traces, score them, and train on group-relative advantages.

Credit follows from the config: which groups are trained on, how rewards become advantages, and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms.advantages import ESTIMATORS, Spread, Whitening
from posttrain.algorithms.credit import (
    Credit,
    CutOffPenalty,
    KlInReward,
    OverlongPenalty,
    RewardScaling,
    RewardStep,
    TokenCredit,
    TurnCredit,
)
from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.algorithms.step_reports import TokenSampling
from posttrain.checkpointing.run_folder import run_folder
from posttrain.config import AdvEstimatorConfig, EnvironmentConfig, GrpoRunConfig, PolicyConfig
from posttrain.config.placement import REFERENCE, group_of_reward
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import TaskDataset, load_task_dataset
from posttrain.data.entries import Entries
from posttrain.data.errors import DataError
from posttrain.data.row_dataset import Stream
from posttrain.environments import build_environments, check_environments
from posttrain.environments.reward_model import reward_model_environment
from posttrain.environments.router import ScoringRouter
from posttrain.environments.settings import read_settings
from posttrain.errors import InputError
from posttrain.files.digests import digest
from posttrain.models.loading import check_model_exists, load_tokenizer
from posttrain.orchestration.ahead import PlacedReward
from posttrain.orchestration.deadlines import deadline_s
from posttrain.orchestration.sampler_check import CheckedEngine
from posttrain.orchestration.sharded import ActorCritic, ShardedEngine, ShardedTrainer
from posttrain.orchestration.workers import WorkerGroup
from posttrain.policy.objectives import ClippedPolicyGradient, Distillation, ValueLoss
from posttrain.policy.objectives.distillation import TeacherDivergence
from posttrain.recipes.recipe import Prepared, Recipe, RunParts, first_rows, load_both, presentation_of
from posttrain.reporting.presentation import Presentation
from posttrain.reporting.run_files import AGENT_CALLS_FOLDER
from posttrain.roles import Environment, RolloutSource, RoundEngine, Stateful, Trainer
from posttrain.rollouts.agents import TurnTaking, build_conversations
from posttrain.rollouts.dynamic_sampling import DynamicSampling, StreamAndSurplus
from posttrain.rollouts.fresh import FixedTasks, FreshRollouts, RecordedRollouts, TaughtRollouts
from posttrain.rollouts.pipelined import PipelinedRollouts
from posttrain.rollouts.rounds import RoundRollouts, StreamAndOpenGroups
from posttrain.types import Completion, OpenGroup, Sampling, Task

Listener = Callable[[OpenGroup], None]


@dataclass(frozen=True)
class GrpoRecipe(Recipe):
    config: GrpoRunConfig
    presentation: ClassVar[Presentation] = presentation_of("grpo")

    def shown(self) -> Presentation:
        if self.config.trains_on_rewards:
            return self.presentation
        return replace(presentation_of("distill"), kind=self.config.kind)

    def trainer_type(self) -> Callable[..., ShardedTrainer]:
        if self.config.critic is None:
            return ShardedTrainer
        loss, warmup = self.config.value_loss_fn, self.config.grpo.policy_training_start_step
        num_updates = warmup * self.config.step_sizes().num_updates
        return partial(ActorCritic, value_loss=ValueLoss(loss.scale, loss.cliprange), warmup_updates=num_updates)

    @property
    def _other_models(self) -> dict[str, str]:
        """By their fields; they read the policy's tokens."""
        names = {"teacher.model_name": self.config.teacher.model_name}
        if self.config.critic is not None:
            names["value.model_name"] = self.config.value.model_name
        return {field: name for field, name in names.items() if name is not None}

    def check(self) -> None:
        for field, name in self._other_models.items():
            check_model_exists(name, field)
        check_environments(self.environments(), Path.cwd())

    def environments(self) -> dict[str, EnvironmentConfig]:
        return self.config.environments

    def beside(self) -> Mapping[str, Callable[[], object]]:
        placed = self.config.placed_rewards
        settings = [
            own for each in read_settings(self.environments(), Path.cwd()).values() for own in each.rewards.values()
        ]
        return {
            group_of_reward(own.path): partial(reward_model_environment, own) for own in settings if own.path in placed
        }

    def prepare(self, chat: ChatFormat) -> Prepared:
        config, grpo = self.config, self.config.grpo
        for field, name in self._other_models.items():
            _check_vocabulary(field, name, chat)
        train, validation = load_both(config.data, lambda entries: self.load_tasks(entries, chat))
        held_out = first_rows(validation, grpo.max_val_samples if grpo.max_val_samples is not None else 0)
        stream = Stream(train, grpo.seed, config.data.shuffle)
        position = build_position(config, stream)

        def algorithm(parts: RunParts) -> Grpo:
            source, validation_source = self._rollouts(stream, position, held_out, chat, parts)
            chosen = with_dynamic_sampling(config, source, position, self._begin_reference(parts))
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
                build_credit(config, parts.policy),
                parts.policy,
                chosen if config.trains_on_rewards else TaughtRollouts(chosen),
                source if isinstance(source, PipelinedRollouts) else parts.weights,
                validation_source if held_out else None,
                parts.announce,
            )

        return Prepared(train, validation, position, algorithm, "prompts")

    def load_tasks(self, entries: Entries, chat: ChatFormat) -> TaskDataset:
        config, length = self.config, self.config.policy.max_total_sequence_length
        tasks = load_task_dataset(
            entries,
            config.data.default,
            chat,
            max_prompt_tokens=min(config.data.max_input_seq_length or length, length - 1),
            seed=config.grpo.seed,
            max_total_tokens=length,
            needs_signal=config.grpo.num_fresh_per_prompt == 0,  # a fresh answer could still differ from equal ones
        )
        agents = {name for name, block in self.environments().items() if block.agent is not None}
        if (task := tasks.first_with_images(agents)) is not None:
            raise DataError(f"{task.id}: has images, which are not given to agents (env.{task.environment}.agent)")
        return tasks

    def scoring(
        self,
        chat: ChatFormat,
        warn: Callable[[str], None],
        cleanup: ExitStack,
        when_stopped: Callable[[Callable[[], None]], None],
        journals: Path | None = None,
        beside: Callable[[str], WorkerGroup | None] = lambda name: None,
    ) -> tuple[ScoringRouter, TurnTaking]:
        """The environments, and what makes conversations of single turns where they ask for it. `journals`: the folder
        for those of agents."""
        environments, model = self.environments(), self.config.policy.model_name

        def placed(path: str) -> Environment | None:
            group = beside(group_of_reward(path))
            return None if group is None else PlacedReward(group)

        environment = build_environments(environments, base_folder=Path.cwd(), placed=placed)
        cleanup.callback(environment.close)
        when_stopped(environment.interrupt)
        identity = digest(self.config.model_dump_json(exclude={"logger", "checkpointing", "cluster"}))
        turns = build_conversations(
            environments,
            chat,
            model=model,
            max_turns=self.config.grpo.max_rollout_turns,
            max_total_tokens=self.config.policy.max_total_sequence_length,
            warn=warn,
            cleanup=cleanup,
            when_stopped=when_stopped,
            journals=None if journals is None else (journals, identity),
        )
        return environment, turns

    def _rollouts(
        self, stream: Stream[Task], position: Stateful, held_out: Sequence[Task], chat: ChatFormat, parts: RunParts
    ) -> tuple[RolloutSource, RolloutSource]:
        """The rollout sources of training and validation."""
        config, grpo = self.config, self.config.grpo
        folder = run_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir) / AGENT_CALLS_FOLDER
        environment, turns = self.scoring(chat, parts.warn, parts.cleanup, parts.when_stopped, folder, parts.beside)
        begin, validation_begin = self._listeners(environment, parts)
        rollouts = FreshRollouts(
            stream,
            self._telling(parts.engine, begin),
            environment,
            num_samples=config.step_sizes().num_sampled_per_row,
            sampling=sampling_of(config.policy, chat.stop_token_ids),
            seed=grpo.seed,
            show_progress=parts.show_progress,
            when_whole=begin,
        )
        validation_rollouts = FreshRollouts(
            FixedTasks(held_out),
            self._telling(parts.engine, validation_begin),
            environment,
            num_samples=grpo.val_num_generations_per_prompt,
            sampling=sampling_of(config.policy, chat.stop_token_ids, validation=True),
            seed=grpo.seed + 1,  # different noise than training
            show_progress=parts.show_progress,
            label="validation",
            after_step=True,
        )
        rollouts, validation_rollouts = turns(rollouts), turns(validation_rollouts)
        if not config.uses_recorded_answers:
            return with_rounds(config, rollouts, position, parts), validation_rollouts
        fresh = rollouts if grpo.num_fresh_per_prompt else None
        return RecordedRollouts(stream, grpo.num_recorded, grpo.seed, fresh), validation_rollouts

    def _listeners(self, environment: ScoringRouter, parts: RunParts) -> tuple[Listener | None, Listener | None]:
        """What is begun with whole groups, in training and in validation, by models on devices of their own."""
        rewards, reference = bool(self.config.placed_rewards), self._begin_reference(parts)

        def score(group: OpenGroup) -> None:
            answers = [answer for answer in group.answers if isinstance(answer, Completion) and answer.error is None]
            # What is judged of a conversation is known when its last turn has ended.
            if answers and group.task.environment not in self._talking:
                environment.begin(group.task, answers)

        def both(group: OpenGroup) -> None:
            if reference is not None:
                reference(group)
            if rewards:
                score(group)

        return both if rewards or reference is not None else None, score if rewards else None

    def _begin_reference(self, parts: RunParts) -> Listener | None:
        is_used = parts.beside(REFERENCE) is not None and self.config.scores_with_reference
        return parts.policy.begin_reference if is_used and isinstance(parts.policy, ShardedTrainer) else None

    def _telling(self, engine: RoundEngine, when_whole: Listener | None) -> RoundEngine:
        """The engine, which tells `when_whole` of groups while it samples others: not of turns of a conversation."""
        if when_whole is None or not isinstance(engine, ShardedEngine):
            return engine

        def tell(group: OpenGroup) -> None:
            if group.task.environment not in self._talking:
                when_whole(group)

        return engine.telling(tell)

    @property
    def _talking(self) -> set[str]:
        """The environments that take turns with the model."""
        return {name for name, block in self.environments().items() if block.takes_turns}


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


def build_position(config: GrpoRunConfig, stream: Stateful) -> Stateful:
    """What a checkpoint holds of the data: the position in the stream, and groups for later steps where
    there are any.
    """
    if config.grpo.async_grpo.enabled:
        return StreamAndOpenGroups(stream)
    return StreamAndSurplus(stream) if config.grpo.use_dynamic_sampling else stream


def with_rounds(config: GrpoRunConfig, fresh: FreshRollouts, position: Stateful, parts: RunParts) -> RolloutSource:
    """`fresh` itself if every step samples its own groups."""
    if not isinstance(position, StreamAndOpenGroups):
        return fresh
    rounds = RoundRollouts(
        fresh,
        parts.engine if not isinstance(fresh.engine, ShardedEngine) else fresh.engine,
        position,
        config.grpo.async_grpo.max_trajectory_age_steps,
        config.num_groups_in_flight,
        parts.max_steps,
    )
    if not config.rounds_ahead:
        return rounds
    # A round makes one call per turn. Each call has its own deadline, whose error names the engine.
    limit_s = deadline_s("sample_round") * (config.grpo.max_rollout_turns + 1)
    compare = parts.engine.compare_short_answers if isinstance(parts.engine, CheckedEngine) else None
    return PipelinedRollouts.start(rounds, parts.weights, limit_s, parts.cleanup, compare)


def with_dynamic_sampling(
    config: GrpoRunConfig, source: RolloutSource, position: Stateful, when_earlier: Listener | None = None
) -> RolloutSource:
    """The source itself if every group is trained on."""
    grpo = config.grpo
    if not isinstance(position, StreamAndSurplus):
        return source
    return DynamicSampling(
        source,
        position,
        num_per_batch=int(grpo.num_prompts_per_step * grpo.batch_multiplier),
        max_batches=grpo.dynamic_sampling_max_gen_batches,
        keeps_surplus=grpo.dynamic_sampling_surplus == "keep",
        looks_at_parts=ESTIMATORS[grpo.adv_estimator.name].credits_parts,
        looks_at_turns=grpo.turn_credit.enabled,
        scaling=_scaling(config),
        when_earlier=when_earlier,
    )


def build_credit(config: GrpoRunConfig, policy: Trainer | None = None) -> Credit:
    """`policy` has the critic, if there is one."""
    estimator = config.grpo.adv_estimator
    form = ESTIMATORS[estimator.name]
    over = estimator.whiten_advantages or form.whiten_over
    if not config.trains_on_rewards:
        return Credit(form.build(estimator, _spread(estimator, Spread())))
    kind: Callable[..., Credit] = Credit
    if isinstance(policy, ActorCritic):
        kind = partial(TokenCredit, values=policy.values, gamma=estimator.gae_gamma, lam=estimator.gae_lambda)
    return kind(
        form.build(estimator, _spread(estimator, Spread())),
        reward_steps=_reward_steps(config),
        whitening=None if over == "none" else Whitening(over, _spread(estimator, form.whiten_by)),
        kl=_kl_in_reward(config),
        clip_low=config.grpo.advantage_clip_low,
        clip_high=config.grpo.advantage_clip_high,
        turns=TurnCredit(config.grpo.turn_credit.discount) if config.grpo.turn_credit.enabled else None,
    )


def build_objective(config: GrpoRunConfig) -> ClippedPolicyGradient:
    changes: dict[str, object] = {}
    if config.loss_fn.use_kl_in_reward:
        changes["reference_policy_kl_penalty"] = 0.0
    normalizer = ESTIMATORS[config.grpo.adv_estimator.name].loss_normalizer
    if normalizer is not None and config.loss_fn.loss_normalizer is None:
        changes["loss_normalizer"] = normalizer
    loss_fn, teacher = config.loss_fn.model_copy(update=changes), config.teacher
    if teacher.model_name is None:
        return ClippedPolicyGradient(loss_fn)
    if not teacher.reward_weight:
        loss_fn = loss_fn.model_copy(update={"reference_policy_kl_penalty": 0.0})
    divergence = TeacherDivergence(teacher.divergence, teacher.over, teacher.top_k)
    return Distillation(loss_fn, divergence, teacher.weight, teacher.reward_weight)


def _check_vocabulary(field: str, name: str, chat: ChatFormat) -> None:
    """A token must be the same in both models."""
    own, theirs = chat.tokenizer.get_vocab(), load_tokenizer(name, field).get_vocab()
    if own != theirs:
        different = sum(theirs.get(token) != number for token, number in own.items())
        raise InputError(
            f"{field}: {name!r} has another tokenizer than the policy: {different} of {len(own)} tokens differ, and it "
            f"has {len(theirs)}; use a model of the same family"
        )


def _spread(config: AdvEstimatorConfig, own: Spread) -> Spread:
    return Spread(
        own.ddof if config.std_ddof is None else config.std_ddof,
        own.epsilon if config.std_epsilon is None else config.std_epsilon,
        own.form if config.std_epsilon_form is None else config.std_epsilon_form,
    )


def _kl_in_reward(config: GrpoRunConfig) -> KlInReward | None:
    loss, estimator = config.loss_fn, config.grpo.adv_estimator
    if not loss.use_kl_in_reward:
        return None
    return KlInReward(
        loss.reference_policy_kl_penalty,
        estimator.kl_in_reward or ESTIMATORS[estimator.name].kl_charged_to,
        loss.reference_policy_kl_type,
        loss.kl_input_clamp_value,
        loss.kl_output_clamp_value,
    )


def _scaling(config: GrpoRunConfig) -> RewardScaling | None:
    scaling = config.grpo.reward_scaling
    if not scaling.enabled:
        return None
    return RewardScaling(scaling.source_min, scaling.source_max, scaling.target_min, scaling.target_max)


def _reward_steps(config: GrpoRunConfig) -> tuple[RewardStep, ...]:
    scaling, shaping = _scaling(config), config.grpo.reward_shaping
    steps: list[RewardStep] = [] if scaling is None else [scaling]
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None:
        steps.append(CutOffPenalty(shaping.stop_properly_penalty_coef))
    elif shaping.zone is not None:
        steps.append(OverlongPenalty(*shaping.zone))
    return tuple(steps)
