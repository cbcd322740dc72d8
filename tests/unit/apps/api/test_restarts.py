"""Restarts of a run that has lost a rank: as many as the config allows, and none once the run was asked to stop."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain import run as start
from posttrain.checkpointing import Interruption, StopAtOnce
from posttrain.errors import RankLostError


class Attempts:
    """Each loses a rank; `is_stopped`: while the run is asked to stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool = False) -> None:
        self.num_made, self.is_stopped = 0, is_stopped
        cluster = SimpleNamespace(max_restarts=2)
        prepared = SimpleNamespace(loaded=SimpleNamespace(config=SimpleNamespace(cluster=cluster)))
        monkeypatch.setattr(start, "_prepared", lambda *args, **kwargs: prepared)
        monkeypatch.setattr(start, "_train", self.train)

    def train(self, *args: Any, **kwargs: Any) -> int:
        self.num_made += 1
        with Interruption():
            if self.is_stopped:
                signal.raise_signal(signal.SIGTERM)
            raise RankLostError("rank 1 died")


def test_a_run_that_loses_a_rank_again_and_again_ends_after_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch)
    with StopAtOnce(), pytest.raises(RankLostError):
        start.start_run("grpo", lambda words: None)  # type: ignore[arg-type, return-value]
    assert attempts.num_made == 3


def test_a_run_that_was_asked_to_stop_does_not_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that are taken away end ranks and driver together."""
    attempts = Attempts(monkeypatch, is_stopped=True)
    with StopAtOnce(), pytest.raises(RankLostError):
        start.start_run("grpo", lambda words: None)  # type: ignore[arg-type, return-value]
    assert attempts.num_made == 1
