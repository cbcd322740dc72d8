"""`posttrain init` writes a config and data that fit each other, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.recipes import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_config_loads_with_the_written_data(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", kind]) == 0
    text = (tmp_path / f"{kind}.yaml").read_text()
    assert "examples/" not in text
    assert "configs/" not in text
    config = load_config(kind, tmp_path / f"{kind}.yaml").config
    data_path = config.data.train_sets()[0].data_path
    assert data_path == Path(KINDS[kind].examples[0]).name
    assert len((tmp_path / data_path).read_text().splitlines()) == 16


def test_a_new_folder_is_made_and_named_in_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "grpo", "my/run"]) == 0
    assert {path.name for path in (tmp_path / "my/run").iterdir()} == {"grpo.yaml", "prompts.jsonl", "rewards.py"}
    assert "  cd my/run\n" in capsys.readouterr().out
    reward = (tmp_path / "my/run/rewards.py").read_text()
    assert "grpo --config grpo.yaml reward=rewards.py:right_and_brief" in reward
    assert "examples/" not in reward


def test_a_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "dpo", "a"]) == 0
    out = capsys.readouterr().out
    assert "models fetch smollm2" in out
    assert " model=models/smollm2-135m-instruct" in out
    model = tmp_path / "models/smollm2-135m-instruct"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    assert main(["init", "dpo", "b/c"]) == 0
    out = capsys.readouterr().out
    assert "models fetch" not in out
    assert " model=../../models/smollm2-135m-instruct" in out


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text("mine")
    assert main(["init", "grpo", str(tmp_path)]) == 64
    assert "prompts.jsonl exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_all_is_the_configs_and_examples_of_the_documentation(tmp_path: Path) -> None:
    assert main(["init", "all", str(tmp_path)]) == 0
    for name in (
        "configs/grpo.yaml",
        "configs/pipelines/demo.yaml",
        "examples/rewards.py",
        "examples/data/pairs.jsonl",
    ):
        assert (tmp_path / name).is_file(), name
    assert not list(tmp_path.rglob("__pycache__"))
