"""Pythons with packages that exclude ours, which `make test-environments` makes."""

from __future__ import annotations

import os

import pytest

OPENENV = os.environ.get("POSTTRAIN_OPENENV_PYTHON", "")
VERIFIERS = os.environ.get("POSTTRAIN_VERIFIERS_PYTHON", "")


def _needs(python: str, name: str) -> pytest.MarkDecorator:
    reason = f"{name} names no Python with the package; `make test-environments` makes one and runs these tests"
    return pytest.mark.skipif(not python, reason=reason)


needs_openenv = _needs(OPENENV, "POSTTRAIN_OPENENV_PYTHON")
needs_verifiers = _needs(VERIFIERS, "POSTTRAIN_VERIFIERS_PYTHON")
