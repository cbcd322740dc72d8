"""MLflow: a run of a tracking server, or of `sqlite:///file.db`, found again by a tag.

The metrics of a step and the metric `step`, which says that it has arrived, are one request and one transaction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from posttrain.config.run_config import MlflowConfig
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers.sink import TABLE, TABLE_COLUMNS, LoggedStep, LoggerProblem, RecordedRun

RUN_TAG = "posttrain.run"
ARRIVED = "step"
MAX_METRICS = 1000  # of one request
MAX_PARAM = 5000  # characters of a value


class MlflowSink:
    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def open(self, run: RecordedRun) -> int | None:
        # Its own retries take minutes; ours come anyway, and ask first what has arrived.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise LoggerProblem(
                "there is no server: set logger.mlflow.tracking_uri, e.g. sqlite:///mlflow.db, or MLFLOW_TRACKING_URI"
            )
        self._client = MlflowClient(tracking_uri=uri)
        name = self._config.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            step = found[0].data.metrics.get(ARRIVED)
            return None if step is None else int(step)
        tags = {RUN_TAG: run.id, "mlflow.note.content": run.title, "posttrain.folder": str(run.folder.absolute())}
        self._run_id = self._client.create_run(
            experiment_id, run_name=self._config.run_name or run.name, tags=tags
        ).info.run_id
        params = [Param(key, str(value)[:MAX_PARAM]) for key, value in run.settings.items() if value is not None]
        for start in range(0, len(params), 100):  # of one request
            self._client.log_batch(self._run_id, params=params[start : start + 100])
        return None

    def send(self, steps: Sequence[LoggedStep]) -> None:
        from mlflow.entities import Metric

        batch: list[Any] = []
        for one in steps:
            now = int(time.time() * 1000)
            values = {**one.values, ARRIVED: float(one.step)}
            metrics = [Metric(key, float(value), now, one.step) for key, value in values.items()]
            if len(batch) + len(metrics) > MAX_METRICS:
                self._client.log_batch(self._run_id, metrics=batch)
                batch = []
            if one.answers:  # before its step counts as arrived; a second time replaces the file
                columns = dict(zip(TABLE_COLUMNS, map(list, zip(*one.answers, strict=True)), strict=True))
                with suppress(Exception):  # a server without files gets the metrics; if it is down, sending those fails
                    self._client.log_dict(self._run_id, columns, f"{TABLE}/step_{one.step}.json")
            batch += metrics
        self._client.log_batch(self._run_id, metrics=batch)

    def alert(self, finding: Finding) -> None:
        self._client.set_tag(self._run_id, f"doctor.{finding.rule}", finding.line[:MAX_PARAM])

    def close(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_finished else "KILLED")
