"""Stages of model versions as a function of the log of changes. No database and no files are accessed.

The log is append-only: the stage of a version is the result of applying all changes in order. So there are never two
production versions, and every stage has a change that explains it. A change may name the version that it expects in the
stage it fills; if another one is there, the change is void.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from posttrain.files.json_files import JsonObject

Stage = Literal["candidate", "canary", "production", "archived"]
Action = Literal["promote", "rollback"]
STAGES: tuple[Stage, ...] = get_args(Stage)

NOTHING_EXPECTED = -1  # any version, or none, may be in the stage
NO_VERSION = 0  # the stage is expected to be empty


@dataclass(frozen=True)
class Change:
    """One line of the log, as requested. For a rollback of a canary, `version` is the one that is removed."""

    action: Action
    version: int
    to: Stage
    by: str
    at: str  # UTC, ISO 8601
    why: str
    expected: int = NOTHING_EXPECTED  # the version in the stage that changes: production, or canary if `to` is canary
    forced: bool = False  # against the gate's verdict, or without one
    ordinal: int = 0  # position in the log, from 1; assigned by the store

    def to_row(self) -> JsonObject:
        return {name: value for name, value in vars(self).items() if name != "ordinal"}


@dataclass(frozen=True)
class Move:
    """A version that went from one stage to another."""

    version: int
    before: Stage
    after: Stage


@dataclass(frozen=True)
class HistoryEntry:
    """A change with its effect. `refused`: why it had none."""

    change: Change
    moves: tuple[Move, ...] = ()
    refused: str | None = None


@dataclass
class Stages:
    """The version in each stage after some changes."""

    production: int = NO_VERSION
    canary: int = NO_VERSION
    archived: set[int] = field(default_factory=set)
    line: list[int] = field(
        default_factory=list
    )  # versions that were put into production; without those that were rolled back

    def of(self, version: int) -> Stage:
        if version == self.production:
            return "production"
        if version == self.canary:
            return "canary"
        return "archived" if version in self.archived else "candidate"

    def previous_production(self) -> int:
        """The version that a rollback returns to; `NO_VERSION` if there is none."""
        earlier = self.line[:-1] if self.production else self.line
        return next((version for version in reversed(earlier) if version != self.production), NO_VERSION)

    def apply(self, change: Change) -> HistoryEntry:
        if refused := self._refusal(change):
            return HistoryEntry(change, refused=refused)
        before = {
            version: self.of(version) for version in {change.version, self.production, self.canary} - {NO_VERSION}
        }
        if change.action == "rollback":
            self._roll_back(change)
        else:
            self._promote(change)
        moves = (Move(version, stage, self.of(version)) for version, stage in sorted(before.items()))
        return HistoryEntry(change, tuple(move for move in moves if move.before != move.after))

    def _refusal(self, change: Change) -> str | None:
        place = "canary" if change.to == "canary" or self._takes_canary_away(change) else "production"
        there = self.canary if place == "canary" else self.production
        if change.expected not in (NOTHING_EXPECTED, there):
            return f"{place} was {_named(there)}, not {_named(change.expected)}"
        if change.action == "promote" and change.to == "canary" and change.version == self.production:
            return f"version {change.version} is in production"
        return None

    def _takes_canary_away(self, change: Change) -> bool:
        return change.action == "rollback" and change.to == "archived"

    def _promote(self, change: Change) -> None:
        version = change.version
        if version == self.canary:
            self.canary = NO_VERSION
        if version == self.production and change.to != "production":
            self.production = NO_VERSION
            self.line.pop()
        self.archived.discard(version)
        if change.to == "production" and version != self.production:
            self._fill_production(version)
            self.line.append(version)
        elif change.to == "canary":
            if self.canary:
                self.archived.add(self.canary)
            self.canary = version
        elif change.to == "archived":
            self.archived.add(version)

    def _roll_back(self, change: Change) -> None:
        if self._takes_canary_away(change):
            self.archived.add(change.version)
            self.canary = NO_VERSION
            return
        if change.version in self.line:  # the last time it was in production; what came after it is undone
            last = len(self.line) - 1 - self.line[::-1].index(change.version)
            del self.line[last + 1 :]
        else:
            self.line.append(change.version)
        if change.version == self.canary:
            self.canary = NO_VERSION
        self._fill_production(change.version)

    def _fill_production(self, version: int) -> None:
        if self.production:
            self.archived.add(self.production)
        self.archived.discard(version)
        self.production = version


def replay(changes: Iterable[Change]) -> tuple[Stages, list[HistoryEntry]]:
    """The stages after all changes, and what each of them did."""
    stages = Stages()
    entries = [stages.apply(change) for change in changes]
    return stages, entries


def _named(version: int) -> str:
    return f"version {version}" if version else "empty"
