"""The schema layers: kinds of Kubernetes, custom resources and their CEL rules."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launch_profiles import CRDS, EKS, make_profile, make_request

from posttrain.apps.launch.admin_objects import render_setup
from posttrain.apps.launch.lint.check import LintReport, check_manifests
from posttrain.apps.launch.lint.custom_schemas import CustomSchemas
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.apps.launch.workloads import render_run
from posttrain.errors import InputError

needs_core = pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed")
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"no CustomResourceDefinitions in {CRDS}")


def check(objects: list[dict[str, Any]], schemas: CustomSchemas | None = None) -> LintReport:
    return check_manifests([Manifest("m", number, body) for number, body in enumerate(objects)], schemas)


def places(report: LintReport, rule: str) -> list[str]:
    return [finding.path for finding in report.errors if finding.rule == rule]


@pytest.fixture(scope="module")
def schemas() -> CustomSchemas:
    return CustomSchemas(CRDS)


@needs_core
def test_unknown_fields_wrong_types_and_unknown_kinds_of_kubernetes(tmp_path: Path) -> None:
    config, _, service, job = render_run(make_request(tmp_path, EKS, "scheduler.kind=job"))
    job["spec"]["template"]["spec"]["nodeSelectors"] = {}
    job["spec"]["backoffLimit"] = "3"
    service["spec"]["ports"][0]["port"] = "ray"
    config["apiVersion"] = "v2"
    found = places(check([config, service, job]), "schema")
    assert sorted(found) == ["kind", "spec.backoffLimit", "spec.ports[0].port", "spec.template.spec.nodeSelectors"]


@needs_crds
@pytest.mark.parametrize(
    ("scheduler", "keys", "value", "path"),
    [
        ("jobset", ("spec", "replicas"), 1, "spec.replicas"),
        ("jobset", ("spec", "ttlSecondsAfterFinished"), "1d", "spec.ttlSecondsAfterFinished"),
        ("volcano", ("spec", "minAvailable"), "2", "spec.minAvailable"),
        (
            "rayjob",
            ("spec", "rayClusterSpec", "headGroupSpec", "replicas"),
            1,
            "spec.rayClusterSpec.headGroupSpec.replicas",
        ),
        ("raycluster", ("spec", "headGroupSpec"), {"rayStartParams": {}}, "spec.headGroupSpec.template"),
    ],
)
def test_custom_resources_are_strict(
    tmp_path: Path, schemas: CustomSchemas, scheduler: str, keys: tuple[str, ...], value: Any, path: str
) -> None:
    objects = render_run(make_request(tmp_path, EKS, f"scheduler.kind={scheduler}"))
    body = objects[-1]
    for key in keys[:-1]:
        body = body[key]
    body[keys[-1]] = value
    assert path in places(check(objects, schemas), "crd-schema")


@needs_crds
def test_cel_rules_of_custom_resources_are_evaluated(tmp_path: Path, schemas: CustomSchemas) -> None:
    objects = render_setup(make_profile(tmp_path, EKS))
    node_class = next(body for body in objects if body["kind"] == "EC2NodeClass")
    node_class["spec"]["amiSelectorTerms"] = [{"alias": "ubuntu@latest"}]
    node_class["spec"]["tags"] = {"karpenter.sh/nodepool": "x"}
    found = places(check(objects, schemas), "crd-cel")
    assert set(found) == {"spec.amiSelectorTerms[0].alias", "spec.tags"}


@needs_crds
def test_version_that_is_not_served_is_named(tmp_path: Path, schemas: CustomSchemas) -> None:
    objects = render_run(make_request(tmp_path, EKS))
    objects[-1]["apiVersion"] = "jobset.x-k8s.io/v1"
    error = next(finding for finding in check(objects, schemas).errors if finding.rule == "crd-schema")
    assert error.path == "apiVersion"
    assert "v1alpha2" in error.remedy


def test_layers_that_did_not_run_are_named(tmp_path: Path) -> None:
    report = check(render_run(make_request(tmp_path, EKS)))
    assert any("jobset.x-k8s.io JobSet" in line for line in report.skipped)


def test_folder_without_definitions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("kind: Pod\n", encoding="utf-8")
    with pytest.raises(InputError, match="no CustomResourceDefinition"):
        CustomSchemas(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        CustomSchemas(tmp_path / "absent")


OWN_CRD = """
kind: CustomResourceDefinition
apiVersion: apiextensions.k8s.io/v1
metadata: {name: jobsets.jobset.x-k8s.io}
spec:
  group: jobset.x-k8s.io
  names: {kind: JobSet}
  versions:
  - name: v1alpha2
    schema:
      openAPIV3Schema:
        type: object
        properties:
          apiVersion: {type: string}
          kind: {type: string}
          spec:
            type: object
            required: [size, place]
            properties:
              size: {type: integer, default: 2}
              place: {type: object}
              labels: {type: object}
              failurePolicy:
                type: object
                properties:
                  rules: {type: array, items: {type: object, required: [name], properties: {name: {type: string}}}}
"""


def test_what_the_server_fills_in_before_it_validates_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "crd.yaml").write_text(OWN_CRD)
    schemas = CustomSchemas(tmp_path)
    jobset: dict[str, Any] = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"}}
    whole = {**jobset, "spec": {"place": {}, "labels": None, "failurePolicy": {"rules": [{}]}}}
    assert places(check([whole], schemas), "crd-schema") == []
    assert places(check([{**whole, "spec": {"place": None}}], schemas), "crd-schema") == ["spec.place"]
    other = check([{**jobset, "kind": "Topology"}], schemas)
    assert places(other, "crd-schema") == []
    assert any("jobset.x-k8s.io Topology" in line for line in other.skipped)
    for wrong in ({"kind": "JobSets"}, {"apiVersion": "jobset.x-k8s.io/v1alpha9"}):
        assert places(check([{**whole, **wrong}], schemas), "crd-schema") == ["apiVersion"]
