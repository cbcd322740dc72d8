"""A registered version, the record that the store keeps of it, and the differences between two versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.apps.ship.registry.artifacts import FileRecord, Files, content_digest
from posttrain.apps.ship.registry.lineage import Lineage
from posttrain.apps.ship.registry.stages import Stage, Stages
from posttrain.files.digests import cache_folder
from posttrain.files.json_files import JsonMapping, JsonObject


@dataclass(frozen=True)
class ModelVersion:
    """A registered version. `path` is its folder; for a tracking server, the cache that files are downloaded to."""

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


def version_from_record(name: str, number: int, record: JsonMapping, stages: Stages, home: Path | None) -> ModelVersion:
    """`home` is the registry's folder: paths inside it are stored relative to it, so that the folder can be moved."""
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


def record_of(version: ModelVersion, home: Path | None) -> JsonObject:
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


def as_row(version: ModelVersion) -> JsonObject:
    """A version as plain values, for JSON."""
    return {"name": version.name, "version": version.version, "stage": version.stage, **record_of(version, None)}


# -- differences -------------------------------------------------------------------------------------------------------

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    section: str  # lineage, metrics, data, config, files
    key: str
    left: object  # None: absent
    right: object


def differences(left: ModelVersion, right: ModelVersion) -> list[Difference]:
    """Everything that differs: lineage, metrics, data, config, files."""
    found = []
    for section, read in _SECTIONS.items():
        old, new = read(left), read(right)
        keys = (key for key in {**old, **new} if old.get(key) != new.get(key))
        found += [Difference(section, key, old.get(key), new.get(key)) for key in keys]
    return found


def _lineage(version: ModelVersion) -> JsonObject:
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
