"""Mutated configs, overrides and data, hostile paths, and the kept corpus of what once failed.

Each is refused with exit code 64 or used: no traceback, no hang, no exit code 0 for nonsense.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from faults import processes
from faults.campaign import Case, Part
from faults.lab import Lab, assert_no_traceback
from faults.mutations import FILE, Configs, Input, Rows, Traces
from faults.processes import Finished, Surroundings
from faults.worker import EXTRA_MEMORY_BYTES, Worker

CORPUS = Path(__file__).parent / "corpus"
COUNTS = {"config": 5200, "rows": 4000, "traces": 800}
SHORT_COUNTS = {"config": 60, "rows": 60, "traces": 20}
EVERY_NTH_AS_USER = 400


class Source(Protocol):
    def draw(self, chance: random.Random) -> Input: ...


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    sources: dict[str, Source] = {"config": Configs(), "rows": Rows(), "traces": Traces()}
    for file in sorted(CORPUS.glob("*.json")):
        yield Case(f"corpus-{file.stem}", partial(replay, file))
    for name, arguments in HOSTILE_PATHS.items():
        if not short or name in SHORT_PATHS:
            yield Case(f"path-{name}", partial(hostile_path, lab, arguments))
    for name, count in (SHORT_COUNTS if short else COUNTS).items():
        for number in range(count):
            as_user = not short and number % EVERY_NTH_AS_USER == 0
            yield Case(f"{name}-{number}", partial(mutated_input, lab, sources[name], as_user))


PART = Part("inputs", "bad input gets exit code 64 and a message: no traceback, no hang, no exit code 0", cases, 12)


def worker_of(lab: Lab) -> Worker:
    def make(folder: Path) -> Worker:
        worker = Worker(folder / "log")
        lab.open.callback(worker.close)
        return worker

    found: Worker = lab.shared("input-worker", make)
    return found


def mutated_input(lab: Lab, source: Source, as_user: bool, folder: Path, chance: random.Random) -> None:
    drawn = source.draw(chance)
    for name, content in drawn.files.items():
        (folder / name).write_bytes(content)
    arguments = [str(folder / next(iter(drawn.files))) if word == FILE else word for word in drawn.arguments]
    finished = worker_of(lab).run(arguments, folder)
    assert_refused_or_used(drawn, arguments, finished, folder)
    if as_user and not arguments[0].startswith("@"):
        alone = processes.run_as_user(arguments)
        assert alone.code == finished.code, f"in a process of its own another exit code: {alone}\nnot {finished}"


def assert_refused_or_used(drawn: Input, arguments: Sequence[str], finished: Finished, folder: Path) -> None:
    shown = {path.name: path.read_bytes()[:2000] for path in folder.iterdir() if path.is_file()}
    told = f"{finished}\narguments: {arguments}\nfiles: {shown}"
    assert "Traceback (most recent call last)" not in finished.output, f"traceback: {told}"
    assert finished.code in (0, 64), f"exit code {finished.code}: {told}"
    if drawn.nonsense:
        assert finished.code != 0, f"nonsense was accepted: {told}"
    if finished.code:
        assert "error" in finished.output, f"refused without a message: {told}"


# -- what once failed --------------------------------------------------------------------------------------------------


def content_of(entry: Any) -> bytes:
    if isinstance(entry, list):
        return b"".join(content_of(part) for part in entry)
    if isinstance(entry, dict):
        return bytes.fromhex(entry["hex"]) if "hex" in entry else entry["repeat"].encode() * entry["times"]
    return str(entry).encode()


def replay(file: Path, folder: Path, chance: random.Random) -> None:
    values = json.loads(file.read_text())
    for name, entry in values.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if entry == {"pipe": True}:
            os.mkfifo(folder / name)
        elif isinstance(entry, dict) and "link" in entry:
            (folder / name).symlink_to(entry["link"])
        else:
            (folder / name).write_bytes(content_of(entry))
    arguments = [word.replace("FOLDER", str(folder)) for word in values["command"]]
    finished = processes.run(
        arguments,
        folder.with_suffix(".log"),
        Surroundings(folder=folder, extra_memory_bytes=EXTRA_MEMORY_BYTES),
        limit_s=60,
    )
    assert_no_traceback(finished)
    assert finished.code == values["exit"], f"{values['why']}: {finished}"
    assert values.get("says", "") in finished.output, f"{values['why']}: {finished}"


# -- paths that are no files -------------------------------------------------------------------------------------------

LONG_NAME = "n" * 300
NOT_UTF8 = os.fsdecode(b"name-\xff\xfe")
# What stands for a path in a command. {model}: the tiny model.
BAD_PATHS = {
    "dev-zero": "/dev/zero",
    "dev-full": "/dev/full",
    "in-dev-null": "/dev/null/x",
    "long-name": LONG_NAME,
    "not-utf8": NOT_UTF8,
    "nul": "a\x00b",
    "missing": "no/such/file",
    "folder": ".",
    "root": "/",
    "empty-name": "",
    "proc-mem": "/proc/self/mem",
}
COMMANDS: dict[str, list[str]] = {
    "config": ["config", "check", "grpo", "--config", "PATH"],
    "run-folder": ["sft", "checkpointing.checkpoint_dir=PATH", "policy.model_name={model}", "data.train.data_path=x"],
    "model": ["eval", "PATH", "data.dataset_name=gsm8k"],
    "data": ["sft", "policy.model_name={model}", "data.train={{dataset_name: ResponseDataset, data_path: 'PATH'}}"],
    "inspect": ["data", "inspect", "PATH"],
    "rewards": ["rewards", "test", "--type", "math", "PATH"],
    "convert": ["convert", "PATH", "--to", "out"],
    "convert-to": ["convert", "{model}", "--to", "PATH"],
    "registry": ["registry", "add", "PATH", "{model}", "--registry", "registry"],
    "registry-place": ["registry", "list", "--registry", "PATH"],
    "pipeline": ["pipeline", "run", "PATH"],
    "gate": ["gate", "--config", "PATH", "--candidate", "x", "--no-production"],
    "plan": ["plan", "--config", "PATH"],
    "key-file": ["serve", "{model}", "--api-key-file", "PATH"],
}
# A folder that is made, or is there and empty.
FINE = {(command, name) for command in ("registry-place", "convert-to") for name in ("missing", "folder", "empty-name")}
HOSTILE_PATHS = {
    f"{command}:{name}": [word.replace("PATH", path) for word in words]
    for command, words in COMMANDS.items()
    for name, path in BAD_PATHS.items()
    if "\x00" not in path and (command, name) not in FINE
}
HOSTILE_PATHS["deleted-working-directory"] = ["config", "check", "grpo", "--config", "x.yaml"]
SHORT_PATHS = ("config:dev-zero", "run-folder:in-dev-null", "registry:long-name", "convert-to:long-name")


def hostile_path(lab: Lab, arguments: Sequence[str], folder: Path, chance: random.Random) -> None:
    place = folder / "here"
    place.mkdir()
    words = [word.replace("{model}", str(lab.model)).replace("{{", "{").replace("}}", "}") for word in arguments]
    started = time.monotonic()
    finished = processes.run(
        words, folder / "log", Surroundings(folder=place, extra_memory_bytes=EXTRA_MEMORY_BYTES), limit_s=120
    )
    assert_no_traceback(finished)
    assert finished.code == 64, f"not refused after {time.monotonic() - started:.0f} s: {finished}"
