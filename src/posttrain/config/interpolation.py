"""`${...}`: references to other keys, and the four small functions that configs may use. OmegaConf does the work."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config.base import ConfigError
from posttrain.config.tree import Path, Tree, Values, dotted, leaves
from posttrain.files.redaction import shown_setting

MISSING = "???"
MAX_EXPANDED = 100_000  # characters of one value, with every reference written out
MAX_REFERENCES = 100  # in one text; the parser of OmegaConf is slow
MAX_EXPRESSION = 10_000  # characters of a text with references
_KEY = re.compile(r"(\.*)([\w\-][\w\-.\[\]]*)")
Number = int | float


def _whole(value: Number) -> Number:
    """An exact result stays an integer, so that `${div:512,4}` fits where a count is expected."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _arithmetic(name: str, compute: Callable[[Number, Number], Number]) -> Callable[[Any, Any], Number]:
    def resolver(left: Any, right: Any) -> Number:
        for operand in (left, right):
            if isinstance(operand, bool) or not isinstance(operand, int | float):
                raise ValueError(f"{name} takes two numbers, got {operand!r}")
        result = compute(left, right)
        both_whole = isinstance(left, int) and isinstance(right, int)
        return _whole(result) if both_whole else result

    return resolver


RESOLVERS: dict[str, Callable[[Any, Any], Number]] = {
    "add": _arithmetic("add", lambda left, right: left + right),
    "mul": _arithmetic("mul", lambda left, right: left * right),
    "div": _arithmetic("div", lambda left, right: left / right),
    "max": _arithmetic("max", max),
}


def resolve(tree: Tree) -> Values:
    """The values of `tree` with every `${...}` replaced by what it stands for."""
    _register_resolvers()
    _check_nothing_is_missing(tree)
    _check_sizes(tree)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree.values), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(tree, error)) from error
    except RecursionError as error:
        raise ConfigError("references (`${…}`) are nested too deep to be resolved") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


@cache
def _register_resolvers() -> None:
    for name, function in RESOLVERS.items():
        OmegaConf.register_resolver(name, function, replace=True)


def _check_nothing_is_missing(tree: Tree) -> None:
    missing = [path for path, value in leaves(tree.values) if value == MISSING]
    if missing:
        lines = [f"{tree.origin(path)}: `{dotted(path)}` is `???`: a value must be given" for path in missing]
        lines[-1] += f", e.g. {dotted(missing[0])}=… on the command line"
        raise ConfigError("\n".join(lines))


def _check_sizes(tree: Tree) -> None:
    """Refuses references to references that double at each step: thirty short lines are gigabytes."""
    sizes: dict[Path, int] = {}

    def size_of(path: Path, value: object) -> int:
        if path in sizes:
            return sizes[path]
        sizes[path] = 1  # a circle of references ends here; OmegaConf reports it
        if isinstance(value, dict):
            size = sum(size_of((*path, str(key)), inner) for key, inner in value.items())
        elif isinstance(value, list):
            size = sum(size_of((*path, str(index)), inner) for index, inner in enumerate(value))
        else:
            size = len(value) if isinstance(value, str) else 1
        if isinstance(value, str) and "${" in value:
            if len(value) > MAX_EXPRESSION or value.count("${") > MAX_REFERENCES:
                raise refused(path, value, f"has more than {MAX_REFERENCES} references or {MAX_EXPRESSION} characters")
            size += sum(size_of(target, tree.get(target)) for target in targets(path, value))
            if size > MAX_EXPANDED:
                raise refused(path, value, f"comes to more than {MAX_EXPANDED} characters, its references written out")
        sizes[path] = size
        return size

    def refused(path: Path, text: str, why: str) -> ConfigError:
        return ConfigError(f"{tree.origin(path)}: `{dotted(path)}` = {text!r:.100} {why}")

    def targets(path: Path, text: str) -> list[Path]:
        """Every key in `text` that could be meant, also as the argument of a function."""
        absent = object()
        found = []
        for dots, name in _KEY.findall(text):
            base = path[: -len(dots)] if dots else ()
            target = (*base, *re.sub(r"\[(\w+)\]", r".\1", name).strip(".[]").split("."))
            if tree.get(target, absent) is not absent:
                found.append(target)
        return found

    for path, value in leaves(tree.values):
        size_of(path, value)


def _explain(tree: Tree, error: OmegaConfBaseException) -> str:
    key = str(getattr(error, "full_key", None) or "")
    path = tuple(key.replace("[", ".").replace("]", "").split("."))
    reason = str(getattr(error, "msg", None) or error).split("\n")[0]
    if not key:
        return f"cannot be resolved: {reason:.200}"
    return f"{tree.origin(path)}: `{key}` = {shown_setting(key, tree.get(path)):.200} cannot be resolved: {reason:.200}"
