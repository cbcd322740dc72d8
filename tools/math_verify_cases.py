"""Compares the math reward with Math-Verify's own tests: what they demand, and what the package itself says.

pip download --no-binary :all: --no-deps math-verify && tar xf math_verify-*.tar.gz
python tools/math_verify_cases.py math_verify-0.9.0

Deviations are listed in docs/rewards.md; run this after an update of the package.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.config.rewards import parse_reward
from posttrain.environments import math_answers
from posttrain.environments.item import ScoringItem

_LIMIT_S = 20


@dataclass(frozen=True)
class Case:
    place: str
    gold: str
    pred: str
    expected: int
    settings: dict[str, Any] = field(default_factory=dict)


def cases_of(module: ModuleType) -> Iterator[Case]:
    """The parametrized cases of a test module that compare two texts."""
    for name, test in list(vars(module).items()):
        for mark in getattr(test, "pytestmark", ()):
            if mark.name != "parametrize" or not name.startswith("test_"):
                continue
            names = [part.strip() for part in mark.args[0].split(",")]
            for values in mark.args[1]:
                given = dict(zip(names, values, strict=True))
                expected = given.get("expected", given.get("result"))
                if isinstance(expected, int) and {"gold", "pred"} <= given.keys():
                    settings = _settings_used(module, test, given)
                    yield Case(f"{module.__name__}.{name}", given["gold"], given["pred"], int(expected), settings)


def _settings_used(module: ModuleType, test: Callable[..., None], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which the test calls `compare_strings`."""
    used: dict[str, Any] = {}

    def record(gold: object, pred: object, match_types: object = ("latex", "expr"), **others: Any) -> int:
        used.update(others, match_types=match_types)
        return int(given["expected"])

    original = getattr(module, "compare_strings", None)
    if original is None:  # the defaults of parse and verify
        return used
    module.compare_strings = record  # type: ignore[attr-defined]
    try:
        test(**given)
    finally:
        module.compare_strings = original  # type: ignore[attr-defined]
    return used


def verdict(case: Case, **settings: Any) -> float | str:
    """What the reward says; the error where it says nothing."""
    setup = parse_reward({"type": "math", **settings}).model_dump(mode="json", by_alias=True)
    signal.alarm(_LIMIT_S)
    try:
        return math_answers.math_scorer(setup)(ScoringItem(prompt="", response=case.pred, reference=case.gold))
    except Exception as error:
        return f"unscored: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def tool_verdict(case: Case) -> float:
    """math-verify with its defaults on a reference in a box, as NeMo RL calls it."""
    from math_verify import parse, verify

    boxed = case.gold if math_answers.last_boxed(case.gold) is not None else f"\\boxed{{{case.gold}}}"
    return float(verify(parse(boxed), parse(case.pred)))


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    files = sorted(folder.glob("tests/test_*.py"))
    cases = [case for file in files for case in cases_of(importlib.import_module(f"tests.{file.stem}"))]
    print(f"{len(cases)} cases in {len(files)} files")
    for title, ours, theirs in (
        ("what the tests demand, with their settings", _with_their_settings, lambda case: float(case.expected)),
        ("what math-verify says with its defaults", verdict, tool_verdict),
    ):
        different = [(case, found, wanted) for case in cases if (found := ours(case)) != (wanted := theirs(case))]
        print(f"\n{title}: {len(cases) - len(different)} of {len(cases)} agree")
        for case, found, wanted in different:
            print(f"  {case.place}: reference {case.gold!r}, answer {case.pred!r}: {found}, there {wanted}")


def _with_their_settings(case: Case) -> float | str:
    return verdict(case, reference_as="written", **case.settings)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"longer than {_LIMIT_S} s")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _too_long)
    main(Path(sys.argv[1]).absolute())
