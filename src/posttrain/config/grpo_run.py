"""The whole config of a GRPO run: what follows from its sections together, and what they must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from posttrain.config.base import IsSetByUser, setting
from posttrain.config.data import REWARD, TRACE_GROUPS, EnvironmentConfig
from posttrain.config.grpo import GrpoConfig, LossFnConfig, TeacherConfig, ValueConfig, ValueLossConfig
from posttrain.config.placement import GroupRequest, group_of_reward
from posttrain.config.policy import ARGUMENTS_OF_VLLM_IN_USE, GrpoPolicyConfig, NativeConfig, PolicyConfig
from posttrain.config.rewards import RewardModelRewardConfig
from posttrain.config.run_config import RunConfig, StepSizes

KL_PERIOD = 10  # steps


class GrpoRunConfig(RunConfig):
    kind: ClassVar[str] = "grpo"
    grpo: GrpoConfig = setting(..., "Sampling, advantages, validation.")
    loss_fn: LossFnConfig = setting(..., "The clipped policy-gradient loss.")
    teacher: TeacherConfig = setting(TeacherConfig, "A model that the policy is distilled from.")
    value: ValueConfig = setting(ValueConfig, "PPO: the critic.")
    value_loss_fn: ValueLossConfig = setting(ValueLossConfig, "PPO: the loss of the critic.")
    policy: GrpoPolicyConfig = setting(..., "The model that is trained and sampled from.")

    @property
    def called(self) -> str:
        return "ppo" if self.critic is not None else self.kind if self.trains_on_rewards else "distill"

    @property
    def teacher_name(self) -> str | None:
        return self.teacher.model_name

    @property
    def critic(self) -> PolicyConfig | None:
        """With the policy's settings, but for its model and its optimizer."""
        if self.grpo.adv_estimator.name != "gae":
            return None
        policy, value = self.policy, self.value
        kwargs = {**policy.optimizer.kwargs, **value.optimizer.kwargs}
        optimizer = policy.optimizer.model_copy(update={"kwargs": kwargs})
        return policy.model_copy(update={"model_name": value.model_name or policy.model_name, "optimizer": optimizer})

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """The environments that a dataset names; others need no processes. Unknown names are reported elsewhere."""
        named = {entry.env_name for entry in [*self.data.train_sets(), *self.data.validation_sets()]}
        return {name: settings for name, settings in self.env.items() if name in named} or dict(self.env)

    @property
    def placed_rewards(self) -> dict[str, RewardModelRewardConfig]:
        """Reward models on GPUs of their own, by their fields."""
        return {
            f"env.{name}.rewards.{part}" if part else f"env.{name}": reward
            for name, block in self.environments.items()
            for part, reward in block.reward_configs(name).items()
            if isinstance(reward, RewardModelRewardConfig) and reward.resources is not None
        }

    @property
    def group_requests(self) -> list[GroupRequest]:
        found = super().group_requests
        for field, reward in self.placed_rewards.items():
            assert reward.resources is not None
            found.append(GroupRequest(group_of_reward(field), field, reward.resources))
        return found

    @property
    def trains_on_rewards(self) -> bool:
        return self.teacher.model_name is None or self.teacher.reward_weight != 0

    @property
    def uses_recorded_answers(self) -> bool:
        return any(entry.holds_recorded_groups for entry in self.data.train_sets())

    @property
    def rounds_ahead(self) -> int:
        """1: the round of a step samples while the step before it trains; 0: when the step begins."""
        section = self.grpo.async_grpo
        return int(section.enabled and section.max_trajectory_age_steps > 0 and self.num_engines > 0)

    @property
    def num_groups_in_flight(self) -> int:
        """What is trained is on average this number / the prompts of a step - 1 + `rounds_ahead` steps old."""
        section = self.grpo.async_grpo
        multiple = section.groups_in_flight
        if multiple is None:
            multiple = 1 + (section.max_trajectory_age_steps - self.rounds_ahead) / 2
        return int(multiple * self.grpo.num_prompts_per_step)

    @property
    def gpus_per_sampler(self) -> int:
        """That share the layers of what samples. A vLLM that shares the GPU of a rank has whole layers."""
        if self.num_engines or self.policy.generation.uses_vllm:
            return self.gpus_per_engine
        return self.policy.dtensor_cfg.tensor_parallel_size

    @property
    def num_samplers(self) -> int:
        """Which have equal shares of a round."""
        return self.num_engines or self.num_ranks // self.gpus_per_sampler

    @property
    def needs_reference(self) -> bool:
        """For a KL penalty, or to estimate the KL. Recorded answers come without a behaviour policy: the starting
        policy stands in for it."""
        return self.scores_with_reference or self.kl_period > 0

    @property
    def scores_with_reference(self) -> bool:
        """In every step."""
        return (self.trains_on_rewards and self.loss_fn.reference_policy_kl_penalty != 0) or self.uses_recorded_answers

    @property
    def kl_period(self) -> int:
        """Steps between estimates of a KL that is not in the loss; 0: none. It costs little with adapters."""
        if self.loss_fn.reference_policy_kl_penalty != 0:
            return 0
        if self.doctor.kl_period != "auto":
            return self.doctor.kl_period
        return KL_PERIOD if self.policy.dtensor_cfg.lora_cfg.enabled else 0

    def step_sizes(self) -> StepSizes:
        grpo = self.grpo
        num_updates = grpo.num_samples_per_step // self.policy.train_global_batch_size
        checks_policy = grpo.seq_logprob_error_threshold is not None or self.loss_fn.use_kl_in_reward
        recorded = self.uses_recorded_answers
        return StepSizes(
            grpo.num_prompts_per_step,
            num_answers_per_row=grpo.num_generations_per_prompt,
            num_sampled_per_row=grpo.num_fresh_per_prompt if recorded else grpo.num_generations_per_prompt,
            num_updates=num_updates,
            num_scorings=int(self.scores_with_reference)
            + int(num_updates > 1 or checks_policy)
            + int(self.critic is not None),
            may_sample_again=grpo.use_dynamic_sampling,
            max_turns=grpo.max_rollout_turns,
        )

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        yield from super().problems(is_set)
        yield from self._batch_problems()
        yield from self._reward_problems()
        yield from self._off_policy_problems()
        yield from self._ratio_problems()
        yield from self._round_problems()
        yield from self._vllm_problems()
        new, total = self.policy.generation.max_new_tokens, self.policy.max_total_sequence_length
        if new > total:
            yield (
                f"policy.generation.max_new_tokens = {new} does not fit into policy.max_total_sequence_length = "
                f"{total}, which holds prompt and answer: lower the first or raise the second"
            )
        if self.policy.generation.temperature == 0:
            yield (
                "policy.generation.temperature = 0 samples the same answer again and again, and training divides by "
                "it: set it above 0 (policy.generation.val_temperature may be 0)"
            )
        kl_penalty = self.loss_fn.reference_policy_kl_penalty
        if self.grpo.skip_reference_policy_logprobs_calculation and kl_penalty != 0:
            yield (
                "grpo.skip_reference_policy_logprobs_calculation needs loss_fn.reference_policy_kl_penalty = 0, which "
                f"is {kl_penalty:g}: set one of them"
            )
        if self.teacher.model_name is not None and self.uses_recorded_answers:
            yield "teacher.model_name distils from answers that the policy samples, and data.train has recorded ones"
        if self.teacher.model_name is not None and not (self.teacher.weight or self.teacher.reward_weight):
            yield "teacher.weight and teacher.reward_weight are 0: nothing would be learnt; set one of them"
        if self.critic is not None and not self.trains_on_rewards:
            yield "grpo.adv_estimator.name = gae learns from rewards: set teacher.reward_weight above 0, or use grpo"
        for name, environment in self.env.items():
            yield from environment.turns_problems(name)
        for name in self._names_with_turns if self.policy.router_replay.enabled else ():
            if self.env[name].agent is not None:
                key = "policy.router_replay.enabled = true"
                yield f"{key}: the experts of env.{name}.agent are not kept; set it to false"
        for name in self._names_with_turns if self.grpo.max_rollout_turns < 2 else ():
            key = "turns" if self.env[name].turns is not None else "agent"
            yield (
                f"env.{name}.{key} takes turns with the model, but grpo.max_rollout_turns = "
                f"{self.grpo.max_rollout_turns} ends a conversation before the model can read what the environment "
                f"returns: set it to 2 or more, or remove the {key}"
            )

    @property
    def _names_with_turns(self) -> list[str]:
        """Of the environments in use."""
        named = {entry.env_name for entry in [*self.data.train_sets(), *self.data.validation_sets()]}
        return [name for name, block in self.env.items() if block.takes_turns and name in named]

    def _batch_problems(self) -> Iterator[str]:
        grpo, size = self.grpo, self.policy.train_global_batch_size
        samples = grpo.num_samples_per_step
        product = (
            f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt = {grpo.num_prompts_per_step} * "
            f"{grpo.num_generations_per_prompt} = {samples}"
        )
        if size > samples:
            yield f"policy.train_global_batch_size = {size} is larger than {product}: set it to a divisor of {samples}"
        elif samples % size:
            yield f"{product} is not a multiple of policy.train_global_batch_size = {size}: use a divisor of {samples}"
        elif self.loss_fn.force_on_policy_ratio and size != samples:
            yield (
                f"loss_fn.force_on_policy_ratio needs one optimizer step per RL step, but {product} and "
                f"policy.train_global_batch_size = {size} make {samples // size}: set "
                f"policy.train_global_batch_size={samples}"
            )

    def _reward_problems(self) -> Iterator[str]:
        used = {entry.env_name for entry in self.data.train_sets()}
        for where, sets in self.data.sets_by_key().items():
            for name in (entry.env_name for entry in sets if entry.env_name not in self.env):
                yield (
                    f"{where}: env_name {name!r} is not under `env` (there: {', '.join(sorted(self.env)) or 'none'}); "
                    f"add env.{name or 'my_reward'}.function, or set data.default.env_name to one of those"
                )
        if self.data.default is not None and self.data.default.env_name == REWARD and REWARD not in used:
            names = ", ".join(sorted(str(name) for name in used))
            yield f"reward: data.train has env_name {names}: it would judge nothing; set data.train.env_name={REWARD}"
        estimator = self.grpo.adv_estimator
        if self.grpo.turn_credit.enabled:
            yield from self._turn_credit_problems()
        if estimator.name != "gdpo":
            return
        if self.loss_fn.use_kl_in_reward and estimator.kl_in_reward == "sequence":
            yield "grpo.adv_estimator.kl_in_reward = sequence charges the total, but gdpo credits its parts: use token"
        rewards = {name: block.reward_configs(name) for name, block in self.env.items() if name in used}
        for name in (name for name in self._names_with_turns if self.env[name].reward_configs(name)):
            yield (
                "grpo.adv_estimator.name = gdpo needs the same reward parts of every rollout, but a conversation of "
                f"env.{name} that a limit ends never comes to its judge, and has none of the judge's: use grpo, or "
                f"have the class in env.{name}.turns give all rewards as named parts, without a judge"
            )
        for name, own in rewards.items():
            # What a user's own function returns may well be parts of a reward; what our types add to theirs is not.
            if set(own) == {""} and own[""].type != "python":
                yield (
                    f"grpo.adv_estimator.name = gdpo credits several rewards one by one, and env.{name} has a single "
                    f"one, of type {own[''].type}: name several in env.{name}.rewards, or use grpo"
                )
        weights = [
            f"env.{name}.rewards.{part}.weight = {reward.weight:g}"
            for name, own in rewards.items()
            for part, reward in own.items()
            if reward.weight != 1
        ]
        if weights and estimator.reward_weights is None:
            yield (
                f"{', '.join(weights)}: gdpo credits each reward on its own, by grpo.adv_estimator.reward_weights, "
                "which is not set: give one weight for each, in alphabetical order"
            )

    def _turn_credit_problems(self) -> Iterator[str]:
        key, grpo = "grpo.turn_credit.enabled = true", self.grpo
        names = self._names_with_turns
        if all(self.env[name].turns is None for name in names):
            why = f"an agent (env.{names[0]}.agent) has no" if names else "no environment in use has"
            yield f"{key}: {why} `turns` (env.NAME.turns), so there is one reward; set it to false"
        if grpo.adv_estimator.name == "gdpo":
            yield f"{key}: gdpo credits the parts of one reward, and a turn has only its sum; use another adv_estimator"
        if grpo.adv_estimator.whiten_advantages == "rollouts":
            yield f"{key}: grpo.adv_estimator.whiten_advantages = rollouts is for one advantage a rollout; use tokens"
        if grpo.reward_scaling.enabled:
            yield f"{key}: grpo.reward_scaling maps the sum of the turns; scale the rewards in the environment instead"

    def _ratio_problems(self) -> Iterator[str]:
        loss = self.loss_fn
        of_answers = {
            "loss_fn.sequence_level_importance_ratios = true": loss.sequence_level_importance_ratios,
            "loss_fn.trust_region = geometric_mean": loss.trust_region == "geometric_mean",
        }
        of_tokens = {
            "grpo.adv_estimator.name = gae": self.critic is not None,
            "grpo.turn_credit.enabled = true": self.grpo.turn_credit.enabled,
            "teacher.over = sampled": self.teacher.model_name is not None and self.teacher.over == "sampled",
        }
        for ratio in (name for name, is_used in of_answers.items() if is_used):
            for advantage in (name for name, is_used in of_tokens.items() if is_used):
                yield f"{ratio}: an answer has one ratio, but with {advantage} an advantage for each token; unset one"

    def _off_policy_problems(self) -> Iterator[str]:
        """Recorded answers, and groups of earlier steps."""
        grpo, recorded = self.grpo, [entry.holds_recorded_groups for entry in self.data.train_sets()]
        wanted = grpo.num_recorded_per_prompt
        if any(recorded) and not all(recorded):
            yield f"data.train: {TRACE_GROUPS} and datasets without recorded answers cannot be mixed in one run"
        if wanted is not None and not any(recorded):
            yield f"grpo.num_recorded_per_prompt = {wanted} needs data.train.dataset_name={TRACE_GROUPS}"
        if wanted is not None and wanted > grpo.num_generations_per_prompt:
            yield (
                f"grpo.num_recorded_per_prompt = {wanted} is more than all answers of a prompt, "
                f"grpo.num_generations_per_prompt = {grpo.num_generations_per_prompt}"
            )
        if not self.loss_fn.force_on_policy_ratio:
            return
        if any(recorded):
            yield "loss_fn.force_on_policy_ratio: recorded answers are not the policy's own; set it to false"
        if grpo.use_dynamic_sampling and grpo.dynamic_sampling_surplus == "keep":
            yield (
                "loss_fn.force_on_policy_ratio and grpo.dynamic_sampling_surplus = keep exclude each other: groups "
                "that are kept for the next step were not sampled by its policy; set dynamic_sampling_surplus=discard"
            )

    def _placement_problems(self) -> Iterator[str]:
        yield from super()._placement_problems()
        first: dict[str, str] = {}
        groups: dict[str, str] = {}
        for field, reward in self.placed_rewards.items():
            if (other := groups.setdefault(group_of_reward(field), field)) != field:
                yield f"{field}.resources: its worker group would have the name of that of {other}; rename one of them"
            if (other := first.setdefault(reward.model_name, field)) != field:
                yield (
                    f"{field}.resources: {other} has {reward.model_name!r} on GPUs of its own already; name that "
                    "environment in both datasets (env_name), or remove one of the `resources`"
                )

    def _round_problems(self) -> Iterator[str]:
        grpo, section = self.grpo, self.grpo.async_grpo
        if not section.enabled:
            return
        field = "grpo.async_grpo.enabled = true"
        multiple, most = section.groups_in_flight, section.max_trajectory_age_steps + 1 - self.rounds_ahead
        if multiple is not None and multiple > most:
            limit = "max_trajectory_age_steps" if self.rounds_ahead else "max_trajectory_age_steps + 1"
            yield f"grpo.async_grpo.groups_in_flight = {multiple:g} is more than {limit} = {most}: groups get too old"
        if grpo.use_dynamic_sampling:
            yield f"{field} and grpo.use_dynamic_sampling = true: groups that wait could become too old; unset one"
        if self.uses_recorded_answers:
            yield f"{field}: recorded answers are not sampled, so there is nothing to continue; set it to false"
        for name in (name for name in self._names_with_turns if self.env[name].agent is not None):
            yield f"{field}: an agent (env.{name}.agent) cannot be carried over to other weights; set it to false"
        if self.loss_fn.force_on_policy_ratio:
            yield f"{field}: earlier weights sample a part of the tokens; set loss_fn.force_on_policy_ratio=false"
        if grpo.num_prompts_per_step % max(self.num_samplers, 1):
            samplers = "ranks that sample (cluster.num_nodes x gpus_per_node / tensor_parallel_size)"
            if self.num_engines:
                samplers = "engines (policy.generation.colocated.resources)"
                samplers += f", each of {self.gpus_per_engine} GPUs" if self.gpus_per_engine > 1 else ""
            yield (
                f"{field}: grpo.num_prompts_per_step = {grpo.num_prompts_per_step} is not a multiple of the "
                f"{self.num_samplers} {samplers}, which have equal shares of a round"
            )

    def _vllm_problems(self) -> Iterator[str]:
        generation, section = self.policy.generation, self.policy.generation.vllm_cfg
        if not generation.uses_vllm:
            return
        prefix, longest = "policy.generation.vllm_cfg", self.policy.max_total_sequence_length
        if section.max_model_len is not None and section.max_model_len < longest:
            yield (
                f"{prefix}.max_model_len = {section.max_model_len} is less than policy.max_total_sequence_length = "
                f"{longest}: raise it, or leave it out"
            )
        if self.grpo.async_grpo.enabled and generation.stop_strings:
            yield (
                "policy.generation.stop_strings with grpo.async_grpo.enabled = true and backend vllm: vLLM would "
                "overlook a stop string that two rounds share; use stop_token_ids, or backend native"
            )
        has_adapters, format_ = self.policy.dtensor_cfg.lora_cfg.enabled, section.load_format
        if format_ is not None and (format_ == "dummy") == has_adapters:
            read = "the weights under the adapters are read from files"
            why = read if has_adapters else "all weights are pushed, no file has them"
            yield f"{prefix}.load_format = {format_}: in this run {why}; set it to null"
        for key in sorted(ARGUMENTS_OF_VLLM_IN_USE & generation.vllm_kwargs.keys()):
            instead = f"use {prefix}.{key}" if key in type(section).model_fields else "remove it"
            yield f"policy.generation.vllm_kwargs.{key}: posttrain sets this argument of vLLM itself; {instead}"
        if section.tensor_parallel_size > 1 and not self.num_engines and self.policy.device != "cpu":
            yield (
                f"{prefix}.tensor_parallel_size = {section.tensor_parallel_size}: a vLLM that shares GPUs with "
                "training has the one GPU of its rank; set it to 1, or give vLLM GPUs of its own "
                "(policy.generation.colocated.enabled=false)"
            )

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        yield from super().cautions(is_set)
        grpo, generation, native = self.grpo, self.policy.generation, self.policy.generation.native_cfg
        in_fp8 = native.precision == "fp8"
        if (in_fp8 or self.policy.fp8) and not self.loss_fn.use_importance_sampling_correction:
            yield (
                f"loss_fn.use_importance_sampling_correction = false: with the {'sampler' if in_fp8 else 'trainer'} "
                "in FP8 the sampler is another policy than the one that is trained, and nothing corrects for it"
            )
        for key in ("kv_cache_dtype", "num_first_layers_in_bf16", "num_last_layers_in_bf16"):
            if not in_fp8 and (value := getattr(native, key)) not in (getattr(NativeConfig(), key), "bfloat16"):
                yield f"policy.generation.native_cfg.{key} = {value}: only native_cfg.precision = fp8 quantises"
        if grpo.max_rollout_turns > 1 and not self._names_with_turns:
            yield f"grpo.max_rollout_turns: {grpo.max_rollout_turns} changes nothing: no environment in use has `turns`"
        key = "grpo.adv_estimator.kl_in_reward"
        if is_set(key) and grpo.adv_estimator.kl_in_reward is not None and not self.loss_fn.use_kl_in_reward:
            yield f"{key}: loss_fn.use_kl_in_reward is off, so it is not used"
        of_critic = {
            "value": self.value != ValueConfig(),
            "value_loss_fn": self.value_loss_fn != ValueLossConfig(),
            "grpo.policy_training_start_step": grpo.policy_training_start_step > 0,
        }
        for key in (key for key, is_given in of_critic.items() if is_given and self.critic is None):
            yield f"{key}: only PPO has a critic (posttrain ppo, or grpo.adv_estimator.name=gae), so it is not used"
        if self.critic is not None and (begins := grpo.policy_training_start_step) >= (steps := grpo.max_num_steps):
            yield f"grpo.policy_training_start_step = {begins}, but grpo.max_num_steps = {steps}: no policy is trained"
        for name, number in generation.colocated.resources:
            if generation.colocated.enabled and number not in (None, getattr(self.cluster, name)):
                yield (
                    f"policy.generation.colocated.resources.{name} = {number}: policy.generation.colocated.enabled is "
                    "true, so all GPUs train and sample; set that to false for GPUs that only sample"
                )
        zone, longest = grpo.reward_shaping.zone, generation.max_new_tokens
        if zone is not None and (begins := zone.max_length - zone.buffer_length) >= longest:
            yield (
                f"grpo.reward_shaping: the penalty begins at {begins} tokens, but answers end at "
                f"policy.generation.max_new_tokens = {longest}: lower max_response_length"
            )
