"""Packages that were documented before `apps/` are importable by their old names, as the same modules."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("posttrain.registry", "posttrain.apps.ship.registry"),
        ("posttrain.registry.version", "posttrain.apps.ship.registry.version"),
        ("posttrain.api", "posttrain.apps.api"),
        ("posttrain.demo.arithmetic", "posttrain.apps.demo.arithmetic"),
        ("posttrain.doctor", "posttrain.reporting.doctor"),
    ],
)
def test_old_name_is_the_same_module(old: str, new: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None
    assert module.__spec__.name == new


def test_other_names_are_still_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"posttrain\.nothing"):
        importlib.import_module("posttrain.nothing")
