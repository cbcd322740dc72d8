"""vLLM as a `roles.Engine`: token ids in, token ids and their log-probabilities out. Imports vllm.

The log-probabilities are vLLM's: close to those of the native engine, not equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.engines.vllm.requests import LengthLimit, allowed_rank, sample_request, sampling_arguments
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
                f"generation.backend=vllm needs vLLM ({error}): pip install 'posttrain[vllm]', or use "
                "generation.backend=native"
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
        shared, limit = sampling_arguments(sampling), LengthLimit("max_model_len", self.max_model_len)
        prompts, parameters = [], []
        for task in tasks:
            for sample in range(num_samples):
                request = sample_request(task, sample, key.step, key.seed, sampling, limit)
                prompts.append({"prompt_token_ids": request.prompt_ids})
                own = {"max_tokens": request.max_tokens, "seed": request.seed}
                parameters.append(self._vllm.SamplingParams(**shared, **own))
        lora = None
        if self._adapter is not None:
            from vllm.lora.request import LoRARequest

            lora = LoRARequest("adapter", 1, str(self._adapter))
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False, lora_request=lora)
        completions = [_completion(output.outputs[0]) for output in outputs]
        if progress is not None:
            progress(len(completions))
        return [completions[start : start + num_samples] for start in range(0, len(completions), num_samples)]

    def release(self) -> None:
        """No-op: vLLM keeps its memory until the process ends, and no trainer shares its GPU."""


def _completion(output: Any) -> Completion:
    ids = tuple(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    # One map per token, from token id to its log-probability; with logprobs=0 it holds the sampled token.
    logprobs = tuple(float(found[token].logprob) for token, found in zip(ids, output.logprobs, strict=True))
    return Completion(token_ids=ids, logprobs=logprobs, text=output.text, finish_reason=output.finish_reason)
