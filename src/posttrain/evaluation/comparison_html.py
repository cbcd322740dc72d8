"""A comparison on one page that needs nothing but itself, in the style of a run's report."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from posttrain.evaluation.comparison import Comparison, ProblemPair
from posttrain.evaluation.results import Evaluation, ProblemResult

MAX_SHOWN = 200  # changed problems with their answers
_MAX_TEXT = 4000  # characters of one answer
_STYLE = """
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
.pair pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; padding: 10px 12px; margin: 4px 0 12px; font: 12px/1.45 var(--mono); max-height: 24em; overflow: auto; }
.better { color: var(--good); } .worse { color: var(--bad); }
details.problem { border: 1px solid var(--rule); border-radius: 10px; background: var(--card); padding: 8px 14px; margin: 8px 0; }
details.problem > summary { cursor: pointer; }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; font-size: 12px; line-height: 22px; color: #fff; }
.bar span { text-align: center; min-width: 2px; }
"""


def render(comparison: Comparison) -> str:
    c = comparison
    style = (files("posttrain.reporting") / "assets" / "report.css").read_text("utf-8") + _STYLE
    title = f"{c.first.summary.dataset}: {c.second.summary.model} against {c.first.summary.model}"
    body = "".join((_header(c, title), _tiles(c), _win_loss(c), _sides(c), _changed(c)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · posttrain</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _header(c: Comparison, title: str) -> str:
    facts = f"{c.metric} · {len(c.pairs)} problems · {c.test}"
    return (
        f'<header><div><h1>{escape(title)}</h1><p class="facts">{escape(facts)}</p></div>'
        f'<p class="status">{escape(c.verdict)}</p></header>'
    )


def _tiles(c: Comparison) -> str:
    i = c.interval
    kind = ("good" if c.difference > 0 else "bad") if c.p_value < 1 - i.confidence else ""
    tiles = [
        ("A", f"{c.first_mean:.4f}", c.first.summary.model, ""),
        ("B", f"{c.second_mean:.4f}", c.second.summary.model, ""),
        ("B - A", f"{c.difference:+.4f}", f"{100 * i.confidence:g}% [{i.low:+.4f}, {i.high:+.4f}]", kind),
        ("p", f"{c.p_value:.3g}", c.test, ""),
    ]
    shown = "".join(
        f'<div class="tile {kind}"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
        for name, value, detail, kind in tiles
    )
    return f'<section class="tiles">{shown}</section>'


def _win_loss(c: Comparison) -> str:
    parts = [("B better", c.wins, "--good"), ("equal", c.ties, "--c7"), ("B worse", c.losses, "--bad")]
    bar = "".join(
        f'<span style="flex:{count};background:var({colour})">{count}</span>' for _, count, colour in parts if count
    )
    rows = "".join(f'<tr><td>{name}</td><td class="n">{count}</td></tr>' for name, count, _ in parts)
    left_out = f'<tr><td>left out (unscored)</td><td class="n">{c.left_out}</td></tr>' if c.left_out else ""
    return (
        f'<section><h2>Problem by problem</h2><div class="bar">{bar}</div>'
        f'<table style="margin-top:12px">{rows}{left_out}</table></section>'
    )


def _sides(c: Comparison) -> str:
    names = list(dict.fromkeys([*c.first.summary.metrics, *c.second.summary.metrics]))
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{_value(c.first, name)}</td><td class="n">{_value(c.second, name)}</td></tr>'
        for name in names
    )
    cautions = "".join(f"<li>{escape(caution)}</li>" for caution in c.cautions)
    note = f'<p class="note">Take care:</p><ul>{cautions}</ul>' if cautions else ""
    head = '<tr><th>metric</th><th class="n">A</th><th class="n">B</th></tr>'
    return f"<section><h2>Both sides</h2><table>{head}{rows}</table>{note}</section>"


def _value(evaluation: Evaluation, name: str) -> str:
    value, interval = evaluation.summary.metrics.get(name), evaluation.summary.intervals.get(name)
    if value is None:
        return "not measured"
    return f"{value:.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if interval else "")


def _changed(c: Comparison) -> str:
    changed = c.changed
    if not changed:
        return '<section><h2>Changed problems</h2><p class="note">None.</p></section>'
    shown = "".join(map(_problem, changed[:MAX_SHOWN]))
    rest = len(changed) - MAX_SHOWN
    more = f'<p class="note">… and {rest} more, not shown here.</p>' if rest > 0 else ""
    return f"<section><h2>Changed problems ({len(changed)})</h2>{shown}{more}</section>"


def _problem(pair: ProblemPair) -> str:
    word = "better" if pair.difference > 0 else "worse"
    summary = (
        f'<summary><b class="{word}">{pair.first_value:.3g} → {pair.second_value:.3g}</b> {escape(pair.first.id)} '
        f'<span class="facts">{escape(" ".join(pair.first.prompt.split())[:100])}</span></summary>'
    )
    sides = "".join(
        f"<div><h3>{name}</h3>{_answers(side)}</div>" for name, side in (("A", pair.first), ("B", pair.second))
    )
    prompt = f"<h3>Problem</h3><div class='pair' style='display:block'><pre>{escape(pair.first.prompt)}</pre></div>"
    expected = f'<p class="note">Expected: {escape(str(pair.first.expected))}</p>'
    return f'<details class="problem">{summary}{prompt}{expected}<div class="pair">{sides}</div></details>'


def _answers(problem: ProblemResult) -> str:
    shown = []
    for number, sample in enumerate(problem.samples[:4], start=1):
        reward = "unscored" if sample.reward is None else f"reward {sample.reward:g}"
        cut = ", cut off" if sample.truncated else ""
        length = "" if sample.num_tokens is None else f", {sample.num_tokens} tokens"
        note = f"sample {number}: {reward}{length}{cut}"
        text = sample.error or "" if sample.reward is None and not sample.text else sample.text
        text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}\n… ({len(text) - _MAX_TEXT} more characters)"
        shown.append(f'<p class="note">{escape(note)}</p><pre>{escape(text)}</pre>')
    if len(problem.samples) > 4:
        shown.append(f'<p class="note">… and {len(problem.samples) - 4} more samples</p>')
    return "".join(shown)
