"""Which rollouts of a step show a problem, from the file of the step's rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.doctor.findings import MAX_TEXT, Answer
from posttrain.doctor.rule import Shown
from posttrain.json_files import JsonMapping

MAX_ANSWERS = 3


def answers_that_show(groups: Sequence[JsonMapping], shown: Shown) -> tuple[Answer, ...]:
    """At most three answers. `groups` are the rows of `rollouts/step_N.jsonl.gz`."""
    if shown == "equal" and groups:
        groups = sorted(groups, key=_num_rewards)[:1]
    rollouts = [(group, answer) for group in groups for answer in group.get("completions", ())]
    if shown == "unscored":
        rollouts = [pair for pair in rollouts if pair[1].get("reward") is None]
    elif shown == "cut":
        rollouts = [pair for pair in rollouts if pair[1].get("finish_reason", "length") == "length"]
    elif shown == "longest":
        rollouts.sort(key=lambda pair: -(pair[1].get("num_tokens") or 0))
    elif shown == "best":
        rollouts.sort(key=lambda pair: -(pair[1].get("reward") or 0.0))
    return tuple(_answer(group, answer) for group, answer in rollouts[:MAX_ANSWERS])


def _num_rewards(group: JsonMapping) -> int:
    return len({answer.get("reward") for answer in group.get("completions", ())})


def _answer(group: JsonMapping, answer: JsonMapping) -> Answer:
    text = str(answer.get("error") or answer.get("text") or "")
    reward, num_tokens = answer.get("reward"), answer.get("num_tokens")
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"
    return Answer(
        id=str(group.get("id", "")),
        text=cut,
        reward=float(reward) if isinstance(reward, int | float) else None,
        num_tokens=int(num_tokens) if isinstance(num_tokens, int) else None,
    )
