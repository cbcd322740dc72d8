"""Two evaluations of the same problems compared: which is better, by how much, with what certainty, and where they
differ.

Everything is paired by problem. Where each problem is passed or failed (0 or 1 on both sides) the test is McNemar's,
exact: of the problems that changed, how likely is a split at least as uneven if both directions were equally likely?
Otherwise the signs of the differences are flipped at random (keyed), a test of their mean. Problems that one side could
not score are left out and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from posttrain.algorithms.pass_at_k import Metric, parse_metric
from posttrain.apps.evaluate.identity import describe_difference, different_settings, why_incomparable
from posttrain.apps.evaluate.metrics import bootstrap_interval, per_problem, random_words
from posttrain.apps.evaluate.results import Evaluation, EvaluationError, Interval, ProblemResult
from posttrain.reporting.pages import render_page

RESAMPLES = 10_000
_NAMES = ("A", "B")
MAX_SHOWN = 200  # changed problems with their answers, on the page


@dataclass(frozen=True)
class ProblemPair:
    first: ProblemResult
    second: ProblemResult
    first_value: float | None
    second_value: float | None

    @property
    def difference(self) -> float:
        assert self.first_value is not None
        assert self.second_value is not None
        return self.second_value - self.first_value

    @property
    def measured(self) -> bool:
        return self.first_value is not None and self.second_value is not None


@dataclass(frozen=True)
class EvaluationComparison:
    first: Evaluation
    second: Evaluation
    metric: str
    first_mean: float
    second_mean: float
    interval: Interval  # of second minus first
    p_value: float
    test: str
    wins: int  # problems on which the second is better
    losses: int
    ties: int
    left_out: int  # problems that one of them could not score
    pairs: tuple[ProblemPair, ...]  # in the order of the dataset
    cautions: tuple[str, ...]

    @property
    def difference(self) -> float:
        return self.second_mean - self.first_mean

    @property
    def changed(self) -> list[ProblemPair]:
        """The problems whose value differs, losses first, the largest change first."""
        changed = [pair for pair in self.pairs if pair.measured and pair.difference != 0]
        return sorted(changed, key=lambda pair: (pair.difference > 0, -abs(pair.difference), pair.first.index))

    @property
    def verdict(self) -> str:
        alpha = 1 - self.interval.confidence
        if self.p_value >= alpha:
            return f"no difference can be told from noise (p = {self.p_value:.3g})"
        better = "B is better" if self.difference > 0 else "B is worse"
        return f"{better} (p = {self.p_value:.3g})"


def compare(
    first: Evaluation, second: Evaluation, metric: str | None = None, *, confidence: float = 0.95, seed: int = 42
) -> EvaluationComparison:
    """Raises EvaluationError if problems or judges are not the same, naming what is not."""
    check_same_problems(first, second)
    name = str(_metric(first, second, metric))
    if reason := why_incomparable(first, second, _NAMES, uses_threshold=not name.startswith("avg")):
        raise EvaluationError(reason)
    by_id = {problem.id: problem for problem in second.problems}
    others = [by_id[problem.id] for problem in first.problems]
    pairs = tuple(
        ProblemPair(a, b, value_a, value_b)
        for a, b, value_a, value_b in zip(
            first.problems,
            others,
            per_problem(first.problems, name, first.summary.pass_threshold),
            per_problem(others, name, second.summary.pass_threshold),
            strict=True,
        )
    )
    measured = [pair for pair in pairs if pair.measured]
    if not measured:
        raise EvaluationError(f"{name}: no problem was scored in both evaluations")
    differences = [pair.difference for pair in measured]
    p_value, test = _test(measured, seed)
    interval = bootstrap_interval(differences, seed=seed, confidence=confidence, resamples=RESAMPLES)
    assert interval is not None
    return EvaluationComparison(
        first=first,
        second=second,
        metric=name,
        first_mean=math.fsum(p.first_value or 0.0 for p in measured) / len(measured),
        second_mean=math.fsum(p.second_value or 0.0 for p in measured) / len(measured),
        interval=interval,
        p_value=p_value,
        test=test,
        wins=sum(difference > 0 for difference in differences),
        losses=sum(difference < 0 for difference in differences),
        ties=sum(difference == 0 for difference in differences),
        left_out=len(pairs) - len(measured),
        pairs=pairs,
        cautions=tuple(_cautions(first, second)),
    )


def check_same_problems(first: Evaluation, second: Evaluation) -> None:
    if first.summary.problem_set_hash == second.summary.problem_set_hash:
        return
    a, b = ({problem.id: problem for problem in evaluation.problems} for evaluation in (first, second))
    changed = [i for i in a if i in b and (a[i].prompt, a[i].expected) != (b[i].prompt, b[i].expected)]
    kinds = {
        f"only in A ({first.folder})": [i for i in a if i not in b],
        f"only in B ({second.folder})": [i for i in b if i not in a],
        "with another text or answer": changed,
    }
    found = "; ".join(
        f"{len(ids)} {kind}: {', '.join(ids[:5])}{', …' * (len(ids) > 5)}" for kind, ids in kinds.items() if ids
    )
    raise EvaluationError(
        f"the two evaluations are not of the same problems (A has {len(a)}, B has {len(b)}), so they cannot be "
        f"compared problem by problem. {found}"
    )


def _metric(first: Evaluation, second: Evaluation, wanted: str | None) -> Metric:
    metric = parse_metric(wanted or first.summary.metric)
    fewest = min(first.summary.num_tests_per_prompt, second.summary.num_tests_per_prompt)
    if metric.k > fewest and metric.kind != "avg":
        raise EvaluationError(f"{metric} needs {metric.k} samples of each problem; one of the evaluations has {fewest}")
    return metric


def _test(pairs: Sequence[ProblemPair], seed: int) -> tuple[float, str]:
    values = {value for pair in pairs for value in (pair.first_value, pair.second_value)}
    differences = [pair.difference for pair in pairs if pair.difference != 0]
    if values <= {0.0, 1.0}:
        return exact_sign_test(sum(d > 0 for d in differences), sum(d < 0 for d in differences)), "exact McNemar"
    return sign_flip_test(differences, seed), "sign-flip permutation of the mean"


def exact_sign_test(num_wins: int, num_losses: int) -> float:
    """Two-sided: how likely a split at least as uneven is if both directions are equally likely."""
    total, fewer = num_wins + num_losses, min(num_wins, num_losses)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def sign_flip_test(differences: Sequence[float], seed: int, resamples: int = RESAMPLES) -> float:
    """Two-sided: how often a sum at least as large comes of random signs. The observed one counts as one of them."""
    values = np.abs(np.array([d for d in differences if d != 0], dtype=np.float64))
    if not len(values):
        return 1.0
    observed = abs(math.fsum(differences)) * (1 - 1e-12)  # sums in another order may differ in the last bit
    hits = 0
    for raw in random_words(seed, 2, resamples, len(values)):
        signs = np.where(raw >> np.uint64(63), 1.0, -1.0)
        hits += int((np.abs(signs @ values) >= observed).sum())
    return (hits + 1) / (resamples + 1)


def _cautions(first: Evaluation, second: Evaluation) -> list[str]:
    found = [describe_difference(difference, _NAMES) for difference in different_settings(first, second)]
    for name, evaluation in zip(_NAMES, (first, second), strict=True):
        if evaluation.summary.counts.unscored:
            found.append(f"{evaluation.summary.counts.unscored} samples of {name} are unscored")
    return found


def comparison_lines(comparison: EvaluationComparison, show: int = 20) -> list[str]:
    c, interval = comparison, comparison.interval
    a, b = c.first.summary, c.second.summary
    lines = [
        f"A  {a.model}  ({c.first.folder})",
        f"B  {b.model}  ({c.second.folder})",
        f"{a.dataset}, {len(c.pairs)} problems, {c.metric}",
        "",
        f"  {'A':<12}{c.first_mean:.4f}",
        f"  {'B':<12}{c.second_mean:.4f}",
        f"  {'B - A':<12}{c.difference:+.4f}   {100 * interval.confidence:g}% [{interval.low:+.4f}, "
        f"{interval.high:+.4f}]",
        f"  {'test':<12}{c.test}: p = {c.p_value:.4g}",
        f"  {'verdict':<12}{c.verdict}",
        "",
        f"  {'B better':<12}{c.wins}",
        f"  {'B worse':<12}{c.losses}",
        f"  {'equal':<12}{c.ties}",
    ]
    if c.left_out:
        lines.append(f"  {'left out':<12}{c.left_out} problems that A or B could not score")
    for key, word in (("mean_length_tokens", "length"), ("truncation_rate", "truncated")):
        if key in a.metrics and key in b.metrics:
            lines.append(f"  {word:<12}{a.metrics[key]:.4g} -> {b.metrics[key]:.4g}")
    lines += [f"  caution     {caution}" for caution in c.cautions]
    changed = c.changed
    if changed and show > 0:
        lines += ["", f"  changed ({len(changed)}):"]
        width = max(len(pair.first.id) for pair in changed[:show])
        for pair in changed[:show]:
            text = " ".join(pair.first.prompt.split())
            lines.append(
                f"    {pair.first.id:<{width}}  {pair.first_value:.3g} -> {pair.second_value:.3g}  {text[:60]}"
            )
        if len(changed) > show:
            lines.append(f"    … and {len(changed) - show} more; --show N or --html FILE has them")
    return lines


def comparison_json(comparison: EvaluationComparison) -> str:
    c = comparison
    row = {
        "a": str(c.first.folder),
        "b": str(c.second.folder),
        "dataset": c.first.summary.dataset,
        "metric": c.metric,
        "a_mean": c.first_mean,
        "b_mean": c.second_mean,
        "difference": c.difference,
        "interval": asdict(c.interval),
        "p_value": c.p_value,
        "test": c.test,
        "wins": c.wins,
        "losses": c.losses,
        "ties": c.ties,
        "left_out": c.left_out,
        "cautions": list(c.cautions),
        "changed": [{"id": p.first.id, "a": p.first_value, "b": p.second_value} for p in c.changed],
    }
    return json.dumps(row, indent=2)


def comparison_page(comparison: EvaluationComparison) -> str:
    """One self-contained HTML page, in the style of a run's report."""
    c = comparison
    names = dict.fromkeys([*c.first.summary.metrics, *c.second.summary.metrics])
    return render_page(
        Path(__file__).with_name("comparison.html"),
        title=f"{c.first.summary.dataset}: {_short(c.second.summary.model)} against {_short(c.first.summary.model)}",
        facts=f"{c.metric} · {len(c.pairs)} problems · {c.test}",
        status_words=c.verdict,
        c=c,
        sides=[(name, _value(c.first, name), _value(c.second, name)) for name in names],
        max_shown=MAX_SHOWN,
    )


def _short(model: str) -> str:
    """The last two parts of a path."""
    return "/".join(model.rstrip("/").split("/")[-2:])


def _value(evaluation: Evaluation, name: str) -> str:
    value, interval = evaluation.summary.metrics.get(name), evaluation.summary.intervals.get(name)
    if value is None:
        return "not measured"
    return f"{value:.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if interval else "")
