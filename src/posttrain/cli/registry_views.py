"""Versions, history and differences of the registry, drawn in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.apps.ship.registry.lineage import Lineage
from posttrain.apps.ship.registry.stages import HistoryEntry
from posttrain.apps.ship.registry.version import ABSENT, Difference, ModelVersion
from posttrain.files.json_files import JsonObject
from posttrain.reporting.wording import printable

STAGE_STYLES = {"production": "green", "canary": "yellow", "candidate": "", "archived": "bright_black"}
MAX_SHOWN = 44


class _Console(Console):
    """Names, notes and metrics come from files and from others: their control characters are shown."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(_plain(each) for each in objects), **options)


class _Table(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(_plain(cell) for cell in cells), **options)


def _plain(value: object) -> Any:
    return printable(value) if isinstance(value, str) else value


def _console() -> Console:
    # Piped output is not cut to 80 columns, so that it can be searched.
    width = None if sys.stdout.isatty() else 200
    return _Console(markup=False, emoji=False, highlight=False, width=width)


def _table(*columns: str) -> Table:
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for column in columns:
        table.add_column(column, justify="right" if column in ("version", "#") else "left")
    return table


def show_versions(versions: Sequence[ModelVersion]) -> None:
    table = _table("model", "version", "stage", "gate", "base model", "added", "by", "note")
    for version in versions:
        table.add_row(
            version.name,
            str(version.version),
            version.stage,
            version.lineage.verdict or ABSENT,
            version.lineage.base_model or ABSENT,
            _when(version.at),
            version.by,
            version.note,
            style=STAGE_STYLES[version.stage],
        )
    _console().print(table)


def show_version(version: ModelVersion, history: Sequence[HistoryEntry], damage: list[str] | None) -> None:
    console, lineage = _console(), version.lineage
    console.print(f"{version.reference}  {version.stage}", style=f"bold {STAGE_STYLES[version.stage]}")
    facts = {
        "added": f"{_when(version.at)} by {version.by}",
        "note": version.note,
        "files": f"{len(version.files)} in {version.path}" + (" (in place)" if version.in_place else ""),
        "uploaded to": version.uploaded_to,
        "base model": lineage.base_model,
        "data": "\n".join(f"{name}  {_short(digest) or 'not hashed'}" for name, digest in lineage.data.items()),
        "config": f"{len(lineage.config)} keys, sha256 {_short(lineage.config_sha256)}" if lineage.config else None,
        "code": lineage.code_version,
        "judged": _judged(lineage),
        "gate": "\n".join([lineage.verdict or ABSENT, *(lineage.gate or {}).get("reasons", [])]),
        "metrics": "\n".join(f"{name}  {value:.6g}" for name, value in lineage.metrics.items()),
    }
    grid = _Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    for name, value in facts.items():
        if value:
            grid.add_row(name, value)
    console.print(grid)
    own = [entry for entry in history if any(move.version == version.version for move in entry.moves)]
    if own:
        console.print()
        console.print(_history_table(own))
    if damage is not None:
        console.print()
        for line in damage:
            console.print(f"damaged: {line}", style="red")
        if not damage:
            console.print(f"{len(version.files)} files are what was registered", style="green")


def show_history(name: str, entries: Sequence[HistoryEntry]) -> None:
    if not entries:
        print(f"{name}: nothing has been promoted yet")
        return
    _console().print(_history_table(entries))


def _history_table(entries: Sequence[HistoryEntry]) -> Table:
    table = _table("#", "when", "who", "what", "why")
    for entry in entries:
        change = entry.change
        forced = " (forced)" if change.forced else ""
        what = _moves(entry) + forced
        table.add_row(
            str(change.ordinal),
            _when(change.at),
            change.by,
            what,
            change.why,
            style="bright_black" if entry.refused else "",
        )
    return table


def describe_entry(entry: HistoryEntry) -> str:
    return f"{_moves(entry)}; change {entry.change.ordinal}, by {entry.change.by}: {entry.change.why}"


def _moves(entry: HistoryEntry) -> str:
    if entry.refused:
        return f"{entry.change.action} of version {entry.change.version} refused: {entry.refused}"
    moves = sorted(entry.moves, key=lambda move: move.version != entry.change.version)
    changes = [f"version {move.version}: {move.before} -> {move.after}" for move in moves]
    return ", ".join(changes) or f"version {entry.change.version} was {entry.change.to} already"


def history_row(entry: HistoryEntry) -> JsonObject:
    moves = [{"version": move.version, "from": move.before, "to": move.after} for move in entry.moves]
    return {"ordinal": entry.change.ordinal, **entry.change.to_row(), "moves": moves, "refused": entry.refused}


def show_differences(left: ModelVersion, right: ModelVersion, found: Sequence[Difference]) -> None:
    if not found:
        print(f"versions {left.version} and {right.version} of {left.name} do not differ")
        return
    table = _table("", "key", f"version {left.version}", f"version {right.version}", "change")
    section = ""
    for difference in found:
        shown = "" if difference.section == section else difference.section
        section = difference.section
        table.add_row(shown, difference.key, _value(difference.left), _value(difference.right), _change(difference))
    _console().print(table)


def _change(difference: Difference) -> str:
    left, right = difference.left, difference.right
    if difference.section != "metrics" or not isinstance(left, int | float) or not isinstance(right, int | float):
        return ""
    return f"{right - left:+.4g}"


def _value(value: object) -> str:
    text = ABSENT if value is None else f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _when(timestamp: str) -> str:
    return timestamp[:19].replace("T", " ")


def _judged(lineage: Lineage) -> str | None:
    if other := lineage.judged_another:
        return f"the files of {other}, not these"
    return f"{lineage.judged_unknown}, not known to be this model" if lineage.judged_unknown else None


def _short(digest: str | None) -> str:
    return digest[:12] if digest else ""
