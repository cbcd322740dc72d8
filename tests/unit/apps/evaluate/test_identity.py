"""What makes an evaluation another one, and what does not: everything that decides answers or rewards, and nothing
else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.evaluate.build import EvaluationBuild
from posttrain.apps.evaluate.server import OpenAiServer
from posttrain.config import load_config

DATA = ("data.dataset_name=rows.jsonl", "data.problem_key=problem", "data.solution_key=answer")
HUB = ("generation.model_name=org/model", *DATA)
VLLM = (*HUB, "generation.backend=vllm")
SERVER = ("generation.model_name=http://localhost:1/v1", *DATA)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of problems."""
    monkeypatch.chdir(tmp_path)
    write_rows(tests="assert f(1) == 2")
    return tmp_path


def write_rows(**columns: Any) -> None:
    rows = [{"problem": f"write f{number}", "answer": "x", **columns} for number in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def identity(*words: str) -> dict[str, Any]:
    return EvaluationBuild(load_config("eval", None, list(words)), print).identity()


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [key for key in first if first[key] != second[key]]


def test_another_column_that_a_judge_reads_is_another_evaluation() -> None:
    before = identity(*HUB, "env.mine.type=code")
    write_rows(tests="assert f(1) == 3")
    assert differing(before, identity(*HUB, "env.mine.type=code")) == ["metadata_hash"]


@pytest.mark.parametrize(
    "setting",
    [
        "generation.vllm_kwargs.quantization=fp8",
        "generation.vllm_cfg.kv_cache_dtype=fp8",
        "generation.vllm_cfg.load_format=dummy",
        "generation.precision=float32",
    ],
)
def test_vllm_number_formats_change_the_identity(setting: str) -> None:
    assert differing(identity(*VLLM), identity(*VLLM, setting)) == ["engine"]


def test_vllm_memory_settings_do_not_change_the_identity() -> None:
    assert not differing(identity(*VLLM), identity(*VLLM, "generation.vllm_cfg.gpu_memory_utilization=0.8"))


@pytest.mark.parametrize(
    ("file", "words", "key"),
    [
        (
            "judge/model.safetensors",
            ("env.rm.rewards.s.type=reward_model", "env.rm.rewards.s.model_name=judge"),
            "judge",
        ),
        ("rewards/mine.py", ("env.mine.function=rewards.mine:score",), "judge"),
        ("rewards/__init__.py", ("env.mine.function=rewards.score",), "judge"),
        ("words/tokenizer.json", ("tokenizer.name=words",), "tokenizer"),
    ],
)
def test_models_modules_and_tokenizers_count_by_their_content(file: str, words: tuple[str, ...], key: str) -> None:
    write(file, "one")
    before = identity(*HUB, *words)
    assert not differing(before, identity(*HUB, *words))
    write(file, "two")
    assert differing(before, identity(*HUB, *words)) == [key]


def test_files_written_by_a_judge_do_not_change_the_identity() -> None:
    settings = ("type=judge", "model=gpt", "base_url=http://localhost:1/v1", "cache_path=judge.sqlite")
    words = [f"env.m.rewards.s.{setting}" for setting in settings]
    write("judge.sqlite", "no verdicts yet")
    before = identity(*HUB, *words)
    write("judge.sqlite", "many verdicts")
    assert not differing(before, identity(*HUB, *words))


@pytest.mark.parametrize(
    "setting",
    ["request_timeout_s=9", "max_retries=9", "input_price=1", "api_key_env=MY_KEY", "cache=false", "timeout_s=9"],
)
def test_speed_and_cost_of_a_judge_do_not_change_the_identity(setting: str) -> None:
    words = [f"env.m.rewards.s.{each}" for each in ("type=judge", "model=gpt", "base_url=http://localhost:1/v1")]
    assert not differing(identity(*HUB, *words), identity(*HUB, *words, f"env.m.rewards.s.{setting}"))
    assert differing(identity(*HUB, *words), identity(*HUB, *words, "env.m.rewards.s.model=other")) == ["judge"]


def test_another_model_behind_the_same_address_is_another_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("old", "new"):
        monkeypatch.setattr(OpenAiServer, "_first_model", lambda self, name=name: name)
        found[name] = identity(*SERVER)
    assert differing(found["old"], found["new"]) == ["model"]
    assert not differing(found["new"], identity(*SERVER, "generation.openai_cfg.model=new")), (
        "named without being asked"
    )


@pytest.mark.parametrize("setting", ["timeout_s=1200", "num_concurrent=4", "max_retries=9", "api_key_env_var=MY_KEY"])
def test_request_settings_of_a_server_do_not_change_the_identity(setting: str) -> None:
    named = (*SERVER, "generation.openai_cfg.model=m")
    assert not differing(identity(*named), identity(*named, f"generation.openai_cfg.{setting}"))
    assert differing(identity(*named), identity(*named, "generation.openai_cfg.api=completions")) == ["server"]
