"""Sample groups as HTML: what the model was asked, what it answered, what that was worth. Model text is never trusted."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from posttrain.reporting.charts import stacked_bars
from posttrain.reporting.run_data import RunData, groups_of
from posttrain.reporting.run_files import Row, rollout_step
from posttrain.reporting.scales import label

MAX_CHARACTERS = 4000
NUM_COMPLETIONS_OPEN = 6


def samples_section(run: RunData) -> str:
    """The latest training step open; the first one and the latest validation below it, folded."""
    training, validation = run.rollout_files(), run.rollout_files(validation=True)
    parts = []
    if training:
        parts.append(_step_samples(training[-1], "Latest step", num_groups=4, is_open=True))
    if len(training) > 1:
        parts.append(_step_samples(training[0], "First step", num_groups=3))
    if validation:
        parts.append(_step_samples(validation[-1], "Latest validation", num_groups=4, is_open=not training))
    body = "".join(parts)
    return f'<section><h2 id="samples">Samples</h2>{body}</section>' if body else ""


def _step_samples(path: Path, words: str, *, num_groups: int, is_open: bool = False) -> str:
    groups = groups_of(path)
    if not groups:
        return ""
    # Groups whose rewards differ are the ones that teach; they are shown first.
    mixed_first = sorted(groups, key=lambda group: len(set(_rewards(group))) < 2)
    rewards = [reward for group in groups for reward in _rewards(group)]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    shown = "".join(_group(group, low, high) for group in mixed_first[:num_groups])
    mean = f", mean reward {label(sum(rewards) / len(rewards))}" if rewards else ""
    count = f"{min(num_groups, len(groups))} of {len(groups)} groups"
    summary = f"{words} <span>step {rollout_step(path)} · {count}{mean}</span>"
    return f'<details class="samples"{" open" if is_open else ""}><summary>{summary}</summary>{shown}</details>'


def _rewards(group: Row) -> list[float]:
    rewards = [completion.get("reward") for completion in group.get("completions", [])]
    return [reward for reward in rewards if isinstance(reward, int | float)]


def _group(group: Row, low: float, high: float) -> str:
    reference = group.get("reference")
    expected = "" if reference is None else f'<div class="expected"><b>expected</b> {_text(reference)}</div>'
    completions = [_completion(completion, low, high) for completion in group.get("completions", [])]
    body = f'<div class="completions">{"".join(completions[:NUM_COMPLETIONS_OPEN])}</div>'
    if len(completions) > NUM_COMPLETIONS_OPEN:
        rest = "".join(completions[NUM_COMPLETIONS_OPEN:])
        summary = f"<summary>{len(completions) - NUM_COMPLETIONS_OPEN} more</summary>"
        body += f'<details>{summary}<div class="completions">{rest}</div></details>'
    name = f"{_text(group.get('id', ''))} · draw {_text(group.get('draw', ''))}"
    prompt = f'<div class="prompt"><b>prompt</b><pre>{_text(group.get("prompt", ""))}</pre></div>'
    return f'<article class="group"><div class="id">{name}</div>{prompt}{expected}{body}</article>'


def _completion(completion: Row, low: float, high: float) -> str:
    reward, advantage = completion.get("reward"), completion.get("advantage")
    chips = []
    if isinstance(reward, int | float):
        share = (reward - low) / (high - low) if high > low else float(reward > 0)
        chips.append(f'<b class="reward">{label(reward)}</b>')
        style, kind = f' style="--share:{100 * share:.0f}%"', "completion"
    else:
        chips.append(f'<b class="reward">unscored</b><span class="why">{_text(completion.get("error") or "")}</span>')
        style, kind = "", "completion unscored"
    if isinstance(advantage, int | float) and advantage:
        chips.append(f"<span>advantage <b>{advantage:+.3f}</b></span>")
    parts = completion.get("parts") or {}
    chips += [f"<span>{_text(name)} {_number(value)}</span>" for name, value in parts.items()]
    cut = ' <span class="cut">cut at the limit</span>' if completion.get("finish_reason") == "length" else ""
    chips.append(f"<span>{_text(completion.get('num_tokens', '?'))} tokens{cut}</span>")
    chips += [
        f"<span>{_text(name)} {_number(value)}</span>" for name, value in (completion.get("counts") or {}).items()
    ]
    said = completion.get("turns") or [{"text": completion.get("text", "")}]
    body = "".join(_turn(turn) for turn in said)
    return f'<div class="{kind}"{style}><div class="verdict">{"".join(chips)}</div>{body}</div>'


def _turn(turn: Row) -> str:
    """What one side said; a single turn needs no name."""
    text = _text(turn.get("text", "")) or '<i class="nothing">(empty)</i>'
    role = turn.get("role")
    if role is None:
        return f"<pre>{text}</pre>"
    kind = "model" if role == "assistant" else "environment"
    return f'<div class="turn {kind}"><b>{_text(role)}</b><pre>{text}</pre></div>'


def _number(value: Any) -> str:
    return label(value) if isinstance(value, int | float) else "–"


def _text(value: Any) -> str:
    text = str(value)
    more = f"\n… {len(text) - MAX_CHARACTERS:,} more characters in rollouts/" if len(text) > MAX_CHARACTERS else ""
    return escape(text[:MAX_CHARACTERS] + more)


def unscored_section(run: RunData) -> str:
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
        return ""
    layers = {"unscored": [value or 0.0 for value in counted.values]}
    chart = stacked_bars("Unscored per step", counted.steps, layers, note="", chart_id="unscored", low=True)
    body = ""
    ordered = sorted(counts, key=lambda reason: -counts[reason])
    for reason in ordered[:20]:
        where = f"{steps[reason][0]}" if len(set(steps[reason])) == 1 else f"{min(steps[reason])}–{max(steps[reason])}"
        trace = tracebacks.get(reason)
        detail = f"<details><summary>first traceback</summary><pre>{_text(trace)}</pre></details>" if trace else ""
        body += (
            f"<tr><td class='n'>{counts[reason]:,}</td><td>{_text(reason)}{detail}</td><td class='n'>{where}</td></tr>"
        )
    more = f"<p class='note'>{len(ordered) - 20} more reasons in unscored.jsonl.</p>" if len(ordered) > 20 else ""
    return (
        "<section><h2>Unscored rollouts</h2><p class='note'>An error or a time-out in a reward is not a reward of zero: "
        "these rollouts took no part in their group's statistics.</p><table><tr><th class='n'>count</th><th>reason</th>"
        f"<th class='n'>steps</th></tr>{body}</table>{more}<div class='charts'>{chart}</div></section>"
    )
