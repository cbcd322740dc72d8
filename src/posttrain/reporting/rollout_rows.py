"""Groups as rows of `rollouts/step_N.jsonl.gz`, and back. Equal groups give equal bytes: no clock, no file name inside."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.reporting.run_files import Row, write_whole

if TYPE_CHECKING:
    from posttrain.types import Conversation, Group, Rollout


def finite(value: float | None) -> float | None:
    """JSON has no word for NaN and infinity; null it is."""
    return None if value is None or not math.isfinite(value) else value


def group_row(group: Group) -> Row:
    task = group.task
    return {
        "draw": task.draw,
        "id": task.id,
        "prompt": task.prompt,
        "reference": _plain(task.reference),
        "completions": [_completion_row(rollout) for rollout in group.rollouts],
    }


def _completion_row(rollout: Rollout) -> Row:
    score = rollout.score
    shaped = {} if rollout.shaped_reward is None else {"shaped_reward": finite(rollout.shaped_reward)}
    return {
        "text": rollout.completion.text,
        **_turns_row(rollout.completion.conversation),
        "reward": finite(score.reward),
        **shaped,
        "parts": {name: finite(value) for name, value in score.parts.items()},
        "advantage": finite(rollout.advantage),
        "error": score.error,
        "finish_reason": rollout.completion.finish_reason,
        "num_tokens": rollout.completion.num_sampled,
    }


def _turns_row(conversation: Conversation | None) -> Row:
    """Who said what, for people: only where the environment took turns with the model."""
    if conversation is None:
        return {}
    said = [{"role": u.role, "text": u.text, "num_tokens": u.num_tokens} for u in conversation.utterances]
    return {"turns": said, "counts": {name: finite(value) for name, value in conversation.counts.items()}}


def _plain(value: Any) -> Any:
    """A reference is whatever the dataset holds; what JSON cannot say becomes its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def write_rollouts(path: Path, groups: Sequence[Group]) -> None:
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    # mtime 0 and no file name: the header of a gzip file would otherwise differ from run to run.
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=5) as packed:
        for group in groups:
            line = json.dumps(group_row(group), ensure_ascii=False, allow_nan=False) + "\n"
            # A lone surrogate has no UTF-8 form; written as \udc80 it is a legal JSON escape.
            packed.write(line.encode("utf-8", "backslashreplace"))
    write_whole(path, buffer.getvalue())


def read_rollouts(path: Path) -> list[Row]:
    with gzip.open(path, "rb") as lines:
        return [json.loads(line) for line in lines]
