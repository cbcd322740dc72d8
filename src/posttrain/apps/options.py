"""Options of a command as the fields of a dataclass: type and default, and beside them the help and what is accepted.

    max_queue: Annotated[int, Option("samples that may wait; then 429", at_least=0)] = 256

The command line adds the options from it (`cli/overrides_parser.py`), and Python gives the same ones by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from posttrain.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Option:
    """`more_than` and `at_least` are two forms of the lower end."""

    help: str = ""
    metavar: str = ""
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] | None = None

    @property
    def accepted(self) -> str:
        ends = {"at least": self.at_least, "more than": self.more_than, "at most": self.at_most}
        return " and ".join(f"{word} {end:g}" for word, end in ends.items() if end is not None)

    def accepts(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
        )


def options_of(kind: type[DataclassInstance]) -> Iterator[tuple[str, Any, Any, Option]]:
    """Name, type, default and option of the fields that have one."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        for option in getattr(hints[field.name], "__metadata__", ()):
            yield field.name, hints[field.name].__origin__, field.default, option


def check_ranges(options: DataclassInstance, prefix: str = "") -> None:
    """InputError for the first value that its option does not accept."""
    for name, _, _, option in options_of(type(options)):
        value = getattr(options, name)
        if isinstance(value, int | float) and not option.accepts(value):
            flag = f"--{prefix}{name}".replace("_", "-")
            raise InputError(f"{flag} is {value}: {option.accepted} is accepted")
