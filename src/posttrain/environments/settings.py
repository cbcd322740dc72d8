"""The blocks under `env:` as checked, typed values. Knows nothing of processes; a wrong value is a `RewardConfigError`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import InputError

DEFAULT_NUM_WORKERS = 8
DEFAULT_TIMEOUT_S = 10.0
MATH_VERIFIERS = ("hf_math_verify", "dapo_math_verify")
VERIFIER_TYPES = ("math", "english_multichoice", "multilingual_multichoice")

# `stop_strings` is NeMo RL's: it stops the turn after this one, and there is none here.
_MATH_KEYS = ("num_workers", "timeout_s", "math_verify_impl", "verifier_type", "stop_strings")
_FUNCTION_KEYS = ("function", "num_workers", "timeout_s")


class RewardConfigError(InputError):
    """A block under `env:` that cannot work, or a task that names an environment which is not there."""


@dataclass(frozen=True)
class EnvironmentSettings:
    """What every environment has: a name, a number of worker processes, a time limit per completion."""

    name: str
    num_workers: int | None  # None: the default, at most one per core
    timeout_s: float

    def worker_setup(self) -> dict[str, Any]:
        """What a worker needs to know to build its scorer, as plain JSON values."""
        raise AssertionError("only the kinds of environment below are ever built")


@dataclass(frozen=True)
class MathSettings(EnvironmentSettings):
    """Answers checked against a reference: `math_verify_impl` for `verifier_type: math`, or a letter of a choice."""

    math_verify_impl: str = MATH_VERIFIERS[0]
    verifier_type: str = VERIFIER_TYPES[0]

    def worker_setup(self) -> dict[str, Any]:
        return {"kind": "math", "math_verify_impl": self.math_verify_impl, "verifier_type": self.verifier_type}


@dataclass(frozen=True)
class FunctionSettings(EnvironmentSettings):
    """The user's own Python function, `file.py:name`, `package.module:name` or `package.module.name`."""

    function: str
    base_folder: Path

    def worker_setup(self) -> dict[str, Any]:
        return {"kind": "function", "function": self.function, "base_folder": str(self.base_folder)}


def read_settings(mapping: Any, base_folder: Path | None) -> dict[str, EnvironmentSettings]:
    """The environments of a config's `env:`, by name. Values may be mappings, pydantic models or nothing at all."""
    folder = Path.cwd() if base_folder is None else Path(base_folder).expanduser().absolute()
    return {str(name): _read_block(str(name), block, folder) for name, block in _plain("env", mapping).items()}


def _plain(path: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise RewardConfigError(f"{path} is {value!r}: a mapping of settings is needed")
    return dict(value)


def _read_block(name: str, block: Any, base_folder: Path) -> EnvironmentSettings:
    path = f"env.{name}"
    values = {key: value for key, value in _plain(path, block).items() if value is not None}
    if "function" in values:
        _refuse_unknown_keys(path, values, _FUNCTION_KEYS)
        return FunctionSettings(
            name=name,
            num_workers=_num_workers(path, values),
            timeout_s=_timeout_s(path, values),
            function=_function_spec(path, values["function"]),
            base_folder=base_folder,
        )
    if name == "math" or "math_verify_impl" in values or "verifier_type" in values:
        _refuse_unknown_keys(path, values, _MATH_KEYS)
        return MathSettings(
            name=name,
            num_workers=_num_workers(path, values),
            timeout_s=_timeout_s(path, values),
            math_verify_impl=_one_of(path, values, "math_verify_impl", MATH_VERIFIERS),
            verifier_type=_one_of(path, values, "verifier_type", VERIFIER_TYPES),
        )
    raise RewardConfigError(
        f"{path} does not say how to judge a completion: set {path}.function to a Python function "
        f"('rewards.py:my_reward'), or {path}.math_verify_impl to one of {', '.join(MATH_VERIFIERS)}"
    )


def _refuse_unknown_keys(path: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            raise RewardConfigError(f"{path}.{key} is not a setting of this environment; {hint}")


def _num_workers(path: str, values: Mapping[str, Any]) -> int | None:
    value = values.get("num_workers")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise RewardConfigError(f"{path}.num_workers is {value!r}: a whole number of at least 1 is needed")
    return value


def _timeout_s(path: str, values: Mapping[str, Any]) -> float:
    value = values.get("timeout_s", DEFAULT_TIMEOUT_S)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise RewardConfigError(f"{path}.timeout_s is {value!r}: a number of seconds greater than 0 is needed")
    return float(value)


def _one_of(path: str, values: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = values.get(key, choices[0])
    if value not in choices:
        raise RewardConfigError(f"{path}.{key} is {value!r}: one of {', '.join(choices)} is needed")
    return str(value)


def _function_spec(path: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not ({":", "."} & set(value)):
        raise RewardConfigError(
            f"{path}.function is {value!r}: 'file.py:name', 'package.module:name' or 'package.module.name' is needed"
        )
    return value.strip()
