"""Settings that follow from the machine and the data where the user has set nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import posttrain
from posttrain.config import load_config
from posttrain.environments.python_function import named_arguments, why_absent
from posttrain.errors import InputError
from posttrain.reporting import machines
from posttrain.run import _refuse_missing, fitted


def loaded(*words: str, kind: str = "grpo"):  # type: ignore[no-untyped-def]
    return fitted(lambda extra: load_config(kind, None, [*words, *extra]))([])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list of GPUs, empty at first."""
    found: list[object] = []
    monkeypatch.setattr(machines, "open_nvml", lambda: found.pop() if found else None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "float32"),
        (["precision=bfloat16"], "bfloat16"),
        (["device=cpu"], "float32"),
        (["device=cuda"], "bfloat16"),
        (["cluster.num_nodes=2"], "bfloat16"),  # a head of a cluster often has no GPU
    ],
)
def test_a_run_on_cpus_computes_in_float32_unless_the_user_says_otherwise(
    words: list[str], expected: str, gpus: list[object]
) -> None:
    assert loaded(*words).config.policy.precision == expected


def test_a_machine_with_a_gpu_keeps_bfloat16(gpus: list[object]) -> None:
    gpus.append("one")
    assert loaded().config.policy.precision == "bfloat16"


def test_a_cluster_elsewhere_may_have_gpus(gpus: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert loaded("cluster.gpus_per_node=2").config.policy.precision == "bfloat16"
    assert loaded().config.policy.precision == "float32", "one process does not join it"


def test_columns_of_a_file_are_guessed_and_said(tmp_path: Path, gpus: list[object]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    found = loaded(f"data={file}")
    assert (found.config.data.train.input_key, found.config.data.train.output_key) == ("question", "answer")
    assert found.warnings[-1] == (
        "data.train: 'question' is taken as the prompt (data.train.input_key), "
        "'answer' is taken as the answer (data.train.output_key)"
    )
    given = loaded(f"data={file}", "data.train.input_key=prompt")
    assert given.config.data.train.input_key == "prompt", "what is set stays"
    file.write_text(json.dumps({"input": "1+1?", "output": "2", "question": "x"}) + "\n")
    usual = loaded(f"data={file}")
    assert usual.config.data.train.input_key is None
    assert not any("taken as" in line for line in usual.warnings)


@pytest.mark.parametrize(
    ("prompt", "parameters", "words", "expected"),
    [
        ([{"role": "user", "content": "1+1?"}], "completions, answer, **kwargs", [], True),
        ("1+1?", "completions, answer, **kwargs", [], None),
        ([{"role": "user", "content": "1+1?"}], "response", [], None),
        ([{"role": "user", "content": "1+1?"}], "completions", ["env.reward.as_messages=false"], False),
    ],
)
def test_a_reward_for_trl_gets_messages_where_prompts_are_messages(
    prompt: object,
    parameters: str,
    words: list[str],
    expected: bool | None,
    tmp_path: Path,
    gpus: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    Path("r.py").write_text(f"def r({parameters}): ...\n")
    found = loaded("data=rows.jsonl", "reward=r.py:r", *words)
    assert (found.config.env["reward"].model_extra or {}).get("as_messages") is expected
    assert any("gets messages" in line for line in found.warnings) == (expected is True)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("{function: 'r.py:r'}", [True]),
        ("{rewards: {a b.c: {type: python, function: 'r.py:r'}, d: {type: regex, pattern: a}}}", [True, None]),
    ],
)
def test_messages_of_one_environment_are_not_those_of_another(
    block: str, expected: list[bool | None], tmp_path: Path, gpus: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}) + "\n")
    Path("text.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    Path("r.py").write_text("def r(completions, answer, **kwargs): ...\n")
    rows = ", ".join(
        f"{{dataset_name: ResponseDataset, data_path: {kind}.jsonl, env_name: {kind}, input_key: prompt}}"
        for kind in ("chat", "text")
    )
    found = loaded(f"data.train=[{rows}]", f"env={{chat: {block}, text: {block}}}")
    rewards = {name: env.reward_configs(name) for name, env in found.config.environments.items()}
    messages = {name: [getattr(one, "as_messages", None) for one in rewards[name].values()] for name in rewards}
    assert (messages["chat"], messages["text"]) == (expected, [one and False for one in expected])


@pytest.mark.parametrize(
    ("text", "spec", "reason"),
    [
        (
            "def right(response): ...\ndef _no(): ...\n",
            "r.py:wrong",
            "r.py has no 'wrong'; the functions it has: right",
        ),
        ("from others import *\n", "r.py:wrong", None),  # it may come from there
        ("right = wrong = len\n", "r.py:wrong", None),
        ("", "s.py:right", "there is no file .*s.py .did you mean '.*rr.py'"),
        ("", "package.module:right", None),
    ],
)
def test_a_function_that_is_not_there_is_found_without_import(
    text: str, spec: str, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "rr.py").write_text(text)
    (tmp_path / "r.py").write_text(text)
    found = why_absent(spec.replace("s.py", "rrr.py"), tmp_path)
    assert found is None if reason is None else found is not None and re.match(reason.replace("s.py", "rrr.py"), found)


def test_arguments_of_a_reward_by_position_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def r(a, b, c): ...\ndef s(response): ...\nimport nothing_of_this_name\n")
    assert named_arguments("r.py:r", tmp_path) == "r (a, b, c are taken as prompt, response, reference)"
    assert named_arguments("r.py:s", tmp_path) == "s"
    assert named_arguments("package.module:f", tmp_path) == "f"


def test_a_call_that_is_refused_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="none"):
        posttrain.grpo(tmp_path / "none", [{"input": "1", "output": "2"}], reward=lambda response: 1.0, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_only_functions_that_the_run_uses_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[object]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"input": "1+1?", "output": "2"}) + "\n")
    Path("model").mkdir()
    words = ["model=model", "data=rows.jsonl", "env.mine.function=absent.py:f"]
    _refuse_missing(loaded(*words, "data.train.env_name=math").config)
    with pytest.raises(InputError, match=r"env\.mine\.function is 'absent\.py:f': there is no file"):
        _refuse_missing(loaded(*words, "data.train.env_name=mine").config)
