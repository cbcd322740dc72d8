"""Reads YAML with the line of every key, and follows `defaults:`.

Numbers are read as OmegaConf reads them: `1e-8` is a float, dates and times stay text. Renames of old keys are applied
to each file on its own, before files are laid over each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path as FilePath
from typing import Any

import yaml

from posttrain.config.base import ConfigError
from posttrain.config.tree import Path, Tree, overlay
from posttrain.errors import near_path
from posttrain.files.json_files import read_at_most

MAX_FILE_BYTES = 2**20
MAX_DEPTH = 64
MAX_VALUES = 20_000  # with every alias written out
DEFAULTS_DIR = FilePath(__file__).parent / "defaults"

# NeMo RL's recipes inherit from these files of its source tree; posttrain carries the same defaults.
EXEMPLARS = {"grpo_math_1B.yaml": "grpo", **{file.name: file.stem for file in DEFAULTS_DIR.glob("*.yaml")}}


_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}


def _error(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
                if key.value in seen:
                    raise _error(f"key `{key.value}` is set twice", key)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _use_plain_numbers(loader: type[_Loader]) -> None:
    """`1e-8` is a float. Dates (2024-01-01), base-60 numbers (1:30:00) and `=` are text."""
    numbers = {
        "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "tag:yaml.org,2002:int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[1-9][0-9_]*|0)",
    }
    replaced = {*numbers, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in loader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in numbers.items():
        loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list("-+0123456789."))


_use_plain_numbers(_Loader)


def parse_value(text: str) -> Any:
    """One YAML value, as it stands on the command line. ValueError with the reason, in one line, if it is not one."""
    return _parse(text)[1]


def parse_document(text: str | bytes, label: str) -> Tree:
    """A YAML document whose origins are `label:line`."""
    try:
        lines, values = _parse(text)
    except ValueError as error:
        raise ConfigError(f"{label}: not valid YAML: {error}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{label}: expected a map of sections (lines of `name:`), got {type(values).__name__}")
    return Tree(values, {path: f"{label}:{line}" for path, line in lines.items()})


def _parse(text: str | bytes) -> tuple[dict[Path, int], Any]:
    """The line of each value, and the values. A config.yaml may be from another machine: nothing that is short as a
    text and endless as values is built from it."""
    lines: dict[Path, int] = {}
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # before nodes are built, in C, which recurses without a limit
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _error(f"nested more than {MAX_DEPTH} deep", event)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, None
        _collect_lines(node, (), {}, count())  # refuses too many values before they are built
        values = _with_text_keys(loader.construct_document(node))  # puts what `<<` names into the nodes
        _collect_lines(node, (), lines, count())
        return lines, values
    except yaml.YAMLError as error:
        raise ValueError(re.sub(r"\s+", " ", str(error)).strip().replace('in "<unicode string>", ', "at ")) from error
    except (LookupError, AttributeError) as error:  # `!!bool maybe`
        raise ValueError(f"{error} does not fit its tag") from error


def _collect_lines(node: yaml.Node, path: Path, lines: dict[Path, int], visits: Iterator[int]) -> None:
    """The line of each value; an alias stands for values of its own."""
    if node.tag not in _TAGS:
        raise _error(f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not read", node)
    if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        raise _error("a text holds the character NUL, which no path can", node)
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    for key, marked, value in children:
        here = (*path, key)
        if isinstance(node, yaml.MappingNode) and not isinstance(marked, yaml.ScalarNode):
            raise _error("a key is a list or a map; keys are names", marked)
        if not isinstance(value, yaml.MappingNode) or not value.value:
            lines[here] = marked.start_mark.line + 1
        if next(visits) > MAX_VALUES or len(here) > MAX_DEPTH:
            raise _error(f"more than {MAX_VALUES} values or {MAX_DEPTH} levels, with its aliases written out", marked)
        _collect_lines(value, here, lines, visits)


def _with_text_keys(value: object) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def display_path(path: FilePath) -> str:
    """As short as it stays clear: relative to where the user is, if it is below there."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def read_built_in(kind: str) -> Tree:
    path = DEFAULTS_DIR / f"{kind}.yaml"
    return parse_document(path.read_text(encoding="utf-8"), f"built-in {path.name}")


def read_with_defaults(
    path: FilePath,
    rename: Callable[[Tree], object],
    keeps_null: Callable[[Path], bool],
    warnings: list[str],
    trail: tuple[FilePath, ...] = (),
    known: dict[FilePath, Tree] | None = None,
) -> Tree:
    """The file at `path` laid over the files that its `defaults:` names, depth first, later ones on top.

    `known` has the files that were read: one that is named in several places is read once.
    """
    known = {} if known is None else known
    label = display_path(path)
    resolved = path.resolve()
    if resolved in known:
        return known[resolved]
    if resolved in trail:
        loop = " -> ".join(display_path(step) for step in (*trail, resolved))
        raise ConfigError(f"{label}: `defaults:` goes round in a circle: {loop}")
    own = read_document(path, label)
    parents = _parents(own, label)
    rename(own)
    base = Tree()
    for parent in parents:
        file = resolved.parent / os.path.expanduser(parent)
        if not file.exists() and file.name in EXEMPLARS:
            kind = EXEMPLARS[file.name]
            theirs = f"; preset=nemo-{kind} has NeMo RL's" if kind in ("grpo", "dpo") else ""
            warnings.append(
                f"{label}: defaults: {parent} is not here; posttrain's own {kind} defaults are used{theirs}"
            )
            continue
        if not file.exists():
            raise ConfigError(f"{label}: defaults: no file {display_path(file)}; the path is relative to {label}")
        below = read_with_defaults(file, rename, keeps_null, warnings, (*trail, resolved), known)
        base = overlay(base, below, keeps_null)
    known[resolved] = overlay(base, own, keeps_null) if parents else own
    return known[resolved]


def read_document(path: FilePath, label: str) -> Tree:
    try:
        content = read_at_most(path, MAX_FILE_BYTES).decode("utf-8")
    except FileNotFoundError as error:
        is_ours = path.parts[0] in ("configs", "examples") and not FilePath(path.parts[0]).exists()
        hint = "; `posttrain init all` writes configs/ and examples/ here" if is_ours else near_path(path)
        raise ConfigError(f"{label}: no such config file{hint}") from error
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{label}: cannot be read: {error}") from error
    return parse_document(content, label)


def _parents(own: Tree, label: str) -> list[str]:
    if "defaults" not in own.values:
        return []
    named = own.remove(("defaults",))
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{label}: `defaults:` must be a file name or a list of file names, got {named!r}")
    return named
