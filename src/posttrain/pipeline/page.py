"""The pipeline as one HTML page: the KPI over iterations, and every stage with a link to its report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from posttrain import __version__
from posttrain.checkpointing import durable
from posttrain.config.pipeline import PipelineConfig
from posttrain.pipeline.kpi import KpiRow, kpi_rows, write_kpi
from posttrain.pipeline.kpi_plot import kpi_svg
from posttrain.pipeline.records import STAGES, Iteration, read_iterations, relative
from posttrain.reporting.wording import duration

PAGE, PICTURE = "index.html", "kpi.svg"
_STYLE = """
section > svg { max-width: 100%; height: auto; margin-bottom: 12px; } td { vertical-align: top; } td.why { max-width: 50em; }
table.kpi { display: block; overflow-x: auto; } table.kpi td, table.kpi th { white-space: nowrap; }
"""
HEADINGS = (
    "iteration",
    "trained",
    "traces",
    "dataset",
    "training",
    "held-out",
    "before",
    "verdict",
    "version, now",
    "time",
    "cost",
)


def write_views(config: PipelineConfig) -> list[KpiRow]:
    """Write kpi.json, kpi.svg and index.html from the records."""
    home, rows = Path(config.pipeline.folder), kpi_rows(config)
    write_kpi(config, rows)
    durable.write_text(home / PICTURE, kpi_svg(config.pipeline.name, rows))
    durable.write_text(home / PAGE, page(config, rows))
    return rows


def page(config: PipelineConfig, rows: Sequence[KpiRow]) -> str:
    style = (files("posttrain.reporting") / "assets" / "report.css").read_text("utf-8") + _STYLE
    title = f"Pipeline {config.pipeline.name}"
    schedule = "" if config.schedule is None else f" · schedule {config.schedule}, kept by the cluster"
    facts = f"{len(rows)} iterations · starts from {config.pipeline.start_from}{schedule} · posttrain {__version__}"
    home = Path(config.pipeline.folder)
    iterations = "".join(_iteration(one, home) for one in reversed(read_iterations(home)))
    picture = kpi_svg(config.pipeline.name, rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · posttrain</title><style>{style}</style></head><body><main>"
        f'<header><div><h1>{escape(title)}</h1><p class="facts">{escape(facts)}</p></div></header>'
        f"<section><h2>KPI</h2>{picture}{_table(rows)}</section>{iterations}</main></body></html>\n"
    )


def cells(row: KpiRow) -> tuple[str, ...]:
    """The values under HEADINGS, for the page and for the terminal."""
    interval = (
        "" if row.score_low is None or row.score_high is None else f" [{row.score_low:.3f}, {row.score_high:.3f}]"
    )
    cost = f"{row.device_hours:.3g} device h" if row.cost is None else f"{row.cost:.3g}"
    return (
        str(row.iteration),
        row.start,
        "–" if row.traces_reward is None else f"reward {row.traces_reward:.4f}",
        row.dataset or "–",
        "–" if row.training_value is None else f"{row.training_metric} {row.training_value:.4f}",
        "–" if row.score is None else f"{row.score_metric} {row.score:.4f}{interval}",
        "–" if row.incumbent_score is None else f"{row.incumbent_score:.4f}",
        row.reached,
        "–" if row.version is None else f"{row.version}, {row.stage or 'stage unknown'}",
        duration(row.seconds),
        cost,
    )


def _table(rows: Sequence[KpiRow]) -> str:
    head = "".join(f"<th>{name}</th>" for name in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>" for row in rows)
    note = "“Now” is when this page was written; <code>posttrain pipeline status</code> reads the registry again."
    return f"<table class='kpi'><tr>{head}</tr>{body}</table><p class='note'>{note}</p>"


def _iteration(iteration: Iteration, home: Path) -> str:
    lines = "".join(_stage(iteration, name, home) for name in STAGES)
    began = iteration.begun_at[:16].replace("T", " ")
    about = f"began {began} UTC, trains {iteration.start.text} ({iteration.start_why})"
    if iteration.incumbent is not None:
        about += f", compared with {iteration.incumbent.text}"
    head = "<tr><th>stage</th><th>time</th><th>outcome</th><th>report</th></tr>"
    return (
        f"<section><h2>Iteration {iteration.number}</h2><p class='note'>{escape(about)}</p>"
        f"<table>{head}{lines}</table></section>"
    )


def _stage(iteration: Iteration, name: str, home: Path) -> str:
    mark, record = iteration.stages.get(name), iteration.record(name)
    if record is None:
        waiting = "stopped here" if iteration.running == name else "–"
        state = f"skipped: {mark.skipped}" if mark is not None and mark.skipped and not mark.outdated else waiting
        return f"<tr><td>{name}</td><td></td><td class='why'>{escape(state)}</td><td></td></tr>"
    time = "reused" if mark is not None and mark.reused else duration(record.seconds)
    link = ""
    if record.report is not None:
        address = relative(record.report, home)
        link = f'<a href="{escape(address)}">{escape(record.report.name)}</a>'
    headline = escape(record.outcome.headline)
    return f"<tr><td>{name}</td><td>{time}</td><td class='why'>{headline}</td><td>{link}</td></tr>"
