"""The files of a run folder: written so that `kill -9` cannot corrupt them, truncated on resume, archived and read.

    metrics.jsonl                         one JSON object per step, appended and fsynced
    unscored.jsonl                        one JSON object per step and reason for which rollouts could not be scored
    findings.jsonl                        one JSON object per problem that the doctor has found, when it was found
    rollouts/step_N.jsonl.gz              the groups of training step N, one per line
    rollouts/validation_step_N.jsonl.gz   the groups of the validation at step N
    rollouts/step_N.tokens.npz            tokens of some groups of step N, see `token_files.py`
    images/                               images of prompts in rollouts, see `image_files.py`
    agent_calls/                          journals of agents in the open step, see `rollouts/call_journal.py`
    workers.jsonl                         phases and ranks, see `machines.py`
    config.yaml                           the config that the run began with
    config_from_step_N.yaml               the config from step N on, where it differs from the one before
    logs/train.log                        what the run printed, in the long form; appended to, and kept on resume
    loggers/                              files of trackers: TensorBoard's events, W&B's offline run
    run.json, report.html                 like the configs, written to a temporary name and renamed
    earlier_NNN/                          the same files of a run that used this folder before
    attempts/NNNN.json                    see `files/run_folder_lock.py`

Files are either appended to line by line, or written under a temporary name and renamed. A kill leaves at most a torn
last line or a temporary file, and `open_run` repairs both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.files import durable
from posttrain.files.json_files import MAX_FILE_BYTES, JsonMapping, JsonObject, parse_json, read_at_most, refuse_pipe
from posttrain.files.redaction import redact

METRICS_FILE = "metrics.jsonl"
UNSCORED_FILE = "unscored.jsonl"
FINDINGS_FILE = "findings.jsonl"
WORKERS_FILE = "workers.jsonl"
ROLLOUTS_FOLDER = "rollouts"
IMAGES_FOLDER = "images"
AGENT_CALLS_FOLDER = "agent_calls"
CONFIG_FILE = "config.yaml"
INFO_FILE = "run.json"
REPORT_FILE = "report.html"
LOG_FOLDER = "logs"
LOGGERS_FOLDER = "loggers"
LOG_FILE = f"{LOG_FOLDER}/train.log"
MAX_TEXT = 10_000  # characters of a text in run.json that is shown
FINISHED = "finished"  # the status in run.json of a run that has all its steps

# Moved in this order. metrics.jsonl is last: as long as it is here, the move is not finished.
FILES_OF_A_RUN = (
    REPORT_FILE,
    INFO_FILE,
    CONFIG_FILE,
    LOG_FOLDER,
    ROLLOUTS_FOLDER,
    IMAGES_FOLDER,
    AGENT_CALLS_FOLDER,
    UNSCORED_FILE,
    FINDINGS_FILE,
    LOGGERS_FOLDER,
    WORKERS_FILE,
    METRICS_FILE,
)

Row = JsonObject


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a text without the credentials in it."""
    durable.write_bytes(path, redact(text).encode("utf-8", "backslashreplace"))


def append_rows(path: Path, rows: Sequence[JsonMapping]) -> None:
    """Append JSON objects, one per line, without credentials. They are on disk when this returns.

    Python writes a float as the shortest text that reads back as the same float, so equal numbers give equal bytes.
    """
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    durable.append(path, redact(lines).encode())


def complete_row(path: Path, row: JsonMapping) -> None:
    """Add `row` to the last one if that is of the same step, in one move; append it else."""
    *earlier, (_, last) = list(parse_lines(path)) or [(b"", None)]
    if last is None or last.get("step") != row["step"]:
        append_rows(path, [row])
        return
    line = json.dumps({**last, **row}, allow_nan=False) + "\n"
    durable.write_bytes(path, b"".join(line + b"\n" for line, _ in earlier) + redact(line).encode())


