"""The lock files that `make demo` and `make test` install: they fit pyproject.toml, and name no index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(extras: list[str]) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found = [Requirement(line) for line in lines]
    own = [extra for one in found if one.name == "posttrain" for extra in one.extras]
    return [one for one in found if one.name not in ("posttrain", "torch")] + (wanted(own) if own else [])


@pytest.mark.parametrize(("name", "extras"), [("demo", ["ui", "gate", "gguf"]), ("dev", ["dev"])])
def test_a_lock_has_a_version_that_fits_for_every_dependency(name: str, extras: list[str]) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--" not in text, "no option of an index"
    locked = {canonical(one.name): one for one in map(Requirement, re.findall(r"^[^#\s].*$", text, re.MULTILINE))}
    assert "torch" not in locked, "it has a file of its own"
    for one in wanted(extras):
        (version,) = (each.version for each in locked[canonical(one.name)].specifier)
        assert one.specifier.contains(version, prereleases=True), f"{one}: run make lock"
