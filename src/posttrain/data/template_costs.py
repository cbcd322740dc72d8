"""What the operations of a chat template cost, known before they run: characters that they read and build.

A table for the methods of texts, lists and maps, one for Jinja's filters and one for its tests. What is in none of them
is refused, so a template cannot find an operation whose cost nobody knows. Independent of how templates are compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_STEPS = 3_000_000  # of one rendering: each part of a loop's body counts; some seconds
STEPS_PER_MESSAGE = 10_000
MAX_CHARACTERS = 2**26  # read and built in one rendering
CHARACTERS_PER_CHARACTER = 100  # more, for each character of the conversation
MAX_NUMBER = 10**7  # a width or a count; no template has a use for larger ones
MAX_DEPTH = 200  # of lists in lists
_MAX_BITS_OF_POWER = 4096

Cost = Callable[..., int]


@dataclass(slots=True)
class Budget:
    steps: int
    characters: int


budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


def spend(characters: int, steps: int = 1) -> None:
    left = budget.get()
    if left is not None:
        left.characters -= characters
        left.steps -= steps
        if left.characters < 0:
            raise SecurityError(f"it builds texts or lists of more than {MAX_CHARACTERS} characters or items")
        if left.steps < 0:
            raise SecurityError(f"it needs more than {MAX_STEPS} steps")


_WITH_CONTENT = (list, tuple, Mapping, range, KeysView, ValuesView, ItemsView, Namespace)


def size(value: Any) -> int:
    """The characters of a value written as text, about; a list that contains another twice counts it twice."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 8
    if not isinstance(value, _WITH_CONTENT):
        return 32
    left = budget.get()
    most = MAX_CHARACTERS if left is None else left.characters
    total, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str | bytes):
                total += len(one) + 4
            elif isinstance(one, int):
                total += one.bit_length() // 3 + 8
            else:
                total += 8 * len(one) if isinstance(one, range) else 32
                inner += _parts(one)
            if total + len(inner) > most:
                raise SecurityError(f"it builds texts or lists of more than {MAX_CHARACTERS} characters or items")
        if not inner:
            return total
        level = inner
    raise SecurityError(f"it nests lists more than {MAX_DEPTH} deep")


def _parts(value: Any) -> Iterable[Any]:
    """The values within, of what Python writes with its content."""
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple | KeysView | ValuesView | ItemsView) else ()


def length(value: Any) -> int:
    """The number of characters or items of a value that has a length."""
    return len(value) if isinstance(value, str | bytes | list | tuple | Mapping | range | KeysView | ValuesView) else 1


def sizes(*values: Any, **named: Any) -> int:
    return sum(map(size, (*values, *named.values())))


def number_only(value: Any, *rest: Any) -> int:
    """Of tests that compute `value % number`: a text would be formatted."""
    if not isinstance(value, int | float):
        raise SecurityError(f"it asks whether {type(value).__name__} is odd, even or divisible")
    return 1


