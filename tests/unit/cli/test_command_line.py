"""The command line: arguments in any order, help, and exit codes as documented."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.checkpointing import CHECKPOINT_THREAD
from posttrain.cli import config_command, eval_command, serve_command
from posttrain.cli.main import COMMANDS, main, run_as_script
from posttrain.errors import InputError, StorageError


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the training command end in a chosen way, without training anything."""

    def end_with(result: int | BaseException) -> None:
        def run(kind: str, args: Any) -> int:
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr("posttrain.cli.main.train", run)

    return end_with


# -- help --------------------------------------------------------------------------------------------------------------


def test_the_installed_command_is_this_one() -> None:
    (script,) = entry_points(group="console_scripts", name="posttrain")
    assert script.load() is main


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call([word], capsys)
    assert (code, out.split()) == (0, ["posttrain", posttrain.__version__])


def test_help_names_every_command_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(["--help"], capsys)
    assert code == 0
    for word in COMMANDS:
        assert out.count(f"\n  {word} ") == (word != "node"), "each once, and none that only pods start"
    text = " ".join(out.split())
    for exit_code in ("0", "64", "74", "85", "143, 129", "130", "1"):
        assert f"{exit_code} " in text.partition("exit codes:")[2]


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_help_of_a_training_command_has_an_example_and_explains_resuming(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call([kind, "--help"], capsys)
    assert code == 0
    assert f"posttrain {kind} --config" in out
    assert "--quiet" in out
    assert "resumes from the newest checkpoint" in " ".join(out.split())


@pytest.mark.parametrize("command", [*COMMANDS, "config show", "config check", "data pack", "launch check", "log sync"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call([*command.split(), "--help"], capsys)
    assert code == 0
    assert out.startswith(f"usage: posttrain {command} ")


# -- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 85, 130])
def test_the_exit_code_of_the_run_is_the_exit_code_of_the_command(
    code: int, outcome: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(code)
    assert call(["grpo"], capsys)[0] == code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("data.train: row 3 has no key"), 64, "data.train: row 3"),
        (StorageError("/mnt/run/metrics.jsonl: Read-only file system"), 74, "/mnt/run/metrics.jsonl"),
        (KeyboardInterrupt(), 130, "newest checkpoint"),
        (RuntimeError("ours"), 1, "RuntimeError: ours"),
    ],
)
def test_only_a_crash_has_a_traceback(
    error: BaseException, code: int, said: str, outcome: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(error)
    found, out, err = call(["grpo"], capsys)
    assert (found, out) == (code, "")
    assert said in err
    assert ("Traceback" in err) == (code == 1)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("words", [["sft"], ["eval", "model"], ["config", "show", "grpo"]])
def test_signals_end_every_command_also_the_first_process_of_a_container(
    words: list[str],
    sent: signal.Signals,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel drops a signal to that process if there is no handler."""

    def interrupted(*arguments: Any, **options: Any) -> int:
        assert signal.getsignal(sent) not in (signal.SIG_DFL, signal.SIG_IGN, None)
        os.kill(os.getpid(), sent)
        return 0

    before = signal.getsignal(sent)  # Ray leaves one of its own
    monkeypatch.setattr("posttrain.cli.main.train", interrupted)
    monkeypatch.setattr(eval_command, "run", interrupted)
    monkeypatch.setattr(config_command, "load_words", interrupted)
    found, _, err = call(words, capsys)
    assert found == code
    assert f"posttrain: {sent.name}: stopped" in err
    assert signal.getsignal(sent) == before


class Left(BaseException):
    pass


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`main` of a program: no arguments are given to it. The codes that it left with at once."""
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise Left

    monkeypatch.setattr(sys, "argv", ["posttrain", "sft"])
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    return left


def test_a_stopped_program_leaves_at_once(outcome: Any, program: list[int]) -> None:
    outcome(85)
    with pytest.raises(Left):
        main()
    assert program == [85]


@pytest.mark.parametrize("code", [0, 1, 64])
def test_other_programs_end_as_python_does(code: int, outcome: Any, program: list[int]) -> None:
    outcome(code)
    assert main() == code
    assert program == []


def test_a_stopped_program_waits_for_a_thread_that_writes(outcome: Any, program: list[int]) -> None:
    outcome(130)
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name=CHECKPOINT_THREAD, daemon=True)
    thread.start()
    try:
        assert main() == 130
    finally:
        over.set()
        thread.join()
    assert program == []


@pytest.mark.parametrize(
    ("name", "module", "function", "words"),
    [
        ("serve", serve_command, "run", "stopped"),
        ("chat", serve_command, "_chat", "stopped"),
        ("eval", eval_command, "run", "finished problems are saved"),
    ],
)
def test_ctrl_c_prints_what_was_kept(
    name: str, module: Any, function: str, words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupted)
    code, _, err = call([name, "model"], capsys)
    assert code == 130
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [["train"], [], ["grpo", "--no-such-option"], ["config", "show", "ppa"], ["config"]],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_invalid_command_line_exits_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """0, 64, 85, 130 and 1 are all the codes there are."""
    code, _, err = call(arguments, capsys)
    assert code == 64
    assert "error" in err
    assert "Traceback" not in err


# -- settings ----------------------------------------------------------------------------------------------------------


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = call(["config", "show", *arguments, "--json"], capsys)
    assert code == 0, err
    return {key: entry["value"] for key, entry in json.loads(out).items()}


def test_settings_and_options_may_come_in_any_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("grpo:\n  seed: 5\n")
    for arguments in (
        ["grpo", "grpo.max_num_steps=3", "--config", str(file), "grpo.val_period=2"],
        ["--config", str(file), "grpo", "grpo.max_num_steps=3", "grpo.val_period=2"],
        ["grpo", "grpo.max_num_steps=3", "grpo.val_period=2", f"--config={file}"],
    ):
        values = shown(arguments, capsys)
        assert (values["grpo.seed"], values["grpo.max_num_steps"], values["grpo.val_period"]) == (5, 3, 2)


def test_hydras_spellings_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+grpo.seed=1", "++grpo.val_period=7", "~policy.scheduler", "+policy.optimizer.kwargs.amsgrad=true"]
    values = shown(["grpo", *words], capsys)
    assert values["grpo.seed"] == 1
    assert values["grpo.val_period"] == 7
    assert values["policy.scheduler"] is None
    assert values["policy.optimizer.kwargs.amsgrad"] is True


def test_a_typo_exits_with_64_and_names_the_right_key(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["grpo"], ["config", "show", "grpo"], ["config", "check", "grpo"]):
        code, _, err = call([*command, "grpo.num_promts_per_step=8"], capsys)
        assert code == 64
        assert "grpo.num_prompts_per_step" in err


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_a_validation_set_given_on_the_command_line_is_used(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in one belongs to the built-in training set and goes with it. One that was given stays."""
    values = shown([kind, "data.train.data_path=train.jsonl", "data.validation.data_path=val.jsonl"], capsys)
    assert values["data.train.data_path"] == "train.jsonl"
    assert values.get("data.validation.data_path") == "val.jsonl"
    without = shown([kind, "data.train.data_path=train.jsonl"], capsys)
    assert without["data.validation"] is None


# -- config show and check ---------------------------------------------------------------------------------------------


def test_show_prints_the_origin_of_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("grpo:\n  seed: 5\n")
    code, out, _ = call(["config", "show", "--config", str(file), "grpo.val_period=2"], capsys)
    assert code == 0
    section = out.split("\ngrpo:\n")[-1] if "\ngrpo:\n" in out else out.removeprefix("grpo:\n")
    lines = {line.split(":")[0]: line for line in section.splitlines()}
    assert lines["  seed"].endswith(f"# from {file}:2")
    assert lines["  val_period"].endswith("# from command line")
    assert "#" not in lines["  max_num_epochs"], "a default has no remark"


def test_check_accepts_every_shipped_config(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
    files = [file for file in shipped if file.name not in ("gate.yaml", "pipeline.yaml")]  # of other commands
    assert len(files) >= 5
    for file in files:
        code, out, err = call(["config", "check", "--config", str(file)], capsys)
        assert code == 0, err
        assert f"ok: {file}" in out


def test_run_as_script_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []

    def run(kind: str, args: Any) -> int:
        received.append((kind, args.words))
        return 0

    monkeypatch.setattr("posttrain.cli.main.train", run)
    monkeypatch.setattr(sys, "argv", ["run_dpo.py", "dpo.seed=1"])
    assert run_as_script("dpo") == 0
    assert received == [("dpo", ["dpo.seed=1"])]


@pytest.mark.parametrize(
    ("command", "words", "meant"),
    [
        ("convert", ["x", "--out", "y"], "--out (did you mean '--to'?)"),
        ("registry list", ["--jsn"], "--jsn (did you mean '--json'?)"),
        ("eval compare", ["a", "b", "--shw=3"], "--shw=3 (did you mean '--show'?)"),
    ],
)
def test_unknown_option_is_refused_with_a_suggestion(
    command: str, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = call([*command.split(), *words], capsys)
    assert code == 64
    assert said.startswith(f"usage: posttrain {command} ")
    assert said.endswith(f"posttrain {command}: error: unrecognized arguments: {meant}\n")


def test_second_argument_of_convert_suggests_to(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = call(["convert", "results/run", "models/mine"], capsys)
    assert code == 64
    assert "--to models/mine" in said
