"""Schemas of Kubernetes itself, from the package `kubernetes-validate`: unknown fields and wrong types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from posttrain.apps.launch.lint.findings import Findings, LintFinding, ManifestPlace
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonMapping

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError
    from referencing import Registry, Resource

VERSION = "1.36.0"
PACKAGE = "kubernetes_validate"
RULE = "schema"
_OF_KUBERNETES = re.compile(  # not all groups under k8s.io: those of its other projects are custom ones
    r"|apps|batch|autoscaling|policy|(admissionregistration|apiextensions|apiregistration|authentication|certificates"
    r"|coordination|discovery|events|flowcontrol\.apiserver|internal\.apiserver|networking|node|(rbac\.)?authorization"
    r"|resource|scheduling|storage|storagemigration)\.k8s\.io"
)


def is_available() -> bool:
    return find_spec(PACKAGE) is not None and find_spec("jsonschema") is not None


def is_of_kubernetes(manifest: Manifest) -> bool:
    return _OF_KUBERNETES.fullmatch(manifest.group) is not None


def check_core_schema(manifest: Manifest) -> Findings:
    validator = _validator(manifest.kind.lower(), str(manifest.body.get("apiVersion", "")))
    if validator is None:
        kind, message = f"{manifest.body.get('apiVersion')} {manifest.kind}", f"Kubernetes {VERSION} has no such kind"
        yield ManifestPlace(manifest, "kind").error(RULE, kind, message, "correct apiVersion and kind")
        return
    yield from findings_of(manifest, validator.iter_errors(manifest.body))


@lru_cache(maxsize=64)
def _validator(kind: str, api_version: str) -> Draft202012Validator | None:
    from jsonschema import Draft202012Validator
    from kubernetes_validate.utils import schema_contents
    from referencing import Registry, Resource

    group, slash, version = api_version.rpartition("/")
    name = f"{group.partition('.')[0]}-{version}" if slash else version
    try:
        schema = schema_contents(f"kubernetes-json-schema/v{VERSION}-local-strict/{kind}-{name}.json", VERSION)
    except FileNotFoundError:
        return None
    registry: Registry[JsonMapping] = _definitions() @ (Resource.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry)


@lru_cache(maxsize=1)
def _definitions() -> Resource[JsonMapping]:
    from kubernetes_validate.utils import schema_contents
    from referencing import Resource

    return Resource.from_contents(
        schema_contents(f"kubernetes-json-schema/v{VERSION}-local-strict/_definitions.json", VERSION)
    )


def findings_of(manifest: Manifest, errors: Iterable[ValidationError], rule: str = RULE) -> Findings:
    """Errors of jsonschema; of alternatives, those of the one that came nearest."""
    from jsonschema.exceptions import best_match

    for error in errors:
        deepest = best_match([error]) or error
        yield _finding_of(manifest, deepest, rule)


def _finding_of(manifest: Manifest, error: ValidationError, rule: str) -> LintFinding:
    place = ManifestPlace(manifest).at(*(key if isinstance(key, int) else str(key) for key in error.absolute_path))
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {})
        unknown = [key for key in error.instance if key not in known]
        if unknown:
            return place.at(str(unknown[0])).error(rule, None, "unknown field", _nearest(str(unknown[0]), list(known)))
    if error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        return (
            place.at(missing[0]).error(rule, None, "is required") if missing else place.error(rule, None, error.message)
        )
    if error.validator == "type":
        wanted = error.validator_value
        names = " or ".join(wanted) if isinstance(wanted, list) else wanted
        return place.error(rule, error.instance, f"must be of type {names}")
    if error.validator == "enum":
        return place.error(rule, error.instance, f"must be one of {', '.join(map(str, error.validator_value))}")
    return place.error(rule, None, error.message[:200])


def _nearest(word: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else ""
