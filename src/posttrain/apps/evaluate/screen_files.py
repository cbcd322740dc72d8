"""The files of a screening: kept rows in NAME.jsonl, all rewards in NAME.screen.jsonl, their settings in
NAME.screen.json.

Rewards are appended batch by batch and reach the disk before the next batch begins. The first line of their file is
what determines them. So an interrupted screening can continue, and another range of rewards needs no new samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.apps.evaluate.identity import plain_identity, what_differs
from posttrain.data.sources import Row
from posttrain.errors import FolderHeld, InputError
from posttrain.files import durable
from posttrain.files.json_files import parse_json
from posttrain.files.locks import LockHeld, locked
from posttrain.reporting.run_files import append_rows, write_text

ENDING = ".jsonl"
MEAN_COLUMN, COUNT_COLUMN = "screen_mean_reward", "screen_num_scored"  # of a kept row, beside its own columns
Rewards = Sequence[float | None]  # of the answers to one prompt; None: unscored


@dataclass
class ScreenFiles:
    """Open for writing, by this process alone. `rewards` are by the place of the prompt in its dataset."""

    out: Path
    rewards: dict[int, Rewards] = field(default_factory=dict)
    _lock: ExitStack = field(default_factory=ExitStack)

    @property
    def journal(self) -> Path:
        return self.out.with_suffix(".screen.jsonl")

    @property
    def summary(self) -> Path:
        return self.out.with_suffix(".screen.json")

    @classmethod
    def check_name(cls, out: Path) -> None:
        if out.suffix != ENDING or out.name.endswith(".screen.jsonl"):
            raise InputError(f"--out {out}: rows are written as jsonl; the name must end in {ENDING}")
        if out.is_dir():
            raise InputError(f"--out {out}: is a folder; name the file to write")
        if not out.absolute().parent.is_dir():
            raise InputError(f"--out {out}: the folder {out.absolute().parent} does not exist")

    @classmethod
    def open(cls, out: Path, identity: Mapping[str, object]) -> ScreenFiles:
        cls.check_name(out)
        files = cls(out)
        try:
            files._lock.enter_context(locked(out.with_name(f".{out.stem}.screen.lock"), wait_s=0))
        except LockHeld as held:
            raise FolderHeld(
                f"--out {out}: {held.holder or 'another process'} is screening into this file; wait for it, or name "
                "another"
            ) from None
        try:
            files._read(plain_identity(identity))
        except BaseException:
            files.close()
            raise
        return files

    def _read(self, identity: dict[str, object]) -> None:
        durable.cut_torn_line(self.journal)
        lines = self.journal.read_bytes().splitlines() if self.journal.exists() else []
        if not lines:
            if self.out.exists():
                raise InputError(
                    f"--out {self.out}: exists, without the {self.journal.name} of a screening; name another"
                )
            append_rows(self.journal, [identity])
            return
        try:
            found, *rows = map(parse_json, lines)
            differing = what_differs(found, identity)
            # Where an answer is unscored, the prompt is measured again.
            self.rewards = {row["row"]: row["rewards"] for row in rows if None not in row["rewards"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{self.journal}: not the rewards of a screening ({error}); name another --out") from error
        if differing:
            if rows or self.out.exists():
                raise InputError(f"--out {self.out}: was screened with other settings: {differing}. Name another file")
            self.journal.unlink()  # of an attempt that failed before it had measured anything
            append_rows(self.journal, [identity])

    def append(self, measured: Mapping[int, Rewards], errors: Mapping[int, str]) -> None:
        """They are on the disk when this returns. `errors`: why an answer to that prompt could not be scored."""
        rows = [
            {"row": place, "rewards": list(rewards), **({"error": errors[place]} if place in errors else {})}
            for place, rewards in measured.items()
        ]
        append_rows(self.journal, rows)
        self.rewards |= measured

    def write(self, kept: Sequence[tuple[Row, float, int]], summary: Mapping[str, object]) -> None:
        """The kept rows with their mean reward and the number of scored answers, and the summary."""
        durable.write_bytes(self.out, "".join(_line(*row) for row in kept).encode())
        write_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        self._lock.close()


def _line(row: Row, mean: float, count: int) -> str:
    values = {**row.values, MEAN_COLUMN: mean, COUNT_COLUMN: count}
    try:
        return json.dumps(values, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise InputError(
            f"{row.where}: cannot be written as JSON ({error}); leave that column out of the data"
        ) from error
