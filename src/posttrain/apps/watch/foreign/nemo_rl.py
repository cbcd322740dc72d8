"""NeMo RL: TensorBoard's event files of `logger.log_dir/exp_NNN`, and the answers in `train_data_stepN.jsonl`.

Our metrics and settings have its names, so few need another.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.watch.foreign.run import ForeignRun, grouped, kind_of
from posttrain.apps.watch.foreign.tensorboard_events import scalars
from posttrain.files.json_files import JsonObject, parse_json

KEYS = {"train/mean_gen_tokens_per_sample": "train/mean_generation_length"}
EVENTS = "events.out.tfevents.*"


def find(folder: Path) -> list[Path]:
    """The event files of the folder, or of its newest experiment."""
    for place in (folder, *sorted(folder.glob("exp_*"), reverse=True)):
        if files := sorted([*place.glob(EVENTS), *place.glob(f"tensorboard/**/{EVENTS}")]):
            return files
    return []


def read(folder: Path, files: list[Path]) -> ForeignRun:
    merged: dict[int, JsonObject] = {}
    for path in files:
        for step, tag, value in scalars(path):
            if tag.startswith(("train/", "validation/", "timing/")):
                merged.setdefault(step, {"step": step})[KEYS.get(tag, tag)] = value
    rows = [merged[step] for step in sorted(merged)]
    logs = files[0].parent.parent if files[0].parent.name == "tensorboard" else files[0].parent
    kind = kind_of(rows, grpo="train/reward", dpo="train/sft_loss", rm="train/rewards_chosen_mean")
    return ForeignRun("NeMo RL", kind, rows, None, groups=lambda step: _groups(logs, step))


def _groups(logs: Path, step: int) -> list[JsonObject]:
    path = logs / f"train_data_step{step}.jsonl"
    if not path.is_file():
        return []
    rows = [row for row in map(parse_json, path.read_bytes().splitlines()) if isinstance(row, dict)]
    return grouped((_prompt(row), {"text": _answer(row), "reward": row.get("rewards")}) for row in rows)


def _prompt(row: JsonObject) -> str:
    content = row.get("content")
    return str(content[0]) if isinstance(content, list) and content else ""


def _answer(row: JsonObject) -> str:
    """The messages after the first, or the whole text where it is not split."""
    content = row.get("content")
    return "\n".join(map(str, content[1:])) if isinstance(content, list) else str(content or "")
