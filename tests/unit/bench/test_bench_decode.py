"""bench/decode.py on a tiny model: every engine does the whole work, and the ratio is that of the rates."""

import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode
import decode_vllm
import pytest
from decode_job import DecodeJob, Sampled, measured
from workloads import workload

from posttrain.errors import InputError

NAME, UNEVEN = "4x6+5-g2", "5x6+2..9"
JOB = DecodeJob("native", "tiny", (NAME,), "cpu", "float32", repeats=1)


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_an_engine_samples_every_token_of_the_workload(engine: str) -> None:
    started = decode.do_job(replace(JOB, engine=engine, workloads=(NAME, "2x4+3")).as_json())
    assert started["start_s"] > 0
    assert started["workloads"]["2x4+3"]["num_tokens"] == 2 * 3
    result = started["workloads"][NAME]
    assert result["num_tokens"] == 4 * 5
    assert result["tokens_per_s"] == pytest.approx(20 / min(result["run_s"]))
    assert result["peak_gib"] > 0
    assert -12 < result["mean_logprob"] < -3  # of 512 tokens, none of them sure


@pytest.mark.parametrize("engine", ["generate", "native"])
def test_lengths_of_their_own_are_asked_of_the_engine(engine: str) -> None:
    job = replace(JOB, engine=engine, workloads=(UNEVEN,), generate_batch=2)
    assert decode.do_job(job.as_json())["workloads"][UNEVEN]["num_tokens"] == sum(job.works[0].limits)


def test_the_cache_can_be_given_up_before_every_run() -> None:
    result = decode.do_job(replace(JOB, repeats=2, release=True).as_json())["workloads"][NAME]
    assert len(result["release_s"]) == len(result["run_s"]) == 2


