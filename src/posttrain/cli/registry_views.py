"""Versions, history and differences of the registry, drawn in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.apps.ship.registry.stages import HistoryEntry
from posttrain.apps.ship.registry.version import ABSENT, Difference, ModelVersion
from posttrain.cli.tables import QUIET, console, facts, table
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

STAGE_STYLES = {"production": "green", "canary": "yellow", "candidate": "", "archived": QUIET}
MAX_SHOWN = 44


def show_versions(versions: Sequence[ModelVersion]) -> None:
    rows = table("model", "version", "stage", "gate", "base model", "added", "by", "note", right=("version",))
    for version in versions:
        rows.add_row(
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
    console(soft_wrap=False).print(rows)


def show_version(version: ModelVersion, history: Sequence[HistoryEntry], damage: list[str] | None) -> None:
    out, lineage = console(soft_wrap=False), version.lineage
    out.print(f"{version.reference}  {version.stage}", style=f"bold {STAGE_STYLES[version.stage]}")
    judged = f"{lineage.judged_unknown}, not known to be this model" if lineage.judged_unknown else None
    if other := lineage.judged_another:
        judged = f"the files of {other}, not these"
    about = {
        "added": f"{_when(version.at)} by {version.by}",
        "note": version.note,
        "files": f"{len(version.files)} in {version.path}" + (" (in place)" if version.in_place else ""),
        "uploaded to": version.uploaded_to,
        "base model": lineage.base_model,
        "data": "\n".join(f"{name}  {_short(digest) or 'not hashed'}" for name, digest in lineage.data.items()),
        "config": f"{len(lineage.config)} keys, sha256 {_short(lineage.config_sha256)}" if lineage.config else None,
        "code": lineage.code_version,
        "judged": judged,
        "gate": "\n".join([lineage.verdict or ABSENT, *(lineage.gate or {}).get("reasons", [])]),
        "metrics": "\n".join(f"{name}  {value:.6g}" for name, value in lineage.metrics.items()),
    }
    out.print(facts(about))
    own = [entry for entry in history if any(move.version == version.version for move in entry.moves)]
    if own:
        out.print()
        out.print(_history_table(own))
    if damage is not None:
        out.print()
        for line in damage:
            out.print(f"damaged: {line}", style="red")
        if not damage:
            out.print(f"{len(version.files)} files are what was registered", style="green")


def show_history(name: str, entries: Sequence[HistoryEntry]) -> None:
    if not entries:
        print(f"{name}: nothing has been promoted yet")
        return
    console(soft_wrap=False).print(_history_table(entries))


def _history_table(entries: Sequence[HistoryEntry]) -> Table:
    rows = table("#", "when", "who", "what", "why", right=("#",))
    for entry in entries:
        change = entry.change
        what = _moves(entry) + (" (forced)" if change.forced else "")
        style = QUIET if entry.refused else ""
        rows.add_row(str(change.ordinal), _when(change.at), change.by, what, change.why, style=style)
    return rows


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
    rows = table("", "key", f"version {left.version}", f"version {right.version}", "change", right=())
    section = ""
    for difference in found:
        shown = "" if difference.section == section else difference.section
        section = difference.section
        rows.add_row(shown, difference.key, _value(difference.left), _value(difference.right), _change(difference))
    console(soft_wrap=False).print(rows)


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


def _short(digest: str | None) -> str:
    return digest[:12] if digest else ""
