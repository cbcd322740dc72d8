"""Runs of other systems, with the metrics under our names, so that the doctor can look at them. Read only.

TRL       `trainer_state.json` of the output folder or its newest checkpoint, and `completions/*.parquet`. The
          rewards of its DPO are beta times ours. `training_args.bin` is a pickle and is not opened, so settings are
          unknown but for what is logged.
verl      the JSON lines of its file logger (`trainer.logger=[file]`), and the answers in `trainer.rollout_data_dir`
NeMo RL   TensorBoard's event files of `logger.log_dir/exp_NNN`, and the answers in `train_data_stepN.jsonl`. Our
          metrics and settings have its names, so few need another.
prime-rl  the `metrics.jsonl` of its file monitor. Trainer and orchestrator write rows of their own for the same step.
          It has no KL to the starting model, and its file monitor keeps no answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json

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
    return next((run for run in runs if run is not None), None)


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
            if key in names["metrics"] and (value is None or isinstance(value, int | float)):
                merged.setdefault(step, {"step": step})[names["metrics"][key]] = value
    return ForeignRun(system, kind, [merged[step] for step in sorted(merged)], names["settings"], groups=groups)


def _kind_of(rows: Iterable[JsonMapping], **metrics: str) -> str:
    """The first kind whose metric was logged; supervised fine-tuning has none of its own."""
    logged = {key for row in rows for key in row}
    return next((kind for kind, metric in metrics.items() if metric in logged), "sft")


def _grouped(answers: Iterable[tuple[str, JsonObject]]) -> list[JsonObject]:
    """Answers with their prompts, as groups: those of equal prompts that follow each other."""
    groups: list[JsonObject] = []
    for prompt, answer in answers:
        if not groups or groups[-1]["prompt"] != prompt:
            groups.append({"id": f"prompt {len(groups) + 1}", "prompt": prompt, "completions": []})
        groups[-1]["completions"].append(answer)
    return groups


def _lines(path: Path, max_lines: int | None = None) -> Iterator[JsonObject]:
    """The objects on the lines of a file. A torn line, as the last one of a run that is being written, is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number == max_lines:
                return
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


# ------------------------------------------------------------------------------------------- TRL


def _trl_run(folder: Path) -> ForeignRun | None:
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2] or 0))
    places = [place / "trainer_state.json" for place in (folder, *reversed(checkpoints))]
    state = next((place for place in places if place.is_file()), None)
    if state is None:
        return None
    content = parse_json(state.read_bytes())
    history = content.get("log_history") if isinstance(content, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{state} has no log_history: it is not the state of a TRL trainer")
    rows = [dict(row) for row in history if isinstance(row, dict) and isinstance(row.get("step"), int)]
    for row in rows:
        if isinstance(row.get("frac_reward_zero_std"), int | float):
            row["groups_with_signal"] = 1 - row["frac_reward_zero_std"]
    kind = _kind_of(rows, grpo="reward", dpo="rewards/chosen", rm="margin")
    return _run("TRL", rows, kind, groups=lambda step: _trl_groups(folder, step))


def _trl_groups(folder: Path, step: int) -> list[JsonObject]:
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    if not path.is_file():
        return []
    import pyarrow.parquet

    known = {"step", "prompt", "completion", "advantage"}
    answers = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        rewards = [value for key, value in row.items() if key not in known and isinstance(value, int | float)]
        answer = {"text": _message_text(row["completion"]), "reward": sum(rewards) if rewards else None}
        answers.append((_message_text(row["prompt"]), answer))
    return _grouped(answers)


def _message_text(content: object) -> str:
    """A string, or the contents of a list of messages."""
    if isinstance(content, list):
        return "\n".join(str(message.get("content", "")) for message in content if isinstance(message, dict))
    return str(content)


# ------------------------------------------------------------------------------------------- verl


def _verl_run(folder: Path) -> ForeignRun | None:
    """From a file of rows {"step": …, "data": {…}}."""
    for file in sorted(folder.glob("*.jsonl")):
        first = next(_lines(file, 1), {})
        if not isinstance(first.get("data"), dict) or "step" not in first:
            continue
        rows = []
        for row in _lines(file):
            if isinstance(row.get("data"), dict) and isinstance(row.get("step"), int):
                scores = [v for key, v in row["data"].items() if key.startswith("val-core/") and "mean@" in key]
                validation = {"validation": sum(scores) / len(scores)} if scores else {}
                rows.append({"step": row["step"], **row["data"], **validation})
        return _run("verl", rows, groups=lambda step: _verl_groups(folder, step))
    return None


def _verl_groups(folder: Path, step: int) -> list[JsonObject]:
    """`STEP.jsonl` in the folder or one below it: input, output, score."""
    paths = (folder / f"{step}.jsonl", *folder.glob(f"*/{step}.jsonl"))
    path = next((path for path in paths if path.is_file()), None)
    rows = [] if path is None else [row for row in _lines(path) if row]
    return _grouped((str(row.get("input")), {"text": row.get("output"), "reward": row.get("score")}) for row in rows)


# ------------------------------------------------------------------------------------------- NeMo RL


def _nemo_rl_run(folder: Path) -> ForeignRun | None:
    """From the event files of the folder, or of its newest experiment."""
    places = (folder, *sorted(folder.glob("exp_*"), reverse=True))
    found = (sorted([*place.glob(EVENTS), *place.glob(f"tensorboard/**/{EVENTS}")]) for place in places)
    files = next((files for files in found if files), None)
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
    return ForeignRun("NeMo RL", kind, rows, None, groups=lambda step: _nemo_rl_groups(logs, step))


def _nemo_rl_groups(logs: Path, step: int) -> list[JsonObject]:
    """The first message is the prompt, those after it the answer; a text that is not split is the answer."""
    path = logs / f"train_data_step{step}.jsonl"
    answers = []
    for row in _lines(path) if path.is_file() else ():
        content = row.get("content")
        prompt, said = (content[:1], content[1:]) if isinstance(content, list) else ([], [content or ""])
        answers.append(("".join(map(str, prompt)), {"text": "\n".join(map(str, said)), "reward": row.get("rewards")}))
    return _grouped(answers)


def scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of one of TensorBoard's event files, in its order; a torn record ends it."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise InputError(f"{path}: reading it needs TensorBoard: pip install 'posttrain[tensorboard]'") from error
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            number = make_ndarray(value.tensor) if value.HasField("tensor") else None
            if number is not None and number.size == 1 and number.dtype.kind == "f":
                yield event.step, value.tag, float(number.item())


# ------------------------------------------------------------------------------------------- prime-rl


def _prime_rl_run(folder: Path) -> ForeignRun | None:
    """From the files of trainer and orchestrator: in the folder, or one below it."""
    places = (folder / "metrics.jsonl", *sorted(folder.glob("*/metrics.jsonl")))
    files = [path for path in places if path.is_file()]
    files = [path for path in files if any(not OF_PRIME_RL.isdisjoint(row) for row in _lines(path, 20))]
    rows = [row for path in files for row in _lines(path) if isinstance(row.get("step"), int)]
    return _run("prime-rl", rows) if files else None
