"""vLLM as a `roles.Engine`: token ids in, token ids and their log-probabilities out. The only file that imports vllm.

Every sample is a separate request with its own seed, so that its tokens depend on (seed, step, draw, sample) and not on the
rest of the batch. vLLM's prefix cache still computes the prompt of a group once. The log-probabilities are vLLM's: close to
those of the native engine, not equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.generation import VllmConfig
from posttrain.engines.native.noise import sequence_key
from posttrain.errors import InputError
from posttrain.roles import Progress
from posttrain.types import Completion, NoiseKey, Sampling, Task


class VllmEngine:
    """A whole model in vLLM's offline engine. `options` are arguments of `vllm.LLM`."""

    def __init__(
        self,
        model: str,
        tokenizer: str,
        *,
        max_model_len: int,
        adapter: Path | None = None,
        adapter_rank: int = 16,
        **options: object,
    ) -> None:
        try:
            import vllm
        except ImportError as error:
            raise InputError(
                f"generation.backend=vllm needs vLLM ({error}): pip install 'posttrain[vllm]', or use generation.backend=native"
            ) from error
        self._vllm = vllm
        self.max_model_len = max_model_len
        if adapter is not None:
            options = {"enable_lora": True, "max_lora_rank": allowed_rank(adapter_rank), **options}
        self._adapter = adapter
        # Log-probabilities under the temperature used, as `Completion` requires.
        self._llm = vllm.LLM(
            model=model,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            **{"logprobs_mode": "processed_logprobs", **options},
        )

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        prompts, parameters = [], []
        for task in tasks:
            if not 0 < len(task.prompt_ids) < self.max_model_len:
                raise InputError(
                    f"task {task.id!r} has {len(task.prompt_ids)} prompt tokens: between 1 and {self.max_model_len - 1} "
                    f"fit max_model_len {self.max_model_len}"
                )
            for sample in range(task.first_sample, task.first_sample + num_samples):
                prompts.append({"prompt_token_ids": list(task.prompt_ids)})
                # A later turn of a conversation draws other noise than the turns before it.
                seed = request_seed(sequence_key(key.seed, key.step, task.draw, sample), task.first_token)
                longest = min(sampling.max_new_tokens, self.max_model_len - len(task.prompt_ids))
                arguments = sampling_arguments(sampling)
                parameters.append(self._vllm.SamplingParams(**arguments, max_tokens=longest, seed=seed))
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False, lora_request=self._lora_request())
        completions = [_completion(output.outputs[0]) for output in outputs]
        if progress is not None:
            progress(len(completions))
        return [completions[start : start + num_samples] for start in range(0, len(completions), num_samples)]

    def release(self) -> None:
        """vLLM keeps its memory until the process ends; no trainer shares its GPU."""

    def _lora_request(self) -> Any:
        if self._adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, str(self._adapter))


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` that all requests of a call share; plain values."""
    ends = list(dict.fromkeys([*sampling.stop_token_ids, *sampling.end_of_turn_ids]))
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0 is off in both
        "stop": None if sampling.ignore_eos else list(sampling.stop_strings) or None,
        "stop_token_ids": None if sampling.ignore_eos else ends or None,
        "include_stop_str_in_output": True,  # as in the native engine
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": True,
    }


def request_seed(sequence_key: int, first_token: int) -> int:
    """The seed of a request whose answer begins, or continues, `first_token` tokens after its first prompt."""
    return (sequence_key + first_token) & 0x7FFF_FFFF_FFFF_FFFF


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


def _completion(output: Any) -> Completion:
    ids = tuple(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    # One map per token, from token id to its log-probability; with logprobs=0 it holds the sampled token.
    logprobs = tuple(float(found[token].logprob) for token, found in zip(ids, output.logprobs, strict=True))
    return Completion(token_ids=ids, logprobs=logprobs, text=output.text, finish_reason=output.finish_reason)


def allowed_rank(rank: int) -> int:
    """The smallest rank that vLLM supports and that holds `rank`."""
    return next((allowed for allowed in (8, 16, 32, 64, 128, 256, 320, 512) if allowed >= rank), rank)
