"""Damaged checkpoints and run folders: found and said, or harmless. Never trained on.

Found: exit code 64 with a message, or the damaged checkpoint is named and an older one taken. Harmless: the run ends
with the bits that it would have had.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.lab import STEPS, Lab, assert_no_traceback, assert_refused

KIND = "dpo"
NEWEST = STEPS - 2  # the last checkpoint is removed first: the run has two more steps to take
# Of a checkpoint. Written out, so that a file that is no longer there, or a new one, is noticed.
FILES = (
    "checksums.json",
    "config.yaml",
    "training_info.json",
    "train_dataloader.pt",
    "policy/model.json",
    "policy/optimizer/schedule.pt",
    "policy/optimizer/optim/.metadata",
    "policy/optimizer/optim/__0_0.distcp",
    "policy/tokenizer/chat_template.jinja",
    "policy/tokenizer/tokenizer.json",
    "policy/tokenizer/tokenizer_config.json",
    "policy/weights/model/chat_template.jinja",
    "policy/weights/model/config.json",
    "policy/weights/model/generation_config.json",
    "policy/weights/model/model.safetensors",
    "policy/weights/model/tokenizer.json",
    "policy/weights/model/tokenizer_config.json",
)
RUN_FILES = ("config.yaml", "run.json", "metrics.jsonl", "latest_checkpoint_status.json", "reference_logprobs.bin")
WEIGHTS = "policy/weights/model/model.safetensors"
SHORT = {
    (WEIGHTS, "flip"),
    ("policy/optimizer/optim/.metadata", "delete"),
    ("train_dataloader.pt", "truncate"),
    ("policy/optimizer/optim/__0_0.distcp", "swap"),
    ("checksums.json", "empty"),
}


# -- ways to damage a file ---------------------------------------------------------------------------------------------


def flip(path: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, other: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(1, path.stat().st_size))


def delete(path: Path, other: Path, chance: random.Random) -> None:
    path.unlink()


def empty(path: Path, other: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def swap(path: Path, other: Path, chance: random.Random) -> None:
    """With the same file of an older checkpoint: valid by itself, and of the same size mostly."""
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


DAMAGES = (flip, truncate, delete, empty, swap)


# -- ways to damage the list of checksums, so that it no longer speaks of a damaged file -------------------------------


def drop_entry(values: dict) -> None:
    values["files"].pop(WEIGHTS)


def drop_all(values: dict) -> None:
    values["files"] = {}


def drop_table(values: dict) -> None:
    del values["files"]


def null_digest(values: dict) -> None:
    values["files"][WEIGHTS]["sha256"] = None


def no_digests(values: dict) -> None:
    values["files"][WEIGHTS]["sha256"] = []


MANIFESTS = (drop_entry, drop_all, drop_table, null_digest, no_digests)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name in FILES:
        for damage in DAMAGES:
            if not short or (name, damage.__name__) in SHORT:
                yield Case(f"{damage.__name__}:{name}", partial(damaged_checkpoint, lab, name, damage))
    for forge in MANIFESTS[:2] if short else MANIFESTS:
        yield Case(f"manifest:{forge.__name__}", partial(forged_manifest, lab, forge))
    yield Case("unknown-files", partial(all_files_are_known, lab))
    yield Case("all-damaged", partial(all_damaged, lab))
    if short:
        return
    for name in FILES:
        yield Case(f"convert:{name}", partial(damaged_conversion, lab, name))
    for name in RUN_FILES:
        for damage in (flip, truncate, delete, empty):
            yield Case(f"run-folder:{damage.__name__}:{name}", partial(damaged_run_file, lab, name, damage))


PART = Part(
    "damage",
    "a damaged checkpoint is found and said, or the damage is harmless; nothing damaged is trained on",
    cases,
    4,
)

Damage = Callable[[Path, Path, random.Random], None]


def unfinished_run(lab: Lab, folder: Path) -> Path:
    """A run that was stopped after step NEWEST."""
    run = folder / "run"
    shutil.copytree(lab.whole(KIND), run)
    shutil.rmtree(run / f"step_{STEPS}")
    return run


def resume(lab: Lab, run: Path, folder: Path) -> processes.Finished:
    return processes.run(lab.arguments(KIND, run), folder / "log")


def damaged_checkpoint(lab: Lab, name: str, damage: Damage, folder: Path, chance: random.Random) -> None:
    run = unfinished_run(lab, folder)
    newest, older = run / f"step_{NEWEST}", run / f"step_{NEWEST - 2}"
    same = (newest / name).read_bytes() == (older / name).read_bytes()
    if damage is swap and same:  # of equal content: nothing to swap. The base model's file is another
        (older / name).write_bytes((older / name).read_bytes() + b"\n")
    damage(newest / name, older / name, chance)
    assert_found_or_harmless(lab, run, resume(lab, run, folder))


def assert_found_or_harmless(lab: Lab, run: Path, finished: processes.Finished) -> None:
    assert_no_traceback(finished)
    if finished.code == 64:
        assert "step_" in finished.output or str(run) in finished.output, f"the message names no checkpoint: {finished}"
        return
    lab.assert_same_end(KIND, run, finished)
    if f"after step {NEWEST}" not in finished.output:
        assert "damaged" in finished.output, f"an older checkpoint was taken without a word: {finished}"


def forged_manifest(lab: Lab, forge: Callable[[dict], None], folder: Path, chance: random.Random) -> None:
    run = unfinished_run(lab, folder)
    newest = run / f"step_{NEWEST}"
    values = json.loads((newest / "checksums.json").read_text())
    forge(values)
    (newest / "checksums.json").write_text(json.dumps(values))
    weights = bytearray((newest / WEIGHTS).read_bytes())
    weights[-chance.randrange(1, 2000)] ^= 1 << 6  # an exponent or a sign: it shows in every number after it
    (newest / WEIGHTS).write_bytes(weights)
    assert_found_or_harmless(lab, run, resume(lab, run, folder))


def all_files_are_known(lab: Lab, folder: Path, chance: random.Random) -> None:
    checkpoint = lab.whole(KIND) / f"step_{NEWEST}"
    found = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert found == set(FILES), f"the campaign does not know of {found ^ set(FILES)}"


def all_damaged(lab: Lab, folder: Path, chance: random.Random) -> None:
    """It is not for the program to decide that everything is lost: it says so, and asks."""
    run = unfinished_run(lab, folder)
    for step in range(2, STEPS, 2):
        os.truncate(run / f"step_{step}" / WEIGHTS, 1000)
    before = (run / "metrics.jsonl").read_bytes()
    finished = resume(lab, run, folder)
    assert_refused(finished)
    assert "--restart" in finished.output, f"the remedy is not named: {finished}"
    assert (run / "metrics.jsonl").read_bytes() == before, "the rows of the damaged run were changed"


def damaged_conversion(lab: Lab, name: str, folder: Path, chance: random.Random) -> None:
    """A converted model has the weights of the checkpoint, or there is none."""
    from faults.kills import weights_in

    def make(shared: Path) -> dict[str, bytes]:
        source = lab.whole(KIND) / f"step_{NEWEST}"
        finished = processes.run(["convert", str(source), "--to", str(shared / "hf")], shared / "log")
        assert finished.code == 0, finished
        return weights_in(shared / "hf")

    expected = lab.shared("converted-for-damage", make)
    run = unfinished_run(lab, folder)
    checkpoint = run / f"step_{NEWEST}"
    flip(checkpoint / name, checkpoint / name, chance)
    finished = processes.run(["convert", str(checkpoint), "--to", str(folder / "hf")], folder / "log")
    assert_no_traceback(finished)
    if finished.code == 0:
        assert weights_in(folder / "hf") == expected, f"converted with damage: {finished}"
    else:
        assert_refused(finished)
        assert not (folder / "hf").exists(), "a refused conversion left a folder"


def damaged_run_file(lab: Lab, name: str, damage: Damage, folder: Path, chance: random.Random) -> None:
    """Files beside the checkpoints: they do not change the weights. The reference's log-probabilities decide their last
    bits, so a run that has lost them says so.
    """
    run = unfinished_run(lab, folder)
    damage(run / name, run / name, chance)
    finished = resume(lab, run, folder)
    assert_no_traceback(finished)
    if finished.code == 64:
        assert name in finished.output, f"the message does not name the file: {finished}"
        return
    if name == "reference_logprobs.bin" and name in finished.output:
        assert finished.code == 0, f"values that can be computed again do not end a run: {finished}"
        return
    lab.assert_same_weights(KIND, run, finished)
    if name == "metrics.jsonl":
        steps = [row["step"] for row in tiny_runs.rows_of(run)]
        complete = [row["step"] for row in tiny_runs.rows_of(lab.whole(KIND))]
        if steps != complete:
            assert name in finished.output, f"rows are missing ({steps}), and the run does not say so: {finished}"
