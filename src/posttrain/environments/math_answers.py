"""Reward 1.0 if the final answer of a completion equals the reference answer, else 0.0. Runs in a worker process.

Two verifiers, by NeMo RL's names. `hf_math_verify` reads both sides as mathematics with the math-verify package and
asks whether they are equal. `dapo_math_verify` compares normalised text, as the DAPO recipe does; it needs no sympy.
Deviations from NeMo RL: a `\\boxed{}` always wins over other ways to state the answer, and after it a last line `####
…`; a verifier that fails leaves the completion unscored instead of scoring 0; numbers that differ are not equal because
both are cut off (`as_math_verify` turns that off); the DAPO verifier also reads `\\boxed{}`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.environments.text_rewards import choice_scorer, last_match, units
from posttrain.files.json_files import JsonMapping

_DAPO_TAIL_CHARACTERS = 300
_LAST_LINE = re.compile(r"^####[ \t]*([^\n]+?)\s*\Z", re.MULTILINE)
_DECIMAL_COMMA = re.compile(r"-?\d+,\d{1,2}")


def math_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    """The scorer for a reward of type math. sympy, about a second, is imported here, not at the first completion."""
    if setup.get("extract") is not None:
        return _extracting(re.compile(setup["extract"]), math_scorer({**setup, "extract": None}))
    verifier_type = setup.get("verifier_type") or "math"
    if verifier_type != "math":
        return choice_scorer(multilingual=verifier_type == "multilingual_multichoice")
    if setup.get("math_verify_impl") == "dapo_math_verify":
        return dapo_score
    return _math_verify_scorer(setup)


def _extracting(pattern: re.Pattern[str], score: Callable[[ScoringItem], float]) -> Callable[[ScoringItem], float]:
    """Scores what the pattern finds, as if it stood in a box."""

    def score_match(item: ScoringItem) -> float:
        answer = last_match(pattern, item.response)
        if answer is None:
            return 0.0
        boxed = answer if last_boxed(answer) is not None else f"\\boxed{{{answer.strip().strip('$')}}}"
        return score(replace(item, response=boxed))

    return score_match


def cosine_math_scorer(setup: JsonMapping) -> Callable[[ScoringItem], Mapping[str, float]]:
    """TRL's `get_cosine_scaled_reward` (arXiv 2502.03373, appendix C) over our verifier. Correctness is a separate
    part of the reward."""
    verify = math_scorer(setup)
    right = (setup["max_value_correct"], setup["min_value_correct"])
    wrong = (setup["min_value_wrong"], setup["max_value_wrong"])

    def score(item: ScoringItem) -> Mapping[str, float]:
        progress = min(len(units(item, "tokens")) / setup["max_length"], 1.0)
        correct = verify(item)
        short, long = right if correct else wrong
        return {"reward": long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * progress)), "correct": correct}

    return score


def reference_text(item: ScoringItem) -> str:
    """The reference as text; without a reference a completion cannot be scored."""
    text = "" if item.reference is None else str(item.reference).strip()
    if not text:
        raise Unscored("the task has no reference answer")
    return text


def _math_verify_scorer(setup: JsonMapping) -> Callable[[ScoringItem], float]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import SympifyError

    # It warns that its own time limits are off. They rely on signals; the pool's limit does not.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    targets = {
        "latex": LatexExtractionConfig(boxed_match_priority=setup.get("boxed_match_priority", 0)),
        "expr": ExprExtractionConfig(),
    }
    response_targets = tuple(targets[kind] for kind in setup.get("match_types", ("latex", "expr")))
    comparison = {
        "float_rounding": setup.get("precision", 6),
        "strict": setup.get("strict", True),
        "allow_set_relation_comp": setup.get("allow_set_relation_comp", False),
    }

    def read(text: str, targets: tuple[object, ...]) -> list[Any]:
        found: list[Any] = parse(text, targets, parsing_timeout=None, raise_on_error=True)
        return found

    def read_reference(text: str) -> list[Any]:
        if setup.get("reference_as") == "written":
            return read(text, response_targets)
        boxed = text if last_boxed(text) is not None else f"\\boxed{{{text}}}"
        found = read(boxed, (LatexExtractionConfig(),))
        # In a box `1,22` is two numbers; alone it may also mean 1.22.
        return found + read(text, (targets["expr"],)) if _DECIMAL_COMMA.fullmatch(text) else found

    def read_response(text: str) -> list[Any]:
        # GSM8K ends with `#### 33`; without this, "the answer as a percentage: 33.3" further up would win.
        line = _LAST_LINE.search(text) if last_boxed(text) is None else None
        try:
            return (read(line[1], response_targets) if line else []) or read(text, response_targets)
        except SympifyError:  # digits of other scripts, which math-verify takes for numbers and sympy cannot read
            return []

    def is_equal(truth: object, answer: object) -> bool:
        equal = bool(verify(truth, answer, timeout_seconds=None, raise_on_error=True, **comparison))
        if not equal or setup.get("as_math_verify"):
            return equal
        return not equal_only_when_cut_off(truth, answer, comparison["float_rounding"])

    def score(item: ScoringItem) -> float:
        reference = reference_text(item)
        expected = read_reference(reference)
        if not expected:
            raise Unscored(f"the reference answer {reference[:80]!r} cannot be read as mathematics")
        # Each side is a list of readings of one answer. One that cannot be compared counts only if no other agrees.
        first_error: Exception | None = None
        for answer in read_response(item.response):
            if divides_by_zero(answer):
                continue
            for truth in expected:
                try:
                    if is_equal(truth, answer):
                        return 1.0
                except Exception as error:
                    if not has_no_value(answer, truth):
                        first_error = first_error or error
        if first_error is not None:
            raise first_error
        return 0.0

    return score


def dapo_score(item: ScoringItem) -> float:
    """1.0 when the last `Answer: …` or `\\boxed{…}` of the last 300 characters is the reference, as normalised text."""
    expected = normalised(last_boxed(reference_text(item)) or reference_text(item))
    answer = stated_answer(item.response[-_DAPO_TAIL_CHARACTERS:])
    return 1.0 if answer is not None and normalised(answer) == expected else 0.0


def stated_answer(text: str) -> str | None:
    """The text after the last `Answer:`, or in the last box if that comes later or on the same line."""
    labels = list(re.finditer(r"(?i)\banswer\s*\**\s*:\s*([^\n]+)", text))
    if not labels:
        return last_boxed(text)
    # Cutting at the label keeps a box that follows it, on the same line or later.
    return last_boxed(text[labels[-1].start() :]) or labels[-1].group(1)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` whose braces close."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None


_REPLACEMENTS = (
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\\[!,;: ]", ""),
    (r"\\[()\[\]]", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\?%|\\\$|[$*]", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (
        r"(?<=\d)\s*(?:degrees?|dollars?|cents?|units?|hours?|minutes?|(?:centi|kilo)?met(?:er|re)s?|cm|inch(?:es)?)\b",
        "",
    ),
)


def normalised(answer: str) -> str:
    """The answer without decoration: dollar signs, spacing, text commands, units, thousands commas, a leading `x =`."""
    answer = answer.strip()
    for pattern, replacement in _REPLACEMENTS:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.split("=")[-1]
    answer = re.sub(r"\s+", "", answer).rstrip(".")
    return re.sub(r"^(-?\d+)\.0+$", r"\1", answer)


# -- numbers -----------------------------------------------------------------------------------------------------------


_DIGITS = 30  # of an exact number that are computed
_EXACT = 1e-25  # relative difference of exact numbers that are equal


def equal_only_when_cut_off(truth: Any, answer: Any, precision: int) -> bool:
    """Whether two numbers that math-verify calls equal differ: exact ones in their first 25 digits, others only if both
    round to zero at `precision` decimals.

    For math-verify, two exact numbers are equal when their difference is 0 after 15 decimals, and two of which one is
    written with a point when they are equal after `precision` decimals. So 1/2004! equals 1/2006!, and 0.0000001 equals
    0.0000002: both round to 0.
    """
    from sympy import Basic, Float, UnevaluatedExpr

    sides = (truth, answer)
    if not all(isinstance(side, Basic) and getattr(side, "is_number", False) for side in sides):
        return False
    if any(side.has(UnevaluatedExpr) for side in sides):  # a percentage: 9 % may be stated as 9
        return False
    try:
        first, second = (side.doit().evalf(_DIGITS) for side in sides)
        size = max(abs(first), abs(second))
        difference = abs(first - second)
        if any(side.has(Float) for side in sides):
            vanish = bool(0 < abs(first) < 0.5 * 10**-precision and 0 < abs(second) < 0.5 * 10**-precision)
            return vanish and bool(difference > 10**-precision * size)
        return bool(difference > _EXACT * size)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False


def divides_by_zero(answer: object) -> bool:
    """Whether the parsed answer contains nan, 1/0 or 0/0. It equals nothing, and comparing it may not terminate."""
    from sympy import Basic, Pow, nan, zoo

    if not isinstance(answer, Basic):
        return False
    powers = answer.atoms(Pow)
    return answer.has(nan, zoo) or any(power.base.is_zero and power.exp.is_negative for power in powers)


def has_no_value(answer: object, truth: object) -> bool:
    """Whether the answer evaluates to nan, or to an infinity that the reference does not have."""
    from sympy import Basic, nan, oo, zoo

    found, expected = _evaluated(answer), _evaluated(truth)
    if not isinstance(found, Basic):
        return False
    is_expected = isinstance(expected, Basic) and expected.has(oo, -oo)
    return bool(found.has(nan, zoo)) or (bool(found.has(oo, -oo)) and not is_expected)


def _evaluated(side: Any) -> Any:
    try:
        return side.doit()
    except Exception:  # the same errors that the comparison raises
        return side
