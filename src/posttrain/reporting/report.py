"""`report.html`: a run on one page. Rendered from the run folder alone, at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.reporting.chart_specs import bands_at_start, chart, charts_of
from posttrain.reporting.charts import label
from posttrain.reporting.image_files import embedded
from posttrain.reporting.pages import ASSETS, render_page, when
from posttrain.reporting.results import shown_name, summarise, validation_metric, verdict
from posttrain.reporting.rows import TOTAL_STEP
from posttrain.reporting.run_data import RunData, Series, groups_of, load_run
from posttrain.reporting.run_files import REPORT_FILE, Row, rollout_step, write_text
from posttrain.reporting.wording import duration

MAX_BARS = 120
MAX_REASONS = 20
MAX_PICTURES = 4  # of one prompt
Tile = tuple[str, str, str, str]  # name, value, detail; good, bad, warn or nothing


def write_report(folder: Path, info: JsonMapping | None = None) -> Path:
    """Write the report of the run in `folder` into that folder. Returns its path. `info`: instead of run.json."""
    target, run = folder / REPORT_FILE, load_run(folder)
    write_text(target, render(run if info is None else replace(run, info=info)))
    return target


def render(run: RunData) -> str:
    info = run.info
    charts, shown = _charts(run)
    groups = ("train/", "validation", "performance/", "timing/")
    others = [key for prefix in groups for key in run.keys if key.startswith(prefix) and key not in shown]
    return render_page(
        ASSETS / "report.html",
        title=run.title,
        **_header(run),
        run=run,
        tiles=list(_tiles(run)),
        charts=charts,
        timing=_timing(run),
        unscored=_unscored(run),
        samples=_samples(run),
        others=[chart(key, [run.series(key, "value")]) for key in others if any(run.series(key).values)],
        config_changes=[
            [row.get(name, "") for name in ("from_step", "key", "old", "new")]
            for row in info.get("config_changes") or []
        ],
        warnings=[
            (row.get("step", ""), row.get("text", ""), row.get("count", 1)) for row in info.get("warnings") or []
        ],
    )


def _header(run: RunData) -> dict[str, str]:
    info = run.info
    status = str(info.get("status", "unknown"))
    facts = [str(info["algorithm"]).upper()] if "algorithm" in info else []
    if info.get("num_devices"):
        word = str(info.get("device_word", "device"))
        facts.append(f"{info['num_devices']} {word}{'s' if info['num_devices'] != 1 else ''}")
    if info.get("started_at"):
        facts.append(f"started {when(info['started_at'])}")
    resumed = info.get("resumed_at_steps") or []
    if resumed:
        facts.append("resumed after step " + ", ".join(str(step) for step in resumed[-5:]))
    words = f"step {run.last_step}" + (f" of {info['max_steps']}" if info.get("max_steps") else "")
    if info.get("reason") and info["reason"] != status:
        words = str(info["reason"])
    elif status == "running" and info.get("updated_at"):
        words += f", as of {when(info['updated_at'])}"
    kind = "sick" if run.is_sick else status
    return {"facts": " · ".join(facts), "status": status, "status_words": f" {words}", "status_kind": kind}


def _tiles(run: RunData) -> Iterator[Tile]:
    """The key figures."""
    headline, max_steps = run.headline, run.info.get("max_steps")
    found = summarise(run.rows, headline.metric, lower_is_better=headline.lower_is_better)
    if found.metric:
        detail = f"first {label(found.first)} · best {label(found.best)} at step {found.best_step}"
        yield headline.name, label(found.last), detail, ""
    metric, lower_is_better = validation_metric(run.rows)
    found = summarise(run.rows, metric, lower_is_better=lower_is_better)
    if found.metric:
        value, detail, kind = label(found.last), "", ""
        if sum(row.get(metric) is not None for row in run.rows) > 1:
            value = f"{label(found.first)} → {value}"
            is_better = (found.last < found.first) == lower_is_better and found.last != found.first
            since = "before → after" if found.first_step == 0 else f"since step {found.first_step}"
            detail = f"{since} · best {label(found.best)} at step {found.best_step}"
            kind = "good" if is_better and not run.is_sick else ""
        yield f"Validation {shown_name(metric, run.rows).removeprefix('validation/')}", value, detail, kind
    seconds = _known(run, f"timing/train/{TOTAL_STEP}")
    pace = f"{duration(sum(seconds) / len(seconds))} per step" if seconds else ""
    yield "Steps", f"{run.last_step:,}" + (f" / {max_steps:,}" if max_steps else ""), pace, ""
    wall_s = float(run.info.get("wall_s") or run.logged_seconds)
    yield "Time", duration(wall_s), f"{duration(run.logged_seconds)} in steps and validation", ""
    worst = run.findings[0] if run.findings else None
    kind = "" if worst is None else {"error": "bad", "warning": "warn", "note": ""}[worst.severity]
    yield (
        "Doctor",
        verdict(run.findings, run.last_step),
        "" if worst is None else f"{worst.rule} at step {worst.step}",
        kind,
    )
    rates, mfu = _known(run, "performance/tokens_per_sec_per_gpu"), _known(run, "performance/train_mfu")
    if rates:
        used = f" · MFU {100 * sum(mfu) / len(mfu):.1f}% in training" if mfu else ""
        detail = f"mean, per {run.info.get('device_word', 'device')}{used}"
        yield "Tokens per second", f"{sum(rates) / len(rates):,.0f}", detail, ""
    unscored = [count for row in run.rows if (count := row.get("train/unscored"))]
    if unscored:
        detail = f"rollouts, in {len(unscored)} of {run.last_step} steps"
        yield "Unscored", f"{sum(unscored):,.0f}", detail, "bad"


def _known(run: RunData, key: str) -> list[float]:
    return [value for value in run.series(key).values if value is not None]


def _charts(run: RunData) -> tuple[list[JsonObject], set[str]]:
    """The curves of every run, and the keys that they show."""
    device = str(run.info.get("device_word", "device"))
    specs = charts_of(run.headline, [key for key in run.keys if not run.series(key).is_empty])
    charts = [
        chart(
            spec.title,
            [run.series(key, name) for key, name in spec.curves],
            note=spec.note_for(device),
            wide=index == 0,
            bands=bands_at_start(spec, run.series(spec.keys[0]).values),
            marks=[
                {"step": finding.step, "kind": finding.severity, "text": f"{finding.rule}: {finding.text}"}
                for finding in run.findings
                if finding.metric in spec.keys
            ],
        )
        for index, spec in enumerate(specs)
    ]
    return charts, {key for spec in specs for key in spec.keys} | {"train/unscored"}  # in a section of its own


def _timing(run: RunData) -> JsonObject | None:
    total_key = f"timing/train/{TOTAL_STEP}"
    rows = [row for row in run.rows if row.get(total_key) is not None]
    whole = sum(row[total_key] for row in rows) or 1.0
    named = {stage: [row.get(f"timing/train/{stage}") or 0.0 for row in rows] for stage in run.stages[:7]}
    layers = {stage: values for stage, values in named.items() if sum(values) >= 0.01 * whole}
    if not rows or not layers:
        return None
    other = [max(0.0, row[total_key] - sum(values)) for row, *values in zip(rows, *layers.values(), strict=True)]
    if sum(other) >= 0.01 * whole:
        layers["other"] = other
    steps = [row["step"] for row in rows]
    shares = {f"{name} ({100 * sum(values) / whole:.0f}%)": values for name, values in layers.items()}
    note = "Seconds per step by stage; in brackets the share of the whole run."
    return _bars("Time per step", steps, shares, note=note, unit="s")


def _bars(title: str, steps: Sequence[int], layers: dict[str, list[float]], **options: object) -> JsonObject:
    """One bar per step, or per few steps, made of the layers; the first layer lies at the bottom."""
    series = [Series(name, steps, values) for name, values in layers.items()]
    return chart(title, series, wide=True, max_points=MAX_BARS) | {"stacked": True, **options}


def _unscored(run: RunData) -> JsonObject | None:
    """Why rollouts could not be scored, the most frequent reason first, with the first traceback of each."""
    found: dict[str, Row] = {}
    for row in run.unscored:
        reason = str(row.get("reason", "no reason given"))
        one = found.setdefault(reason, {"reason": reason, "count": 0, "steps": [], "traceback": ""})
        one["count"] += int(row.get("count", 1))
        one["steps"].append(row["step"])
        one["traceback"] = one["traceback"] or str(row.get("traceback") or "")
    counted = run.series("train/unscored", "unscored")
    if not found and not any(counted.values):
        return None
    layers = {"unscored": [value or 0.0 for value in counted.values]}
    reasons = sorted(found.values(), key=lambda one: -one["count"])
    return {
        "reasons": reasons[:MAX_REASONS],
        "num_more": len(reasons) - MAX_REASONS,
        "chart": _bars("Unscored per step", counted.steps, layers, height=130),
    }


def _samples(run: RunData) -> list[JsonObject]:
    """The latest training step open; the first one and the latest validation below it, folded."""
    training, validation = run.rollout_files(), run.rollout_files(validation=True)
    steps = [
        *((path, "Latest step", 4, True) for path in training[-1:]),
        *((path, "First step", 3, False) for path in training[:-1][:1]),
        *((path, "Latest validation", 4, not training) for path in validation[-1:]),
    ]
    return [
        _step_samples(path, groups, words, num_shown) | {"is_open": is_open}
        for path, words, num_shown, is_open in steps
        if (groups := groups_of(path))
    ]


def _step_samples(path: Path, groups: Sequence[Row], words: str, num_shown: int) -> JsonObject:
    rewards = [_rewards(group) for group in groups]
    known = [reward for group in rewards for reward in group]
    # Groups with different rewards, which give a gradient, are shown first.
    mixed_first = sorted(range(len(groups)), key=lambda index: len(set(rewards[index])) < 2)
    shown = []
    for group in (groups[index] for index in mixed_first[:num_shown]):
        images = [one for one in group.get("images") or [] if isinstance(one, dict)][:MAX_PICTURES]
        pictures = [{**one, "url": embedded(path.parents[1], one)} for one in images]
        shown.append({**group, "pictures": pictures})
    return {
        "words": words,
        "step": rollout_step(path),
        "num_groups": len(groups),
        "shown": shown,
        "mean": sum(known) / len(known) if known else None,
        "low": min(known, default=0.0),
        "high": max(known, default=1.0),
    }


def _rewards(group: Row) -> list[float]:
    rewards = [completion.get("reward") for completion in group.get("completions", [])]
    return [reward for reward in rewards if isinstance(reward, int | float)]
