"""One engine's share of `decode.py`: what to sample, and how it is timed. Independent of engines.

Every engine is asked for the same prompts, temperature 1, no stop token, log-probabilities of the sampled tokens, and
none turns tokens into text. In order: the first token of one prompt (start); then, for each workload, a few tokens of
all prompts (warm-up), one token of all (the prompts alone), the whole.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from machine import GIB, peak_bytes, reset_peak, resolve_dtype, seconds_of
from shapes import vocab_size_of
from workloads import Workload, workload

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DecodeJob:
    engine: str
    model: str  # a shape or a folder
    workloads: tuple[str, ...]
    device: str
    dtype: str
    repeats: int = 2
    seed: int = 0
    max_batch_size: int = 512  # sequences that decode together, where the engine has such a limit
    generate_batch: int = 256  # rows of one call of transformers' generate
    gpu_memory_utilization: float = 0.9  # of vLLM
    native: Mapping[str, Any] = field(default_factory=dict)  # settings of the native engine
    vllm: Mapping[str, Any] = field(default_factory=dict)  # options of vLLM
    sharded: bool = False  # by FSDP over one rank: the native engine as on several GPUs that train
    release: bool = False  # the native engine gives up its cache before every measured run, as it does for training
    profile: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return resolve_dtype(self.dtype, self.device)

    @property
    def works(self) -> list[Workload]:
        return [workload(name, self.seed) for name in self.workloads]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return max(work.prompt_tokens + work.longest for work in self.works)

    def prompts(self, work: Workload) -> list[list[int]]:
        return work.prompts(vocab_size_of(self.model), self.seed)


@dataclass(frozen=True)
class Sampled:
    """Of each sequence, in order: how many tokens it has, and how many log-probabilities came with them."""

    num_tokens: Sequence[int]
    num_logprobs: Sequence[int]
    mean_logprob: float


class Engine(Protocol):
    def sample(self, prompts: Sequence[Sequence[int]], work: Workload) -> Callable[[], Sampled]:
        """`work.num_samples` completions of each prompt; `work.limits[i]` new tokens for those of prompt i.

        What was sampled is looked at later, by calling the answer: that takes time which is not the engine's.
        """
        ...


def timed(job: DecodeJob, build: Callable[[], Engine]) -> tuple[dict[str, Any], Engine]:
    """Start, and sample each workload. What is loaded before `build` is called does not count as start."""
    works = job.works
    begin = time.perf_counter()
    engine = build()
    first = Workload("first token", 1, works[0].prompt_tokens, 1, (1,))
    engine.sample(job.prompts(works[0])[:1], first)
    start_s = time.perf_counter() - begin
    found = {}
    for work in works:
        if hasattr(engine, "release"):
            engine.release()  # a cache made for the workload before may be larger than this one needs
        try:
            found[work.name] = sample_timed(job, engine, work)
        except Exception as error:
            traceback.print_exc()
            found[work.name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return {"start_s": start_s, "workloads": found}, engine


def sample_timed(job: DecodeJob, engine: Engine, work: Workload) -> dict[str, Any]:
    prompts = job.prompts(work)
    reset_peak()
    warm_up_s = seconds_of(lambda: engine.sample(prompts, work.cut_to(WARM_UP_TOKENS)))
    prompts_s = seconds_of(lambda: engine.sample(prompts, work.cut_to(1)))
    runs: list[float] = []
    releases: list[float] = []
    sampled: list[Callable[[], Sampled]] = []
    for _ in range(job.repeats):
        sampled.clear()
        if job.release:
            releases.append(seconds_of(engine.release))  # only asked of the engine that has it
        runs.append(seconds_of(lambda: sampled.append(engine.sample(prompts, work))))
    return {
        **measured(work, sampled[-1](), min(runs), prompts_s),
        "warm_up_s": warm_up_s,
        "run_s": runs,
        "release_s": releases,
        "peak_gib": peak_bytes(job.device) / GIB,
    }


def measured(work: Workload, sampled: Sampled, seconds: float, prompts_s: float) -> dict[str, Any]:
    """Rates of one run; refuses a run that did less than it was asked for."""
    wanted = [limit for limit in work.limits for _ in range(work.num_samples)]
    if list(sampled.num_tokens) != wanted:
        short = sum(got != want for got, want in zip(sampled.num_tokens, wanted, strict=False))
        raise RuntimeError(f"{short or 'some'} of {len(wanted)} completions do not have the length asked for")
    if list(sampled.num_logprobs) != wanted:
        raise RuntimeError("a completion lacks log-probabilities")
    num_tokens = sum(sampled.num_tokens)
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "prompts_s": prompts_s,
        # One step for each token of the longest completion but its first, which belongs to the prompts.
        "ms_per_step": 1000 * max(seconds - prompts_s, 0.0) / max(work.longest - 1, 1),
        "mean_logprob": sampled.mean_logprob,
    }
