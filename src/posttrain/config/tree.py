"""Nested plain values that remember where each was set: laid over each other, and `${...}` replaced by OmegaConf.

A tree is independent of the schema: `keeps_null` is true for the sections in which null is a value of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config.base import ConfigError
from posttrain.files.redaction import shown_setting

Path = tuple[str, ...]
Values = dict[str, Any]  # of a YAML map: nested maps, lists and scalars

DEFAULT = "default"
COMMAND_LINE = "command line"
OVERRIDE_MARK = "_override_"
MISSING = "???"  # a value that must be given
_REFERENCE = re.compile(r"\$\{([\w.\[\]-]+)\}")
_MAX_RESOLVED_LENGTH = 2**22

# A dataset is one choice: the keys of the built-in one make no sense beside the keys of yours.
REPLACES_BUILT_IN: frozenset[Path] = frozenset({("data", "train"), ("data", "validation")})


def dotted(path: Path) -> str:
    return ".".join(path)


def leaves(values: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a map, and every empty map, with its path. A list is one value."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, str(key)))
    elif path:
        yield path, values


@dataclass
class Tree:
    values: Values = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def from_one_origin(cls, values: Values, origin: str) -> Tree:
        return cls(values, {path: origin for path, _ in leaves(values)})

    def copy(self) -> Tree:
        return Tree(deepcopy(self.values), dict(self.origins))

    def get(self, path: Path, missing: object = None) -> Any:
        node: Any = self.values
        for key in path:
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                return missing
        return node

    def origin(self, path: Path) -> str:
        """Where the value at `path` was set; for a part of a value, where the value was set."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        return next(inside, DEFAULT)

    def remove(self, path: Path) -> Any:
        """Take the value at `path` out, with its origins, and return it."""
        parent = self.get(path[:-1]) if len(path) > 1 else self.values
        value = parent.pop(int(path[-1])) if isinstance(parent, list) else parent.pop(path[-1])
        self._forget(path)
        return value

    def put(self, path: Path, value: object, origin: str) -> None:
        """Set the value at `path`, making the maps on the way; what was there is replaced."""
        node: Any = self.values
        for index, key in enumerate(path[:-1]):
            if isinstance(node, list):
                node = node[int(key)]
                continue
            if not isinstance(node.get(key), dict | list):
                self._forget(path[: index + 1])
                node[key] = {}
            node = node[key]
        if isinstance(node, list):
            node[int(path[-1])] = value
        else:
            node[path[-1]] = value
        self._forget(path)
        self.origins.update({(*path, *rest): origin for rest, _ in leaves(value)} or {path: origin})

    def _forget(self, path: Path) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def overlay(base: Tree, top: Tree, keeps_null: Callable[[Path], bool], *, over_built_in: bool = False) -> Tree:
    """`top` laid over `base`: maps merge, everything else replaces. Neither argument is changed."""
    result = base.copy()
    _overlay_map(result, top, (), keeps_null, over_built_in)
    return result


def _overlay_map(result: Tree, top: Tree, path: Path, keeps_null: Callable[[Path], bool], over_built_in: bool) -> None:
    for key, value in (top.get(path) if path else top.values).items():
        here = (*path, str(key))
        if key == OVERRIDE_MARK:
            continue
        below = result.get(here)
        if value is None and isinstance(below, dict) and not keeps_null(here):
            continue  # `section:` with nothing under it
        replaces = isinstance(value, dict) and value.get(OVERRIDE_MARK) is True
        replaces = replaces or (over_built_in and here in REPLACES_BUILT_IN)
        if isinstance(value, dict) and isinstance(below, dict) and not replaces:
            forget_arguments_of_another_class(result, here, value)
            if value:
                _overlay_map(result, top, here, keeps_null, over_built_in)
            continue
        # Between files the mark stays, so that it also holds against the built-in defaults further down.
        result.put(here, without_marks(value) if over_built_in else deepcopy(value), DEFAULT)
        result._forget(here)
        result.origins.update({known: origin for known, origin in top.origins.items() if known[: len(here)] == here})


