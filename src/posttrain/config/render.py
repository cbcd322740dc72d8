"""A config as YAML text: plain, or with a remark at each value about where it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from posttrain.config.tree import OVERRIDE_MARK, REPLACES_BUILT_IN, Path, Values, dotted
from posttrain.config.yaml_files import parse_value
from posttrain.files.redaction import REFERENCE, Replace, without_credentials

REMARK_COLUMN = 60


def with_override_marks(values: object, defaults: object, path: Path = ()) -> Any:
    """`values` with `_override_: true` in maps that lack a key of the default, which loading would bring back."""
    if not isinstance(values, dict) or not isinstance(defaults, dict) or path in REPLACES_BUILT_IN:
        return values
    marked = {key: with_override_marks(inner, defaults.get(key), (*path, key)) for key, inner in values.items()}
    return {OVERRIDE_MARK: True, **marked} if set(defaults) - set(values) and values else marked


class Expression(str):
    """A text with `${...}` that is to be resolved when it is read."""

    __slots__ = ()


def without_credentials_of_config(
    values: object, expressions: Mapping[str, str], replace: Replace, path: Path = ()
) -> Any:
    """`values` without credentials; one that was written as `${oc.env:…}` is that reference."""
    if isinstance(values, dict):
        return {
            key: without_credentials_of_config(inner, expressions, replace, (*path, str(key)))
            for key, inner in values.items()
        }
    if isinstance(values, list | tuple):
        return [without_credentials_of_config(inner, expressions, replace, path) for inner in values]
    cleaned = without_credentials(values, path[-1] if path else "", replace)
    if cleaned == values or not isinstance(cleaned, str):
        return cleaned
    written = expressions.get(dotted(path), "")
    if REFERENCE.search(written):
        return Expression(written)
    return Expression(cleaned) if REFERENCE.search(cleaned) else cleaned


def to_yaml_text(values: Values, remark: Callable[[Path], str] | None = None) -> str:
    """YAML that loads to `values` again. `remark` gives the comment behind a value, or nothing."""
    lines: list[str] = []
    _write_map(values, (), remark or (lambda path: ""), lines)
    return "\n".join(lines) + "\n"


def _write_map(values: Values, path: Path, remark: Callable[[Path], str], lines: list[str]) -> None:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, str(key))
        name = f"{indent}{_flow(str(key))}:"
        if isinstance(value, dict) and value:
            if not path and lines:
                lines.append("")
            lines.append(name)
            _write_map(value, here, remark, lines)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            lines.append(_with_remark(name, remark(here)))
            lines += [f"{indent}  - {_flow(item)}" for item in value]
        else:
            lines.append(_with_remark(f"{name} {_flow(value)}", remark(here)))


def _with_remark(line: str, remark: str) -> str:
    return f"{line:<{REMARK_COLUMN}}  # {remark}" if remark else line


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not plainly a word, and keeps `${` of a resolved value from being resolved again."""


_WORD = re.compile(r"(?!\.\.\.$)[A-Za-z_./][A-Za-z0-9_./\-]*")  # "..." ends a document


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_word = _WORD.fullmatch(text) is not None and parse_value(text) == text
    escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", escaped, style=None if is_word else '"')


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(
    Expression, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')
)


def _flow(value: object) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, sort_keys=False, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...").strip()
