"""Schemas of custom resources (CustomResourceDefinitions) and their CEL rules, from a folder that the user names.

posttrain contains none of them: they depend on the versions of the operators in a cluster. `kubectl get crd -o json`
writes them. CEL rules that compare with the stored object are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posttrain.apps.launch.lint.cel_rules import found
from posttrain.apps.launch.lint.core_schemas import findings_of
from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.manifest_files import Manifest, read_manifests
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonObject

RULE = "crd-schema"
CEL_RULE = "crd-cel"
_NAMED_BY_WEBHOOK = re.compile(r"spec\.failurePolicy\.rules\[\d+\]\.name")  # if they have no name
_KEPT = (
    "type", "enum", "required", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties", "uniqueItems", "multipleOf", "additionalProperties",
)  # fmt: skip


class CustomSchemas:
    """Schemas by group, version and kind."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(
                f"--crds {folder}: no such folder; expected CustomResourceDefinitions as .json or .yaml files"
            )
        if find_spec("jsonschema") is None:
            raise InputError("--crds needs the package jsonschema: pip install 'posttrain[k8s]'")
        self.schemas: dict[tuple[str, str, str], JsonObject] = {}
        for manifest in read_manifests([folder]):
            if manifest.kind != "CustomResourceDefinition":
                continue
            try:
                spec = manifest.body["spec"]
                for version in spec["versions"]:
                    key = (spec["group"], version["name"], spec["names"]["kind"])
                    self.schemas[key] = version["schema"]["openAPIV3Schema"]
            except (KeyError, TypeError) as error:
                raise InputError(f"{manifest.file}: {manifest.title} is incomplete: {error}") from error
        if not self.schemas:
            raise InputError(
                f"--crds {folder}: no CustomResourceDefinition in it; `kubectl get crd -o json` writes them"
            )
        self.skipped: list[str] = []  # rules that were not evaluated, and why
        self._validators: dict[tuple[str, str, str], Any] = {}

    def has(self, manifest: Manifest) -> bool:
        """Whether the kind, or one that it may be a misspelling of, is there."""
        kinds = [kind for group, _, kind in self.schemas if group == manifest.group]
        return bool(get_close_matches(manifest.kind, kinds, 1, 0.8))

    def check(self, manifest: Manifest) -> Findings:
        from jsonschema import Draft202012Validator

        key = manifest.group, str(manifest.body.get("apiVersion", "")).rpartition("/")[2], manifest.kind
        if key not in self.schemas:
            versions = sorted({f"{group}/{version} {kind}" for group, version, kind in self.schemas if group == key[0]})
            message, remedy = f"no {key[2]} of this version", f"served: {', '.join(versions)}"
            yield ManifestPlace(manifest, "apiVersion").error(RULE, manifest.body.get("apiVersion"), message, remedy)
            return
        if key not in self._validators:
            self._validators[key] = Draft202012Validator(_closed(self.schemas[key], is_root=True))
        body = _without_nulls(manifest.body)
        for finding in findings_of(manifest, self._validators[key].iter_errors(body), RULE):
            if not (manifest.kind == "JobSet" and _NAMED_BY_WEBHOOK.fullmatch(finding.path)):
                yield finding
        for place, rule, value in _rules(self.schemas[key], manifest.body, ManifestPlace(manifest)):
            if not self._holds(rule["rule"], value):
                yield place.error(CEL_RULE, None, rule.get("message", rule["rule"]))

    def _holds(self, rule: str, value: object) -> bool:
        """Evaluated with the string functions that Kubernetes adds."""
        import cel

        functions = {"find": found, "split": lambda text, separator: text.split(separator)}
        try:
            return bool(cel.evaluate(rule, cel.Context(variables={"self": value}, functions=functions)))
        except Exception as error:  # a function or a field that this implementation does not support
            self.skipped.append(f"CEL rule {rule!r}: {reason_of(error)}")
            return True


def _without_nulls(value: object) -> Any:
    """As the server prunes fields that may not be null, before it fills in defaults and validates."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _closed(schema: JsonObject, is_root: bool = False) -> JsonObject:
    """An OpenAPI schema as JSON Schema that refuses unknown fields, as the server does with strict decoding."""
    result: JsonObject = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: _closed(inner) for name, inner in value.items()}
        elif key in ("items", "additionalProperties", "not") and isinstance(value, dict):
            result[key] = _closed(value)
        elif key in ("anyOf", "allOf", "oneOf"):
            result[key] = [{**part} for part in value]  # conditions on what is described elsewhere: not closed
        elif key in _KEPT:
            result[key] = value
    if "required" in result:  # the server fills in defaults before it validates
        properties = schema.get("properties", {})
        result["required"] = [name for name in result["required"] if "default" not in properties.get(name, {})]
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        result.pop("additionalProperties", None)
    elif "properties" in schema and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    if is_root:
        result["properties"] = {**result.get("properties", {}), "metadata": {"type": "object"}}
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


def _rules(
    schema: JsonObject, value: object, place: ManifestPlace
) -> Iterator[tuple[ManifestPlace, dict[str, str], Any]]:
    """Every CEL rule whose value is in the object."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"]:
            yield place, rule, value
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if value.get(name) is not None:
                yield from _rules(inner, value[name], place.at(name))
        if isinstance(others := schema.get("additionalProperties"), dict):
            for name, item in value.items():
                yield from _rules(others, item, place.at(str(name)))
    elif isinstance(value, list) and isinstance(items := schema.get("items"), dict):
        for index, item in enumerate(value):
            yield from _rules(items, item, place.at(index))
