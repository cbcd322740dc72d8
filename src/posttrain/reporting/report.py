"""`report.html`: a run on one page. Rendered from the run folder alone, at any time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.reporting.chart_specs import bands_at_start, charts_of
from posttrain.reporting.charts import Mark, line_chart, stacked_bars
from posttrain.reporting.doctor import Answer
from posttrain.reporting.pages import Html, folded, header, join, note, page, section, table, tag, tile, tiles, when
from posttrain.reporting.report_samples import samples_section, unscored_section
from posttrain.reporting.results import shown_name, summarise, validation_metric, verdict
from posttrain.reporting.rows import TOTAL_STEP
from posttrain.reporting.run_data import RunData, load_run
from posttrain.reporting.run_files import CONFIG_FILE, REPORT_FILE, write_text
from posttrain.reporting.scales import label
from posttrain.reporting.wording import duration


def write_report(folder: Path) -> Path:
    """Write the report of the run in `folder` into that folder. Returns its path."""
    target = folder / REPORT_FILE
    write_text(target, render(load_run(folder)))
    return target


def render(run: RunData) -> str:
    charts, shown = _charts(run)
    return page(
        run.title,
        _header(run),
        _key_figures(run),
        _findings(run),
        charts,
        _timing(run),
        unscored_section(run),
        samples_section(run),
        _other_metrics(run, shown),
        _config_changes(run),
        _warnings(run),
        _configs(run),
        with_script=True,
    )


def _header(run: RunData) -> Html:
    info = run.info
    status = str(info.get("status", "unknown"))
    max_steps = info.get("max_steps")
    facts = [str(info["algorithm"]).upper()] if "algorithm" in info else []
    if info.get("num_devices"):
        word = str(info.get("device_word", "device"))
        facts.append(f"{info['num_devices']} {word}{'s' if info['num_devices'] != 1 else ''}")
    if info.get("started_at"):
        facts.append(f"started {when(info['started_at'])}")
    resumed = info.get("resumed_at_steps") or []
    if resumed:
        facts.append("resumed after step " + ", ".join(str(step) for step in resumed[-5:]))
    words = f"step {run.last_step}" + (f" of {max_steps}" if max_steps else "")
    if info.get("reason") and info["reason"] != status:
        words = str(info["reason"])
    elif status == "running" and info.get("updated_at"):
        words += f", as of {when(info['updated_at'])}"
    return header(
        run.title,
        " · ".join(facts),
        join((tag("b", status), f" {words}")),
        status_kind="sick" if run.is_sick else status,
    )


def _key_figures(run: RunData) -> Html:
    shown = []
    headline = run.headline
    found = summarise(run.rows, headline.metric, lower_is_better=headline.lower_is_better)
    if found.metric:
        detail = f"first {label(found.first)} · best {label(found.best)} at step {found.best_step}"
        shown.append(tile(headline.name, label(found.last), detail))
    metric, lower_is_better = validation_metric(run.rows)
    found = summarise(run.rows, metric, lower_is_better=lower_is_better)
    if found.metric:
        num_points = sum(row.get(metric) is not None for row in run.rows)
        value = f"{label(found.first)} → {label(found.last)}" if num_points > 1 else label(found.last)
        better = num_points > 1 and (found.last < found.first) == lower_is_better and found.last != found.first
        since = "before → after" if found.first_step == 0 else f"since step {found.first_step}"
        detail = f"{since} · best {label(found.best)} at step {found.best_step}" if num_points > 1 else ""
        name = shown_name(metric, run.rows).removeprefix("validation/")
        shown.append(tile(f"Validation {name}", value, detail, kind="good" if better and not run.is_sick else ""))
    max_steps = run.info.get("max_steps")
    step_series = run.series(f"timing/train/{TOTAL_STEP}")
    step_seconds = [value for value in step_series.values if value is not None]
    mean_s = f"{duration(sum(step_seconds) / len(step_seconds))} per step" if step_seconds else ""
    shown.append(tile("Steps", f"{run.last_step:,}" + (f" / {max_steps:,}" if max_steps else ""), mean_s))
    wall_s = float(run.info.get("wall_s") or run.logged_seconds)
    shown.append(tile("Time", duration(wall_s), f"{duration(run.logged_seconds)} in steps and validation"))
    shown += [_health_tile(run), *_throughput_tile(run), *_unscored_tile(run)]
    return tiles(shown)


def _health_tile(run: RunData) -> Html:
    first = run.findings[0] if run.findings else None
    kind = "" if first is None else {"error": "bad", "warning": "warn", "note": ""}[first.severity]
    return tile(
        "Doctor", verdict(run.findings), "" if first is None else f"{first.rule} at step {first.step}", kind=kind
    )


def _findings(run: RunData) -> Html:
    """What is wrong with the run, the worst first, with the setting that fixes it."""
    if not run.findings:
        return Html()
    articles = [
        tag(
            "article",
            tag("p", tag("b", finding.severity), f" {finding.rule}, step {finding.step}", kind="what"),
            tag("p", f"{finding.text[0].upper()}{finding.text[1:]}."),
            tag("p", "fix: ", _alternatives(finding.fixes)) if finding.fixes else "",
            folded(f"{len(finding.answers)} answers", *map(_answer, finding.answers)) if finding.answers else "",
            note(f"{finding.metric}; threshold: {finding.source}"),
            kind=f"finding {finding.severity}",
        )
        for finding in run.findings
    ]
    return section("Doctor", *articles)


def _alternatives(fixes: Sequence[str]) -> Html:
    return Html(" or ".join(tag("code", fix) for fix in fixes))


def _answer(answer: Answer) -> Html:
    reward = "unscored" if answer.reward is None else f"reward {label(answer.reward)}"
    length = "" if answer.num_tokens is None else f" · {answer.num_tokens} tokens"
    return tag("div", tag("p", f"{answer.id} · {reward}{length}", kind="note"), tag("pre", answer.text))


def _throughput_tile(run: RunData) -> list[Html]:
    rates = [value for value in run.series("performance/tokens_per_sec_per_gpu").values if value is not None]
    if not rates:
        return []
    mfu = [value for value in run.series("performance/train_mfu").values if value is not None]
    device = str(run.info.get("device_word", "device"))
    detail = f"mean, per {device}" + (f" · MFU {100 * sum(mfu) / len(mfu):.1f}% in training" if mfu else "")
    return [tile("Tokens per second", f"{sum(rates) / len(rates):,.0f}", detail)]


def _unscored_tile(run: RunData) -> list[Html]:
    count = sum(row.get("train/unscored") or 0 for row in run.rows)
    steps = sum(bool(row.get("train/unscored")) for row in run.rows)
    return (
        [tile("Unscored", f"{count:,.0f}", f"rollouts, in {steps} of {run.last_step} steps", kind="bad")]
        if count
        else []
    )


def _charts(run: RunData) -> tuple[Html, set[str]]:
    """The curves of every run, and the keys that they show."""
    device = str(run.info.get("device_word", "device"))
    charts = charts_of(run.headline, [key for key in run.keys if not run.series(key).is_empty])
    if len(charts) > 2 and len(charts) % 2 == 0:
        charts.pop()  # one wide chart, then pairs: the chart without a partner goes to the other metrics
    figures = [
        line_chart(
            chart.title,
            [run.series(key, name) for key, name in chart.curves],
            note=chart.note.format(device=device),
            wide=index == 0,
            chart_id=f"c{index}",
            bands=bands_at_start(chart, run.series(chart.keys[0]).values),
            marks=[
                Mark(finding.step, finding.severity, f"{finding.rule}: {finding.text}")
                for finding in run.findings
                if finding.metric in chart.keys
            ],
        )
        for index, chart in enumerate(charts)
    ]
    shown = {key for chart in charts for key in chart.keys} | {"train/unscored"}  # in a section of its own
    if not any(figures):
        return tag("section", note("No step has been recorded yet.")), shown
    toggle = Html('<label class="toggle"><input type="checkbox" id="smooth" checked> smooth</label>')
    title = tag("div", tag("h2", "Curves"), toggle, kind="bar-title")
    return tag("section", title, tag("div", *figures, kind="charts")), shown


def _timing(run: RunData) -> Html:
    total_key = f"timing/train/{TOTAL_STEP}"
    rows = [row for row in run.rows if row.get(total_key) is not None]
    if not rows:
        return Html()
    whole = sum(row[total_key] for row in rows) or 1.0
    named_layers = {stage: [row.get(f"timing/train/{stage}") or 0.0 for row in rows] for stage in run.stages[:7]}
    layers = {stage: values for stage, values in named_layers.items() if sum(values) >= 0.01 * whole}
    if not layers:
        return Html()
    other = [max(0.0, row[total_key] - sum(values)) for row, *values in zip(rows, *layers.values(), strict=True)]
    if sum(other) >= 0.01 * whole:
        layers["other"] = other
    named = {f"{name} ({100 * sum(values) / whole:.0f}%)": values for name, values in layers.items()}
    words = "Seconds per step by stage; in brackets the share of the whole run."
    chart = stacked_bars("Time per step", [row["step"] for row in rows], named, note=words, chart_id="timing", unit="s")
    return section("Time", tag("div", chart, kind="charts"))


def _other_metrics(run: RunData, shown: set[str]) -> Html:
    """A chart of every other metric that was logged."""
    groups: tuple[str, ...] = ("train/", "validation", "performance/", "timing/")
    keys = [key for prefix in groups for key in run.keys if key.startswith(prefix) and key not in shown]
    keys = [key for key in keys if _varies(run.series(key).values)]
    figures = [line_chart(key, [run.series(key, "value")], chart_id=f"m{index}") for index, key in enumerate(keys)]
    if not any(figures):
        return Html()
    return tag("section", folded(f"All other metrics ({len(keys)})", tag("div", *figures, kind="charts")))


def _varies(values: Sequence[float | None]) -> bool:
    """Whether a curve is worth showing: not zero throughout."""
    return any(value for value in values)


def _config_changes(run: RunData) -> Html:
    """The settings that were changed within the run, by the first step that was trained with them."""
    changes = run.info.get("config_changes") or []
    rows = [[row.get(name, "") for name in ("from_step", "key", "old", "new")] for row in changes]
    headings = ("from step", "setting", "before", "since")
    return section("Settings changed within the run", table(headings, rows, numbers=(0,))) if rows else Html()


def _warnings(run: RunData) -> Html:
    rows = [(row.get("step", ""), row.get("text", ""), row.get("count", 1)) for row in run.info.get("warnings") or []]
    return section("Warnings", table(("after step", "warning", "times"), rows, numbers=(0, 2))) if rows else Html()


def _configs(run: RunData) -> Html:
    parts = [
        folded("Config" if name == CONFIG_FILE else name, tag("pre", text, kind="config"))
        for name, text in run.configs.items()
    ]
    return tag("section", *parts) if parts else Html()
