"""Ray inside the process of a test; runs that the test starts join it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def start(num_gpus: int = 0) -> None:
    """Unless it runs already. Four slots, which are not cores: a small machine can hold four ranks."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        num_cpus=4,
        num_gpus=num_gpus,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        address="local",
    )


def is_running() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def stop() -> None:
    sys.modules["ray"].shutdown()


def stop_unless_needed(next_test: pytest.Item | None) -> None:
    """Tests that are not marked `ray` must not find it."""
    if is_running() and (next_test is None or not next_test.get_closest_marker("ray")):
        stop()


@contextmanager
def local_ray(num_gpus: int = 0) -> Iterator[None]:
    start(num_gpus)
    try:
        yield
    finally:
        stop()