def check_number(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise SecurityError(f"it uses the number {value}; numbers up to {MAX_NUMBER} are accepted")


# -- operators ---------------------------------------------------------------------------------------------------------


def cost_of_operator(operator: str, left: Any, right: Any) -> int:
    if operator == "%":
        return cost_of_percent(left, right) if isinstance(left, str | bytes) else 0
    if operator == "+":
        return length(left) + length(right)
    if isinstance(left, int | float) and isinstance(right, int | float):
        if (operator == "*" and abs(left) * abs(right) > MAX_NUMBER) or (operator == "**" and _is_large(left, right)):
            raise SecurityError(f"it computes {left} {operator} {right}; numbers up to {MAX_NUMBER} are accepted")
        return 0
    sequence, count = (right, left) if isinstance(left, int) else (left, right)
    return length(sequence) * max(count, 0) if isinstance(count, int) else 0


def _is_large(base: float, exponent: float) -> bool:
    if abs(exponent) > 64:
        return True
    return isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS_OF_POWER


def cost_of_percent(text: Any, values: Any) -> int:
    """Of `text % values`: every field may hold all values, at the largest width."""
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    if re.search(r"%[^%a-zA-Z]*\*", text):
        raise SecurityError("it formats with a width that is a value (`%*d`)")
    return len(text) + text.count("%") * (10 * size(values) + _largest_number(text))


def cost_of_format(text: str, *values: Any, **named: Any) -> int:
    if re.search(r"\{[^{}]*:[^{}]*\{", text):
        raise SecurityError("it formats with a width that is a value (`{:{}}`)")
    widths = [abs(value) for value in (*values, *named.values()) if isinstance(value, int)]
    largest = max([_largest_number(text), *widths])
    return len(text) + text.count("{") * (10 * sizes(*values, **named) + largest)


def _largest_number(text: str) -> int:
    numbers = [int(digits.lstrip("0")[:12] or 0) for digits in re.findall(r"\d+", text)]
    return max(numbers, default=0) * 10


# -- methods -----------------------------------------------------------------------------------------------------------


def _linear(text: Any, *values: Any, **named: Any) -> int:
    return 4 * size(text) + sizes(*values, **named)


def _one(*values: Any, **named: Any) -> int:
    return 1


def _deep(value: Any, *values: Any, **named: Any) -> int:
    return sizes(value, *values, **named)


def _widened(text: Any, width: int = 80, *rest: Any, **named: Any) -> int:
    return size(text) + max(int(width), 0)


def _replaced(text: Any, old: Any = "", new: Any = "", *rest: Any, **named: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return 2 * len(text) + (text.count(old) if old else len(text) + 1) * len(new)


_BYTES_OF_PIECE = 64


def _split(text: str, sep: Any = None, *rest: Any, **named: Any) -> int:
    sep = named.get("sep", sep)
    pieces = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    return 2 * len(text) + _BYTES_OF_PIECE * pieces


def _lines(text: str, *rest: Any, **named: Any) -> int:
    return len(text) * _BYTES_OF_PIECE // 2


def _tabs(text: str, tabsize: int = 8) -> int:
    return len(text) * max(int(tabsize), 1)


def _joined(separator: Any, items: Iterable[Any] = (), *rest: Any, **named: Any) -> int:
    return sizes(items) + length(items) * size(separator)


_LINEAR_METHODS = """
capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric
isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rstrip
startswith strip swapcase title upper encode
"""
_METHODS: tuple[tuple[type | tuple[type, ...], dict[str, Cost]], ...] = (
    (
        str,
        dict.fromkeys(re.findall(r"\w+", _LINEAR_METHODS), _linear)
        | dict.fromkeys(("center", "ljust", "rjust", "zfill"), _widened)
        | {"replace": _replaced, "split": _split, "rsplit": _split, "splitlines": _lines, "expandtabs": _tabs}
        | {"join": _joined},
    ),
    (bytes, {"decode": _linear}),
    ((list, tuple, range), {"index": _deep, "count": _deep, "copy": lambda items: len(items)}),
    (
        dict,
        {
            "get": lambda items, key, *rest: size(key),
            "keys": _one,
            "values": _one,
            "items": _one,
            "copy": lambda items: len(items),
        },
    ),
    ((int, float), {"bit_length": _one, "is_integer": _one}),
    ((KeysView, ValuesView, ItemsView), {}),
)


def cost_of_method(owner: Any, name: str) -> Cost | None:
    """The cost of a method; None if `owner` is not of a type of Python's own."""
    for kind, costs in _METHODS:
        if isinstance(owner, kind):
            if name not in costs:
                raise SecurityError(f"it calls the method {name!r} of a {type(owner).__name__}, which is not accepted")
            return costs[name]
    return None


# -- filters and tests -------------------------------------------------------------------------------------------------


class Lazy:
    """The items of a filter that has not run yet, such as `map`; each counts as a step."""

    def __init__(self, items: Iterator[Any], source: Any) -> None:
        self._items = items
        self.depth: int = source.depth + 1 if isinstance(source, Lazy) else 0
        if self.depth > MAX_DEPTH:
            raise SecurityError(f"it nests filters more than {MAX_DEPTH} deep")

    def __iter__(self) -> Lazy:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        spend(1)
        return item


def _written(value: Any, *rest: Any, **named: Any) -> int:
    return 6 * size(value)  # escaped


def _json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *rest: Any) -> int:
    total = size(value)
    parts = total // 4 + 1 if isinstance(value, list | tuple | Mapping) else 1
    width = indent if isinstance(indent, int) else length(indent) if isinstance(indent, str) else 0
    per_part = max(width, 0) * _depth(value) + (sizes(separators) if separators is not None else 0)
    return (12 if ensure_ascii else 6) * total + parts * per_part


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level, depth = list({id(part): part for one in level for part in _parts(one)}.values()), depth + 1
    return depth


def _indented(text: Any, width: Any = 4, *rest: Any, **named: Any) -> int:
    return length(text) + (str(text).count("\n") + 2) * (len(width) if isinstance(width, str) else max(int(width), 0))


def _grouped(items: Any, count: Any = 1, *rest: Any, **named: Any) -> int:
    return length(items) + _BYTES_OF_PIECE * max(int(count), 1)


def _sorted(items: Any, *rest: Any, **named: Any) -> int:
    return 20 * size(items)


def _summed(items: Any, attribute: Any = None, start: Any = 0, *rest: Any) -> int:
    if not isinstance(start, int | float):
        raise SecurityError("it joins lists with `sum`")
    return length(items)


def _formatted(text: Any, *values: Any, **named: Any) -> int:
    return cost_of_percent(text, named or values)


def _long(items: Any, *rest: Any, **named: Any) -> int:
    return length(items)


def _by_name(*names: str, cost: Cost) -> dict[str, Cost]:
    return dict.fromkeys(names, cost)


FILTERS: dict[str, Cost] = {
    **_by_name("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "round", "safe", cost=_one),
    **_by_name("list", "map", "random", "reject", "rejectattr", "reverse", "select", "selectattr", cost=_long),
    **_by_name("capitalize", "int", "float", "lower", "title", "trim", "upper", "filesizeformat", cost=_linear),
    **_by_name("e", "escape", "forceescape", "string", "urlencode", cost=_written),
    **_by_name("dictsort", "groupby", "max", "min", "sort", "unique", cost=_sorted),
    **_by_name("batch", "slice", cost=_grouped),
    "center": _widened,
    "truncate": _linear,
    "wordcount": _lines,
    "indent": _indented,
    "replace": _replaced,
    "sum": _summed,
    "format": _formatted,
    "tojson": _json,
    "join": lambda items, separator="", *rest, **named: _joined(separator, items),
}
CONSUMING = ("join", "sort", "unique", "groupby", "max", "min", "sum", "list")  # of them, those that need all items
TESTS = re.findall(r"\S+", "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")  # that read
