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


def test_default_folder_of_the_first_run_has_no_number() -> None:
    assert choose_checkpoint_dir(load(), accept_changes=False) == ("results/sft", [])


def test_unfinished_run_with_equal_settings_is_resumed() -> None:
    save_run("results/sft", step=4)
    folder, notes = choose_checkpoint_dir(load(), accept_changes=False)
    assert folder == "results/sft"
    assert notes == ["resuming the run in results/sft: it is not finished and has the same settings"]


def test_longer_run_is_resumed_in_its_default_folder() -> None:
    save_run("results/sft", step=4)
    assert chosen("sft.max_num_steps=50") == "results/sft"


def test_other_settings_get_the_next_default_folder() -> None:
    save_run("results/sft", step=4)
    folder, notes = choose_checkpoint_dir(load(f"{LR}=1e-3"), accept_changes=False)
    assert folder == "results/sft-2"
    (note,) = notes
    assert note.startswith(f"a new run in results/sft-2: results/sft holds a run with other settings ({LR}: ")
    save_run("results/sft-2", f"{LR}=1e-3", step=4)
    assert chosen(f"{LR}=1e-3") == "results/sft-2"
    assert chosen(f"{LR}=1e-4") == "results/sft-3"
    assert chosen() == "results/sft", "an older run with the same settings is resumed, too"


def test_finished_run_with_equal_settings_is_not_trained_again() -> None:
    save_run("results/sft", step=4, status="finished")
    folder, notes = choose_checkpoint_dir(load(), accept_changes=False)
    assert folder == "results/sft"
    assert "results/sft is finished and has the same settings" in notes[0]
    assert chosen("sft.max_num_steps=50") == "results/sft", "a longer run continues"


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
    assert f"results/sft is in use by process {os.getpid()} on" in second.notes[0]
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
    assert choose_checkpoint_dir(load("checkpointing.checkpoint_dir=results/sft"), accept_changes=False) == (
        "results/sft",
        [],
    )


def test_folder_with_equal_settings_has_nothing_to_name() -> None:
    save_run("results/sft", step=4)
    assert check_run_folder(load(), accept_changes=False) == []


def test_change_of_training_is_refused_with_key_values_and_remedies() -> None:
    save_run("results/sft", f"{LR}=1e-3", step=4)
    with pytest.raises(InputError) as refused:
        check_run_folder(load(f"{LR}=1e-4", "sft.max_num_steps=50"), accept_changes=False)
    message = str(refused.value)
    assert f"  {LR}: 0.001 -> 0.0001\n" in message
    assert "max_num_steps" not in message
    for remedy in ("results/sft/step_4/config.yaml", "checkpointing.checkpoint_dir", "--resume-with-changes"):
        assert remedy in message


def test_accepted_changes_are_named() -> None:
    save_run("results/sft", f"{LR}=1e-3", step=4)
    lines = check_run_folder(load(f"{LR}=1e-4"), accept_changes=True)
    assert lines == ["settings that differ from step 5 on:", f"  {LR}: 0.001 -> 0.0001"]


def test_longer_run_is_named_and_not_refused() -> None:
    save_run("results/sft", "sft.max_num_steps=5", step=4)
    lines = check_run_folder(load("sft.max_num_steps=50"), accept_changes=False)
    assert lines[1:] == ["  sft.max_num_steps: 5 -> 50"]


def test_checkpoint_counts_and_not_a_config_that_was_replaced_later() -> None:
    """Earlier versions replaced config.yaml of a finished run."""
    save_run("results/sft", f"{LR}=1e-3", step=4)
    Path("results/sft/config.yaml").write_text(load(f"{LR}=1e-4").to_yaml())
    assert check_run_folder(load(f"{LR}=1e-3"), accept_changes=False) == []
    with pytest.raises(InputError, match=r"0\.001 -> 0\.0001"):
        check_run_folder(load(f"{LR}=1e-4"), accept_changes=False)


def test_change_accepted_after_the_checkpoint_is_in_force() -> None:
    save_run("results/sft", f"{LR}=1e-3", step=4)
    Path("results/sft/config_from_step_5.yaml").write_text(load(f"{LR}=1e-4").to_yaml())
    assert check_run_folder(load(f"{LR}=1e-4"), accept_changes=False) == []


def test_folder_without_checkpoint_is_not_refused() -> None:
    save_run("results/sft", f"{LR}=1e-3")
    lines = check_run_folder(load(f"{LR}=1e-4"), accept_changes=False)
    assert lines[1:] == [f"  {LR}: 0.001 -> 0.0001"]


def test_folder_of_another_kind_of_run_is_refused() -> None:
    save_run("results/sft", step=4)
    loaded = load_config("dpo", None, ["checkpointing.checkpoint_dir=results/sft"])
    with pytest.raises(InputError, match=r"config of a sft run(?s:.*)another folder"):
        check_run_folder(loaded, accept_changes=True)
