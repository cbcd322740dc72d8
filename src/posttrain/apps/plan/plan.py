"""The plan of one config on one GPU: memory of each phase, time of each stage, whether it fits, and assumptions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.apps.plan.calibration import CALIBRATION, GPUS, MEASURED_ON, Gpu
from posttrain.apps.plan.phases import MemoryPlan, plan_memory
from posttrain.apps.plan.timing import StepTime, TimeModel
from posttrain.apps.plan.workload import MeanLengths, Workload, workload_of
from posttrain.config import GrpoRunConfig, RunConfig
from posttrain.config.placement import ENGINE, REFERENCE
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.files.text_templates import render_text
from posttrain.policy.memory.model_shape import ModelShape, find_shape
from posttrain.policy.memory.peak_memory import GIB, SAMPLING, Phase, RankMemory
from posttrain.policy.memory.settings import CheckpointCopy, RunSettings, counts_too_many_adapters, run_settings

if TYPE_CHECKING:
    from posttrain.apps.plan.split import Splits

NO_LIMIT = 1_000_000  # steps: the run ends with its epochs, and how many steps those have depends on the data


@dataclass(frozen=True)
class RunEstimate:
    """Memory and time of one set of settings."""

    shape: ModelShape
    settings: RunSettings
    workload: Workload
    gpu: Gpu
    memory: MemoryPlan
    time: StepTime

    @property
    def rank(self) -> RankMemory:
        return RankMemory(self.shape, self.settings)

    @property
    def most_gib(self) -> float:
        """Of the GPU, in the phase that needs most."""
        return max(phase.needed_bytes for phase in self.memory.phases) / GIB

    def fits(self, phase: Phase) -> bool:
        cache = self.memory.cache
        if (
            phase.name == SAMPLING
            and cache is not None
            and (cache.num_bytes < cache.least_bytes or cache.max_rows == 0)
        ):
            return False
        return phase.needed_bytes <= self.gpu.memory_bytes

    @property
    def too_large(self) -> list[Phase]:
        return [phase for phase in self.memory.phases if not self.fits(phase)]

    @property
    def tokens_per_s(self) -> float:
        """Of full sequences, per GPU, end to end."""
        return self.workload.num_tokens / self.time.total_s


def estimate(shape: ModelShape, settings: RunSettings, workload: Workload, gpu: Gpu) -> RunEstimate:
    if settings.engine is not None and shape.state_bytes(settings.element):
        settings = replace(settings, engine=replace(settings.engine, num_drafts=0))  # a state cannot be taken back
    rank = RankMemory(shape, settings)
    memory = plan_memory(rank, workload, gpu)
    time = TimeModel(rank, gpu).step(workload, memory.cache)
    return RunEstimate(shape, settings, workload, gpu, memory, time)


def find_gpu(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise InputError(f"--gpu {name}: not in the planner's table; accepted: {', '.join(GPUS)}")
    return GPUS[name.lower()]


def _refuse_fp8(config: RunConfig, gpu: Gpu) -> None:
    generation = config.policy.generation
    settings = {
        "policy.fp8 = true": config.policy.fp8,
        "policy.generation.native_cfg.precision = fp8": generation is not None
        and generation.native_cfg.precision == "fp8",
    }
    for setting, is_on in settings.items():
        if is_on and not gpu.has_fp8:
            raise InputError(f"{setting}: {gpu.name} has no FP8 matrix units; Ada, Hopper and newer GPUs have")


def estimate_run(
    config: RunConfig,
    gpu: Gpu,
    *,
    shape: ModelShape | None = None,
    lengths: MeanLengths | None = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
) -> RunEstimate:
    """The plan of a config. Lengths are those given, else those measured, else assumed. `shape`: where it is known."""
    if shape is None:
        shape = find_shape(config.policy.model_name, config.policy.hf_config_overrides)
        shape = shape.without_output_table() if config.scores_answers else shape
    _refuse_fp8(config, gpu)
    workload = workload_of(config, lengths, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
    saving = config.checkpointing
    copy: CheckpointCopy = "none"
    if saving.enabled and saving.async_save is not False:  # as loop.py decides it on a GPU, where host memory suffices
        copy = "with optimizer" if saving.save_optimizer else "weights"

    beside = _models_beside(config, shape)

    def with_checkpointing(recomputes: bool) -> RunEstimate:
        settings = run_settings(
            config.policy,
            has_reference=config.needs_reference and config.placement.group(REFERENCE) is None,
            ranks=config.num_ranks,
            scores_answers=config.scores_answers,
            checkpointing=recomputes,
            checkpoint_copy=copy,
            num_engines=config.num_engines,
            engine_shares=config.gpus_per_engine,
            **beside,
        )
        return estimate(shape, settings, workload, gpu)

    plain = with_checkpointing(False)
    if config.policy.dtensor_cfg.activation_checkpointing == "auto" and plain.too_large:
        return with_checkpointing(True)
    return plain


def _models_beside(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    """Settings that name the critic and the teacher."""
    found: dict[str, Any] = {}
    if (critic := config.critic) is not None:
        is_own = critic.model_name != config.policy.model_name
        own = find_shape(critic.model_name, field="value.model_name") if is_own else shape
        found["critic"] = own.without_output_table()
    if isinstance(config, GrpoRunConfig) and config.teacher_name is not None:
        found["teacher"] = find_shape(config.teacher_name, field="teacher.model_name")
        found["compared_numbers"] = config.teacher.compared_numbers
    return found


def splits_of(found: RunEstimate, config: RunConfig, rewards_s: float = 0.0) -> Splits | None:
    """None where there is nothing to split: one GPU, or no answers to sample."""
    if not isinstance(config, GrpoRunConfig) or config.cluster.num_workers == 1 or found.memory.cache is None:
        return None
    from posttrain.apps.plan.split import find_splits  # imports torch

    return find_splits(found, config, rewards_s)


def planned_step_s(found: RunEstimate, config: RunConfig, rewards_s: float = 0.0) -> float:
    """Of stages one after the other; simulated where some run beside others, or go on in the next step."""
    if not isinstance(config, GrpoRunConfig) or not (config.num_engines or config.grpo.async_grpo.enabled):
        return found.time.total_s
    from posttrain.apps.plan.split import simulated_step_s

    return simulated_step_s(found, config, rewards_s)


def assumptions(found: RunEstimate, config: RunConfig) -> list[str]:
    """The assumptions of the estimate, one line each."""
    text = render_text(
        Path(__file__).with_name("assumptions.txt"),
        found=found,
        config=config,
        gpu=found.gpu,
        workload=found.workload,
        shape=found.shape,
        step=config.step_sizes(),
        CALIBRATION=CALIBRATION,
        GIB=GIB,
        MEASURED_ON=MEASURED_ON,
        counts_too_many_adapters=counts_too_many_adapters(config.policy.dtensor_cfg.lora_cfg),
        leaves_answers_out=isinstance(config, GrpoRunConfig) and config.loss_fn.reference_policy_kl_penalty == 0,
        places_scorers=any(group.name != ENGINE for group in config.placement.groups),
    )
    return text.splitlines()


def as_json(found: RunEstimate, config: RunConfig) -> JsonObject:
    time, cache, workload = found.time, found.memory.cache, found.workload
    return {
        "model": found.shape.name,
        "num_weights": found.shape.num_weights,
        "num_trained": found.rank.num_trained,
        "gpu": found.gpu.name,
        "gpu_is_measured": found.gpu.is_measured,
        "gpu_memory_gib": found.gpu.memory_bytes / GIB,
        "lengths": {
            "prompt": workload.lengths.prompt,
            "answer": workload.lengths.answer,
            "source": workload.lengths.source,
        },
        "num_samples": workload.num_samples,
        "num_tokens": workload.num_tokens,
        "activation_checkpointing": found.settings.checkpointing,
        "memory_gib": {
            phase.name: {
                "items": {name: num_bytes / GIB for name, num_bytes in phase.items.items()},
                "peak": phase.peak_bytes / GIB,
                "needed": phase.needed_bytes / GIB,
                "fits": found.fits(phase),
            }
            for phase in found.memory.phases
        },
        "host_memory_gib": sum(found.memory.host_items.values()) / GIB,
        "host_memory_items_gib": {name: num_bytes / GIB for name, num_bytes in found.memory.host_items.items()},
        "kv_cache": None
        if cache is None
        else {
            "gib": cache.num_bytes / GIB,
            "wanted_gib": cache.wanted_bytes / GIB,
            "bytes_per_token": cache.bytes_per_token,
            "recurrent_states_gib": cache.state_bytes / GIB,
            "kept_while_training": cache.is_kept,
        },
        "seconds": {
            **time.stages,
            "total_step_time": time.total_s,
            "parts": {
                "generation/prompts": time.prompts_s,
                "generation/decoding": time.decoding_s,
                "generation/recording": time.capture_s,
                "policy_training/passes": time.passes_s,
                "policy_training/optimizer": time.optimizer_s,
                "decode_step": time.mean_step_s,
            },
        },
        "tokens_per_s_per_gpu": found.tokens_per_s,
        "fits": not found.too_large,
        "assumptions": assumptions(found, config),
    }


def described(config: RunConfig, device_name: str, max_steps: int) -> str:
    """Memory and time for the header of a run; empty for unknown devices, and if the prediction fails."""
    gpu = next((gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in device_name.lower()), None)
    if gpu is None:
        return ""
    try:
        found = estimate_run(config, gpu)
    except Exception:  # the planner must not keep a run from starting
        return ""
    hours = max_steps * found.time.total_s / 3600
    return f"{found.most_gib:.0f} of {gpu.memory_bytes / GIB:.0f} GiB of GPU memory, {hours:.2g} hours"


@dataclass(frozen=True)
class RunCost:
    """At a price for an hour of one GPU, in its currency; only GPUs are counted."""

    gpu_hour_price: float
    num_gpus: int
    num_steps: int | None  # None: not known before the data is read
    step_s: float

    @property
    def per_step(self) -> float:
        return self.gpu_hour_price * self.num_gpus * self.step_s / 3600

    @property
    def in_all(self) -> float | None:
        return None if self.num_steps is None else self.per_step * self.num_steps

    def lines(self) -> list[str]:
        return render_text(Path(__file__).with_name("gpu_cost.txt"), cost=self, amount=_amount).splitlines()


def cost_of(config: RunConfig, step_s: float, gpu_hour_price: float) -> RunCost:
    steps = config.schedule.max_num_steps
    return RunCost(gpu_hour_price, config.cluster.num_workers, steps if steps < NO_LIMIT else None, step_s)


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"
