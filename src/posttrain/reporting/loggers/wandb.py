"""Weights & Biases. Online, the server says which steps it has. Offline, the folder for `wandb sync` is written anew at
every start."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Sequence
from urllib.parse import urlparse

from posttrain.config.run_config import WandbConfig
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers.sink import TABLE, TABLE_COLUMNS, LoggedStep, LoggerProblem, RecordedRun

TOOL = "wandb"
NOT_OURS = ("log_nemo_gym_full_result_tables",)  # NeMo RL's own key of this section
LEVELS = {"note": "INFO", "warning": "WARN", "error": "ERROR"}


class WandbSink:
    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def open(self, run: RecordedRun) -> int | None:
        import wandb

        mode = self._config.mode or os.environ.get("WANDB_MODE") or "online"
        folder = run.place(TOOL)
        if mode == "offline":
            for old in (folder / "wandb").glob(f"offline-run-*-{run.id}"):
                shutil.rmtree(old)
        elif mode == "online" and not _has_key():
            raise LoggerProblem(
                "there is no API key: type `wandb login`, set WANDB_API_KEY, or logger.wandb.mode=offline"
            )
        self._wandb = wandb
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            name=self._config.name or run.name,
            notes=run.title,
            id=run.id,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=dict(run.settings),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False),
            **{key: value for key, value in (self._config.model_extra or {}).items() if key not in NOT_OURS},
        )
        next_step = int(self._run.step)  # 0 also for a new run
        return next_step - 1 if next_step > 0 else None

    def send(self, steps: Sequence[LoggedStep]) -> None:
        for one in steps:
            rows = [list(row) for row in one.answers]
            table = {TABLE: self._wandb.Table(list(TABLE_COLUMNS), rows)} if rows else {}
            self._run.log({**one.values, **table}, step=one.step)  # kept open until the next

    def alert(self, finding: Finding) -> None:
        self._run.alert(title=finding.rule, text=finding.line, level=LEVELS[finding.severity])

    def close(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


def _has_key() -> bool:
    """Without one, `wandb.init` would ask on the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
