"""The pipeline as one HTML page: the KPI over iterations, and every stage with a link to its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain import __version__
from posttrain.apps.ship.pipeline.kpi import KpiRow, kpi_rows, write_kpi
from posttrain.apps.ship.pipeline.kpi_plot import kpi_svg
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations, relative
from posttrain.config.pipeline import PipelineConfig
from posttrain.files import durable
from posttrain.reporting.pages import render_page, when
from posttrain.reporting.wording import duration

PAGE, PICTURE = "index.html", "kpi.svg"
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
    "training, predicted",
    "training, actual",
    "time",
    "cost",
)


def write_views(config: PipelineConfig) -> list[KpiRow]:
    """Write kpi.json, kpi.svg and index.html from the records."""
    home, rows = Path(config.pipeline.folder), kpi_rows(config)
    write_kpi(config, rows)
    durable.write_text(home / PICTURE, kpi_svg(config.pipeline.name, rows))
    durable.write_text(home / PAGE, pipeline_page(config, rows))
    return rows


def pipeline_page(config: PipelineConfig, rows: Sequence[KpiRow]) -> str:
    schedule = "" if config.schedule is None else f" · schedule {config.schedule}, kept by the cluster"
    home = Path(config.pipeline.folder)
    return render_page(
        Path(__file__).with_name("pipeline.html"),
        title=f"Pipeline {config.pipeline.name}",
        facts=f"{len(rows)} iterations · starts from {config.pipeline.start_from}{schedule} · posttrain {__version__}",
        picture=kpi_svg(config.pipeline.name, rows),
        headings=HEADINGS,
        cells=map(cells, rows),
        rows=rows,
        iterations=[(one, [_stage(one, name, home) for name in STAGES]) for one in reversed(read_iterations(home))],
        when=when,
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
        row.predicted.text if row.predicted else "not predicted" if row.not_predicted else "–",
        row.actual.text if row.actual else "–",
        duration(row.seconds),
        cost,
    )


def _stage(iteration: Iteration, name: str, home: Path) -> tuple[str, str, str, str]:
    """Its name, its time, its outcome and the address of its report."""
    mark, record = iteration.stages.get(name), iteration.record(name)
    if record is not None:
        time = "reused" if mark is not None and mark.reused else duration(record.seconds)
        report = "" if record.report is None else relative(record.report, home)
        return name, time, record.outcome.headline, report
    if mark is not None and mark.skipped and not mark.outdated:
        return name, "", f"skipped: {mark.skipped}", ""
    return name, "", "stopped here" if iteration.running == name else "–", ""
