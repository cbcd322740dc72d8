"""What the fields of a config must agree on. Asked when it is loaded, long before a model is.

Each finding names the fields, their values and the remedy. A check reads only the config, neither data nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from posttrain.config.aliases import REWARD
from posttrain.config.data import TRACE_GROUPS
from posttrain.config.dpo import DpoRunConfig
from posttrain.config.evaluation import EvalRunConfig, check_eval, eval_cautions
from posttrain.config.generation import ARGUMENTS_OF_VLLM_IN_USE, NativeConfig
from posttrain.config.grpo import GrpoRunConfig
from posttrain.config.loss import LossFnConfig
from posttrain.config.preference_losses import ambiguous_loss, check_preference_loss
from posttrain.config.run_config import RunConfig
from posttrain.config.turns import check_turn_classes, check_turns, unused_turns
from posttrain.config.variants import check_variants, compares_within_group, normalizer, unused_variants

IsSetByUser = Callable[[str], bool]


def check_run(config: RunConfig | EvalRunConfig, is_set: IsSetByUser) -> list[str]:
    """Everything in `config` that contradicts itself."""
    if isinstance(config, EvalRunConfig):
        return [*check_eval(config), *check_turn_classes(config.env)]
    found = [*_data(config), *_optimizer(config), *_fp8(config), *config.scoring_layer_problems()]
    found += [*_dedicated(config)] or [*_parallelism(config)]
    if isinstance(config, GrpoRunConfig):
        found += [*_batches(config), *_groups(config), *_loss(config), *_lengths(config), *_stopping(config)]
        found += [*_record(config), *_rounds(config), *_vllm(config), *_short_reward(config)]
        found += check_turns(config)
        found += check_variants(config)
    else:
        found += _micro_batches(config, is_set)
    if isinstance(config, DpoRunConfig):
        found += check_preference_loss(config)
    return found


def _short_reward(config: GrpoRunConfig) -> Iterator[str]:
    """`reward=` sets data.default.env_name, which data sets with an env_name of their own do not use."""
    used = {entry.env_name for entry in config.data.train_sets()}
    if config.data.default is not None and config.data.default.env_name == REWARD and REWARD not in used:
        names = ", ".join(sorted(str(name) for name in used))
        yield f"reward: data.train has env_name {names}, so `reward` would judge nothing; set data.train.env_name={REWARD}"


def cautions(config: RunConfig | EvalRunConfig, is_set: IsSetByUser) -> list[str]:
    """What is allowed and probably not meant."""
    if isinstance(config, EvalRunConfig):
        return eval_cautions(config)
    found: list[str] = []
    if isinstance(config, DpoRunConfig):
        found += ambiguous_loss(config, is_set)
    alone = isinstance(config, GrpoRunConfig) and config.grpo.num_generations_per_prompt == 1
    if isinstance(config, GrpoRunConfig) and alone and compares_within_group(config) and not list(_groups(config)):
        found.append("grpo.num_generations_per_prompt: a group of 1 has advantage 0, so nothing is learnt from rewards")
    if isinstance(config, GrpoRunConfig):
        found += _quantised_sampling(config)
        found += unused_turns(config)
        found += unused_variants(config, is_set)
    metric = config.checkpointing.metric_name
    if metric and metric.startswith("val:") and is_set("checkpointing.metric_name") and not _validates(config):
        found.append(
            f"checkpointing.metric_name: {metric} is not measured without data.validation or split_validation_size; "
            "the newest checkpoints are kept"
        )
    return found


def _quantised_sampling(config: GrpoRunConfig) -> Iterator[str]:
    generation = config.policy.generation
    if generation is None:
        return
    native = generation.native_cfg
    in_fp8 = native.precision == "fp8" or config.policy.fp8
    if in_fp8 and not config.loss_fn.use_importance_sampling_correction:
        where = "sampler" if native.precision == "fp8" else "trainer"
        yield (
            f"loss_fn.use_importance_sampling_correction = false: with the {where} in FP8 the sampler is another policy than the "
            "one that is trained, and nothing corrects for it"
        )
    if native.precision == "fp8":
        return
    defaults = NativeConfig()
    for key in ("kv_cache_dtype", "num_first_layers_in_bf16", "num_last_layers_in_bf16"):
        if (value := getattr(native, key)) not in (getattr(defaults, key), "bfloat16"):
            yield f"policy.generation.native_cfg.{key} = {value}: without native_cfg.precision = fp8 nothing is quantised"


def _validates(config: RunConfig) -> bool:
    return bool(config.data.validation_sets()) or any(entry.split_validation_size for entry in config.data.train_sets())


def _data(config: RunConfig) -> Iterator[str]:
    if not config.data.train_sets():
        yield "data.train is empty: set data.train.dataset_name (and data.train.data_path for rows of your own)"
    sets = {"data.train": config.data.train_sets(), "data.validation": config.data.validation_sets()}
    for where, entries in sets.items():
        for entry in entries:
            if not entry.dataset_name and not entry.data_path:
                yield f"{where}: a dataset needs `dataset_name` or `data_path`"
            if isinstance(config, GrpoRunConfig) and entry.env_name not in config.env:
                known = ", ".join(sorted(config.env)) or "none"
                yield (
                    f"{where}: env_name {entry.env_name!r} is not under `env` (there: {known}); "
                    f"add env.{entry.env_name or 'my_reward'}.function, or set data.default.env_name to one of those"
                )


def _optimizer(config: RunConfig) -> Iterator[str]:
    if "lr" not in config.policy.optimizer.kwargs:
        yield (
            f"policy.optimizer.kwargs.lr is not set, and {config.policy.optimizer.name} would choose one of its own: "
            "set policy.optimizer.kwargs.lr"
        )


def _fp8(config: RunConfig) -> Iterator[str]:
    policy, lora = config.policy, config.policy.dtensor_cfg.lora_cfg
    if not policy.fp8:
        return
    if policy.precision != "bfloat16":
        yield f"policy.fp8 quantises weights in bfloat16, and policy.precision = {policy.precision}: set that to bfloat16"
    if policy.device == "cpu":
        yield "policy.fp8 needs a GPU with FP8 matrix units (Ada, Hopper or newer), and policy.device = cpu"
    if config.num_ranks > 1:
        yield (
            f"policy.fp8: weights that are sharded over GPUs cannot be quantised yet, and this run trains on {config.num_ranks}; "
            "set policy.fp8=false"
        )
    if lora.enabled and lora.dropout:
        yield (
            f"policy.fp8 with policy.dtensor_cfg.lora_cfg.dropout = {lora.dropout}: layers with dropout are not fused, and "
            "their products would not be in FP8; set one of them to its default"
        )


def _dedicated(config: RunConfig) -> Iterator[str]:
    """GPUs that only sample, as in NeMo RL: some of the only machine, or whole machines."""
    generation, cluster = config.policy.generation, config.cluster
    if generation is None or generation.colocated.enabled:
        return
    resources, field = generation.colocated.resources, "policy.generation.colocated"
    if cluster.num_nodes == 1:
        name, number, limit = "gpus_per_node", resources.gpus_per_node, cluster.gpus_per_node
        if resources.num_nodes not in (None, 1):
            yield f"{field}.resources.num_nodes = {resources.num_nodes}, but cluster.num_nodes = 1; set it to null"
    else:
        name, number, limit = "num_nodes", resources.num_nodes, cluster.num_nodes
        if resources.gpus_per_node not in (None, cluster.gpus_per_node):
            yield (
                f"{field}.resources.gpus_per_node = {resources.gpus_per_node}: of several machines, whole ones sample; set it to "
                f"null or cluster.gpus_per_node = {cluster.gpus_per_node}"
            )
    if number is None or number >= limit:
        yield (
            f"{field}.enabled = false needs {field}.resources.{name}, what only samples of cluster.{name} = {limit}; it is "
            f"{'null' if number is None else number}, and at least one must be left to train"
        )
        return
    size, per_node = config.gpus_per_engine, number if cluster.num_nodes == 1 else cluster.gpus_per_node
    if per_node % size:
        yield (
            f"policy.generation.vllm_cfg.tensor_parallel_size = {size} must divide the {per_node} GPUs of a machine that only "
            "sample: those that share an engine's layers are on one machine"
        )


def _parallelism(config: RunConfig) -> Iterator[str]:
    parallel, num_ranks = config.policy.dtensor_cfg, config.num_ranks
    tp, cp, replicas = parallel.tensor_parallel_size, parallel.context_parallel_size, parallel.dp_replicate_size or 1
    if num_ranks % (tp * cp * replicas):
        yield (
            f"policy.dtensor_cfg: tensor_parallel_size {tp} x context_parallel_size {cp} x dp_replicate_size {replicas} = "
            f"{tp * cp * replicas} must divide the number of ranks, cluster.num_nodes x gpus_per_node"
            f"{' less what only samples' if config.num_engine_gpus else ''} = {num_ranks}"
        )
    elif config.cluster.gpus_per_node % tp and config.cluster.num_nodes > 1:
        yield (
            f"policy.dtensor_cfg.tensor_parallel_size = {tp} must divide cluster.gpus_per_node = {config.cluster.gpus_per_node}: "
            "ranks that share layers exchange sums several times in each, so they are on one machine"
        )
    for name in ("state_dtype", "master_weights"):
        if tp > 1 and (value := getattr(config.policy.optimizer, name)) != "float32":
            yield (
                f"policy.optimizer.{name} = {value} with policy.dtensor_cfg.tensor_parallel_size = {tp}: that state is kept by "
                "whole rows, and here ranks hold parts of rows; set one of them to its default"
            )


def _batches(config: GrpoRunConfig) -> Iterator[str]:
    grpo, size = config.grpo, config.policy.train_global_batch_size
    samples = grpo.num_samples_per_step
    product = (
        f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt = {grpo.num_prompts_per_step} * "
        f"{grpo.num_generations_per_prompt} = {samples}"
    )
    if size > samples:
        yield f"policy.train_global_batch_size = {size} is larger than {product}: set it to {samples} or a divisor of it"
    elif samples % size:
        yield f"{product} is not a multiple of policy.train_global_batch_size = {size}: set that to a divisor of {samples}"
    elif config.loss_fn.force_on_policy_ratio and size != samples:
        yield (
            f"loss_fn.force_on_policy_ratio needs one optimizer step per RL step, but {product} and "
            f"policy.train_global_batch_size = {size} make {samples // size}: set policy.train_global_batch_size={samples}"
        )


def _record(config: GrpoRunConfig) -> Iterator[str]:
    recorded = [entry.holds_recorded_groups for entry in config.data.train_sets()]
    wanted = config.grpo.num_recorded_per_prompt
    if any(recorded) and not all(recorded):
        yield f"data.train: {TRACE_GROUPS} and datasets without recorded answers cannot be mixed in one run"
    if wanted is not None and not any(recorded):
        yield f"grpo.num_recorded_per_prompt = {wanted} needs recorded answers: data.train.dataset_name={TRACE_GROUPS}"
    if wanted is not None and wanted > config.grpo.num_generations_per_prompt:
        yield (
            f"grpo.num_recorded_per_prompt = {wanted} is more than all answers of a prompt, "
            f"grpo.num_generations_per_prompt = {config.grpo.num_generations_per_prompt}"
        )
    if any(recorded) and config.loss_fn.force_on_policy_ratio:
        yield "loss_fn.force_on_policy_ratio: recorded answers are not the policy's own; set it to false"


def _rounds(config: GrpoRunConfig) -> Iterator[str]:
    if not config.grpo.async_grpo.enabled:
        return
    field = "grpo.async_grpo.enabled = true"
    multiple, age = config.grpo.async_grpo.groups_in_flight, config.grpo.async_grpo.max_trajectory_age_steps
    most = age + 1 - config.rounds_ahead
    if multiple is not None and multiple > most:
        limit = "max_trajectory_age_steps" if config.rounds_ahead else "max_trajectory_age_steps + 1"
        yield (
            f"grpo.async_grpo.groups_in_flight = {multiple:g} is more than {limit} = {most}: some groups would become too old"
        )
    if config.grpo.use_dynamic_sampling:
        yield f"{field} and grpo.use_dynamic_sampling = true: groups that wait could become too old; set one of them to false"
    if config.uses_recorded_answers:
        yield f"{field}: recorded answers are not sampled, so there is nothing to continue; set it to false"
    if config.loss_fn.force_on_policy_ratio:
        yield f"{field}: earlier weights sample a part of the tokens; set loss_fn.force_on_policy_ratio=false"
    if config.grpo.num_prompts_per_step % max(config.num_samplers, 1):
        samplers = "ranks that sample (cluster.num_nodes x gpus_per_node / tensor_parallel_size)"
        if config.num_engines:
            samplers = "engines (policy.generation.colocated.resources)"
            samplers += f", each of {config.gpus_per_engine} GPUs" if config.gpus_per_engine > 1 else ""
        yield (
            f"{field}: grpo.num_prompts_per_step = {config.grpo.num_prompts_per_step} is not a multiple of the "
            f"{config.num_samplers} {samplers}, which have equal shares of a round"
        )


def _vllm(config: GrpoRunConfig) -> Iterator[str]:
    generation = config.policy.generation
    if not generation.uses_vllm:
        return
    section = generation.vllm_cfg
    size, longest = section.tensor_parallel_size, config.policy.max_total_sequence_length
    if section.max_model_len is not None and section.max_model_len < longest:
        yield (
            f"policy.generation.vllm_cfg.max_model_len = {section.max_model_len} is less than "
            f"policy.max_total_sequence_length = {longest}: raise it, or leave it out"
        )
    if config.grpo.async_grpo.enabled and generation.stop_strings:
        yield (
            "policy.generation.stop_strings with grpo.async_grpo.enabled = true and backend vllm: vLLM would overlook a stop "
            "string that two rounds share; use stop_token_ids, or backend native"
        )
    has_adapters, format_ = config.policy.dtensor_cfg.lora_cfg.enabled, section.load_format
    if format_ is not None and (format_ == "dummy") == has_adapters:
        why = (
            "the weights under the adapters are read from files"
            if has_adapters
            else "all weights are pushed, no file has them"
        )
        yield f"policy.generation.vllm_cfg.load_format = {format_}: in this run {why}; set it to null"
    for key in sorted(ARGUMENTS_OF_VLLM_IN_USE & generation.vllm_kwargs.keys()):
        instead = f"use policy.generation.vllm_cfg.{key}" if key in type(section).model_fields else "remove it"
        yield f"policy.generation.vllm_kwargs.{key}: posttrain sets this argument of vLLM itself; {instead}"
    if size > 1 and not config.num_engines and config.policy.device != "cpu":
        yield (
            f"policy.generation.vllm_cfg.tensor_parallel_size = {size}: a vLLM that shares GPUs with training has the one GPU of "
            "its rank; set it to 1, or give vLLM GPUs of its own (policy.generation.colocated.enabled=false)"
        )


def _groups(config: GrpoRunConfig) -> Iterator[str]:
    if config.grpo.num_generations_per_prompt > 1:
        return
    estimator = config.grpo.adv_estimator
    if estimator.name not in ("grpo", "gdpo") or not compares_within_group(config):
        return
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        if getattr(estimator, name):
            yield (
                f"grpo.num_generations_per_prompt = 1 and grpo.adv_estimator.{name} = true: one answer has no spread and no "
                f"others to compare with; sample at least 2 per prompt, or set grpo.{name}=false"
            )


def _loss(config: GrpoRunConfig) -> Iterator[str]:
    loss = config.loss_fn
    yield from _ratio_variants(loss)
    yield from _importance_correction(loss)
    if config.grpo.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
        yield (
            "grpo.skip_reference_policy_logprobs_calculation needs loss_fn.reference_policy_kl_penalty = 0, which is "
            f"{loss.reference_policy_kl_penalty:g}: set one of them"
        )
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low is not None and high is not None and low >= high:
        yield f"grpo.advantage_clip_low = {low:g} must be below grpo.advantage_clip_high = {high:g}"


def _ratio_variants(loss: LossFnConfig) -> Iterator[str]:
    if loss.sequence_level_importance_ratios and normalizer(loss) != "sequences":
        yield (
            "loss_fn.sequence_level_importance_ratios (GSPO) needs loss_fn.token_level_loss = false, because its ratio "
            "belongs to an answer: set loss_fn.token_level_loss=false"
        )
    if not loss.use_cispo:
        return
    excluded = {
        "sequence_level_importance_ratios": loss.sequence_level_importance_ratios,
        "disable_ppo_ratio": loss.disable_ppo_ratio,
        "force_on_policy_ratio": loss.force_on_policy_ratio,
        "ratio_clip_c": loss.ratio_clip_c is not None,
    }
    for name in [name for name, is_on in excluded.items() if is_on]:
        yield f"loss_fn.use_cispo and loss_fn.{name} exclude each other: CISPO has its own use of the ratio; unset one"
    if normalizer(loss) == "sequences":
        yield "loss_fn.use_cispo needs loss_fn.token_level_loss = true: CISPO averages over tokens"


def _importance_correction(loss: LossFnConfig) -> Iterator[str]:
    kind = loss.truncated_importance_sampling_type
    if kind is None:
        return
    field = f"loss_fn.truncated_importance_sampling_type = {kind}"
    if not loss.use_importance_sampling_correction:
        yield f"{field} needs loss_fn.use_importance_sampling_correction = true: there is nothing to truncate otherwise"
    upper, lower = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    if upper is None:
        yield f"{field} needs loss_fn.truncated_importance_sampling_ratio, the upper bound, e.g. 2.0"
    if kind in ("icepop", "seq-mask-tis") and lower is None:
        yield f"{field} needs loss_fn.truncated_importance_sampling_ratio_min, the lower bound, e.g. 0.5"
    if upper is not None and lower is not None and lower >= upper:
        yield (
            f"loss_fn.truncated_importance_sampling_ratio_min = {lower:g} must be below "
            f"loss_fn.truncated_importance_sampling_ratio = {upper:g}"
        )


def _lengths(config: GrpoRunConfig) -> Iterator[str]:
    new, total = config.policy.generation.max_new_tokens, config.policy.max_total_sequence_length
    if new > total:
        yield (
            f"policy.generation.max_new_tokens = {new} does not fit into policy.max_total_sequence_length = {total}, which "
            "holds prompt and answer: lower the first or raise the second"
        )
    if config.policy.generation.temperature == 0:
        yield (
            "policy.generation.temperature = 0 samples the same answer again and again, and training divides by it: "
            "set it above 0 (policy.generation.val_temperature may be 0)"
        )


def _stopping(config: GrpoRunConfig) -> Iterator[str]:
    grpo = config.grpo
    if (grpo.stop_at_validation_metric is None) != (grpo.stop_at_validation_threshold is None):
        yield (
            f"grpo.stop_at_validation_metric = {grpo.stop_at_validation_metric} and grpo.stop_at_validation_threshold = "
            f"{grpo.stop_at_validation_threshold} go together: set both or neither"
        )


def _micro_batches(config: RunConfig, is_set: IsSetByUser) -> Iterator[str]:
    """A micro-batch size that was typed must divide its batch. One that was not is only an upper bound. A pack of pairs must
    hold two of the longest sequences."""
    is_paired = config.step_sizes().num_answers_per_unit == 2
    unit = "pairs" if is_paired else "examples"
    packing, longest = config.policy.sequence_packing, config.policy.max_total_sequence_length
    room = packing.train_mb_tokens
    if is_paired and packing.enabled and room is not None and room < 2 * longest:
        yield (
            f"policy.sequence_packing.train_mb_tokens = {room} is less than twice policy.max_total_sequence_length = {longest}: "
            f"a pack must hold both answers of a pair; set it to {2 * longest} or more"
        )
    whole, part = config.policy.train_global_batch_size, config.policy.train_micro_batch_size
    if whole % part and is_set("policy.train_micro_batch_size"):
        yield (
            f"policy.train_global_batch_size = {whole} {unit} is not a multiple of policy.train_micro_batch_size = {part}: "
            "set a micro-batch that divides the batch"
        )
