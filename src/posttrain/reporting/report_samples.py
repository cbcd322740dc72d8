"""The samples of a run on its report: prompts, answers and rewards, and the rollouts without a score."""

from __future__ import annotations

from pathlib import Path

from posttrain.reporting.charts import stacked_bars
from posttrain.reporting.pages import Html, folded, html, join, note, section, shortened, table, tag
from posttrain.reporting.run_data import RunData, groups_of
from posttrain.reporting.run_files import Row, rollout_step
from posttrain.reporting.scales import label

MAX_CHARACTERS = 4000
NUM_COMPLETIONS_OPEN = 6
MAX_REASONS = 20


def samples_section(run: RunData) -> Html:
    """The latest training step open; the first one and the latest validation below it, folded."""
    training, validation = run.rollout_files(), run.rollout_files(validation=True)
    parts = []
    if training:
        parts.append(_step_samples(training[-1], "Latest step", num_groups=4, is_open=True))
    if len(training) > 1:
        parts.append(_step_samples(training[0], "First step", num_groups=3))
    if validation:
        parts.append(_step_samples(validation[-1], "Latest validation", num_groups=4, is_open=not training))
    return section("Samples", *parts) if any(parts) else Html()


def _step_samples(path: Path, words: str, *, num_groups: int, is_open: bool = False) -> Html:
    groups = groups_of(path)
    if not groups:
        return Html()
    # Groups with different rewards, which give a gradient, are shown first.
    mixed_first = sorted(groups, key=lambda group: len(set(_rewards(group))) < 2)
    rewards = [reward for group in groups for reward in _rewards(group)]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    mean = f", mean reward {label(sum(rewards) / len(rewards))}" if rewards else ""
    count = f"{min(num_groups, len(groups))} of {len(groups)} groups"
    summary = join((f"{words} ", tag("span", f"step {rollout_step(path)} · {count}{mean}")))
    shown = [_group(group, low, high) for group in mixed_first[:num_groups]]
    return folded(summary, *shown, kind="samples", is_open=is_open)


def _rewards(group: Row) -> list[float]:
    rewards = [completion.get("reward") for completion in group.get("completions", [])]
    return [reward for reward in rewards if isinstance(reward, int | float)]


def _group(group: Row, low: float, high: float) -> Html:
    reference = group.get("reference")
    name = join((_text(group.get("id", "")), " · draw ", _text(group.get("draw", ""))))
    completions = [_completion(completion, low, high) for completion in group.get("completions", [])]
    shown, rest = completions[:NUM_COMPLETIONS_OPEN], completions[NUM_COMPLETIONS_OPEN:]
    return tag(
        "article",
        tag("div", name, kind="id"),
        tag("div", tag("b", "prompt"), tag("pre", _text(group.get("prompt", ""))), kind="prompt"),
        "" if reference is None else tag("div", tag("b", "expected"), " ", _text(reference), kind="expected"),
        tag("div", *shown, kind="completions"),
        folded(f"{len(rest)} more", tag("div", *rest, kind="completions")) if rest else "",
        kind="group",
    )


def _completion(completion: Row, low: float, high: float) -> Html:
    reward, advantage = completion.get("reward"), completion.get("advantage")
    if isinstance(reward, int | float):
        share = (reward - low) / (high - low) if high > low else float(reward > 0)
        chips = [tag("b", label(reward), kind="reward")]
        style, kind = f' style="--share:{100 * share:.0f}%"', "completion"
    else:
        chips = [tag("b", "unscored", kind="reward"), tag("span", _text(completion.get("error") or ""), kind="why")]
        style, kind = "", "completion unscored"
    if isinstance(advantage, int | float) and advantage:
        chips.append(tag("span", "advantage ", tag("b", f"{advantage:+.3f}")))
    chips += _named_numbers(completion.get("parts"))
    is_cut = completion.get("finish_reason") == "length"
    cut = join((" ", tag("span", "cut at the limit", kind="cut"))) if is_cut else ""
    chips.append(tag("span", f"{completion.get('num_tokens', '?')} tokens", cut))
    chips += _named_numbers(completion.get("counts"))
    turns = completion.get("turns") or [{"text": completion.get("text", "")}]
    body = join((tag("div", *chips, kind="verdict"), *map(_turn, turns)))
    return Html(f'<div class="{kind}"{style}>{body}</div>')


def _named_numbers(values: Row | None) -> list[Html]:
    return [
        tag("span", _text(name), " ", label(value) if isinstance(value, int | float) else "–")
        for name, value in (values or {}).items()
    ]


def _turn(turn: Row) -> Html:
    """The text of one side; a single turn needs no name."""
    text = tag("pre", _text(turn.get("text", "")) or tag("i", "(empty)", kind="nothing"))
    role = turn.get("role")
    if role is None:
        return text
    kind = "model" if role == "assistant" else "environment"
    return tag("div", tag("b", _text(role)), text, kind=f"turn {kind}")


def _text(value: object) -> Html:
    return html(shortened(str(value), MAX_CHARACTERS, " in rollouts/"))


def unscored_section(run: RunData) -> Html:
    """Why rollouts could not be scored, the most frequent reason first, with the first traceback of each."""
    counts: dict[str, int] = {}
    steps: dict[str, list[int]] = {}
    tracebacks: dict[str, str] = {}
    for row in run.unscored:
        reason = str(row.get("reason", "no reason given"))
        counts[reason] = counts.get(reason, 0) + int(row.get("count", 1))
        steps.setdefault(reason, []).append(row["step"])
        if row.get("traceback"):
            tracebacks.setdefault(reason, str(row["traceback"]))
    counted = run.series("train/unscored", "unscored")
    if not counts and not any(counted.values):
        return Html()
    layers = {"unscored": [value or 0.0 for value in counted.values]}
    chart = stacked_bars("Unscored per step", counted.steps, layers, note="", chart_id="unscored", low=True)
    ordered = sorted(counts, key=lambda reason: -counts[reason])
    rows = []
    for reason in ordered[:MAX_REASONS]:
        first, last = min(steps[reason]), max(steps[reason])
        trace = tracebacks.get(reason)
        detail = folded("first traceback", tag("pre", _text(trace))) if trace else ""
        where = str(first) if first == last else f"{first}–{last}"
        rows.append((f"{counts[reason]:,}", join((_text(reason), detail)), where))
    more = len(ordered) - MAX_REASONS
    return section(
        "Unscored rollouts",
        note(
            "An error or a time-out in a reward is not a reward of zero: these rollouts took no part in their group's "
            "statistics."
        ),
        table(("count", "reason", "steps"), rows, numbers=(0, 2)),
        note(f"{more} more reasons in unscored.jsonl.") if more > 0 else "",
        tag("div", chart, kind="charts"),
    )