def forget_arguments_of_another_class(tree: Tree, path: Path, incoming: Values) -> None:
    """`{name, kwargs}` with another name: the arguments of the old class do not fit. Those typed by the user stay."""
    present = tree.get(path)
    if "name" not in incoming or not isinstance(present.get("kwargs"), dict) or present.get("name") == incoming["name"]:
        return
    for key in list(present["kwargs"]):
        if tree.origin((*path, "kwargs", key)) != COMMAND_LINE:
            tree.remove((*path, "kwargs", key))


def without_marks(value: object, mark: str = OVERRIDE_MARK) -> Any:
    if isinstance(value, dict):
        return {key: without_marks(inner, mark) for key, inner in value.items() if key != mark}
    if isinstance(value, list):
        return [without_marks(inner, mark) for inner in value]
    return deepcopy(value)


def resolve(tree: Tree) -> Values:
    """The values of `tree` with every `${...}` replaced by what it stands for."""
    _register_functions()
    if missing := [path for path, value in leaves(tree.values) if value == MISSING]:
        lines = [f"{tree.origin(path)}: `{dotted(path)}` is `???`: a value must be given" for path in missing]
        raise ConfigError("\n".join(lines) + f", e.g. {dotted(missing[0])}=… on the command line")
    _check_lengths(tree)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree.values), resolve=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        path = tuple(key.replace("[", ".").replace("]", "").split("."))
        written = f"{tree.origin(path)}: `{key}` = {shown_setting(key, tree.get(path)):.200} " if key else ""
        reason = str(getattr(error, "msg", None) or error).split("\n")[0]
        raise ConfigError(f"{written}cannot be resolved: {reason:.200}") from error
    except RecursionError as error:
        raise ConfigError("references (`${…}`) are nested too deep") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _check_lengths(tree: Tree) -> None:
    """Refuses texts that become huge: forty references, each twice the one before, would take all memory."""
    lengths: dict[Path, int] = {}

    def length(path: Path, value: object) -> int:
        if path in lengths:
            return lengths[path]
        lengths[path] = 0  # a circle, which OmegaConf refuses
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            total = sum(length((*path, str(key)), inner) for key, inner in items)
        else:
            total = len(value) if isinstance(value, str) else 1
            for reference in _REFERENCE.findall(value) if isinstance(value, str) else ():
                name = reference.lstrip(".")
                base = path[: -(len(reference) - len(name))] if name != reference else ()
                target = (*base, *name.replace("[", ".").replace("]", "").split("."))
                total += length(target, tree.get(target))
        if total > _MAX_RESOLVED_LENGTH:
            known = f"{tree.origin(path)}: `{dotted(path)}` " if path else ""
            raise ConfigError(f"{known}would be longer than {_MAX_RESOLVED_LENGTH:,} characters with its references")
        lengths[path] = total
        return total

    length((), tree.values)


@cache
def _register_functions() -> None:
    """`${add:1,2}`, `${mul:…}`, `${div:…}` and `${max:…}` of two numbers."""

    def register(name: str, compute: Callable[[Any, Any], int | float]) -> None:
        def function(left: object, right: object) -> int | float:
            for operand in (left, right):
                if isinstance(operand, bool) or not isinstance(operand, int | float):
                    raise ValueError(f"{name} takes two numbers, got {operand!r}")
            result = compute(left, right)
            # An exact result of two integers stays one, so that `${div:512,4}` fits where a count is expected.
            both_whole = isinstance(left, int) and isinstance(right, int)
            return int(result) if both_whole and isinstance(result, float) and result.is_integer() else result

        OmegaConf.register_resolver(name, function, replace=True)

    register("add", lambda left, right: left + right)
    register("mul", lambda left, right: left * right)
    register("div", lambda left, right: left / right)
    register("max", max)
