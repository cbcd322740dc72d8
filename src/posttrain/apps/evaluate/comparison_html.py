"""A comparison as one self-contained HTML page, in the style of a run's report."""

from __future__ import annotations

from posttrain.apps.evaluate.comparison import EvaluationComparison, ProblemPair
from posttrain.apps.evaluate.results import Evaluation, ProblemResult
from posttrain.reporting.pages import (
    Html,
    bullets,
    folded,
    header,
    join,
    note,
    page,
    section,
    shortened,
    table,
    tag,
    tile,
    tiles,
)

MAX_SHOWN = 200  # changed problems with their answers
_MAX_TEXT = 4000  # characters of one answer
_STYLE = """
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
.pair pre, .problem-text pre { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 10px 12px; margin: 4px 0 12px; font: 12px/1.45 var(--mono); max-height: 24em; overflow: auto; }
.better { color: var(--good); } .worse { color: var(--bad); }
details.problem { border: 1px solid var(--rule); border-radius: 10px; background: var(--card); padding: 8px 14px; margin: 8px 0; }
.share { display: flex; height: 22px; margin-bottom: 12px; border-radius: 6px; overflow: hidden;
  font-size: 12px; line-height: 22px; color: #fff; }
.share span { text-align: center; min-width: 2px; }
"""


def render(comparison: EvaluationComparison) -> str:
    c = comparison
    title = f"{c.first.summary.dataset}: {c.second.summary.model} against {c.first.summary.model}"
    facts = f"{c.metric} · {len(c.pairs)} problems · {c.test}"
    return page(title, header(title, facts, c.verdict), _tiles(c), _win_loss(c), _sides(c), _changed(c), style=_STYLE)


def _tiles(c: EvaluationComparison) -> Html:
    i = c.interval
    kind = ("good" if c.difference > 0 else "bad") if c.p_value < 1 - i.confidence else ""
    return tiles(
        (
            tile("A", f"{c.first_mean:.4f}", c.first.summary.model),
            tile("B", f"{c.second_mean:.4f}", c.second.summary.model),
            tile("B - A", f"{c.difference:+.4f}", f"{100 * i.confidence:g}% [{i.low:+.4f}, {i.high:+.4f}]", kind=kind),
            tile("p", f"{c.p_value:.3g}", c.test),
        )
    )


def _win_loss(c: EvaluationComparison) -> Html:
    parts = [("B better", c.wins, "--good"), ("equal", c.ties, "--c7"), ("B worse", c.losses, "--bad")]
    bar = "".join(
        f'<span style="flex:{count};background:var({colour})">{count}</span>' for _, count, colour in parts if count
    )
    rows = [(name, count) for name, count, _ in parts]
    left_out = [("left out (unscored)", c.left_out)] if c.left_out else []
    return section("Problem by problem", tag("div", Html(bar), kind="share"), table((), rows + left_out, numbers=(1,)))


def _sides(c: EvaluationComparison) -> Html:
    names = dict.fromkeys([*c.first.summary.metrics, *c.second.summary.metrics])
    rows = [(name, _value(c.first, name), _value(c.second, name)) for name in names]
    cautions = [note("Take care:"), bullets(c.cautions)] if c.cautions else []
    return section("Both sides", table(("metric", "A", "B"), rows, numbers=(1, 2)), *cautions)


def _value(evaluation: Evaluation, name: str) -> str:
    value, interval = evaluation.summary.metrics.get(name), evaluation.summary.intervals.get(name)
    if value is None:
        return "not measured"
    return f"{value:.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if interval else "")


def _changed(c: EvaluationComparison) -> Html:
    changed = c.changed
    if not changed:
        return section("Changed problems", note("None."))
    rest = len(changed) - MAX_SHOWN
    more = [note(f"… and {rest} more, not shown here.")] if rest > 0 else []
    return section(f"Changed problems ({len(changed)})", *map(_problem, changed[:MAX_SHOWN]), *more)


def _problem(pair: ProblemPair) -> Html:
    values = f"{pair.first_value:.3g} → {pair.second_value:.3g}"
    summary = join(
        (
            tag("b", values, kind="better" if pair.difference > 0 else "worse"),
            f" {pair.first.id} ",
            tag("span", " ".join(pair.first.prompt.split())[:100], kind="facts"),
        )
    )
    sides = [tag("div", tag("h3", name), _answers(side)) for name, side in (("A", pair.first), ("B", pair.second))]
    return folded(
        summary,
        tag("h3", "Problem"),
        tag("div", tag("pre", pair.first.prompt), kind="problem-text"),
        note(f"Expected: {pair.first.expected}"),
        tag("div", *sides, kind="pair"),
        kind="problem",
    )


def _answers(problem: ProblemResult) -> Html:
    shown: list[Html] = []
    for number, sample in enumerate(problem.samples[:4], start=1):
        reward = "unscored" if sample.reward is None else f"reward {sample.reward:g}"
        cut = ", cut off" if sample.truncated else ""
        length = "" if sample.num_tokens is None else f", {sample.num_tokens} tokens"
        text = sample.error or "" if sample.reward is None and not sample.text else sample.text
        shown += [note(f"sample {number}: {reward}{length}{cut}"), tag("pre", shortened(text, _MAX_TEXT))]
    if len(problem.samples) > 4:
        shown.append(note(f"… and {len(problem.samples) - 4} more samples"))
    return join(shown)
