"""The checkpoints of a run: steps, sizes and metrics, from its folders. The run's objects name the folders."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import yaml

from posttrain.apps.launch.pod_template import Object
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.reporting.run_files import METRICS_FILE, read_rows

_STEP = re.compile(r"step_(\d+)")
_SHOWN = ("train/reward", "train/accuracy", "train/loss", "validation/accuracy", "validation/loss")


def checkpoint_rows(checkpoints: Path, logs: Path) -> list[JsonObject]:
    """One row for each complete checkpoint, in the order of steps."""
    metrics: dict[int, JsonObject] = {}
    if (logs / METRICS_FILE).is_file():
        for row in read_rows(logs / METRICS_FILE):
            known = {key: row[key] for key in _SHOWN if isinstance(row.get(key), int | float)}
            values = {key: value for key, value in known.items() if abs(value) < 1e100}
            metrics.setdefault(int(row["step"]), {}).update(values)
    found: list[JsonObject] = []
    for folder in checkpoints.glob("step_*") if checkpoints.is_dir() else ():
        if (match := _STEP.fullmatch(folder.name)) is None:
            continue
        try:
            saved = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(timespec="seconds")
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        except (OSError, OverflowError, ValueError):  # removed since, a link to nothing, a time beyond all calendars
            continue
        step = int(match[1])
        found.append({"step": step, "saved": saved, "bytes": num_bytes, "metrics": metrics.get(step, {})})
    return sorted(found, key=lambda row: int(row["step"]))


def run_folders(config_text: str) -> tuple[PurePosixPath, PurePosixPath]:
    """The folders of checkpoints and metrics, as pods see them."""
    config: JsonObject = yaml.safe_load(config_text)
    checkpoints = config["checkpointing"]["checkpoint_dir"]
    return PurePosixPath(checkpoints), PurePosixPath((config.get("logger") or {}).get("log_dir") or checkpoints)


def listing_command(checkpoints: object, logs: object) -> list[str]:
    """Prints `checkpoint_rows` where the folders are mounted."""
    return ["posttrain", "launch", "checkpoints", "--folder", str(checkpoints), "--logs", str(logs), "--json"]


def shared_mount(workload: Object) -> tuple[PurePosixPath, str]:
    """Where the pods of a run have its claim, and the name of the claim."""
    spec = pod_spec(workload)
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for mount in spec["containers"][0].get("volumeMounts", []):
        if (claim := volumes[mount["name"]].get("persistentVolumeClaim")) is not None:
            return PurePosixPath(mount["mountPath"]), str(claim["claimName"])
    raise InputError(f"{workload['metadata']['name']}: its pods mount no claim")


def pod_spec(workload: Object) -> Object:
    """The `spec` of the first pod template in it."""

    def look(value: object) -> Object | None:
        if isinstance(value, dict):
            if isinstance(value.get("containers"), list):
                return value
            value = list(value.values())
        for inner in value if isinstance(value, list) else ():
            if (found := look(inner)) is not None:
                return found
        return None

    found = look(workload["spec"])
    assert found is not None, json.dumps(workload)[:200]
    return found
