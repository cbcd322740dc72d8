"""The summary of an evaluation: metrics with their intervals, counts, speed and cost; and the block that is printed.

Computed from the saved problems alone, so that another metric of a finished evaluation needs no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from posttrain import __version__
from posttrain.algorithms.pass_at_k import measured_mean
from posttrain.apps.evaluate.metrics import LENGTH, TRUNCATION, UNSCORED, bootstrap_interval, per_problem
from posttrain.apps.evaluate.results import Counts, EvaluationSummary, ProblemResult, hash_of
from posttrain.config.evaluation import EvalRunConfig

RULE = "=" * 60


def summarise(
    config: EvalRunConfig,
    problems: Sequence[ProblemResult],
    model_fingerprint: str | None,
    timings: Mapping[str, float],
) -> EvaluationSummary:
    """The main metric first, then the usual ones of that many samples, then length, truncation and unscored rate.
    `timings` are sums: generation_s, wall_s, num_tokens."""
    wanted, n = config.eval, config.eval.num_tests_per_prompt
    usual = ["pass@1", f"pass@{n}", f"cons@{n}", f"avg@{n}"] if n > 1 else ["pass@1", "avg@1"]
    ordered = sorted(problems, key=lambda problem: problem.index)  # so that sums do not depend on what finished first
    metrics, intervals = {}, {}
    for name in dict.fromkeys([config.metric_name, *usual, LENGTH, TRUNCATION, UNSCORED]):
        values = per_problem(ordered, name, wanted.pass_threshold)
        total = measured_mean(values)
        interval = bootstrap_interval(
            values, seed=wanted.seed, confidence=wanted.confidence, resamples=wanted.bootstrap_resamples
        )
        if total is not None and interval is not None:
            metrics[name], intervals[name] = total[0] / total[1], interval
    samples = [sample for problem in ordered for sample in problem.samples]
    generation_s, wall_s, num_tokens = (timings.get(key, 0.0) for key in ("generation_s", "wall_s", "num_tokens"))
    lengths = [sample.num_tokens for sample in samples if sample.num_tokens is not None]
    are_known = len(lengths) == len(samples)
    price = wanted.gpu_hour_price
    cost = None if price is None else price * config.num_devices * wall_s / 3600
    return EvaluationSummary(
        model=config.generation.model_name,
        dataset=config.data.dataset_name,
        metric=config.metric_name,
        metrics=metrics,
        intervals=intervals,
        counts=Counts(
            problems=len(ordered),
            samples=len(samples),
            unscored=sum(sample.reward is None for sample in samples),
            truncated=sum(sample.truncated for sample in samples),
        ),
        num_tests_per_prompt=wanted.num_tests_per_prompt,
        pass_threshold=wanted.pass_threshold,
        seed=wanted.seed,
        problem_set_hash=hash_of(ordered),
        config=config.model_dump(by_alias=True),
        code_version=__version__,
        model_fingerprint=model_fingerprint,
        generated_tokens=sum(lengths) if are_known else None,
        generation_s=generation_s,
        wall_s=wall_s,
        tokens_per_second=num_tokens / generation_s if are_known and generation_s > 0 else None,
        cost=cost,
        cost_per_answer=None if cost is None or not samples else cost / len(samples),
    )


def block(config: EvalRunConfig, summary: EvaluationSummary, problems: Sequence[ProblemResult]) -> list[str]:
    """The lines that NeMo RL prints, then ours."""
    generation = config.generation
    ordered = sorted(problems, key=lambda problem: problem.index)
    values = per_problem(ordered, summary.metric, summary.pass_threshold)
    total, count = measured_mean(values) or (0.0, 0)
    score = f"score={total / count:.4f} ({total}/{count})" if count else "score=none (no sample was scored)"
    return [
        "",
        RULE,
        f"model_name={summary.model!r} dataset_name={summary.dataset!r}",
        f"max_new_tokens={generation.max_new_tokens} temperature={generation.temperature} top_p={generation.top_p} "
        f"top_k={generation.top_k if generation.top_k is not None else -1} seed={summary.seed}",
        f"metric={summary.metric} num_tests_per_prompt={summary.num_tests_per_prompt}",
        score,
        RULE,
        "",
        *_more(summary, count, _first_reason(ordered)),
    ]


def _first_reason(problems: Sequence[ProblemResult]) -> str | None:
    """Why most of the unscored samples are unscored."""
    errors = Counter(s.error for problem in problems for s in problem.samples if s.reward is None and s.error)
    if not errors:
        return None
    (error, count), *others = errors.most_common()
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [error]
    others_too = f"; {len(others)} other reasons, in problems.jsonl" if others else ""
    return f"{count} times: {lines[-1][:200]}{others_too}"


def _more(summary: EvaluationSummary, num_measured: int, why_unscored: str | None) -> list[str]:
    counts = summary.counts
    lines: dict[str, str] = {}
    for name, value in summary.metrics.items():
        if "@" in name:
            interval = summary.intervals[name]
            lines[name] = f"{value:.4f}   {100 * interval.confidence:g}% [{interval.low:.4f}, {interval.high:.4f}]"
    lines["length"] = "unknown: no answer came, or the server reports no `usage`"
    if LENGTH in summary.metrics:
        interval = summary.intervals[LENGTH]
        lines["length"] = f"{summary.metrics[LENGTH]:.1f} tokens   [{interval.low:.1f}, {interval.high:.1f}]"
    share = counts.truncated / counts.samples
    lines["truncated"] = "unknown: nothing says why an answer ended"
    if TRUNCATION in summary.metrics:
        lines["truncated"] = f"{counts.truncated} of {counts.samples} samples ({share:.1%})"
    left_out = counts.problems - num_measured
    note = f"; {left_out} problems without any scored sample are left out" if left_out else ""
    lines["unscored"] = f"{counts.unscored} of {counts.samples} samples{note}"
    if why_unscored is not None:
        lines[""] = why_unscored
    if (speed := summary.tokens_per_second) is not None:
        lines["speed"] = f"{speed:,.1f} tokens/s   {summary.generated_tokens:,} in {summary.wall_s:,.1f} s"
    if summary.cost is not None:
        lines["cost"] = f"{summary.cost:.4f}   {summary.cost_per_answer:.6f} per answer"
    width = max(map(len, lines))
    return [f"  {name:<{width}}  {text}" for name, text in lines.items()]
