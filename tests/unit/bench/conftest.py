"""The scripts under bench/ import one another by name, as they do when they are started."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[3] / "bench"
sys.path.insert(0, str(BENCH))


@pytest.fixture(autouse=True)
def _one_thread_and_no_left_overs() -> Any:
    """Peers seed and switch global state as they please."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets a script do its sides in this process: importing everything anew takes longer than a tiny job."""

    def switch(script: Any) -> None:
        monkeypatch.setattr(script, "run_side", lambda _, job, environment=None: script.do_job(dict(job)))

    return switch
