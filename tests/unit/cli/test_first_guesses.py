"""What people type first, and the answer they get."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.main import build_parser, main
from posttrain.errors import InputError, near_path
from posttrain.models.accepted_names import from_checkpoints
from posttrain.models.hub import why_unavailable


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train", "grpo, ppo, distill, dpo, rm and sft train"),
        ("grop", "did you mean 'grpo'?"),
        ("data inspekt", "did you mean 'inspect'?"),
        ("grpo --stpes 4", "--stpes (did you mean '--steps'?)"),
        ("dpo --leraning-rate=1", "--leraning-rate=1 (did you mean '--learning-rate'?)"),
        ("grpo --lr", "--lr needs a value"),
    ],
)
def test_a_mistake_gets_a_suggestion(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 64
    assert said in capsys.readouterr().err


def test_settings_as_options() -> None:
    args = build_parser().parse_args(["grpo", "--lr", "1e-6", "policy.precision=float32", "--max-steps=3", "--quiet"])
    assert args.words == ["lr=1e-6", "policy.precision=float32", "max_steps=3"]
    assert args.quiet


@pytest.mark.parametrize("words", [["help"], ["help", "grpo"]])
def test_help_is_understood_as_a_word(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {' '.join(['posttrain', *words[1:]])} ")


def test_a_config_of_the_documentation_that_is_not_here_names_the_command_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "check", "--config", "configs/grpo.yaml"]) == 64
    assert "`posttrain init all` writes configs/" in capsys.readouterr().err


def test_a_benchmark_after_the_model_of_eval_is_told_from_a_second_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "models/mine", "gsm8k"]) == 64
    assert "data.dataset_name=gsm8k" in capsys.readouterr().err


def test_a_misspelt_folder_on_the_way_to_a_model_gets_a_suggestion(tmp_path: Path) -> None:
    meant = tmp_path / "results" / "demo" / "step_5"
    meant.mkdir(parents=True)
    assert near_path(tmp_path / "results" / "dmeo" / "step_5") == f" (did you mean '{meant}'?)"
    assert near_path(tmp_path / "results" / "dmeo" / "step_6") == ""
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert near_path(tmp_path / "smollm2") == f" (did you mean '{tmp_path / 'smollm2-135m-instruct'}'?)"
    assert f"did you mean '{meant}'" in str(why_unavailable(str(tmp_path / "results" / "dmeo" / "step_5")))


def fake_load(folder: Path) -> object:
    """Loads a config whose model is `folder`, with the overrides that it is given."""
    from posttrain.config import load_config

    return lambda extra: load_config("sft", None, [f"policy.model_name={folder}", *extra])


def checkpoint(run: Path, *, adapter: bool) -> Path:
    weights = run / "step_3" / "policy" / "weights" / "model"
    weights.mkdir(parents=True)
    (run / "step_3" / "policy" / "tokenizer").mkdir()
    (run / "step_3" / "training_info.json").write_text("{}")
    if adapter:
        (weights / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    else:
        (weights / "config.json").write_text('{"model_type": "llama"}')
        (weights / "model.safetensors").write_bytes(b"")
    return weights


def test_a_run_folder_as_the_model_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "run", adapter=False)
    loaded = from_checkpoints(fake_load(tmp_path / "run"))([])  # type: ignore[arg-type]
    assert Path(loaded.config.policy.model_name) == weights
    assert Path(loaded.config.policy.tokenizer.name) == weights.parents[1] / "tokenizer"


def test_adapters_have_to_be_merged_first(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", adapter=True)
    with pytest.raises(InputError, match="posttrain convert"):
        from_checkpoints(fake_load(tmp_path / "run"))([])  # type: ignore[arg-type]


def test_a_model_folder_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    loaded = from_checkpoints(fake_load(tmp_path))([])  # type: ignore[arg-type]
    assert Path(loaded.config.policy.model_name) == tmp_path
