"""Requests to vLLM and its arguments, as plain values: for the engine of `eval` and for that of a training run.

Every sample is a separate request with its own seed, a function of (seed, step, draw, sample), so its tokens do not
depend on the rest of the batch. vLLM's prefix cache still computes the prompt of a group once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.config.policy import VllmConfig
from posttrain.engines.native.noise import sequence_key
from posttrain.errors import InputError
from posttrain.types import Sampling, Task


class LengthLimit(NamedTuple):
    """Most tokens of prompt and answer together, and the setting that limits them."""

    name: str
    num_tokens: int


class SampleRequest(NamedTuple):
    prompt_ids: list[int]
    seed: int
    max_tokens: int


def sample_request(
    task: Task, sample: int, step: int, seed: int, sampling: Sampling, limit: LengthLimit, begun: Sequence[int] = ()
) -> SampleRequest:
    """Sample number `sample` of the task. The tokens `begun` of an answer that continues are part of the prompt."""
    if task.images:
        raise InputError(
            f"task {task.id!r} has images, which posttrain does not send to vLLM: policy.generation.backend=native"
        )
    length = len(task.prompt_ids)
    if not 0 < length < limit.num_tokens:
        raise InputError(
            f"task {task.id!r} has {length} prompt tokens: between 1 and {limit.num_tokens - 1} fit "
            f"{limit.name} = {limit.num_tokens}"
        )
    key = sequence_key(seed, step, task.draw, task.first_sample + sample)
    # Each turn of a conversation, and each continuation, gets its own noise.
    own_seed = (key + task.first_token + len(begun)) & 0x7FFF_FFFF_FFFF_FFFF
    longest = min(sampling.limit_of(task), limit.num_tokens - length)
    return SampleRequest([*task.prompt_ids, *begun], own_seed, longest - len(begun))


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` that all requests of a call share; plain values."""
    ends = list(dict.fromkeys([*sampling.stop_token_ids, *sampling.end_of_turn_ids]))
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0 disables it in both
        "stop": None if sampling.ignore_eos else list(sampling.stop_strings) or None,
        "stop_token_ids": None if sampling.ignore_eos else ends or None,
        "include_stop_str_in_output": True,  # as in the native engine
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,  # of the sampled token only
        "skip_special_tokens": True,
    }


def vllm_options(config: VllmConfig, extra: Mapping[str, object], precision: str) -> dict[str, object]:
    """Arguments of `vllm.LLM` from the section `vllm_cfg`; `extra` (`vllm_kwargs`) is passed through."""
    options: dict[str, object] = {
        "dtype": precision,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "kv_cache_dtype": config.kv_cache_dtype,
        "logprobs_mode": config.logprobs_mode,
        "load_format": config.load_format or "auto",
        "enable_prefix_caching": True if config.enable_prefix_caching is None else config.enable_prefix_caching,
    }
    return {**options, **extra}


def allowed_rank(rank: int) -> int:
    """The smallest rank supported by vLLM that is at least `rank`."""
    return next((allowed for allowed in (8, 16, 32, 64, 128, 256, 320, 512) if allowed >= rank), rank)
