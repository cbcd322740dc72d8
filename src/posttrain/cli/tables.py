"""Tables and lists of facts in a terminal or a pipe, for the commands that print them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.reporting.wording import printable

QUIET = "bright_black"  # headings and names
_FILE_WIDTH = 200  # piped output is not cut to 80 columns, so that it can be searched


class _Console(Console):
    """Names, notes and metrics come from files and from others: their control characters are shown."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(_plain(each) for each in objects), **options)


class _Table(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(_plain(cell) for cell in cells), **options)


def _plain(value: object) -> Any:
    return printable(value) if isinstance(value, str) else value


def console(*, soft_wrap: bool = True) -> Console:
    """Without `soft_wrap`, long lines are broken at words."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return _Console(markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap, width=width)


def table(*columns: str, right: Collection[str] | None = None, **options: Any) -> Table:
    """`right`: columns of numbers; all but the first by default."""
    settings = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), "header_style": QUIET, **options}
    made = _Table(**settings)
    for index, column in enumerate(columns):
        is_right = index > 0 if right is None else column in right
        made.add_column(column, justify="right" if is_right else "left")
    return made


def facts(values: Mapping[str, str | None]) -> Table:
    """A line for each name that has a value."""
    grid = _Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True)
    grid.add_column()
    for name, value in values.items():
        if value:
            grid.add_row(name, value)
    return grid
