"""Reward 1.0 if the completion is JSON that matches a schema, else 0.0. Runs in a worker process.

JSON as in RFC 8259: `NaN` and duplicate keys are invalid. The schema is checked against its own
dialect when the worker starts. A `$ref` to another document is not followed: nothing is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.files.json_files import JsonMapping, JsonObject

if TYPE_CHECKING:
    from referencing import Registry

_FENCED = re.compile(r"^[ \t]*(```+|~~~+)[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)


def json_schema_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    fits = _validator(_schema(setup))
    where = setup["where"]

    def score(item: ScoringItem) -> float:
        text = json_text(item.response, where)
        try:
            value = json.loads(text or "", parse_constant=_refuse, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0 if fits(value) else 0.0

    return score


def json_text(response: str, where: str) -> str | None:
    """The part of the response that should be JSON: all of it, or its last fenced block."""
    if where != "whole":
        blocks = _FENCED.findall(response)
        if blocks:
            return str(blocks[-1][1])
    return None if where == "fenced" else response


def _schema(setup: JsonMapping) -> object:
    if setup.get("schema_file") is None:
        return setup.get("schema")
    path = Path(setup["base_folder"]) / Path(setup["schema_file"]).expanduser()
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetup(f"schema_file {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadSetup(f"schema_file {path} is not JSON: {error}") from None


def _validator(schema: object) -> Callable[[object], bool]:
    if schema is None:
        return lambda value: True
    try:
        import jsonschema
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise BadSetup("a schema needs the package jsonschema: pip install 'posttrain[rewards]'") from None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise BadSetup(f"the schema is not a JSON schema: at {place}: {error.message}") from None
    validator = kind(schema, registry=_no_registry())

    def fits(value: object) -> bool:
        try:
            return bool(validator.is_valid(value))
        except Unresolvable as error:
            raise Unscored(f"the schema refers to {error.ref!r}, which is not in it") from None
        except RecursionError:
            raise Unscored("the schema refers to itself without end") from None

    return fits


def _no_registry() -> Registry[JsonMapping]:
    from referencing import Registry

    return Registry()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _without_repeats(pairs: list[tuple[str, object]]) -> JsonObject:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value
