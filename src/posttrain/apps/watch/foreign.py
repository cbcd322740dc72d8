"""Runs of other systems, with the metrics under our names, so that the doctor can look at them. Read only.

TRL       `trainer_state.json` of the output folder or its newest checkpoint, and `completions/*.parquet`. The
          rewards of its DPO are beta times ours. `training_args.bin` is a pickle and is not opened, so settings are
          unknown but for what is logged.
verl      the JSON lines of its file logger (`trainer.logger=[file]`), and the answers in `trainer.rollout_data_dir`
NeMo RL   TensorBoard's event files of `logger.log_dir/exp_NNN`, and the answers in `train_data_stepN.jsonl`. Our
          metrics and settings have its names, so few need another.
prime-rl  the `metrics.jsonl` of its file monitor. Trainer and orchestrator write rows of their own for the same step.
          It has no KL to the starting model, and its file monitor keeps no answers.

A file with the metrics that cannot be read is an InputError; of answers, those that can be read are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path

import yaml

from posttrain.errors import InputError
from posttrain.files.json_files import MAX_FILE_BYTES, JsonMapping, JsonObject, parse_json, read_json
from posttrain.reporting.run_data import BYTES_OF_A_VALUE, MAX_ANSWERS, is_number

EXPECTED = (
    "a run folder of posttrain (metrics.jsonl, run.json), or the output of TRL (trainer_state.json), NeMo RL "
    "(TensorBoard's event files), verl (the file of its file logger) or prime-rl (metrics.jsonl of its file monitor)"
)
EVENTS = "events.out.tfevents.*"
OF_PRIME_RL = {"optim/grad_norm", "reward/all/mean", "reward/mean"}


@dataclass(frozen=True)
class ForeignRun:
    system: str
    kind: str  # grpo, dpo, rm or sft
    rows: Sequence[JsonObject]  # as in our metrics.jsonl
    names: Mapping[str, str] | None  # our name of a setting to theirs; None: the names are the same
    settings: Mapping[str, object] = field(default_factory=dict)  # by our names, as far as they are known
    groups: Callable[[int], list[JsonObject]] = lambda step: []  # the answers of a step, as in our rollouts


def open_foreign_run(folder: Path) -> ForeignRun | None:
    """None if none of the known systems wrote it."""
    runs = (read(folder) for read in (_trl_run, _verl_run, _nemo_rl_run, _prime_rl_run))
    try:
        return next((run for run in runs if run is not None), None)
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from error


@cache
def _names() -> dict[str, dict[str, dict[str, str]]]:
    """`metrics` and `settings` by system."""
    found: dict[str, dict[str, dict[str, str]]] = yaml.safe_load(
        Path(__file__).with_name("foreign.yaml").read_text("utf-8")
    )
    return found


def _run(
    system: str,
    rows: Iterable[JsonMapping],
    kind: str = "grpo",
    groups: Callable[[int], list[JsonObject]] = lambda step: [],
) -> ForeignRun:
    """One row per step with the metrics that have a name of ours; the step of each row is in `step`."""
    names = _names()[system]
    merged: dict[int, JsonObject] = {}
    for row in rows:
        step = int(row["step"])
        for key, value in row.items():
            if key in names["metrics"] and is_number(value):
                merged.setdefault(step, {"step": step})[names["metrics"][key]] = value
    return ForeignRun(system, kind, [merged[step] for step in sorted(merged)], names["settings"], groups=groups)


def _kind_of(rows: Iterable[JsonMapping], **metrics: str) -> str:
    """The first kind whose metric was logged; supervised fine-tuning has none of its own."""
    logged = {key for row in rows for key in row}
    return next((kind for kind, metric in metrics.items() if metric in logged), "sft")


def _grouped(answers: Iterable[tuple[str, str, object]]) -> list[JsonObject]:
    """Prompts, answers and rewards as groups: those of equal prompts that follow each other. Reading ends where the
    file is damaged.
    """
    groups: list[JsonObject] = []
    try:
        for prompt, text, reward in islice(answers, MAX_ANSWERS):
            if not groups or groups[-1]["prompt"] != prompt:
                groups.append({"id": f"prompt {len(groups) + 1}", "prompt": prompt, "completions": []})
            groups[-1]["completions"].append({"text": text, "reward": reward if is_number(reward) else None})
    except (OSError, ValueError, OverflowError):  # the last one: a time that Python has no number for
        pass
    return groups


def _numbers(values: Iterable[object]) -> list[float]:
    return [value for value in values if isinstance(value, int | float) and is_number(value)]


def _lines(path: Path, max_lines: int | None = None) -> Iterator[JsonObject]:
    """The objects on the lines of a file. A torn line, as the last one of a run that is being written, is left out."""
    left = MAX_FILE_BYTES
    with path.open("rb") as file:
        for line in islice(iter(partial(file.readline, MAX_FILE_BYTES + 1), b""), max_lines):
            left -= len(line) + BYTES_OF_A_VALUE * (line.count(b"{") + line.count(b"["))
            if left < 0:
                raise InputError(f"{path}: more than {MAX_FILE_BYTES / 2**20:g} MiB; that is no file of a run")
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


# ------------------------------------------------------------------------------------------- TRL


def _trl_run(folder: Path) -> ForeignRun | None:
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    checkpoints = sorted(
        (path for path, number in numbers.items() if number.isdecimal()), key=lambda p: int(numbers[p])
    )
    places = [place / "trainer_state.json" for place in (folder, *reversed(checkpoints))]
    state = next((place for place in places if place.is_file()), None)
    if state is None:
        return None
    history = read_json(state).get("log_history")
    if not isinstance(history, list):
        raise InputError(f"{state} has no log_history: it is not the state of a TRL trainer")
    rows = [dict(row) for row in history if isinstance(row, dict) and isinstance(row.get("step"), int)]
    for row in rows:
        for share in _numbers([row.get("frac_reward_zero_std")]):
            row["groups_with_signal"] = 1 - share
    completions = folder / "completions"
    kind = _kind_of(rows, grpo="reward", dpo="rewards/chosen", rm="margin")
    return _run(
        "TRL", rows, kind, groups=lambda step: _grouped(_trl_answers(completions / f"completions_{step:05d}.parquet"))
    )


def _trl_answers(path: Path) -> Iterator[tuple[str, str, object]]:
    from pyarrow import parquet

    from posttrain.data.sources import not_parquet

    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return
    known = {"step", "prompt", "completion", "advantage"}
    with not_parquet(), parquet.ParquetFile(path) as file:
        for row in (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist()):
            rewards = _numbers(value for key, value in row.items() if key not in known)
            prompt, completion = _message_text(row.get("prompt", "")), _message_text(row.get("completion", ""))
            yield prompt, completion, sum(rewards) if rewards else None


def _message_text(content: object) -> str:
    """A string, or the contents of a list of messages."""
    if isinstance(content, list):
        return "\n".join(str(message.get("content", "")) for message in content if isinstance(message, dict))
    return str(content)


# ------------------------------------------------------------------------------------------- verl


def _verl_run(folder: Path) -> ForeignRun | None:
    """From a file of rows {"step": …, "data": {…}}."""
    for file in sorted(path for path in folder.glob("*.jsonl") if path.is_file()):
        first = next(_lines(file, 1), {})
        if not isinstance(first.get("data"), dict) or "step" not in first:
            continue
        rows = []
        for row in _lines(file):
            if isinstance(row.get("data"), dict) and isinstance(row.get("step"), int):
                scores = _numbers(v for key, v in row["data"].items() if key.startswith("val-core/") and "mean@" in key)
                validation = {"validation": sum(scores) / len(scores)} if scores else {}
                rows.append({**row["data"], **validation, "step": row["step"]})
        return _run("verl", rows, groups=lambda step: _verl_groups(folder, step))
    return None


def _verl_groups(folder: Path, step: int) -> list[JsonObject]:
    """`STEP.jsonl` in the folder or one below it: input, output, score."""
    paths = (folder / f"{step}.jsonl", *folder.glob(f"*/{step}.jsonl"))
    path = next((path for path in paths if path.is_file()), None)
    rows = _lines(path) if path is not None else ()
    return _grouped((str(row.get("input")), str(row.get("output")), row.get("score")) for row in rows)


# ------------------------------------------------------------------------------------------- NeMo RL


def _nemo_rl_run(folder: Path) -> ForeignRun | None:
    """From the event files of the folder, or of its newest experiment."""
    places = (folder, *sorted(folder.glob("exp_*"), reverse=True))
    found = (sorted([*place.glob(EVENTS), *place.glob(f"tensorboard/**/{EVENTS}")]) for place in places)
    files = next((files for paths in found if (files := [path for path in paths if path.is_file()])), None)
    if files is None:
        return None
    names = _names()["NeMo RL"]["metrics"]
    merged: dict[int, JsonObject] = {}
    for path in files:
        for step, tag, value in scalars(path):
            if tag.startswith(("train/", "validation/", "timing/")):
                merged.setdefault(step, {"step": step})[names.get(tag, tag)] = value
    rows = [merged[step] for step in sorted(merged)]
    logs = files[0].parent.parent if files[0].parent.name == "tensorboard" else files[0].parent
    kind = _kind_of(rows, grpo="train/reward", dpo="train/sft_loss", rm="train/rewards_chosen_mean")
    return ForeignRun(
        "NeMo RL",
        kind,
        rows,
        None,
        groups=lambda step: _grouped(_nemo_rl_answers(logs / f"train_data_step{step}.jsonl")),
    )


def _nemo_rl_answers(path: Path) -> Iterator[tuple[str, str, object]]:
    """The first message is the prompt, those after it the answer; a text that is not split is the answer."""
    for row in _lines(path) if path.is_file() else ():
        content = row.get("content")
        prompt, said = (content[:1], content[1:]) if isinstance(content, list) else ([], [content or ""])
        yield "".join(map(str, prompt)), "\n".join(map(str, said)), row.get("rewards")


def scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of one of TensorBoard's event files, in its order; a torn record ends it."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise InputError(f"{path}: reading it needs TensorBoard: pip install 'posttrain[tensorboard]'") from error
    try:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                # The shape is not checked against the values: a tensor of one value may claim any size.
                is_scalar = value.HasField("tensor") and all(dim.size == 1 for dim in value.tensor.tensor_shape.dim)
                number = make_ndarray(value.tensor) if is_scalar else None
                if number is not None and number.size == 1 and number.dtype.kind == "f":
                    yield event.step, value.tag, float(number.item())
    except Exception as error:  # of protobuf, NumPy and TensorBoard, which have no class in common
        raise InputError(f"{path}: not a readable event file of TensorBoard ({error})") from error


# ------------------------------------------------------------------------------------------- prime-rl


def _prime_rl_run(folder: Path) -> ForeignRun | None:
    """From the files of trainer and orchestrator: in the folder, or one below it."""
    places = (folder / "metrics.jsonl", *sorted(folder.glob("*/metrics.jsonl")))
    files = [path for path in places if path.is_file()]
    files = [path for path in files if any(not OF_PRIME_RL.isdisjoint(row) for row in _lines(path, 20))]
    rows = [row for path in files for row in _lines(path) if isinstance(row.get("step"), int)]
    return _run("prime-rl", rows) if files else None
