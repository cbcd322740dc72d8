"""Reads YAML with the line of every key, and follows `defaults:`.

Numbers are read as OmegaConf reads them: `1e-8` is a float, dates and times stay text. Renames of old keys are applied to
each file on its own, before files are laid over each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import yaml

from posttrain.config.errors import ConfigError
from posttrain.config.tree import Path, Tree, overlay

MAX_DEPTH = 64
DEFAULTS_DIR = FilePath(__file__).parent / "defaults"

# NeMo RL's recipes inherit from these files of its source tree; posttrain carries the same defaults.
EXEMPLARS = {"grpo_math_1B.yaml": "grpo", **{file.name: file.stem for file in DEFAULTS_DIR.glob("*.yaml")}}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge" and key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key `{key_node.value}` is set twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _use_plain_numbers(loader: type[_Loader]) -> None:
    """`1e-8` is a float. Dates (2024-01-01) and base-60 numbers (1:30:00) are text."""
    numbers = {
        "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "tag:yaml.org,2002:int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[1-9][0-9_]*|0)",
    }
    replaced = {*numbers, "tag:yaml.org,2002:timestamp"}
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in loader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in numbers.items():
        loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list("-+0123456789."))


_use_plain_numbers(_Loader)


def parse_value(text: str) -> Any:
    """One YAML value, as it stands on the command line."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_document(text: str, label: str) -> Tree:
    """A YAML document whose origins are `label:line`."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{label}: expected a map of sections (`name:` at the beginning of a line), got {type(values).__name__}"
        )
    origins: dict[Path, str] = {}
    if node is not None:
        _collect_lines(node, (), f"{label}:", origins)
    return Tree(_with_text_keys(values), origins)


def _collect_lines(node: yaml.Node, path: Path, prefix: str, origins: dict[Path, str]) -> None:
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{prefix[:-1]}: nested more than {MAX_DEPTH} deep; does an alias contain itself?")
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    for key, marked, value in children:
        here = (*path, key)
        is_leaf = not isinstance(value, yaml.MappingNode) or not value.value
        if is_leaf:
            origins[here] = f"{prefix}{marked.start_mark.line + 1}"
        _collect_lines(value, here, prefix, origins)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


def display_path(path: FilePath) -> str:
    """As short as it stays clear: relative to where the user is, if it is below there."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def read_built_in(kind: str) -> Tree:
    path = DEFAULTS_DIR / f"{kind}.yaml"
    return parse_document(path.read_text(encoding="utf-8"), f"built-in {path.name}")


def read_with_defaults(
    path: FilePath,
    rename: Callable[[Tree], None],
    keeps_null: Callable[[Path], bool],
    warnings: list[str],
    trail: tuple[FilePath, ...] = (),
) -> Tree:
    """The file at `path` laid over the files that its `defaults:` names, depth first, later ones on top."""
    label = display_path(path)
    resolved = path.resolve()
    if resolved in trail:
        loop = " -> ".join(display_path(step) for step in (*trail, resolved))
        raise ConfigError(f"{label}: `defaults:` goes round in a circle: {loop}")
    try:
        own = parse_document(path.read_text(encoding="utf-8"), label)
    except FileNotFoundError as error:
        raise ConfigError(f"{label}: no such config file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: cannot be read: {error}") from error
    parents = _parents(own, label)
    rename(own)
    base = Tree()
    for parent in parents:
        file = resolved.parent / os.path.expanduser(parent)
        if not file.exists() and file.name in EXEMPLARS:
            warnings.append(
                f"{label}: defaults: {parent} is not here; posttrain's own {EXEMPLARS[file.name]} defaults are used"
            )
            continue
        if not file.exists():
            raise ConfigError(f"{label}: defaults: no file {display_path(file)}; the path is relative to {label}")
        below = read_with_defaults(file, rename, keeps_null, warnings, (*trail, resolved))
        base = overlay(base, below, keeps_null)
    return overlay(base, own, keeps_null) if parents else own


def _parents(own: Tree, label: str) -> list[str]:
    if "defaults" not in own.values:
        return []
    named = own.remove(("defaults",))
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{label}: `defaults:` must be a file name or a list of file names, got {named!r}")
    return named
