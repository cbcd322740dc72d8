"""How GPUs are split between training and sampling: splits that a config allows, simulated on the planner's times.

Candidates are the config with other values of `policy.generation.colocated` and `grpo.async_grpo`, as far as its checks
accept them. Rounds and what a step waits for are simulated (`simulation.py`); memory is that of the plan of each
candidate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.apps.plan.decoding import answer_lengths, batch_sizes
from posttrain.apps.plan.plan import RunEstimate, estimate_run
from posttrain.apps.plan.simulation import EngineSpeed, SimulatedEngine, Training, simulate
from posttrain.apps.plan.timing import TimeModel
from posttrain.apps.plan.workload import Workload
from posttrain.config import GrpoRunConfig
from posttrain.config.base import problems_of
from posttrain.files.json_files import JsonObject
from posttrain.policy.memory.layer_bytes import Pass
from posttrain.policy.memory.peak_memory import GIB, SAMPLING

AGES = (0, 1, 2)
_COUNTED_STEPS = 8  # after those in which the rounds fill up
_MOST_ENGINES = 8  # that are simulated; the others are like them
_NUM_LENGTHS = 256  # different lengths of answers
_WORTH_PROPOSING = 0.03  # of a step's time
SHARED_FOLDER_BYTES_PER_S = 2e9  # of weights between machines; an assumption


@dataclass(frozen=True)
class Split:
    config: GrpoRunConfig
    found: RunEstimate
    step_s: float

    @property
    def max_age(self) -> int:
        section = self.config.grpo.async_grpo
        return section.max_trajectory_age_steps if section.enabled else 0

    @property
    def is_plain(self) -> bool:
        """Synchronous, on shared GPUs."""
        return not self.config.num_engines and self.max_age == 0

    def needed_bytes(self, *, sampling: bool) -> float:
        """Of one GPU at its peak, while sampling or else while doing what is left."""
        phases = [phase for phase in self.found.memory.phases if (phase.name == SAMPLING) == sampling]
        return max(phase.needed_bytes for phase in phases)

    @property
    def settings(self) -> dict[str, str]:
        generation, section = "policy.generation.colocated", self.config.grpo.async_grpo
        resources = self.config.policy.generation.colocated.resources
        names = {f"{generation}.enabled": str(not self.config.num_engines).lower()}
        if self.config.num_engines:
            name = "gpus_per_node" if self.config.cluster.num_nodes == 1 else "num_nodes"
            names[f"{generation}.resources.{name}"] = str(getattr(resources, name))
        names["grpo.async_grpo.enabled"] = str(section.enabled).lower()
        if section.enabled:
            names["grpo.async_grpo.max_trajectory_age_steps"] = str(section.max_trajectory_age_steps)
        return names


@dataclass(frozen=True)
class Splits:
    now: Split  # what the config has
    shared: Split  # synchronous, on shared GPUs: what speeds are compared with
    others: tuple[Split, ...]

    @property
    def best(self) -> Split | None:
        """The fastest that fits, with answers at most as old as the config allows, or 1 step; None: as it is."""
        oldest = max(self.now.max_age, 1)
        fitting = [split for split in self.others if not split.found.too_large and split.max_age <= oldest]
        best = min(fitting, key=lambda split: split.step_s, default=self.now)
        if self.now.found.too_large and best is not self.now:
            return best
        return best if best.step_s < (1 - _WORTH_PROPOSING) * self.now.step_s else None

    @property
    def shown(self) -> list[Split]:
        """The config's own, and for each age the shared GPUs and the best number of engines."""
        rows: list[Split] = []
        for age in AGES:
            own = [split for split in self.others if split.max_age == age]
            fitting = [split for split in own if not split.found.too_large] or own
            for dedicated in (False, True):
                group = [split for split in fitting if bool(split.config.num_engines) == dedicated]
                rows += [min(group, key=lambda split: split.step_s)] if group else []
        now = self.now.config.num_engines, self.now.max_age
        return [self.now, *[split for split in rows if (split.config.num_engines, split.max_age) != now]]

    @property
    def proposed(self) -> dict[str, str]:
        """Settings that differ from the config's; none: it is as fast as it is."""
        best, now = self.best, self.now.settings
        return {} if best is None else {name: value for name, value in best.settings.items() if now.get(name) != value}

    @property
    def assumptions(self) -> list[str]:
        lines = [
            "splits: the lengths of all answers are drawn independently, and a step waits for its slowest GPU; speed "
            "is beside shared GPUs without asynchronous sampling"
        ]
        if self.now.config.policy.generation.uses_vllm:
            lines.append("splits: vLLM samples as fast as the native engine")
        rate, way, less = self.now.found.gpu.host_bytes_per_s, "host memory", "; over CUDA IPC in less time"
        if self.now.config.cluster.num_nodes > 1:
            rate, way, less = SHARED_FOLDER_BYTES_PER_S, "the shared checkpoint folder", ""
        lines.append(f"splits: weights reach engines through {way} at {rate / 1e9:g} GB/s, written and then read{less}")
        return lines

    def as_json(self) -> JsonObject:
        return {
            "proposal": self.proposed,
            "assumptions": self.assumptions,
            "splits": [
                {
                    "num_trainers": split.config.num_ranks,
                    "num_engines": split.config.num_engines,
                    "max_age": split.max_age,
                    "step_s": split.step_s,
                    "speed": self.shared.step_s / split.step_s,
                    "needed_gib": {
                        "training": split.needed_bytes(sampling=False) / GIB,
                        "sampling": split.needed_bytes(sampling=True) / GIB,
                    },
                    "fits": not split.found.too_large,
                }
                for split in (self.now, *self.others)
            ],
        }


