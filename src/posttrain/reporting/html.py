"""`report.html`: a run on one page that needs nothing but itself. Rendered from the run folder alone, at any time.

No network, no fonts, no library: inline SVG, one style sheet, one small script for reading values under the pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from posttrain.reporting.charts import line_chart, stacked_bars
from posttrain.reporting.metric_rows import TOTAL_STEP
from posttrain.reporting.run_data import RunData, load_run
from posttrain.reporting.run_files import CONFIG_FILE, REPORT_FILE, write_whole
from posttrain.reporting.samples_html import samples_section, unscored_section
from posttrain.reporting.scales import label
from posttrain.reporting.wording import duration, headline_metric, summarise, validation_metric

MAX_CURVES = 8  # as many as there are colours

# Title, (key, name) of each curve, what to look for.
ChartSpec = tuple[str, tuple[tuple[str, str], ...], str]

HEADLINE_CHARTS: dict[str, ChartSpec] = {
    "grpo": (
        "Reward",
        (("train/reward", "training reward"), ("validation/accuracy", "validation accuracy")),
        "Mean reward of the rollouts of each step, and of greedy or sampled answers to held-out prompts.",
    ),
    "dpo": (
        "Preference accuracy",
        (("train/accuracy", "training"), ("validation/accuracy", "validation")),
        "Share of pairs whose chosen answer has the higher implicit reward.",
    ),
    "rm": (
        "Preference accuracy",
        (("train/accuracy", "training"), ("validation/accuracy", "validation")),
        "Share of pairs whose chosen answer has the higher score.",
    ),
    "sft": (
        "Loss",
        (("train/loss", "training"), ("validation/loss", "validation")),
        "Mean negative log-likelihood per token.",
    ),
}
CHARTS: tuple[ChartSpec, ...] = (
    (
        "Rewards of the pairs",
        (("train/rewards_chosen_mean", "chosen"), ("train/rewards_rejected_mean", "rejected")),
        "The log-probability gained over the reference, not multiplied by beta, or a reward model's score. "
        "The gap should open.",
    ),
    (
        "KL to the reference",
        (("train/kl_penalty", "KL"),),
        "Per token. 0.01 to 0.1 is usual; above 0.5 the policy is running away.",
    ),
    (
        "Mean generation length",
        (("train/mean_generation_length", "training"), ("validation/mean_generation_length", "validation")),
        "Response tokens per sample.",
    ),
    (
        "Signal and truncation",
        (("train/groups_with_signal", "groups with signal"), ("train/truncation_rate", "truncated answers")),
        "Only a group whose rewards differ teaches anything. A truncated answer ended at the length limit.",
    ),
    ("Gradient norm", (("train/grad_norm", "norm"),), "Before clipping. Spikes above 10 are a sign of instability."),
    ("Loss", (("train/loss", "training"), ("validation/loss", "validation")), ""),
    (
        "Approximate entropy",
        (("train/approx_entropy", "entropy"),),
        "Per token. A fall to zero means that exploration ends.",
    ),
    (
        "Sampler against trainer",
        (("train/token_mult_prob_error", "mean exp |difference|"),),
        "1 is perfect agreement of sampling and training log-probabilities.",
    ),
    (
        "Throughput",
        (
            ("performance/tokens_per_sec_per_gpu", "end to end"),
            ("performance/generation_tokens_per_sec_per_gpu", "generation"),
            ("performance/policy_training_tokens_per_sec_per_gpu", "training"),
        ),
        "Tokens of full sequences per second and {device}.",
    ),
    ("Learning rate", (("train/lr", "lr"),), ""),
)


def write_report(folder: Path) -> Path:
    """Renders the report of the run in `folder` into that folder, and returns where it is."""
    target = folder / REPORT_FILE
    write_whole(target, render(load_run(folder)).encode("utf-8", "backslashreplace"))
    return target


def render(run: RunData) -> str:
    charts, shown = _charts(run)
    body = "".join(
        (
            _header(run),
            _key_figures(run),
            charts,
            _timing(run),
            unscored_section(run),
            samples_section(run),
            _other_metrics(run, shown),
            _config_changes(run),
            _warnings(run),
            _configs(run),
        )
    )
    assets = files("posttrain.reporting") / "assets"
    style, script = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.title)} · posttrain</title><style>{style}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def _header(run: RunData) -> str:
    info = run.info
    status = str(info.get("status", "unknown"))
    max_steps = info.get("max_steps")
    facts = [run.algorithm.upper()]
    if info.get("num_devices"):
        word = str(info.get("device_word", "device"))
        facts.append(f"{info['num_devices']} {word}{'s' if info['num_devices'] != 1 else ''}")
    if info.get("started_at"):
        facts.append(f"started {_when(info['started_at'])}")
    resumed = info.get("resumed_at_steps") or []
    if resumed:
        facts.append("resumed after step " + ", ".join(str(step) for step in resumed[-5:]))
    words = f"step {run.last_step}" + (f" of {max_steps}" if max_steps else "")
    if info.get("reason") and info["reason"] != status:
        words = str(info["reason"])
    elif status == "running" and info.get("updated_at"):
        words += f", as of {_when(info['updated_at'])}"
    return (
        f'<header><div><h1>{escape(run.title)}</h1><p class="facts">{escape(" · ".join(facts))}</p></div>'
        f'<p class="status {escape(status)}"><b>{escape(status)}</b> {escape(words)}</p></header>'
    )


def _when(timestamp: object) -> str:
    """2025-01-31T12:34:56+00:00 as 2025-01-31 12:34 UTC."""
    return str(timestamp)[:16].replace("T", " ") + " UTC"


def _tile(name: str, value: str, detail: str = "", *, kind: str = "") -> str:
    return (
        f'<div class="tile {kind}"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
    )


def _key_figures(run: RunData) -> str:
    tiles = []
    metric, lower_is_better = headline_metric(run.algorithm)
    found = summarise(run.rows, metric, lower_is_better=lower_is_better)
    if found.metric:
        name = {"train/reward": "Reward", "train/accuracy": "Pair accuracy"}.get(metric, "Loss")
        detail = f"first {label(found.first)} · best {label(found.best)} at step {found.best_step}"
        tiles.append(_tile(name, label(found.last), detail))
    metric, lower_is_better = validation_metric(run.rows)
    found = summarise(run.rows, metric, lower_is_better=lower_is_better)
    if found.metric:
        num_points = sum(row.get(metric) is not None for row in run.rows)
        value = f"{label(found.first)} → {label(found.last)}" if num_points > 1 else label(found.last)
        better = num_points > 1 and (found.last < found.first) == lower_is_better and found.last != found.first
        detail = f"before → after · best {label(found.best)} at step {found.best_step}" if num_points > 1 else ""
        tiles.append(
            _tile(f"Validation {metric.removeprefix('validation/')}", value, detail, kind="good" if better else "")
        )
    max_steps = run.info.get("max_steps")
    step_series = run.series(f"timing/train/{TOTAL_STEP}")
    step_seconds = [value for value in step_series.values if value is not None]
    mean_s = f"{duration(sum(step_seconds) / len(step_seconds))} per step" if step_seconds else ""
    tiles.append(_tile("Steps", f"{run.last_step:,}" + (f" / {max_steps:,}" if max_steps else ""), mean_s))
    wall_s = float(run.info.get("wall_s") or run.logged_seconds)
    tiles.append(_tile("Time", duration(wall_s), f"{duration(run.logged_seconds)} in steps and validation"))
    tiles += _throughput_tile(run) + _unscored_tile(run)
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _throughput_tile(run: RunData) -> list[str]:
    rates = [value for value in run.series("performance/tokens_per_sec_per_gpu").values if value is not None]
    if not rates:
        return []
    mfu = [value for value in run.series("performance/train_mfu").values if value is not None]
    device = str(run.info.get("device_word", "device"))
    detail = f"mean, per {device}" + (f" · MFU {100 * sum(mfu) / len(mfu):.1f}% in training" if mfu else "")
    return [_tile("Tokens per second", f"{sum(rates) / len(rates):,.0f}", detail)]


def _unscored_tile(run: RunData) -> list[str]:
    count = sum(row.get("train/unscored") or 0 for row in run.rows)
    steps = sum(bool(row.get("train/unscored")) for row in run.rows)
    return (
        [_tile("Unscored", f"{count:,.0f}", f"rollouts, in {steps} of {run.last_step} steps", kind="bad")]
        if count
        else []
    )


def _charts(run: RunData) -> tuple[str, set[str]]:
    """The curves everybody wants, and the keys that they show."""
    headline = HEADLINE_CHARTS.get(run.algorithm, HEADLINE_CHARTS["sft"])
    device = str(run.info.get("device_word", "device"))
    logged = {key for key in run.keys if not run.series(key).is_empty}
    parts = tuple((key, key.removeprefix("train/reward/")) for key in run.keys if key.startswith("train/reward/"))
    reward_parts: ChartSpec = ("Reward parts", parts[:MAX_CURVES], "Mean of each named part of the reward.")
    charts = [headline, reward_parts, *(chart for chart in CHARTS if chart[1] != headline[1])]
    charts = [chart for chart in charts if any(key in logged for key, _ in chart[1])]
    if len(charts) > 2 and len(charts) % 2 == 0:
        charts.pop()  # one wide chart, then pairs: what would stand alone goes to the other metrics
    figures = [
        line_chart(
            title,
            [run.series(key, name) for key, name in curves],
            note=note.format(device=device),
            wide=index == 0,
            chart_id=f"c{index}",
        )
        for index, (title, curves, note) in enumerate(charts)
    ]
    shown = {key for _, curves, _ in charts for key, _ in curves} | {"train/unscored"}  # which has its own section
    body = "".join(figures)
    if not body:
        return '<section><p class="note">No step has been recorded yet.</p></section>', shown
    toggle = '<label class="toggle"><input type="checkbox" id="smooth" checked> smooth</label>'
    return (
        f'<section><div class="bar-title"><h2>Curves</h2>{toggle}</div><div class="charts">{body}</div></section>',
        shown,
    )


def _timing(run: RunData) -> str:
    total_key = f"timing/train/{TOTAL_STEP}"
    rows = [row for row in run.rows if row.get(total_key) is not None]
    if not rows:
        return ""
    whole = sum(row[total_key] for row in rows) or 1.0
    named_layers = {stage: [row.get(f"timing/train/{stage}") or 0.0 for row in rows] for stage in run.stages[:7]}
    layers = {stage: values for stage, values in named_layers.items() if sum(values) >= 0.01 * whole}
    if not layers:
        return ""
    other = [max(0.0, row[total_key] - sum(values)) for row, *values in zip(rows, *layers.values(), strict=True)]
    if sum(other) >= 0.01 * whole:
        layers["other"] = other
    named = {f"{name} ({100 * sum(values) / whole:.0f}%)": values for name, values in layers.items()}
    note = "Seconds per step by stage; in brackets the share of the whole run."
    chart = stacked_bars("Time per step", [row["step"] for row in rows], named, note=note, chart_id="timing", unit="s")
    return f'<section><h2>Time</h2><div class="charts">{chart}</div></section>'


def _other_metrics(run: RunData, shown: set[str]) -> str:
    """Every other number that was logged, so that nothing has to be looked up in the file."""
    groups: tuple[str, ...] = ("train/", "validation", "performance/", "timing/")
    keys = [key for prefix in groups for key in run.keys if key.startswith(prefix) and key not in shown]
    keys = [key for key in keys if _varies(run.series(key).values)]
    figures = [line_chart(key, [run.series(key, "value")], chart_id=f"m{index}") for index, key in enumerate(keys)]
    body = "".join(figures)
    if not body:
        return ""
    summary = f"<summary>All other metrics ({len(keys)})</summary>"
    return f"<section><details>{summary}<div class='charts'>{body}</div></details></section>"


def _varies(values: Sequence[float | None]) -> bool:
    """A curve that is zero throughout says nothing; a constant that is not zero does."""
    return any(value for value in values)


def _warnings(run: RunData) -> str:
    warnings = run.info.get("warnings") or []
    if not warnings:
        return ""
    rows = "".join(
        f"<tr><td class='n'>{escape(str(row.get('step', '')))}</td><td>{escape(str(row.get('text', '')))}</td>"
        f"<td class='n'>{escape(str(row.get('count', 1)))}</td></tr>"
        for row in warnings
    )
    table = f"<table><tr><th class='n'>after step</th><th>warning</th><th class='n'>times</th></tr>{rows}</table>"
    return f"<section><h2>Warnings</h2>{table}</section>"


def _config_changes(run: RunData) -> str:
    """The settings that were changed within the run, by the first step that was trained with them."""
    changes = run.info.get("config_changes") or []
    if not changes:
        return ""
    rows = "".join(
        f"<tr><td class='n'>{escape(str(row.get('from_step', '')))}</td>"
        + "".join(f"<td>{escape(str(row.get(name, '')))}</td>" for name in ("key", "old", "new"))
        + "</tr>"
        for row in changes
    )
    head = "<tr><th class='n'>from step</th><th>setting</th><th>before</th><th>since</th></tr>"
    return f"<section><h2>Settings changed within the run</h2><table>{head}{rows}</table></section>"


def _configs(run: RunData) -> str:
    names = {name: "Config" if name == CONFIG_FILE else name for name in run.configs}
    details = "".join(
        f"<details><summary>{escape(names[name])}</summary><pre class='config'>{escape(text)}</pre></details>"
        for name, text in run.configs.items()
    )
    return f"<section>{details}</section>" if details else ""
