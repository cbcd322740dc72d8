"""Overrides on the command line, in Hydra's grammar: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`, `~a.b=c`.

Every key of the schema exists from the start, so the three ways to set mean the same here; what Hydra's `+` guards
against, an unknown key, is an error in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.base import ConfigError
from posttrain.config.tree import (
    COMMAND_LINE,
    DEFAULT,
    REPLACES_BUILT_IN,
    Path,
    Tree,
    dotted,
    forget_arguments_of_another_class,
    leaves,
)
from posttrain.config.yaml_files import parse_value
from posttrain.files.redaction import redact_argument, shown_setting

_KEY = re.compile(r"[A-Za-z_][\w\-]*(?:\.[\w\-]+|\[\d+\])*")
_HYDRA_MAP_KEY = re.compile(r"([{,]\s*[\w.\-]+):(?=[^\s/])")


@dataclass(frozen=True)
class Override:
    text: str
    path: Path
    deletes: bool
    has_value: bool
    value: Any


def parse_override(text: str) -> Override:
    match = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(?:(=)(.*))?", text, flags=re.DOTALL)
    assert match is not None, "every string has this form"
    sign, key, equals, raw = match.groups()
    key = key.strip()
    deletes = sign == "~"
    if not _KEY.fullmatch(key) or (equals is None and not deletes):
        hint = f"; a config file is given with --config {text}" if text.endswith((".yaml", ".yml")) else ""
        raise ConfigError(
            f"command line: {redact_argument(text)!r} is not an override; write key=value (e.g. policy.precision=float32), or "
            f"~key to remove{hint}"
        )
    try:
        value = _parse(raw) if equals else None
    except ValueError as error:
        shown = redact_argument(text)
        reason = f" ({error})" if shown == text else ""  # it may quote a part of the value
        raise ConfigError(
            f"command line: the value of {shown!r:.200} is not valid{reason}; put it in quotes if it is text"
        ) from error
    return Override(text, tuple(re.sub(r"\[(\d+)\]", r".\1", key).split(".")), deletes, bool(equals), value)


def _parse(raw: str) -> Any:
    if not raw.strip():
        return ""
    if raw.lstrip().startswith("{"):
        raw = _HYDRA_MAP_KEY.sub(r"\1: ", raw)  # Hydra accepts {a:1}; YAML needs {a: 1}
    return parse_value(raw)


def apply_overrides(
    tree: Tree,
    overrides: Sequence[str],
    rename: Callable[[Tree], bool],
    has_default: Callable[[Path], bool],
) -> Tree:
    """`tree` with the overrides applied in order. `rename` rewrites old keys in a small tree and returns whether it did."""
    result = tree.copy()
    for text in overrides:
        override = parse_override(text)
        if override.deletes:
            _delete(result, override, has_default)
            continue
        written = Tree()
        written.put(override.path, override.value, COMMAND_LINE)
        if not rename(written):
            _assign(result, override.path, override.value, override)
            continue
        for path, value in leaves(written.values):
            if value != {}:  # the section of a key that was dropped
                _assign(result, path, value, override)
    return result


def _delete(tree: Tree, override: Override, has_default: Callable[[Path], bool]) -> None:
    absent = object()
    present = tree.get(override.path, absent)
    if present is absent:
        if has_default(override.path):
            return  # it has nothing but the default of the schema
        raise ConfigError(f"command line: {redact_argument(override.text)!r} removes a key that is not there")
    if override.has_value and present != override.value:
        raise ConfigError(
            f"command line: {redact_argument(override.text)!r} does not apply: `{dotted(override.path)}` is "
            f"{shown_setting(dotted(override.path), present)} "
            f"({tree.origin(override.path)})"
        )
    tree.remove(override.path)


def _assign(tree: Tree, path: Path, value: object, override: Override) -> None:
    _check_way(tree, path, override)
    below = tree.get(path)
    if path[-1] == "name" and isinstance(tree.get(path[:-1]), dict):
        forget_arguments_of_another_class(tree, path[:-1], {"name": value})
    replaces = path in REPLACES_BUILT_IN and tree.origin(path) == DEFAULT
    if isinstance(value, dict) and value and isinstance(below, dict) and not replaces:
        if "name" in value:
            forget_arguments_of_another_class(tree, path, value)
        for rest, inner in leaves(value):
            tree.put((*path, *rest), inner, COMMAND_LINE)
        return
    tree.put(path, value, COMMAND_LINE)


def _check_way(tree: Tree, path: Path, override: Override) -> None:
    """What is on the way to the key must be a map, or a list with that entry."""
    for length in range(1, len(path)):
        node = tree.get(path[:length])
        key = path[length]
        if isinstance(node, list) and not (key.isdigit() and int(key) < len(node)):
            raise ConfigError(
                f"command line: {redact_argument(override.text)!r}: `{dotted(path[:length])}` is a list of {len(node)}; "
                f"name an entry, e.g. {dotted(path[:length])}[0]"
            )
        if node is not None and not isinstance(node, dict | list):
            raise ConfigError(
                f"command line: {redact_argument(override.text)!r}: `{dotted(path[:length])}` is "
                f"{shown_setting(dotted(path[:length]), node)}, which has no keys"
            )
