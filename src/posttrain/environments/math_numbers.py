"""Two corrections of math-verify's verdicts on numbers. Runs inside a worker process; both sides are sympy expressions.

Two exact numbers are equal for math-verify when their difference is 0 after 15 decimals, and two of which one is
written with a point when they are equal after `precision` decimals. So 1/2004! equals 1/2006!, and 0.0000001 equals
0.0000002: both round to 0. And if an answer has no value (0/0, 1/0), the comparison may raise an error, although the
answer is just wrong.
"""

from __future__ import annotations

from typing import Any

_DIGITS = 30  # of an exact number that are computed
_EXACT = 1e-25  # relative difference of exact numbers that are equal


def equal_only_when_cut_off(truth: Any, answer: Any, precision: int) -> bool:
    """Whether two numbers that math-verify calls equal differ: exact ones in their first 25 digits, others only if both
    round to zero at `precision` decimals.
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
    """Whether the parsed answer contains nan, 1/0 or 0/0. Such an answer equals nothing; its comparison may not
    terminate.
    """
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
