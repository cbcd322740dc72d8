"""The schema as a tree of keys, read off the pydantic models: which keys exist, what the defaults are, and what was
most likely meant by a key that does not exist."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from typing import Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from posttrain.config.base import OpenSection, Section, members
from posttrain.config.runs import RUN_CONFIGS, Kind
from posttrain.config.tree import Path, Values, dotted

ANY_NAME = "<name>"
Shape = Literal["section", "named", "free", "value"]
_LIKELY = 0.65
_MAX_LISTED = 14  # fields of a section that are named if none of them is like the key
_MIN_BEGINNING = 3  # letters by which a key that was not written out is known


@dataclass(frozen=True)
class Node:
    """One key. A `section` has known keys below it, a `named` map any names with one shape, a `free` map anything."""

    shape: Shape
    nullable: bool
    children: Mapping[str, Node] = field(default_factory=dict)
    open: bool = False  # a section that carries unknown keys along
    listed: bool = False  # a section that may also be a list of such sections

    def child(self, key: str) -> Node | None:
        if self.shape == "free":
            return _FREE
        if self.shape == "named":
            return self.children[ANY_NAME]
        if self.listed and key.isdecimal():
            return self
        return self.children.get(key) or (_FREE if self.open else None)


_FREE = Node(shape="free", nullable=True)


@cache
def schema_of(kind: Kind) -> Node:
    return schema_of_model(RUN_CONFIGS[kind])


@cache
def schema_of_model(model: type[Section]) -> Node:
    """The keys of a file that is not the config of a run, such as gate.yaml."""
    return _section(model, nullable=False, listed=False)


def _section(model: type[Section], *, nullable: bool, listed: bool) -> Node:
    fields = {info.alias or name: _node(info.annotation) for name, info in model.model_fields.items()}
    return Node("section", nullable, fields, open=issubclass(model, OpenSection), listed=listed)


def _node(annotation: object) -> Node:
    options = list(members(annotation))
    nullable = types.NoneType in options
    lists = [get_args(option)[0] for option in options if get_origin(option) is list]
    models = [option for option in [*options, *lists] if isinstance(option, type) and issubclass(option, Section)]
    if models:
        return _section(models[0], nullable=nullable, listed=models[0] in lists)
    for option in options:
        if get_origin(option) is dict:
            inner = get_args(option)[1]
            if isinstance(inner, type) and issubclass(inner, Section):
                return Node("named", nullable, {ANY_NAME: _section(inner, nullable=False, listed=False)})
            return Node("free", nullable)
    return Node("value", nullable)


def find(root: Node, path: Path) -> Node | None:
    node: Node | None = root
    for key in path:
        node = node.child(key) if node else None
    return node


def is_field(root: Node, path: Path) -> bool:
    """Whether `path` is a field of a section, not just a possible entry of a map."""
    parent = find(root, path[:-1])
    return parent is not None and path[-1] in parent.children


def known_keys(root: Node, path: Path = ()) -> Iterator[Path]:
    """Every key of the schema, sections before what is in them."""
    for key, node in root.children.items():
        here = (*path, key)
        yield here
        yield from known_keys(node, here)


def unknown_keys(root: Node, values: object, path: Path = ()) -> Iterator[Path]:
    """The topmost keys in `values` that the schema does not have."""
    if isinstance(values, list) and root.listed:
        values = {str(index): value for index, value in enumerate(values)}
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        here = (*path, str(key))
        node = root.child(str(key))
        if node is None:
            yield here
        elif node.shape != "free":
            yield from unknown_keys(node, value, here)


def sections_that_are_not_maps(root: Node, values: object, path: Path = ()) -> Iterator[Path]:
    """Sections that were given a plain value, such as `grpo: 3`."""
    if isinstance(values, list) and root.listed:
        values = {str(index): value for index, value in enumerate(values)}
    is_reference = isinstance(values, str) and "${" in values
    if not isinstance(values, dict):
        if not is_reference and not (values is None and root.nullable):
            yield path
        return
    for key, value in values.items():
        node = root.child(str(key))
        if node is not None and node.shape in ("section", "named"):
            yield from sections_that_are_not_maps(node, value, (*path, str(key)))


def schema_defaults(model: type[Section]) -> Values:
    """The defaults that the models themselves have, as plain values. Fields without one are left out."""
    values: Values = {}
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True, validated_data={})
        nested = [one for one in members(info.annotation) if isinstance(one, type) and issubclass(one, Section)]
        if isinstance(default, Section):
            default = default.model_dump(by_alias=True)
        elif default is PydanticUndefined:
            if not nested:
                continue
            default = schema_defaults(nested[0])
        values[info.alias or name] = default
    return values


def hint_for(root: Node, path: Path, read: Node | None = None) -> str:
    """To put behind `unknown key`; `path` is the topmost one that is not known, so that what it lies in is. A key of
    another section is proposed only from `read`: what of `root` is read, if not all of it.
    """
    place = find(root, path[:-1])
    assert place is not None, "the topmost unknown key lies in a known section"
    nearest = _nearest(read or root, place, path)
    hint = f"; did you mean `{dotted(nearest)}`?" if nearest is not None else ""
    if nearest is not None and nearest[:-1] == path[:-1]:
        return hint
    return hint + _listed(place, path[:-1], ";" if nearest is None else "")


def _nearest(root: Node, place: Node, path: Path) -> Path | None:
    """A similar name in the same section, the same name elsewhere, or a very similar one."""
    here = [(_likeness(path[-1], name), (*path[:-1], name)) for name in _fields(place)]
    elsewhere = [(_likeness_elsewhere(path, key), key) for key in _fields_elsewhere(root, path)]
    score, best = max([*here, *elsewhere], default=(0.0, ()), key=lambda pair: pair[0])
    return best if score >= _LIKELY else None


def _fields(section: Node) -> list[str]:
    return [name for name in section.children if name != ANY_NAME]


def _fields_elsewhere(root: Node, path: Path) -> Iterator[Path]:
    """The names of entries are the user's own. They are filled in where the user is among those entries, and nowhere
    else: a name that was never given leads to a place that does not exist."""
    for key in known_keys(root):
        if key[-1] == ANY_NAME:
            continue
        filled = key
        for index, part in enumerate(key):
            if part == ANY_NAME and filled[:index] == path[:index] and index < len(path) - 1:
                filled = (*filled[:index], path[index], *filled[index + 1 :])
        if filled[:-1] != path[:-1] and filled != path[: len(filled)]:
            yield filled


def _likeness(written: str, known: str) -> float:
    shorter, longer = sorted((written, known), key=len)
    is_beginning = longer.startswith(shorter) and len(shorter) >= _MIN_BEGINNING
    alike = SequenceMatcher(None, written, known).ratio()
    return max(alike, 0.85 + 0.1 * alike) if is_beginning else alike


def _likeness_elsewhere(written: Path, known: Path) -> float:
    if written[-1] == known[-1]:  # the right name in the wrong place: the more of the path fits, the likelier
        here = _num_common(written, known)
        return 0.8 + 0.01 * here + 0.03 * _num_common(written[::-1], known[::-1])
    alike = SequenceMatcher(None, written[-1], known[-1]).ratio()
    return 0.75 * max(alike, SequenceMatcher(None, dotted(written), dotted(known)).ratio())


def _num_common(left: Path, right: Path) -> int:
    """How many of their first parts are the same."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _listed(place: Node, path: Path, separator: str) -> str:
    if place.shape == "value":
        return f"{separator} `{dotted(path)}` takes a value and has no keys"
    fields = _fields(place)
    if not fields or len(fields) > _MAX_LISTED:
        return ""
    return f"{separator} {f'`{dotted(path)}`' if path else 'the file'} has {', '.join(fields)}"
