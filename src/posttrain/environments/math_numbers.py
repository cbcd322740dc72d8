"""Two corrections of math-verify's verdicts on numbers. Runs inside a worker process; both sides are sympy expressions.

Two exact numbers are equal for math-verify when their difference is 0 after 15 decimals, and two of which one is written with
a point when they are equal after `precision` decimals. So 1/2004! equals 1/2006!, and 0.0000001 equals 0.0000002: nothing is
left of either. And where an answer has no value (0/0, 1/0), comparing it may raise an error, though it is merely wrong.
"""

from __future__ import annotations

from typing import Any

_DIGITS = 30  # of an exact number that are computed
_EXACT = 1e-25  # relative difference of exact numbers that are equal


def equal_only_when_cut_off(truth: Any, answer: Any, precision: int) -> bool:
    """Whether two numbers that math-verify calls equal differ: exact ones in their first 25 digits, others only if nothing
    but zeros is left of either after `precision` decimals."""
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
    """Whether nan, 1/0 or 0/0 stands in the answer as it was read. Such an answer equals nothing; comparing it may not end."""
    from sympy import Basic, Pow, nan, zoo

    if not isinstance(answer, Basic):
        return False
    powers = answer.atoms(Pow)
    return answer.has(nan, zoo) or any(power.base.is_zero and power.exp.is_negative for power in powers)


def has_no_value(answer: object, truth: object) -> bool:
    """Whether the answer comes to nan, or to an infinity that the reference does not have."""
    from sympy import Basic, nan, oo, zoo

    found, expected = _evaluated(answer), _evaluated(truth)
    if not isinstance(found, Basic):
        return False
    is_expected = isinstance(expected, Basic) and expected.has(oo, -oo)
    return bool(found.has(nan, zoo)) or (bool(found.has(oo, -oo)) and not is_expected)


def _evaluated(side: Any) -> Any:
    try:
        return side.doit()
    except Exception:  # the very errors that comparing raises
        return side
