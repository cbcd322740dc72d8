"""The vLLM engine against a fake `vllm`: what it is asked, token by token, and what becomes of the reply."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from posttrain.config import load_config
from posttrain.engines.vllm import VllmEngine, vllm_options
from posttrain.errors import InputError
from posttrain.types import NoiseKey, Sampling, Task


@dataclass
class FakeVllm:
    arguments: dict[str, Any]
    requests: list[tuple[dict[str, Any], Any]]
    lora: Any = None
    finish_reason: str = "stop"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    seen = FakeVllm({}, [])

    class SamplingParams(SimpleNamespace):
        pass

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            seen.arguments = arguments

        def generate(
            self, prompts: list[Any], parameters: list[Any], *, use_tqdm: bool, lora_request: Any
        ) -> list[Any]:
            assert not use_tqdm
            seen.requests += list(zip(prompts, parameters, strict=True))
            seen.lora = lora_request
            outputs = []
            for prompt, _ in zip(prompts, parameters, strict=True):
                ids = [prompt["prompt_token_ids"][-1] + 1, 2]
                logprobs = [{token: SimpleNamespace(logprob=-0.5 * token)} for token in ids]
                completion = SimpleNamespace(
                    token_ids=ids, logprobs=logprobs, text=f"t{ids[0]}", finish_reason=seen.finish_reason
                )
                outputs.append(SimpleNamespace(outputs=[completion]))
            return outputs

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    lora: Any = ModuleType("vllm.lora.request")
    lora.LoRARequest = lambda name, number, path: (name, number, path)
    for name, fake in {"vllm": module, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": lora}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return seen


TASKS = [Task(draw=4, id="a", prompt="", prompt_ids=(5, 6)), Task(draw=9, id="b", prompt="", prompt_ids=(7,))]
SAMPLING = Sampling(
    8, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(11,), end_of_turn_ids=(2, 11), stop_strings=("X",)
)


def test_tokens_in_and_tokens_out_with_their_logprobs(vllm: FakeVllm) -> None:
    received: list[int] = []
    found = VllmEngine("m", "t", max_model_len=9).generate(TASKS, 2, SAMPLING, NoiseKey(1, 0), received.append)
    assert [prompt["prompt_token_ids"] for prompt, _ in vllm.requests] == [[5, 6], [5, 6], [7], [7]]
    assert [[completion.token_ids for completion in row] for row in found] == [[(7, 2)] * 2, [(8, 2)] * 2]
    assert found[1][0].logprobs == (-4.0, -1.0)
    assert (found[0][0].text, found[0][0].finish_reason) == ("t7", "stop")
    assert received == [4]
    parameters = vllm.requests[0][1]
    assert (parameters.temperature, parameters.top_p, parameters.top_k, parameters.logprobs) == (0.7, 0.9, 3, 0)
    assert (parameters.stop, parameters.stop_token_ids) == (["X"], [11, 2])
    assert [p.max_tokens for _, p in vllm.requests] == [7, 7, 8, 8], "prompt and answer fit max_model_len"


def test_noise_is_keyed_by_draw_and_sample_only(vllm: FakeVllm) -> None:
    engine = VllmEngine("m", "t", max_model_len=9)
    engine.generate(TASKS, 2, SAMPLING, NoiseKey(1, 0))
    engine.generate(TASKS[::-1], 1, SAMPLING, NoiseKey(1, 0))
    seeds = [parameters.seed for _, parameters in vllm.requests]
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == [seeds[2], seeds[0]]
    assert all(0 <= seed < 2**63 for seed in seeds)
    engine.generate([replace(TASKS[0], first_sample=1, first_token=6)], 1, SAMPLING, NoiseKey(1, 0))
    assert vllm.requests[-1][1].seed not in seeds, "a later turn of a sample draws other noise than its first"


def test_ignore_eos_ignores_all_stops(vllm: FakeVllm) -> None:
    VllmEngine("m", "t", max_model_len=9).generate(
        TASKS, 1, Sampling(4, stop_strings=("X",), ignore_eos=True), NoiseKey(1, 0)
    )
    parameters = vllm.requests[0][1]
    assert (parameters.stop, parameters.stop_token_ids, parameters.ignore_eos) == (None, None, True)


def test_adapter_is_passed_to_vllm(vllm: FakeVllm) -> None:
    engine = VllmEngine("m", "t", max_model_len=9, adapter=Path("adapter"), adapter_rank=20)
    engine.generate(TASKS, 1, SAMPLING, NoiseKey(1, 0))
    assert vllm.lora == ("adapter", 1, "adapter")
    assert (vllm.arguments["enable_lora"], vllm.arguments["max_lora_rank"]) == (True, 32)


def test_settings_become_arguments_of_vllm(vllm: FakeVllm) -> None:
    overrides = [
        "generation.vllm_cfg.tensor_parallel_size=8",
        "generation.vllm_cfg.logprobs_mode=raw_logprobs",
        "generation.vllm_kwargs={max_num_seqs: 64}",
    ]
    generation = load_config("eval", None, overrides).config.generation
    VllmEngine("m", "t", max_model_len=9, **vllm_options(generation.vllm_cfg, generation.vllm_kwargs, "bfloat16"))
    expected = {"tensor_parallel_size": 8, "dtype": "bfloat16", "gpu_memory_utilization": 0.9, "max_num_seqs": 64}
    assert expected.items() <= vllm.arguments.items()
    assert vllm.arguments["logprobs_mode"] == "raw_logprobs"


def test_too_long_prompts_and_aborted_requests_are_errors(vllm: FakeVllm) -> None:
    with pytest.raises(InputError, match="task 'a' has 2 prompt tokens: between 1 and 1 fit"):
        VllmEngine("m", "t", max_model_len=2).generate(TASKS, 1, SAMPLING, NoiseKey(1, 0))
    vllm.finish_reason = "abort"
    with pytest.raises(RuntimeError, match="abort"):
        VllmEngine("m", "t", max_model_len=9).generate(TASKS, 1, SAMPLING, NoiseKey(1, 0))


def test_missing_vllm_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"pip install 'posttrain\[vllm\]', or use generation.backend=native"):
        VllmEngine("m", "t", max_model_len=9)
