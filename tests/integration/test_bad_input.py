"""What bad input gets: exit code 64 and one message with the place and the remedy, before a model is loaded if
possible.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import LORA, command, dpo, grpo, questions, rm, run, save_data, sft, write_rows

import posttrain.policy.trainer as trainer_module


@dataclass(frozen=True)
class Inputs:
    """Good ones; each test spoils one thing."""

    folder: Path
    model: Path
    data: Path

    def grpo(self, *settings: str) -> list[str]:
        return [*grpo(self.model, self.data, self.folder / "run", steps=1), *settings]

    def dpo(self, *settings: str) -> list[str]:
        return [*dpo(self.model, self.data, self.folder / "run", steps=1), *settings]

    def rm(self, *settings: str) -> list[str]:
        return [*rm(self.model, self.data, self.folder / "run", steps=1), *settings]

    def sft(self, *settings: str) -> list[str]:
        return [*sft(self.model, self.data, self.folder / "run", steps=1), *settings]

    def file(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content)
        return path

    def rows(self, name: str, rows: Sequence[dict[str, Any]]) -> Path:
        return write_rows(self.folder / name, rows)


@pytest.fixture
def inputs(model: Path, tmp_path: Path) -> Inputs:
    return Inputs(tmp_path, model, save_data(tmp_path / "data"))


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("the model was loaded although the input was known to be bad")

    monkeypatch.setattr(trainer_module, "load_model", refuse)
    monkeypatch.setattr(trainer_module, "load_reward_model", refuse)


def assert_refused(
    arguments: Sequence[str], inputs: Inputs, capsys: pytest.CaptureFixture[str], *expected: str
) -> None:
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


def test_good_input_is_accepted(inputs: Inputs) -> None:
    """Otherwise the others would show nothing."""
    assert run(inputs.grpo()) == 0


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_missing_model_folder(kind: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(inputs.folder / "no_model")
    arguments = getattr(inputs, kind)(f"policy.model_name={missing}")
    assert_refused(arguments, inputs, capsys, "policy.model_name", missing, "config.json", "hub name")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_folder_that_is_no_model(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.grpo(f"policy.model_name={inputs.data}")
    assert_refused(arguments, inputs, capsys, "policy.model_name", str(inputs.data), "config.json")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "lama", "lama"),
        ("num_attention_heads", "many", "num_attention_heads"),
        ("hidden_act", "silo", "hidden_act 'silo' is not known"),
    ],
)
def test_config_that_makes_no_model(
    key: str, value: Any, said: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = inputs.folder / "model"
    shutil.copytree(inputs.model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert_refused(inputs.grpo(f"policy.model_name={folder}"), inputs, capsys, "policy.model_name", str(file), said)


def test_dropout_in_attention_is_not_ignored(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    drops = inputs.sft("policy.hf_config_overrides={attention_dropout: 0.5}")
    assert_refused(drops, inputs, capsys, "attention_dropout = 0.5", "policy.hf_config_overrides.attention_dropout=0.0")


@pytest.mark.parametrize("damage", ["no weights", "torn weights"])
def test_model_folder_without_usable_weights(damage: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = inputs.folder / "model"
    shutil.copytree(inputs.model, folder)
    if damage == "torn weights":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    else:
        (folder / "model.safetensors").unlink()
    assert_refused(inputs.grpo(f"policy.model_name={folder}"), inputs, capsys, "policy.model_name", str(folder))


def test_adapters_that_match_no_layer(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    targets = ["lora_cfg.match_all_linear=false", "lora_cfg.target_modules=[wq]"]
    arguments = inputs.grpo(*LORA, *(f"policy.dtensor_cfg.{target}" for target in targets))
    assert_refused(arguments, inputs, capsys, "policy.dtensor_cfg.lora_cfg", "wq")


def test_overrides_that_do_not_fit_the_model(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.grpo("policy.hf_config_overrides={no_such_thing: 3}")
    assert_refused(arguments, inputs, capsys, "policy.hf_config_overrides", "no_such_thing")


# -- data --------------------------------------------------------------------------------------------------------------


def reading(path: Path, kind: str = "ResponseDataset") -> str:
    return f"data.train={{dataset_name: {kind}, data_path: {path}}}"


@pytest.mark.usefixtures("no_model_is_loaded")
def test_unknown_dataset(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.grpo("data.train.dataset_name=gms8k")
    assert_refused(arguments, inputs, capsys, "gms8k", "did you mean 'gsm8k'", "OpenMathInstruct-2")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_unknown_hub_dataset(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.grpo("data.train.dataset_name=nobody/nothing", "~data.train.data_path")
    assert_refused(arguments, inputs, capsys, "nobody/nothing", "data_path")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_missing_data_file(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    missing = inputs.data / "question.jsonl"
    assert_refused(inputs.grpo(reading(missing)), inputs, capsys, str(missing), "did you mean 'questions.jsonl'")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_row_without_the_key(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.rows("rows.jsonl", [*questions(4), {"input": "1 + 1", "answer": "2"}])
    expected = (str(path), "row 5", "'output'", "'answer'", "output_key")
    assert_refused(inputs.grpo(reading(path)), inputs, capsys, *expected)
    assert_refused(inputs.sft(reading(path)), inputs, capsys, *expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_pair_without_the_key(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.rows("pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}])
    arguments = inputs.dpo(reading(path, "PreferenceDataset"))
    assert_refused(arguments, inputs, capsys, str(path), "row 2", "'rejected'", "rejected_key")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_validation_data_is_looked_at_too(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.rows("rows.jsonl", [{"question": "1 + 1", "output": "2"}])
    arguments = inputs.grpo(f"data.validation.data_path={path}")
    assert_refused(arguments, inputs, capsys, str(path), "row 1", "'input'", "input_key")


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_file(content: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.file("rows.jsonl", content)
    assert_refused(inputs.grpo(reading(path)), inputs, capsys, str(path), "the file is empty")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_broken_json_line(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.file("rows.jsonl", '{"input": "1 + 1", "output": "2"}\n{"input": "1 + 2", "outp\n')
    assert_refused(inputs.grpo(reading(path)), inputs, capsys, f"{path}:2", "broken JSON")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_dataset_smaller_than_a_step(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.rows("rows.jsonl", questions(3))
    arguments = inputs.grpo(reading(path), "grpo.max_num_epochs=1")
    assert_refused(arguments, inputs, capsys, "data.train", "3 usable prompts", "4 of one step", "max_num_epochs")


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_nothing_is_short_enough(kind: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    """Never cut to fit; the message names the data and the setting that is too low."""
    long = "9" * 200
    rows = [{"input": long, "output": "1", "prompt": long, "chosen": "a", "rejected": "b"}] * 5
    path = inputs.rows("rows.jsonl", rows)
    dataset = "PreferenceDataset" if kind in ("dpo", "rm") else "ResponseDataset"
    arguments = getattr(inputs, kind)(reading(path, dataset))
    assert_refused(arguments, inputs, capsys, "rows", "tokens: 5", "policy.max_total_sequence_length")


# -- rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("import no_such_package\ndef f(prompt, response, reference): return 1.0", "no_such_package"),
        ("def f(prompt, response, reference) return 1.0", "SyntaxError"),
        ("def other(prompt, response, reference): return 1.0", "the functions it has: other"),
        ("def f(left, right): return 1.0", "prompt, response, reference"),
        ("import os\nos._exit(3)", "exited with code 3"),
    ],
)
def test_reward_function_that_cannot_be_used(
    content: str, expected: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = inputs.file("my_rewards.py", content + "\n")
    arguments = inputs.grpo(f"env.mine.function={path}:f")
    assert_refused(arguments, inputs, capsys, "env.mine.function", f"{path}:f", expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_reward_function_in_a_file_that_is_not_there(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.grpo("env.mine.function=no_such_file.py:f")
    assert_refused(arguments, inputs, capsys, "env.mine.function", "there is no file", "no_such_file.py")


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
    block: str, place: str, expected: str, inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = inputs.grpo(f"env.fmt={block}", "data.default.env_name=fmt")
    assert_refused(arguments, inputs, capsys, place, expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_environment_that_is_not_configured(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.grpo("data.default.env_name=yours")
    assert_refused(arguments, inputs, capsys, "env_name 'yours'", "mine", "env.yours.function")


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
        (["steps"], ["'steps'", "key=value"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else None,
)
def test_settings_that_cannot_work(
    settings: list[str], expected: list[str], inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(inputs.grpo(*settings), inputs, capsys, *expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_batches_of_pairs_that_do_not_divide(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inputs.dpo("policy.train_micro_batch_size=4")
    expected = ("policy.train_global_batch_size = 6", "policy.train_micro_batch_size = 4")
    assert_refused(arguments, inputs, capsys, *expected)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_typo_in_a_file_names_file_and_line(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.file("my.yaml", "# mine\ngrpo:\n  num_promts_per_step: 8\n")
    arguments = [*inputs.grpo(), "--config", str(path)]
    assert_refused(arguments, inputs, capsys, f"{path}:3", "did you mean `grpo.num_prompts_per_step`")


@pytest.mark.usefixtures("no_model_is_loaded")
def test_missing_config_file(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused([*inputs.grpo(), "--config", "no.yaml"], inputs, capsys, "no.yaml", "no such config file")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            "policy.optimizer.name=torch.optim.AdamZ",
            ["policy.optimizer.name", "torch.optim.AdamZ", "torch.optim.AdamW"],
        ),
        ("policy.optimizer.name=adam", ["policy.optimizer.name", "'adam'", "torch.optim.AdamW"]),
        ("policy.optimizer.kwargs.learning_rate=1", ["policy.optimizer.kwargs", "learning_rate"]),
        ("policy.optimizer.kwargs.lr=-1.0", ["policy.optimizer.kwargs", "-1"]),
        ("policy.scheduler={name: torch.optim.lr_scheduler.Up}", ["policy.scheduler", "torch.optim.lr_scheduler.Up"]),
        (
            "policy.scheduler={name: torch.optim.lr_scheduler.StepLR, kwargs: {size: 1}}",
            ["policy.scheduler", "torch.optim.lr_scheduler.StepLR", "size"],
        ),
    ],
)
def test_optimizers_and_schedules_that_do_not_exist_or_do_not_fit(
    setting: str, expected: list[str], inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [setting]
    if setting.startswith("policy.optimizer.name"):
        settings.append("policy.optimizer.kwargs.lr=1e-3")  # another optimizer keeps none of the built-in settings
    assert_refused(inputs.grpo(*settings), inputs, capsys, *expected)


def test_run_folder_that_is_a_file(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    path = inputs.file("results", "")
    arguments = inputs.grpo(f"checkpointing.checkpoint_dir={path}")
    assert_refused(arguments, inputs, capsys, "checkpointing.checkpoint_dir", str(path), "file")


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
