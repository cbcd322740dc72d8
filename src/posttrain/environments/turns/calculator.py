"""A calculator for the model: `env.<name>.turns: calculator`. Exact arithmetic on rational numbers, no more."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from posttrain.environments.turns.tools import MalformedCall, ToolCall, ToolEnvironment, ToolError, schema_of
from posttrain.files.json_files import JsonMapping

_MAX_CHARACTERS = 200
_MAX_EXPONENT = 64
_MAX_BITS = 2048  # of a numerator or denominator: more than a word problem needs

_ABOUT = "Works out an arithmetic expression with + - * / ** and parentheses."
_SCHEMA = schema_of("calculator", _ABOUT, "expression", "for instance (17 + 4) * 2.5")
_SIGNS = str.maketrans("×÷−$", "*/- ")
_INLINE = re.compile(r"<calc>(.*?)(?:</calc>|\Z)", re.DOTALL)


class Calculator(ToolEnvironment):
    """`syntax: json` takes tool calls in the documented format; `inline` takes `<calc>17 * 23</calc>`, which is
    easier to learn for a very small model. `describe: false` keeps the tool out of the prompt, for models that know
    it already."""

    def __init__(self, syntax: Literal["json", "inline"] = "json", describe: bool = True) -> None:
        if syntax not in ("json", "inline"):
            raise ValueError(f"syntax is {syntax!r}: json or inline is needed")
        self.inline = syntax == "inline"
        self.tools = (_SCHEMA,) if describe and not self.inline else ()

    def parse(self, response: str) -> Sequence[ToolCall | MalformedCall]:
        if not self.inline:
            return super().parse(response)
        return [ToolCall("calculator", {"expression": expression}) for expression in _INLINE.findall(response)]

    def call(self, state: Any, name: str, arguments: JsonMapping) -> str:
        expression = arguments.get("expression")
        if name != "calculator" or not isinstance(expression, str):  # without schemas in the prompt nothing has checked
            raise ToolError('the only tool is calculator, with one argument: {"expression": "17 * 23"}')
        return shown(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The value of an arithmetic expression. `ToolError` if it has none."""
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {_MAX_CHARACTERS} characters")
    text = expression.translate(_SIGNS).replace("^", "**")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip()
    text = re.sub(r"(?<![\w.])0+(?=\d)", "", text)  # 07 is a number, though not in Python
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression.strip()[:60]!r} is not an arithmetic expression") from None
    return _value(tree, text)


_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # As it was written, not as the nearest float: 0.1 is a tenth.
        written = ast.get_source_segment(text, node) or str(node.value)
        power_of_ten = re.search(r"e([+-]?\d+)$", written.lower().replace("_", ""))
        if power_of_ten and abs(int(power_of_ten[1])) > _MAX_BITS:  # writing it out first would take too long
            raise ToolError("the number is too large")
        try:
            return _bounded(Fraction(written.replace("_", "")))
        except ValueError:
            raise ToolError(f"{written[:40]!r} is not a decimal number") from None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            try:
                return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
            except ZeroDivisionError:
                raise ToolError("division by zero") from None
    raise ToolError("only numbers, + - * / // % ** and parentheses are understood")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number between -{_MAX_EXPONENT} and {_MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the number is too large")
    return value


def shown(value: Fraction) -> str:
    """A whole number in full, any other to ten significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        raise ToolError("the number is too large") from None
