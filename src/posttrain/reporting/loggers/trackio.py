"""Trackio: a project in its local database, or on a server or Space of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.config.run_config import TrackioConfig
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers.sink import TABLE, TABLE_COLUMNS, LoggedStep, RecordedRun


class TrackioSink:
    def __init__(self, config: TrackioConfig) -> None:
        self._config = config

    def open(self, run: RecordedRun) -> int | None:
        import trackio

        self._trackio = trackio
        name = f"{self._config.name or run.name}-{run.id}"  # runs are found again by their name
        self._run = trackio.init(
            project=self._config.project,
            name=name,
            space_id=self._config.space_id,
            server_url=self._config.server_url,
            config={key: value for key, value in run.settings.items() if value is not None},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Whatever is in the database, or on the server, was committed there; what a kill left in memory is sent again.
        next_step = int(self._run._next_step)
        return next_step - 1 if next_step > 0 else None

    def send(self, steps: Sequence[LoggedStep]) -> None:
        for one in steps:
            values: dict[str, Any] = dict(one.values)
            if one.answers:
                import pandas

                frame = pandas.DataFrame(one.answers, columns=list(TABLE_COLUMNS))
                values[TABLE] = self._trackio.Table(dataframe=frame)
            self._run.log(values, step=one.step)

    def alert(self, finding: Finding) -> None:
        levels = self._trackio.AlertLevel
        level = {"note": levels.INFO, "warning": levels.WARN, "error": levels.ERROR}[finding.severity]
        self._run.alert(title=finding.rule, text=finding.line, level=level)

    def close(self, *, is_finished: bool) -> None:
        self._run.finish()
