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
    cached = cache_folder() / "registry" / content_digest(files)[:24]
    path = cached if uploaded_to else (home or Path()) / record["path"]
    lineage = Lineage(**{key: value for key, value in record["lineage"].items() if key != "data_hash"})
    rest = {key: record[key] for key in ("by", "at", "note", "in_place", "uploaded_to")}
    return ModelVersion(name, number, stages.of(number), path, files, lineage, **rest)


def record_of(version: ModelVersion, home: Path | None) -> JsonObject:
    """What the store keeps of a version: everything that never changes."""
    is_inside = home is not None and version.path.is_relative_to(home)
    return {
        "path": str(version.path.relative_to(home) if is_inside and home else version.path),
        **{key: getattr(version, key) for key in ("in_place", "uploaded_to", "by", "at", "note")},
        "lineage": {**asdict(version.lineage), "data_hash": version.lineage.data_hash},
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
    found, others = [], _sections(right)
    for section, old in _sections(left).items():
        new = others[section]
        keys = (key for key in {**old, **new} if old.get(key) != new.get(key))
        found += [Difference(section, key, old.get(key), new.get(key)) for key in keys]
    return found


def _sections(version: ModelVersion) -> dict[str, JsonMapping]:
    lineage = version.lineage
    return {
        "lineage": {
            "base_model": lineage.base_model,
            "data_hash": lineage.data_hash,
            "code_version": lineage.code_version,
            "gate": lineage.verdict,
        },
        "metrics": lineage.metrics,
        "data": lineage.data,
        "config": lineage.config,
        "files": {name: f"{file.size} B {file.sha256[:12]}" for name, file in version.files.items()},
    }
