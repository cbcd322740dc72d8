"""`${...}`: references to other keys, and the four small functions that configs may use. OmegaConf does the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config.errors import ConfigError
from posttrain.config.tree import Tree, Values, dotted, leaves
from posttrain.redaction import shown_setting

MISSING = "???"
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
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree.values), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(tree, error)) from error
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


def _explain(tree: Tree, error: OmegaConfBaseException) -> str:
    key = str(getattr(error, "full_key", None) or "")
    path = tuple(key.replace("[", ".").replace("]", "").split("."))
    reason = str(getattr(error, "msg", None) or error).split("\n")[0]
    if not key:
        return f"cannot be resolved: {reason}"
    return f"{tree.origin(path)}: `{key}` = {shown_setting(key, tree.get(path))} cannot be resolved: {reason}"
