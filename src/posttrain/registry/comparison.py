"""What two versions differ in: lineage, config key by key, metrics, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.registry.version import ModelVersion

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    section: str  # lineage, metrics, data, config, files
    key: str
    left: Any  # None: not there
    right: Any


def differences(left: ModelVersion, right: ModelVersion) -> list[Difference]:
    """Everything that is not equal in both, in the order in which people ask."""
    found: list[Difference] = []
    for section, read in _SECTIONS.items():
        found += _differing(section, read(left), read(right))
    return found


def _lineage(version: ModelVersion) -> dict[str, Any]:
    lineage = version.lineage
    return {
        "base_model": lineage.base_model,
        "data_hash": lineage.data_hash,
        "code_version": lineage.code_version,
        "gate": lineage.verdict,
    }


_SECTIONS = {
    "lineage": _lineage,
    "metrics": lambda version: version.lineage.metrics,
    "data": lambda version: version.lineage.data,
    "config": lambda version: version.lineage.config,
    "files": lambda version: {name: f"{file.size} B {file.sha256[:12]}" for name, file in version.files.items()},
}


def _differing(section: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    keys = [*left, *(key for key in right if key not in left)]
    return [Difference(section, key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]
