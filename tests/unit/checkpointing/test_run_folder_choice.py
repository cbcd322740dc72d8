"""Which folder a command uses, and whether the run in it is resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from posttrain.checkpointing import run_folder as folders
from posttrain.checkpointing.run_folder import check_run_folder, choose_checkpoint_dir, prepare_run_folder, run_folder
from posttrain.config import LoadedConfig, load_config
from posttrain.errors import FolderHeld, InputError
from posttrain.files.run_folder_lock import Attempt

LR = "policy.optimizer.kwargs.lr"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(*overrides: str) -> LoadedConfig:
    return load_config("sft", None, overrides)


def save_run(folder: str, *overrides: str, step: int = 0, status: str = "running") -> None:
    text = load(*overrides).to_yaml()
    for place in (Path(folder), *([Path(folder) / f"step_{step}"] if step else [])):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.yaml").write_text(text)
    (Path(folder) / "run.json").write_text(json.dumps({"status": status}))


def chosen(*overrides: str, accept_changes: bool = False) -> str:
    return choose_checkpoint_dir(load(*overrides), accept_changes=accept_changes)[0]


def test_run_folder_is_that_of_the_checkpoints_unless_another_is_given() -> None:
    assert run_folder(None, "results/a") == Path("results/a")
    assert run_folder("logs/a", "results/a") == Path("logs/a")
    assert choose_checkpoint_dir(load(), accept_changes=False) == ("results/sft", []), "the first has no number"


@pytest.mark.parametrize("status", ["running", "finished"])
def test_a_run_with_equal_settings_or_more_steps_is_resumed(status: str) -> None:
    save_run("results/sft", step=4, status=status)
    folder, (note,) = choose_checkpoint_dir(load(), accept_changes=False)
    assert folder == "results/sft"
    assert folder in note
    assert chosen("sft.max_num_steps=50") == "results/sft"


def test_other_settings_get_the_next_default_folder() -> None:
    save_run("results/sft", step=4)
    folder, notes = choose_checkpoint_dir(load(f"{LR}=1e-3"), accept_changes=False)
    assert folder == "results/sft-2"
    assert LR in notes[0]
    save_run("results/sft-2", f"{LR}=1e-3", step=4)
    assert chosen(f"{LR}=1e-3") == "results/sft-2"
    assert chosen(f"{LR}=1e-4") == "results/sft-3"
    assert chosen() == "results/sft", "an older run with the same settings is resumed, too"


def test_numbers_are_compared_as_numbers() -> None:
    for number in (2, 9, 10):
        save_run(f"results/sft-{number}", f"{LR}=1e-3", step=4)
    for other in ("sft-notes", "sft-20250101"):
        (Path("results") / other).mkdir()
    assert chosen() == "results/sft-11"


def test_accepted_changes_resume_the_newest_default_folder() -> None:
    save_run("results/sft", step=4, status="finished")
    assert chosen(f"{LR}=1e-3", accept_changes=True) == "results/sft"


def test_default_folder_that_is_in_use_is_not_chosen() -> None:
    first = prepare_run_folder(lambda extra: load(*extra))
    second = prepare_run_folder(lambda extra: load(*extra))
    names = [prepared.loaded.config.checkpointing.checkpoint_dir for prepared in (first, second)]
    assert names == ["results/sft", "results/sft-2"]
    assert f"process {os.getpid()}" in second.notes[0]
    for prepared in (second, first):
        prepared.access.end(64)
    assert not Path("results").exists()
    assert chosen() == "results/sft"


def test_default_folder_that_is_taken_after_it_was_chosen_is_left_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal commands, both before either has written."""
    others: list[Attempt] = []
    choose = folders.choose_checkpoint_dir

    def choose_and_lose(*arguments: Any, **options: Any) -> Any:
        found = choose(*arguments, **options)
        if not others:
            others.append(Attempt(Path(found[0])))
        return found

    monkeypatch.setattr(folders, "choose_checkpoint_dir", choose_and_lose)
    prepared = prepare_run_folder(lambda extra: load(*extra))
    assert prepared.loaded.config.checkpointing.checkpoint_dir == "results/sft-2"


def test_metrics_of_two_runs_do_not_share_a_log_folder() -> None:
    prepare_run_folder(lambda extra: load("checkpointing.checkpoint_dir=a", "logger.log_dir=logs", *extra))
    with pytest.raises(FolderHeld, match="logs is in use"):
        prepare_run_folder(lambda extra: load("logger.log_dir=logs", *extra))
    assert not Path("results").exists()


def test_given_folder_is_used_as_given() -> None:
    save_run("results/sft", step=4, status="finished")
    given = load("checkpointing.checkpoint_dir=results/sft")
    assert choose_checkpoint_dir(given, accept_changes=False) == ("results/sft", [])


def test_change_of_training_is_refused_with_key_values_and_remedies() -> None:
    save_run("results/sft", f"{LR}=1e-3", step=4)
    with pytest.raises(InputError) as refused:
        check_run_folder(load(f"{LR}=1e-4", "sft.max_num_steps=50"), accept_changes=False)
    message = str(refused.value)
    assert f"  {LR}: 0.001 -> 0.0001\n" in message
    assert "max_num_steps" not in message


@pytest.mark.parametrize(
    ("step", "then", "now", "accepted"),
    [
        pytest.param(4, f"{LR}=0.001", f"{LR}=0.0001", True, id="accepted"),
        pytest.param(4, "sft.max_num_steps=5", "sft.max_num_steps=50", False, id="longer run"),
        pytest.param(0, f"{LR}=0.001", f"{LR}=0.0001", False, id="no checkpoint"),
    ],
)
def test_changes_that_are_not_refused_are_named(step: int, then: str, now: str, accepted: bool) -> None:
    save_run("results/sft", then, step=step)
    lines = check_run_folder(load(now), accept_changes=accepted)
    assert lines[1:] == [f"  {then.replace('=', ': ')} -> {now.partition('=')[2]}"]
    assert check_run_folder(load(then), accept_changes=False) == []


def test_checkpoint_counts_and_not_a_config_that_was_replaced_later() -> None:
    """Earlier versions replaced config.yaml of a finished run."""
    save_run("results/sft", f"{LR}=1e-3", step=4)
    Path("results/sft/config.yaml").write_text(load(f"{LR}=1e-4").to_yaml())
    assert check_run_folder(load(f"{LR}=1e-3"), accept_changes=False) == []
    with pytest.raises(InputError, match=LR):
        check_run_folder(load(f"{LR}=1e-4"), accept_changes=False)


def test_change_accepted_after_the_checkpoint_is_in_force() -> None:
    save_run("results/sft", f"{LR}=1e-3", step=4)
    Path("results/sft/config_from_step_5.yaml").write_text(load(f"{LR}=1e-4").to_yaml())
    assert check_run_folder(load(f"{LR}=1e-4"), accept_changes=False) == []


def test_folder_of_another_kind_of_run_is_refused() -> None:
    save_run("results/sft", step=4)
    loaded = load_config("dpo", None, ["checkpointing.checkpoint_dir=results/sft"])
    with pytest.raises(InputError, match="sft run"):
        check_run_folder(loaded, accept_changes=True)