def find_splits(found: RunEstimate, config: GrpoRunConfig, rewards_s: float = 0.0) -> Splits:
    """`found` is the plan of `config`; `rewards_s` of a step, where a run has measured them."""

    def split(candidate: GrpoRunConfig) -> Split:
        estimate = estimate_run(candidate, found.gpu, shape=found.shape, lengths=found.workload.lengths)
        return Split(candidate, estimate, simulated_step_s(estimate, candidate, rewards_s))

    shared = split(_with(config, 0, 0))
    others = [split(candidate) for candidate in _candidates(config)]
    return Splits(Split(config, found, simulated_step_s(found, config, rewards_s)), shared, tuple(others))


def _candidates(config: GrpoRunConfig) -> Iterator[GrpoRunConfig]:
    cluster = config.cluster
    per_part = 1 if cluster.num_nodes == 1 else cluster.gpus_per_node
    for age in AGES:
        for num_gpus in range(0, cluster.num_workers, per_part):
            candidate = _with(config, num_gpus, age)
            if not problems_of(candidate, lambda name: True):
                yield candidate


def _with(config: GrpoRunConfig, num_gpus: int, age: int) -> GrpoRunConfig:
    """`num_gpus` only sample."""
    generation, section = config.policy.generation, config.grpo.async_grpo
    whole_nodes = config.cluster.num_nodes > 1
    resources = generation.colocated.resources.model_copy(
        update={
            "gpus_per_node": None if whole_nodes or not num_gpus else num_gpus,
            "num_nodes": num_gpus // config.cluster.gpus_per_node if whole_nodes and num_gpus else None,
        }
    )
    colocated = generation.colocated.model_copy(update={"enabled": not num_gpus, "resources": resources})
    rounds = section.model_copy(update={"enabled": age > 0, "max_trajectory_age_steps": age, "groups_in_flight": None})
    policy = config.policy.model_copy(update={"generation": generation.model_copy(update={"colocated": colocated})})
    return config.model_copy(update={"policy": policy, "grpo": config.grpo.model_copy(update={"async_grpo": rounds})})


def simulated_step_s(found: RunEstimate, config: GrpoRunConfig, rewards_s: float = 0.0) -> float:
    """Mean of a few steps, after those in which the rounds fill up."""
    section, workload = config.grpo.async_grpo, found.workload
    age = section.max_trajectory_age_steps if section.enabled else 0
    num_groups = max(1, math.ceil(config.grpo.num_prompts_per_step / config.num_samplers))
    in_flight = max(num_groups, round(num_groups * workload.in_flight))
    engines = [
        SimulatedEngine(_speed(found, config.gpus_per_sampler), _lengths(workload, seed), num_groups, in_flight, age)
        for seed in range(min(config.num_samplers, _MOST_ENGINES))
    ]
    training = Training(rewards_s, found.time.logprobs_s + found.time.training_s, handover_s(found, config))
    steps = simulate(engines, training, age + 1 + _COUNTED_STEPS, ahead=bool(config.rounds_ahead))
    return sum(steps[-_COUNTED_STEPS:]) / _COUNTED_STEPS


def handover_s(found: RunEstimate, config: GrpoRunConfig) -> float:
    """Written by ranks, then read by every engine: in host memory, or in a folder that machines share. An upper bound
    on one machine, where GPUs may read each other's memory."""
    if not config.num_engines:
        return 0.0
    rank = found.rank
    num_bytes = rank.weights if found.settings.lora_rank is None else found.settings.element * rank.num_trained
    rate = found.gpu.host_bytes_per_s if config.cluster.num_nodes == 1 else SHARED_FOLDER_BYTES_PER_S
    return 2 * num_bytes / rate


def _speed(found: RunEstimate, layer_parts: int) -> EngineSpeed:
    """Ranks that share layers are counted as ranks that share the answers."""
    workload, cache, sampler = found.workload, found.memory.cache, found.rank.sampler
    engine = sampler.settings.engine
    assert engine is not None
    assert cache is not None
    model, sizes, prompt = TimeModel(sampler, found.gpu), batch_sizes(engine.rows), workload.lengths.prompt
    fitting = min(engine.rows, model.rows_that_fit(workload, cache))

    def decode_s(rows: int, written: float) -> float:
        own = -(-rows // layer_parts)
        size = next(size for size in sizes if size >= own)
        return model.decode_step_s(size, own, prompt, written, workload.num_sampled)

    def prefill_s(tokens: int) -> float:
        own = tokens / layer_parts
        return model.forward_s(Pass(own, 0.0, 0.0, own * (prompt + 1) / 2), head=False)

    return EngineSpeed(fitting * layer_parts, round(prompt), decode_s, prefill_s, found.time.capture_s)


def _lengths(workload: Workload, seed: int) -> Iterator[Sequence[int]]:
    """Of the answers of one group after another, drawn from those that the plan assumes."""
    longest = min(workload.max_new_tokens, int(workload.max_total_tokens - workload.lengths.prompt))
    mean = longest if workload.fixed_length else min(workload.lengths.answer, longest)
    known = answer_lengths(_NUM_LENGTHS, mean, longest)
    chance = random.Random(seed)
    while True:
        yield chance.choices(known, k=workload.num_sampled)