def test_sharded_modules_sample_the_same_tokens(tmp_path: Path) -> None:
    """Each side is a process of its own, so the process group is too."""
    found = []
    for words in ([], ["--sharded"]):
        out = tmp_path / "report.json"
        usual = ["--shape", "tiny", "--engines", "native", "--workload", NAME, "--device", "cpu", "--repeats", "1"]
        assert decode.main([*usual, "--out", str(out), *words]) == 0
        found.append(json.loads(out.read_text())["engines"]["native"]["workloads"][NAME]["mean_logprob"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_the_profile_names_the_largest_costs() -> None:
    costs = decode.do_job(replace(JOB, profile=True).as_json())["profile"]["costs"]
    assert len(costs) == 10
    assert any("mm" in cost["name"] for cost in costs)


def test_less_than_the_work_is_refused_and_a_step_is_what_remains_beside_the_prompts() -> None:
    work = workload("2x4+5")
    for sampled in (Sampled([5, 4], [5, 4], -1.0), Sampled([5, 5], [5, 0], -1.0)):
        with pytest.raises(RuntimeError):
            measured(work, sampled, 1.0, 0.1)
    result = measured(work, Sampled([5, 5], [5, 5], -1.0), seconds=1.0, prompts_s=0.2)
    assert (result["tokens_per_s"], result["ms_per_step"]) == (10, pytest.approx(200))


def test_settings_of_the_native_engine_are_checked() -> None:
    assert decode.options_of(["page_size=64", "kv_cache_gib=1.5"], "--native") == {"page_size": 64, "kv_cache_gib": 1.5}
    with pytest.raises(InputError, match=r"page_sise.*page_size"):
        decode.do_job(replace(JOB, native={"page_sise": 64}).as_json())
    with pytest.raises(InputError, match="KEY=VALUE"):
        decode.options_of(["page_size"], "--native")


def test_the_report_has_machine_versions_and_ratios(tmp_path: Path, in_process: Callable[[Any], None]) -> None:
    in_process(decode)
    words = ["--shape", "tiny", "--engines", "native", "generate", "--workload", "2x4+3", "--repeats", "1"]
    assert decode.main([*words, "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert {"date", "device", "versions", "python"} <= report.keys()
    assert {"torch", "transformers", "posttrain"} <= report["versions"].keys()
    rates = {engine: result["workloads"]["2x4+3"]["tokens_per_s"] for engine, result in report["engines"].items()}
    assert report["ratios"]["2x4+3"] == {"generate": pytest.approx(rates["native"] / rates["generate"])}


def test_a_peer_that_fails_is_shown_and_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"tokens_per_s": 9.0, "ms_per_step": 1.0, "prompts_s": 0.1, "warm_up_s": 1.0, "peak_gib": 1.0}
    fine = {"start_s": 1.0, "workloads": {"2x4+3": rates}}
    sides = {"native": fine, "vllm": {"error": "no such engine", "output": ""}}
    monkeypatch.setattr(decode, "run_side", lambda _, job, environment=None: dict(sides[job["engine"]]))
    words = ["--shape", "tiny", "--workload", "2x4+3", "--engines"]
    assert decode.main([*words, "native", "vllm"]) == 0
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert "no such engine" in shown.err
    sides["native"] = {"error": "broken"}
    assert decode.main([*words, "native"]) == 1


def test_wrong_workload_is_an_error_before_anything_runs() -> None:
    with pytest.raises(InputError, match="workload 'many'"):
        decode.main(["--workload", "512x128+256", "many"])


# -- vLLM, with a stand-in that keeps what it was asked ----------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    class Params:
        def __init__(self, **options: Any) -> None:
            self.__dict__.update(options)

    class Llm:
        def __init__(self, **options: Any) -> None:
            seen.append({**options, "config": json.loads((Path(options["model"]) / "config.json").read_text())})

        def reset_prefix_cache(self) -> None:
            seen.append("reset")

        def generate(self, prompts: list[Any], sampling: list[Params], use_tqdm: bool) -> list[Any]:
            seen.append((prompts, sampling))

            def sample(limit: int) -> Any:
                logprobs = [{7: types.SimpleNamespace(logprob=-2.0)}] * limit
                return types.SimpleNamespace(token_ids=[7] * limit, logprobs=logprobs)

            return [types.SimpleNamespace(outputs=[sample(p.max_tokens) for _ in range(p.n)]) for p in sampling]

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = Llm, Params, "0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 * 2**30, 4 * 2**30))
    return seen


def test_vllm_gets_the_same_prompts_the_same_sampling_and_the_same_shape(calls: list[Any]) -> None:
    job = replace(JOB, engine="vllm", workloads=(UNEVEN,))
    result = decode_vllm.measure(job)
    engine, *generated = calls
    assert engine["load_format"] == "dummy"
    assert engine["config"]["hidden_size"] == 64
    assert engine["config"]["architectures"] == ["LlamaForCausalLM"]
    assert engine["enable_prefix_caching"] is False
    prompts, sampling = generated[-1]
    assert [prompt["prompt_token_ids"] for prompt in prompts] == job.prompts(job.works[0])
    assert [params.max_tokens for params in sampling] == list(job.works[0].limits)
    assert {(p.temperature, p.ignore_eos, p.logprobs) for p in sampling} == {(1.0, True, 0)}
    assert result["workloads"][UNEVEN]["num_tokens"] == sum(job.works[0].limits)
    assert result["workloads"][UNEVEN]["mean_logprob"] == -2.0
    assert result["workloads"][UNEVEN]["peak_gib"] == 3, "of the whole device: its engine is in another process"


def test_vllm_shares_prompts_within_a_call_but_not_between_calls(calls: list[Any]) -> None:
    decode_vllm.measure(replace(JOB, engine="vllm"))
    assert calls[0]["enable_prefix_caching"] is True
    generated = [index for index, call in enumerate(calls) if isinstance(call, tuple)]
    # The first is the one token of the start, of a prompt that nobody shares.
    assert [calls[index - 1] == "reset" for index in generated] == [False, True, True, True]
    assert {params.n for params in calls[-1][1]} == {2}
