"""Reads a YAML file that is not the config of a run (gate.yaml and the like) with the same strictness.

Unknown keys get "did you mean", wrong values their file and line; `defaults:`, `${…}` and `a.b=c` work as in every config.
There are no built-in values but those of the schema, and no names of other systems to understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from posttrain.config.base import ConfigError, Section, message_of
from posttrain.config.interpolation import resolve
from posttrain.config.overrides import apply_overrides
from posttrain.config.schema import (
    Node,
    find,
    is_field,
    schema_of_model,
    sections_that_are_not_maps,
    unknown_keys,
)
from posttrain.config.suggestions import hint_for
from posttrain.config.tree import Path, Tree, dotted
from posttrain.config.yaml_files import read_with_defaults
from posttrain.files.redaction import shown_setting

S = TypeVar("S", bound=Section)


def load_standalone(model: type[S], path: FilePath, overrides: Sequence[str] = ()) -> S:
    """The file at `path`, with `overrides` over it, as a `model`. Raises ConfigError with every problem that it has."""
    root = schema_of_model(model)

    def keeps_null(key: Path) -> bool:
        node = find(root, key)
        return node is None or node.nullable

    read = read_with_defaults(path, lambda tree: None, keeps_null, [])
    tree = apply_overrides(read, overrides, rename=lambda written: False, has_default=lambda key: is_field(root, key))
    _refuse_wrong_shape(root, tree)
    try:
        return model.model_validate(resolve(tree))
    except ValidationError as error:
        lines = dict.fromkeys(_explain(problem, path, tree) for problem in error.errors())
        raise ConfigError("\n".join(lines)) from error


def _refuse_wrong_shape(root: Node, tree: Tree) -> None:
    lines = []
    for path in unknown_keys(root, tree.values):
        lines.append(f"{tree.origin(path)}: unknown key `{dotted(path)}`{hint_for(root, path)}")
    lines += [
        f"{tree.origin(path)}: `{dotted(path)}` = {shown_setting(dotted(path), tree.get(path))}: must be a map of settings"
        for path in sections_that_are_not_maps(root, tree.values)
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _explain(problem: ErrorDetails, file: FilePath, tree: Tree) -> str:
    path = _key_of(problem["loc"], tree)
    where = tree.origin(path) if path else str(file)
    message = message_of(problem)
    if problem["type"] == "missing":
        missing = (*path, str(problem["loc"][-1]))
        return f"{where}: `{dotted(missing)}` is missing"
    value = problem["input"]
    if isinstance(value, dict | Section):
        return f"{where}: `{dotted(path)}`: {message}" if path else f"{where}: {message}"
    return f"{where}: `{dotted(path)}` = {shown_setting(dotted(path), value)}: {message}"


def _key_of(location: tuple[int | str, ...], tree: Tree) -> Path:
    """The part of pydantic's location that is in the file; the rest names members of unions."""
    absent = object()
    path: Path = ()
    for part in location:
        if tree.get((*path, str(part)), absent) is not absent:
            path = (*path, str(part))
    return path
