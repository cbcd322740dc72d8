"""SwanLab. All steps are sent at every start: it ignores those that it has. Offline, the folder is written anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from posttrain.config.run_config import SwanlabConfig
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers.sink import TABLE, LoggedStep, LoggerProblem, RecordedRun

TOOL = "swanlab"
KEY_FILE = Path("~/.swanlab/.netrc")  # without a key, `swanlab.init` would ask on the terminal


class SwanlabSink:
    def __init__(self, config: SwanlabConfig) -> None:
        self._config = config

    def open(self, run: RecordedRun) -> int | None:
        import swanlab

        self._swanlab = swanlab
        mode = self._config.mode or os.environ.get("SWANLAB_MODE") or "online"
        if mode == "online" and not os.environ.get("SWANLAB_API_KEY") and not KEY_FILE.expanduser().exists():
            raise LoggerProblem(
                "there is no API key: type `swanlab login`, set SWANLAB_API_KEY, or logger.swanlab.mode=offline"
            )
        if mode != "online":
            shutil.rmtree(run.place(TOOL))
        self._run = swanlab.init(
            project=self._config.project,
            name=self._config.name or run.name,
            description=run.title,
            config=dict(run.settings),
            mode=mode,
            log_dir=str(run.place(TOOL)),
            reinit=True,
            id=run.id,
            resume="allow",
            # It neither keeps what the run prints nor looks at the machine: the run folder has both.
            settings=swanlab.Settings(terminal={"proxy_type": "none"}, probe={"monitor": False}),
            **(self._config.model_extra or {}),
        )
        return None

    def send(self, steps: Sequence[LoggedStep]) -> None:
        for one in steps:
            texts = [f"{row[3]}: {row[1]}\n\n{row[2]}" for row in one.answers]
            table = {TABLE: [self._swanlab.Text(text) for text in texts]} if texts else {}
            self._run.log({**one.values, **table}, step=one.step)

    def alert(self, finding: Finding) -> None:
        self._run.log({f"doctor/{finding.rule}": self._swanlab.Text(finding.line)}, step=finding.step)

    def close(self, *, is_finished: bool) -> None:
        self._run.finish()
