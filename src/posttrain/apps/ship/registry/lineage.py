"""Where a model version comes from: base model, data, config, code, measured metrics and the gate's verdict.

As much as possible is read from the files beside the weights. The caller provides the rest. Unknown values stay empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import posttrain
from posttrain.apps.ship.registry.artifacts import content_digest, measure
from posttrain.errors import RegistryError
from posttrain.files.digests import sha256_of, sha256_of_file
from posttrain.files.json_files import JsonMapping, JsonObject, read_json
from posttrain.files.redaction import without_credentials

MAX_DATA_FILES = 100_000  # a folder with more is not hashed: a mistyped path may name a whole disk
CONFIG_FILE = "config.yaml"
TRAINING_FILE = "training_info.json"
CONVERSION_FILE = "conversion.json"  # lineage of a model that `posttrain convert` wrote


@dataclass(frozen=True)
class Lineage:
    base_model: str | None = None
    data: Mapping[str, str | None] = field(default_factory=dict)  # path or name -> SHA-256; None where it is not local
    config: JsonMapping = field(default_factory=dict)  # dotted key -> value
    config_sha256: str | None = None
    code_version: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)  # "<evaluation>/<metric>"
    gate: JsonMapping | None = None  # verdict, reasons, report, judged, another_model, unknown_model
    source: str = ""  # the folder that was registered

    @property
    def data_hash(self) -> str | None:
        """One hash for all of the data; None if there is none, or if a part of it could not be read."""
        if not self.data or None in self.data.values():
            return None
        return sha256_of(json.dumps(dict(self.data), sort_keys=True))

    @property
    def verdict(self) -> str | None:
        return None if self.gate is None else str(self.gate.get("verdict"))

    @property
    def judged_another(self) -> str | None:
        """The model that the gate judged, if it is known to be another one than this."""
        return (self.gate or {}).get("another_model")

    @property
    def judged_unknown(self) -> str | None:
        """The model that the gate judged, if it is unknown whether it is this one."""
        return (self.gate or {}).get("unknown_model")

    @property
    def objection(self) -> str | None:
        """Why no gate has passed this very model; None if one has."""
        if other := self.judged_another:
            return f"its gate judged the files of {other}, which differ; evaluate and judge the files that you register"
        if self.verdict is None:
            return "it has no gate verdict (registry add --gate FILE)"
        if self.verdict != "promote":
            return f"its gate's verdict is {self.verdict}"
        if unknown := self.judged_unknown:
            return (
                f"its gate judged {unknown}, which is not known to be this model; evaluate the files that you register"
            )
        return None


def gather_lineage(
    folder: Path,
    *,
    base_model: str | None = None,
    config: Path | None = None,
    data: Sequence[str] = (),
    evaluations: Mapping[str, Path] | None = None,
    metrics: Mapping[str, float] | None = None,
    gate: Path | None = None,
) -> Lineage:
    """The lineage from the files; arguments take precedence. `evaluations`: name -> folder of a finished evaluation."""
    # The config lies beside the weights, or in the run that the checkpoint belongs to.
    places = [folder, folder.parent] if (folder / "policy" / "weights").is_dir() else [folder]
    config_path = config or next((file for place in places if (file := place / CONFIG_FILE).is_file()), None)
    values, config_hash = _read_config(config_path) if config_path else ({}, None)
    converted: JsonObject = {}
    if (file := folder / CONVERSION_FILE).is_file():
        converted = read_json(file, RegistryError)
        _check_kinds(file, converted, {"base_model": str, "data": list, "metrics": dict})
    blocks = (one for one in converted.get("data") or [] if isinstance(one, dict) and one.get("role") == "train")
    of_conversion = [str(name) for one in blocks if (name := one.get("data_path") or one.get("dataset_name"))]
    sources = list(data) or _data_of(values) or of_conversion
    return Lineage(
        base_model=base_model or _base_model(folder, values) or converted.get("base_model"),
        data={source: _hash_of(source, is_given=bool(data)) for source in sources},
        config=values,
        config_sha256=config_hash,
        code_version=code_version(),
        metrics={**_training_metrics(folder, converted), **_evaluated(evaluations or {}), **(metrics or {})},
        gate=read_verdict(folder, gate) if gate else None,
        source=str(folder),
    )


def code_version() -> str:
    """Version of the package; from a checkout, with the commit, and `-changed` if files differ from it."""
    home = Path(posttrain.__file__).parent
    try:
        ended = subprocess.run(
            ["git", "-C", str(home), "describe", "--always", "--dirty=-changed", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return posttrain.__version__
    commit = ended.stdout.strip()
    return f"{posttrain.__version__}+g{commit}" if ended.returncode == 0 and commit else posttrain.__version__


def _read_config(path: Path) -> tuple[JsonObject, str]:
    from posttrain.config.tree import dotted, leaves
    from posttrain.config.yaml_files import parse_document

    try:
        content = path.read_bytes()
        values = parse_document(content.decode("utf-8"), str(path)).values
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path}: the config cannot be read ({error})") from error
    flat = {dotted(key): value for key, value in leaves(values)}
    # Records are JSON, which has neither dates nor .inf: they are stored as text.
    plain = without_credentials(json.loads(json.dumps(flat, default=str), parse_constant=str))
    return plain, sha256_of(content)


def _base_model(folder: Path, config: JsonMapping) -> str | None:
    for adapter in (folder, folder / "policy/weights/model"):
        path = adapter / "adapter_config.json"
        if path.is_file():
            named = read_json(path, RegistryError).get("base_model_name_or_path")
            return str(named) if named else None
    named = config.get("policy.model_name")
    return str(named) if named else None


def _data_of(config: JsonMapping) -> list[str]:
    """The files or the names that the config trains on."""
    train = config.get("data.train")
    if isinstance(train, list):
        blocks = [block for block in train if isinstance(block, dict)]
    else:
        blocks = [{key: config.get(f"data.train.{key}") for key in ("data_path", "dataset_name")}]
    named = [block.get("data_path") or block.get("dataset_name") for block in blocks]
    return [str(one) for name in named if name for one in (name if isinstance(name, list) else [name])]


def _check_kinds(path: Path, content: JsonMapping, kinds: Mapping[str, type]) -> None:
    """Rejects a file that was edited into another format."""
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind | None):
            raise RegistryError(f"{path}: {key} is {content[key]!r:.80}; a {kind.__name__} is needed")


def _hash_of(source: str, *, is_given: bool) -> str | None:
    path = Path(source).expanduser()
    if path.is_dir():
        files = (name for _, _, names in os.walk(path, followlinks=True) for name in names)
        if next(islice(files, MAX_DATA_FILES, None), None) is not None:
            problem = f"{source} has more than {MAX_DATA_FILES} files; name the folder or the files of the data"
            if is_given:
                raise RegistryError(f"--data {problem}")
            print(f"warning: the data of the config is not hashed: {problem} with --data", file=sys.stderr)
            return None
        return content_digest(measure(path))
    if path.is_file():
        return sha256_of_file(path)
    if is_given and "://" not in source:
        raise RegistryError(f"--data {source}: no such file or folder")
    return None


def _training_metrics(folder: Path, converted: JsonMapping) -> dict[str, float]:
    path = folder / TRAINING_FILE
    if not path.is_file():
        measured = {key: value for key, value in (converted.get("metrics") or {}).items() if _is_number(value)}
        return {f"training/{key}": float(value) for key, value in measured.items() if key.startswith("validation/")}
    kept = {key: value for key, value in read_json(path, RegistryError).items() if key == "total_steps" or ":" in key}
    return {f"training/{key}": float(value) for key, value in kept.items() if _is_number(value)}


def _evaluated(evaluations: Mapping[str, Path]) -> dict[str, float]:
    from posttrain.apps.evaluate.results import read_summary

    found: dict[str, float] = {}
    for name, folder in evaluations.items():
        summary = read_summary(folder)
        found.update({f"{name}/{metric}": float(value) for metric, value in summary.metrics.items()})
        if summary.cost_per_answer is not None:
            found[f"{name}/cost_per_answer"] = summary.cost_per_answer
    return found


def _read_gate(path: Path) -> JsonObject:
    report = read_json(path, RegistryError)
    verdict = report.get("verdict")
    if verdict not in ("promote", "reject", "needs_more_samples"):
        raise RegistryError(
            f"{path}: verdict is {verdict!r}; expected the JSON that `posttrain gate --json FILE` writes, with the "
            "verdict promote, reject or needs_more_samples"
        )
    _check_kinds(path, report, {"reasons": list, "candidate": dict})
    candidate = report.get("candidate") or {}
    _check_kinds(path, candidate, dict.fromkeys(candidate, dict))
    return {
        "verdict": verdict,
        "reasons": list(report.get("reasons") or []),
        "report": str(path),
        "judged": {
            name: {key: evaluation.get(key) for key in ("model", "model_fingerprint")}
            for name, evaluation in candidate.items()
            if evaluation is not None
        },
    }


def read_verdict(folder: str | Path, gate: Path) -> JsonObject:
    """What `posttrain gate --json` wrote, and whether it judged the model in `folder`."""
    judged = _read_gate(gate)
    return judged | _compare_with_judged(_fingerprint(folder), judged["judged"])


def doubtful_evaluations(folder: str | Path, evaluations: Mapping[str, Path]) -> dict[str, str]:
    """Of evaluations by name, those that are not known to be of the model in `folder`, and why."""
    from posttrain.apps.evaluate.results import read_summary

    if not evaluations:
        return {}  # without evaluations the fingerprint, a hash of every byte, is not needed
    own = _fingerprint(folder)
    found = {}
    for name, path in evaluations.items():
        summary = read_summary(path)
        if own is None or summary.model_fingerprint is None:
            found[name] = f"is of {summary.model}, which is not known to be this model"
        elif summary.model_fingerprint != own:
            found[name] = f"is of {summary.model}, whose files differ"
    return found


def _compare_with_judged(own: str | None, judged: Mapping[str, JsonMapping]) -> dict[str, str | None]:
    """A server and a name on the hub have no files to compare: a verdict on them does not apply to files."""
    another = unknown = None
    for evaluation in judged.values():
        fingerprint, model = evaluation["model_fingerprint"], str(evaluation["model"])
        if own is None or fingerprint is None:
            unknown = unknown or model
        elif fingerprint != own:
            another = another or model
    return {"another_model": another, "unknown_model": unknown if judged else "a model that its report does not name"}


def _fingerprint(folder: str | Path) -> str | None:
    """Of the model in `folder`; None if there are no local files of a model."""
    from posttrain.models.accepted_names import ModelReferenceError, model_fingerprint, resolve_model

    try:
        return model_fingerprint(resolve_model(folder))
    except ModelReferenceError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
