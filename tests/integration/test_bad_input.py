"""What bad input gets: exit code 64 and a message with place and remedy, before a model is loaded if possible."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_runs
from tiny_runs import LORA, command, questions, run, save_data, write_rows

import posttrain.policy.trainer as trainer_module


@dataclass(frozen=True)
class Inputs:
    """Good ones; each test spoils one thing."""

    folder: Path
    model: Path
    data: Path

    def run_of(self, kind: str, *settings: str) -> list[str]:
        return [*getattr(tiny_runs, kind)(self.model, self.data, self.folder / "run", steps=1), *settings]

    def grpo(self, *settings: str) -> list[str]:
        return self.run_of("grpo", *settings)

    def reading(self, content: str | Sequence[dict[str, Any]], kind: str = "ResponseDataset") -> str:
        """The setting that trains on a file with this content."""
        path = self.folder / "rows.jsonl"
        path.write_text(content) if isinstance(content, str) else write_rows(path, content)
        return f"data.train={{dataset_name: {kind}, data_path: {path}}}"

    def model_with(self, **changes: Any) -> str:
        """The setting that trains a copy of the model with other entries in its config.json."""
        shutil.copytree(self.model, self.folder / "model")
        file = self.folder / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return f"policy.model_name={file.parent}"


@pytest.fixture
def inputs(model: Path, tmp_path: Path) -> Inputs:
    return Inputs(tmp_path, model, save_data(tmp_path / "data"))


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Mock(side_effect=AssertionError("the model was loaded although the input was known to be bad"))
    monkeypatch.setattr(trainer_module, "load_model", loaded)
    monkeypatch.setattr(trainer_module, "load_reward_model", loaded)


@pytest.fixture
def assert_refused(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def check(arguments: Sequence[str], *expected: str) -> None:
        """Exit code 64, no traceback, a message that holds every expected text, and no trace of a run."""
        capsys.readouterr()
        try:
            exit_code = run(arguments)
        except SystemExit as error:  # how argparse refuses
            exit_code = int(error.code or 0)
        message = capsys.readouterr().err
        assert exit_code == 64, message
        assert "Traceback (most recent call last)" not in message
        assert "posttrain: error: " in message
        for text in expected:
            assert text in message
        assert not (inputs.folder / "run").exists()

    return check


def test_good_input_is_accepted(inputs: Inputs) -> None:
    """Otherwise the others would show nothing."""
    assert run(inputs.grpo()) == 0


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
@pytest.mark.parametrize("name", ["no_model", "data"])
def test_folder_that_is_no_model(kind: str, name: str, inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    folder = str(inputs.folder / name)
    arguments = inputs.run_of(kind, f"policy.model_name={folder}")
    assert_refused(arguments, "policy.model_name", folder, "config.json")


@pytest.mark.parametrize(
    ("key", "value"), [("model_type", "lama"), ("num_attention_heads", "many"), ("hidden_act", "silo")]
)
def test_config_that_makes_no_model(key: str, value: Any, inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    file = str(inputs.folder / "model" / "config.json")
    assert_refused(inputs.grpo(inputs.model_with(**{key: value})), "policy.model_name", file, value)


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["no weights", "torn weights"])
def test_model_folder_without_usable_weights(share: float, inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    setting = inputs.model_with()
    weights = inputs.folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if share:
        weights.write_bytes(content[: int(share * len(content))])
    assert_refused(inputs.grpo(setting), "policy.model_name", str(weights.parent))


NO_LAYER = [f"policy.dtensor_cfg.lora_cfg.{one}" for one in ("match_all_linear=false", "target_modules=[wq]")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([*LORA, *NO_LAYER], ["policy.dtensor_cfg.lora_cfg", "wq"]),
        (["policy.hf_config_overrides={attention_dropout: 0.5}"], ["policy.hf_config_overrides.attention_dropout=0.0"]),
        (["policy.hf_config_overrides={no_such_thing: 3}"], ["policy.hf_config_overrides", "no_such_thing"]),
    ],
    ids=["adapters that match no layer", "dropout in attention", "unknown overrides"],
)
def test_settings_that_do_not_fit_the_model(
    settings: list[str], expected: list[str], inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    assert_refused(inputs.run_of("sft", *settings), *expected)


# -- data --------------------------------------------------------------------------------------------------------------

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.train.dataset_name=gms8k"], ["gms8k", "'gsm8k'", "OpenMathInstruct-2"]),
        (["data.train.dataset_name=nobody/nothing", "~data.train.data_path"], ["nobody/nothing", "data_path"]),
        (["data.train.data_path={data}/question.jsonl"], ["{data}/question.jsonl", "'questions.jsonl'"]),
    ],
    ids=["unknown dataset", "unknown hub dataset", "missing file"],
)
def test_data_that_is_not_there(
    settings: list[str], expected: list[str], inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    place = {"data": inputs.data}
    arguments = inputs.grpo(*(setting.format(**place) for setting in settings))
    assert_refused(arguments, *(text.format(**place) for text in expected))


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("kind", "rows", "expected"),
    [
        ("grpo", [*questions(4), {"input": "1 + 1", "answer": "2"}], ["row 5", "'output'", "'answer'", "output_key"]),
        ("sft", [*questions(4), {"input": "1 + 1", "answer": "2"}], ["row 5", "'output'", "'answer'", "output_key"]),
        ("dpo", [PAIR, {"prompt": "a", "chosen": "b"}], ["row 2", "'rejected'", "rejected_key"]),
        ("grpo", "", ["empty"]),
        ("grpo", "\n\n", ["empty"]),
        ("grpo", '{"input": "1 + 1", "output": "2"}\n{"input": "1 + 2", "outp\n', ["rows.jsonl:2", "JSON"]),
    ],
    ids=["row of grpo", "row of sft", "pair of dpo", "empty", "blank", "broken JSON"],
)
def test_rows_that_cannot_be_used(
    kind: str, rows: Any, expected: list[str], inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    dataset = "PreferenceDataset" if kind == "dpo" else "ResponseDataset"
    arguments = inputs.run_of(kind, inputs.reading(rows, dataset))
    assert_refused(arguments, str(inputs.folder / "rows.jsonl"), *expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_validation_data_is_looked_at_too(inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    path = write_rows(inputs.folder / "rows.jsonl", [{"asked": "1 + 1", "output": "2"}])
    arguments = inputs.grpo(f"data.validation.data_path={path}")
    assert_refused(arguments, str(path), "row 1", "'input'", "input_key")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_dataset_smaller_than_a_step(inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    arguments = inputs.grpo(inputs.reading(questions(3)), "grpo.max_num_epochs=1")
    assert_refused(arguments, "data.train", "3 usable prompts", "4 of one step", "max_num_epochs")


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_nothing_is_short_enough(kind: str, inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    """Never cut to fit; the message names the data and the setting that is too low."""
    rows = [{"input": "9" * 200, "output": "1", **PAIR, "prompt": "9" * 200}] * 5
    dataset = "PreferenceDataset" if kind in ("dpo", "rm") else "ResponseDataset"
    arguments = inputs.run_of(kind, inputs.reading(rows, dataset))
    assert_refused(arguments, "rows", "tokens: 5", "policy.max_total_sequence_length")


# -- rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("import no_such_package\ndef f(prompt, response, reference): return 1.0", "no_such_package"),
        ("def f(prompt, response, reference) return 1.0", "SyntaxError"),
        ("def other(prompt, response, reference): return 1.0", "the functions it has: other"),
        ("def f(left, right): return 1.0", "prompt, response, reference"),
        ("import os\nos._exit(3)\ndef f(prompt, response, reference): return 1.0", "exited with code 3"),
        (None, "there is no file"),
    ],
)
def test_reward_function_that_cannot_be_used(
    content: str | None, expected: str, inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    path = inputs.folder / "my_rewards.py"
    if content is not None:
        path.write_text(content + "\n")
    arguments = inputs.grpo(f"env.mine.function={path}:f")
    assert_refused(arguments, "env.mine.function", f"{path}:f", expected)


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("block", "place", "expected"),
    [
        ("{type: regex, pattern: '(a'}", "env.fmt.pattern", "not a regular expression"),
        ("{type: regex, patern: a}", "env.fmt.patern", "did you mean 'pattern'"),
        ("{type: regexp, pattern: a}", "env.fmt.type", "did you mean 'regex'"),
        ("{rewards: {shape: {type: json_schema, schema: {type: 3}}}}", "env.fmt.rewards.shape", "not a JSON schema"),
        ("{rewards: {shape: {type: json_schema, schema_file: no.json}}}", "env.fmt.rewards.shape", "cannot be read"),
        ("{rewards: {right: {type: math, weight: heavy}}}", "env.fmt.rewards.right.weight", "must be a valid number"),
    ],
)
def test_reward_that_cannot_be_built(
    block: str, place: str, expected: str, inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    assert_refused(inputs.grpo(f"env.fmt={block}", "data.default.env_name=fmt"), place, expected)


# -- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=4"],
            ["grpo.num_generations_per_prompt = 1", "normalize_rewards", "at least 2"],
        ),
        (["policy.train_global_batch_size=7"], ["4 * 4 = 16", "policy.train_global_batch_size = 7", "divisor of 16"]),
        (["policy.train_global_batch_size=32"], ["policy.train_global_batch_size = 32", "divisor of 16"]),
        (["grpo.num_promts_per_step=8"], ["grpo.num_promts_per_step", "did you mean `grpo.num_prompts_per_step`"]),
        (["policy.generation.max_new_tokens=65"], ["policy.generation.max_new_tokens = 65", "64"]),
        (["policy.megatron_cfg.enabled=true"], ["policy.megatron_cfg.enabled", "not implemented"]),
        (["policy.max_grad_norm=-1"], ["policy.max_grad_norm", "-1"]),
        (["policy.scheduler={name: torch.optim.lr_scheduler.StepLR}", "grpo.seed=x"], ["grpo.seed", "'x'"]),
        (["checkpointing.checkpoint_must_save_by='3h'"], ["checkpointing.checkpoint_must_save_by", "00:03:45:00"]),
        (["data.default.env_name=yours"], ["env_name 'yours'", "mine", "env.yours.function"]),
        (["steps"], ["'steps'", "key=value"]),
        (["--config", "no.yaml"], ["no.yaml"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else None,
)
def test_settings_that_cannot_work(
    settings: list[str], expected: list[str], inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    assert_refused(inputs.grpo(*settings), *expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_batches_of_pairs_that_do_not_divide(inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    arguments = inputs.run_of("dpo", "policy.train_micro_batch_size=4")
    assert_refused(arguments, "policy.train_global_batch_size = 6", "policy.train_micro_batch_size = 4")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_typo_in_a_file_names_file_and_line(inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    path = inputs.folder / "my.yaml"
    path.write_text("# mine\ngrpo:\n  num_promts_per_step: 8\n")
    assert_refused([*inputs.grpo(), "--config", str(path)], f"{path}:3", "`grpo.num_prompts_per_step`")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("policy.optimizer.name=torch.optim.AdamZ", ["policy.optimizer.name", "torch.optim.AdamZ"]),
        ("policy.optimizer.name=adam", ["policy.optimizer.name", "'adam'", "torch.optim.AdamW"]),
        ("policy.optimizer.kwargs.learning_rate=1", ["policy.optimizer.kwargs", "learning_rate"]),
        ("policy.optimizer.kwargs.lr=-1.0", ["policy.optimizer.kwargs", "-1"]),
        ("policy.scheduler={name: torch.optim.lr_scheduler.Up}", ["policy.scheduler", "torch.optim.lr_scheduler.Up"]),
        ("policy.scheduler={name: torch.optim.lr_scheduler.StepLR, kwargs: {size: 1}}", ["policy.scheduler", "size"]),
    ],
)
def test_optimizers_and_schedules_that_do_not_exist_or_do_not_fit(
    setting: str, expected: list[str], inputs: Inputs, assert_refused: Callable[..., None]
) -> None:
    # Another optimizer keeps none of the built-in settings.
    lr = ["policy.optimizer.kwargs.lr=1e-3"] if setting.startswith("policy.optimizer.name") else []
    assert_refused(inputs.grpo(setting, *lr), *expected)


def test_run_folder_that_is_a_file(inputs: Inputs, assert_refused: Callable[..., None]) -> None:
    path = inputs.folder / "results"
    path.touch()
    arguments = inputs.grpo(f"checkpointing.checkpoint_dir={path}")
    assert_refused(arguments, "checkpointing.checkpoint_dir", str(path), "file")


# -- as a process ------------------------------------------------------------------------------------------------------


def test_the_process_exits_with_64_and_prints_one_message(inputs: Inputs) -> None:
    missing = str(inputs.folder / "no_model")
    ended = subprocess.run(
        command(inputs.grpo(f"policy.model_name={missing}")), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 64
    assert ended.stdout == ""
    assert ended.stderr.startswith("posttrain: error: policy.model_name")
    assert len(ended.stderr.strip().split("\n\n")) == 1, "one paragraph"
