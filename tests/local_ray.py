"""Ray inside the process of a test; runs that the test starts join it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def local_ray(num_gpus: int = 0) -> Iterator[None]:
    """Four slots, which are not cores: a small machine can hold four ranks."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        num_cpus=4,
        num_gpus=num_gpus,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        address="local",
    )
    try:
        yield
    finally:
        ray.shutdown()