def append_log(folder: Path, lines: Sequence[str]) -> None:
    """Add lines, without credentials, to the log of a run that has not opened it."""
    (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    with (folder / LOG_FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(redact("".join(f"{line}\n" for line in lines)))


def parse_lines(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    """The lines of a file of JSON objects as (raw line, object), the object None where the line is none."""
    if not path.exists():
        return
    refuse_pipe(path)
    with path.open("rb") as file:
        for line in file:
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            yield line.rstrip(b"\n"), row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_rows(path: Path) -> list[Row]:
    """The objects of a file, unreadable lines left out: a run that is being written may end in half a line."""
    return [row for _, row in parse_lines(path) if row is not None]


def read_info(folder: Path) -> Row:
    """`run.json`; empty if it is missing or unreadable, because the report has to work without it."""
    try:
        return parse_info(read_at_most(folder / INFO_FILE, MAX_FILE_BYTES))
    except (OSError, ValueError):
        return {}


def parse_info(content: bytes) -> Row:
    """ValueError if it is no object. Values of another type than `Recorder` writes are left out."""
    info = parse_json(content)
    if not isinstance(info, dict):
        raise ValueError("not an object")
    return {key: value for key, value in info.items() if key not in _INFO or _INFO[key](value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_rows(value: object, number: str, **kinds: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and _is_number(row.get(number))
        and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
        for row in value
    )


_INFO: dict[str, Callable[[Any], bool]] = {
    "config_changes": lambda value: _are_rows(value, "from_step", key=str),
    "warnings": lambda value: _are_rows(value, "step", text=str, count=int),
    "resumed_at_steps": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "headline": lambda value: isinstance(value, dict),
    "held_until": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    **dict.fromkeys(("wall_s", "max_steps", "num_devices"), _is_number),
    **dict.fromkeys(
        ("started_at", "updated_at", "status", "title", "reason", "device_word", "algorithm"),
        lambda value: isinstance(value, str) and len(value) <= MAX_TEXT,
    ),
}


def config_from_step(step: int) -> str:
    """The name of the config that holds from `step` on."""
    return f"config_from_step_{step}.yaml"


def config_files(folder: Path) -> dict[int, Path]:
    """Every config of the run by the first step that was trained with it, in order."""
    found = {1: folder / CONFIG_FILE} if (folder / CONFIG_FILE).exists() else {}
    for path in folder.glob("config_from_step_*.yaml"):
        if match := re.fullmatch(r"config_from_step_(\d+)\.yaml", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest_config(folder: Path) -> Path:
    """The config that the newest steps were trained with."""
    return next(reversed(config_files(folder).values()), folder / CONFIG_FILE)


def open_run(folder: Path, resumed_step: int) -> tuple[list[str], list[str]]:
    """Prepare the folder for the steps after `resumed_step`. Returns a line for each thing that had to be done, and one
    for each part of the record that is missing.

    A fresh run (`resumed_step` 0) moves the files of an earlier run to `earlier_NNN/`. A resumed one truncates them to
    `resumed_step`, because the steps after it run again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes = []
    if resumed_step == 0 and (folder / METRICS_FILE).exists():
        notes.append(f"{folder} held an earlier run; its files are now in {archive(folder).name}/")
    last_row, changes = _truncate(folder / METRICS_FILE, resumed_step)
    notes += changes
    for name in (UNSCORED_FILE, FINDINGS_FILE, WORKERS_FILE):
        _truncate(folder / name, resumed_step)
    for path in (folder / ROLLOUTS_FOLDER).glob("*"):
        match = re.fullmatch(r"(?:validation_)?step_(\d+)\.(?:jsonl\.gz|tokens\.npz)", path.name)
        if match is not None and int(match[1]) > resumed_step:
            path.unlink()
    for path in (folder / AGENT_CALLS_FOLDER).glob("*.jsonl"):
        # Of use only with the weights of the checkpoint: in the step after it, and in a validation that it owes.
        _, header = next(parse_lines(path), (b"", None))
        step = resumed_step if path.stem == "validation" else resumed_step + 1
        if resumed_step and header is None and path.stat().st_size:
            notes.append(f"{path} cannot be read: the agents of the open step begin anew")
        if not resumed_step or header is None or header["step"] != step:
            path.unlink()
    for place in (folder, folder / ROLLOUTS_FOLDER, folder / IMAGES_FOLDER):
        for torn in place.glob(f"*{durable.PARTIAL}"):
            torn.unlink()
    if not (folder / METRICS_FILE).exists() and resumed_step:
        return notes, [f"{METRICS_FILE} is missing: the rows of the steps up to {resumed_step} are lost"]
    if last_row < resumed_step:
        return notes, [f"{METRICS_FILE} ends at step {last_row} although the run resumes at step {resumed_step}"]
    return notes, []


def archive(folder: Path, *, also: Sequence[str] = ()) -> Path:
    """Move the files of a run, and entries of other names, to `earlier_NNN/`."""
    numbers = [int(path.name[8:]) for path in folder.glob("earlier_*") if path.name[8:].isdecimal()]
    newest = max(numbers, default=0)
    configs = [path.name for which in ("until", "from") for path in folder.glob(f"config_{which}_step_*.yaml")]
    names = [name for name in [*also, *configs, *FILES_OF_A_RUN] if (folder / name).exists()]
    # A folder without metrics is an interrupted move, which this call finishes, unless it has one of the files already.
    last = folder / f"earlier_{newest:03d}"
    interrupted = newest > 0 and not any((last / name).exists() for name in [METRICS_FILE, *names])
    target = last if interrupted else folder / f"earlier_{newest + 1:03d}"
    target.mkdir(exist_ok=True)
    for name in names:
        durable.move(folder / name, target / name)
    return target


def _truncate(path: Path, last_step: int) -> tuple[int, list[str]]:
    """Keep the rows up to `last_step`, byte for byte. The file is only rewritten if rows are removed.

    Returns the last step that has a row, and what was removed.
    """
    if not path.exists():
        return 0, []
    notes, kept, last_kept_step, dropped = [], [], 0, 0
    for number, (line, row) in enumerate(parse_lines(path), start=1):
        if row is None:
            notes.append(f"{path.name} line {number} was torn or unreadable; it is removed")
        elif row["step"] > last_step:
            dropped += 1
        else:
            kept.append(line + b"\n")
            last_kept_step = max(last_kept_step, row["step"])
    content = b"".join(kept)
    if content != path.read_bytes():
        durable.write_bytes(path, content)
    if dropped:
        notes.append(f"{path.name}: {dropped} rows after step {last_step} are removed; those steps run again")
    return last_kept_step, notes


def rollout_step(path: Path) -> int | None:
    """The step in the name of a rollout file, None for a file that is something else."""
    match = re.fullmatch(r"(?:validation_)?step_(\d+)\.jsonl\.gz", path.name)
    return int(match.group(1)) if match else None
