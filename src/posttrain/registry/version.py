"""A registered version as a value, and its record: the plain values that the store keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.hashing import cache_folder
from posttrain.registry.artifacts import FileRecord, Files, content_digest
from posttrain.registry.lineage import Lineage
from posttrain.registry.stages import Stage, Stages


@dataclass(frozen=True)
class ModelVersion:
    """A registered version. `path` is its folder; on a tracking server, where the files are put when they are needed."""

    name: str
    version: int
    stage: Stage
    path: Path
    files: Files
    lineage: Lineage
    by: str
    at: str  # UTC, ISO 8601
    note: str = ""
    in_place: bool = False  # the files stayed where they were
    uploaded_to: str | None = None  # on the tracking server

    @property
    def reference(self) -> str:
        return f"registry:{self.name}@{self.version}"

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def version_from_record(
    name: str, number: int, record: Mapping[str, Any], stages: Stages, home: Path | None
) -> ModelVersion:
    """`home` is the registry's folder: what lies in it is recorded relative to it, so that the folder can be moved."""
    files = {key: FileRecord(**file) for key, file in record["files"].items()}
    uploaded_to = record["uploaded_to"]
    return ModelVersion(
        name=name,
        version=number,
        stage=stages.of(number),
        path=cache_folder() / "registry" / content_digest(files)[:24]
        if uploaded_to
        else (home or Path()) / record["path"],
        files=files,
        lineage=Lineage.from_row(record["lineage"]),
        by=record["by"],
        at=record["at"],
        note=record["note"],
        in_place=record["in_place"],
        uploaded_to=uploaded_to,
    )


def record_of(version: ModelVersion, home: Path | None) -> dict[str, Any]:
    """What the store keeps of a version: everything that never changes."""
    is_inside = home is not None and version.path.is_relative_to(home)
    return {
        "path": str(version.path.relative_to(home) if is_inside and home else version.path),
        "in_place": version.in_place,
        "uploaded_to": version.uploaded_to,
        "by": version.by,
        "at": version.at,
        "note": version.note,
        "lineage": version.lineage.to_row(),
        "files": {name: asdict(file) for name, file in version.files.items()},
    }


def as_row(version: ModelVersion) -> dict[str, Any]:
    """A version as plain values, for JSON."""
    return {"name": version.name, "version": version.version, "stage": version.stage, **record_of(version, None)}
