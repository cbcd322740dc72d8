"""A sequence of items in tokens, stored as flat integer arrays and assembled on access; and the order of a run over it.

A million prompts as Python integers would not fit in memory. Independent of files.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Self

import numpy as np
from numpy.typing import NDArray

from posttrain.data.errors import DataError
from posttrain.data.readers import Item
from posttrain.files.digests import running_sha256
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.types import Judged, Pair, Task


def keyed_order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `length` things that (seed, epoch) decides.

    Only the raw words of Philox are used: numpy guarantees their stability, but not that of `Generator.permutation`.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(length)
    return np.argsort(words, kind="stable")


class TokenColumn:
    """One list of integers per row."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q")

    def append(self, row: Iterable[int]) -> None:
        if isinstance(row, np.ndarray):  # from a file of tokens
            self._values.frombytes(row.astype(np.intc, copy=False).tobytes())
        else:
            self._values.extend(row)
        self._ends.append(len(self._values))

    def __getitem__(self, row: int) -> array[int]:
        return self._values[self._ends[row - 1] if row else 0 : self._ends[row]]


class Table(Generic[Item]):
    """The rows of all entries, in the order of the files. Several datasets may show parts of one table."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.columns: dict[str, TokenColumn] = {}
        self.pack_size = 0  # of pairs from a file of precomputed packs

    def append(self, item: Item, tokens: Mapping[str, Iterable[int]]) -> None:
        for name, row in tokens.items():
            self.columns.setdefault(name, TokenColumn()).append(row)
        self.items.append(item)

    def item(self, row: int, draw: int) -> Item:
        fields: JsonObject = {name: tuple(column[row]) for name, column in self.columns.items()}
        if "mask" in fields:
            fields["mask"] = tuple(map(bool, fields["mask"]))
        return replace(self.items[row], draw=draw, **fields)

    def digest(self, row: int) -> bytes:
        """Digest of the content seen by model and judge, independent of the file."""
        summary = running_sha256()
        for name, column in sorted(self.columns.items()):
            part = column[row].tobytes()
            summary.update(f"{name}:{len(part)};".encode() + part)
        summary.update(json.dumps(_verdict(self.items[row]), sort_keys=True, default=str).encode())
        summary.update(self._images(row))
        return summary.digest()

    def prompt_of(self, row: int) -> bytes:
        """What stays together when rows are divided: the prompt of a judgement; nothing of other items."""
        if not isinstance(self.items[row], Pair | Judged):
            return b""
        return running_sha256(self.columns["prompt_ids"][row].tobytes() + self._images(row)).digest()

    def _images(self, row: int) -> bytes:
        return "".join(image.digest for image in self.items[row].images).encode()


def _verdict(item: object) -> Any:
    """The label of the texts: the expected answer, the rewards of a pair, whether an answer is wanted."""
    if isinstance(item, Judged):
        return item.desirable
    if isinstance(item, Pair):
        rewards = (item.chosen_reward, item.rejected_reward)
        return None if rewards == (1.0, 0.0) else rewards
    if isinstance(item, Task) and item.recorded:
        return item.reference, [(r.completion.token_ids, r.completion.mask, r.score.reward) for r in item.recorded]
    return getattr(item, "reference", None)


@dataclass(frozen=True)
class HoldOut:
    """What an entry holds back for validation: positions [start, stop) of the dataset are its rows."""

    start: int
    stop: int
    size: float
    seed: int


class RowDataset(Generic[Item]):
    """A sequence of items. By reason, `dropped` counts rows that were left out, `noted` remarkable ones."""

    def __init__(
        self,
        name: str,
        table: Table[Item],
        rows: Sequence[int] | NDArray[np.int64],
        dropped: Mapping[str, int] | None = None,
        hold_outs: Sequence[HoldOut] = (),
        noted: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.dropped = dict(dropped or {})
        self.noted = dict(noted or {})
        self._table: Table[Item] = table
        self._rows = np.asarray(rows, dtype=np.int64)
        self._hold_outs = tuple(hold_outs)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a dataset of {len(self)}")
        return self._table.item(int(self._rows[index]), draw=index)

    @property
    def pack_size(self) -> int:
        """Room of precomputed packs, in tokens; 0 if there are none."""
        return self._table.pack_size

    def first_with_images(self, environments: Container[str]) -> Item | None:
        """Of tasks that these environments judge."""
        items = (item for item in self._table.items if item.images)
        return next((item for item in items if getattr(item, "environment", "") in environments), None)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The shuffled order of one pass. Pairs of one precomputed pack stay next to each other."""
        if not self.pack_size:
            return keyed_order(len(self), seed, epoch)
        starts: list[int] = self._pack_starts
        ends = [*starts[1:], len(self)]
        return np.concatenate([np.arange(starts[run], ends[run]) for run in keyed_order(len(starts), seed, epoch)])

    @cached_property
    def _pack_starts(self) -> list[int]:
        """Where a pack begins; a pair without one is a pack of its own."""
        packs = [getattr(self._table.items[int(row)], "pack", -1) for row in self._rows]
        return [i for i, pack in enumerate(packs) if i == 0 or pack < 0 or pack != packs[i - 1]]

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 of the content in its order. Two datasets with the same one give the same run."""
        summary = running_sha256()
        for row in self._rows:
            summary.update(self._table.digest(int(row)))
        return summary.hexdigest()

    def held_out(self) -> tuple[Self, Self | None]:
        """Training and validation rows by the entries' `split_validation_size`; None when no entry keeps any back."""
        training: list[int] = []
        validation: list[int] = []
        for part in self._hold_outs:
            positions = range(part.start, part.stop)
            kept, held = self._divide(positions, part.size, part.seed) if part.size else (list(positions), [])
            training += kept
            validation += held
        if not validation:
            return self, None
        rest = type(self)(self.name, self._table, self._rows[training], self.dropped, noted=self.noted)
        return rest, type(self)(self.name, self._table, self._rows[validation])

    def _divide(self, positions: Sequence[int], size: float, seed: int) -> tuple[list[int], list[int]]:
        """Training rows and validation rows: a share of them below 1, otherwise a number.

        Equal rows stay together, and so do the judgements of one prompt, which may make it a few rows more: validation
        on a prompt that was trained on would be biased.
        """
        digests = [self._table.digest(int(self._rows[position])) for position in positions]
        units = [
            self._table.prompt_of(int(self._rows[position])) or digest
            for position, digest in zip(positions, digests, strict=True)
        ]
        members: dict[bytes, set[bytes]] = {}
        for unit, digest in zip(units, digests, strict=True):
            members.setdefault(unit, set()).add(digest)
        num_distinct = len(set(digests))
        count = int(size) if size >= 1 else max(1, round(size * num_distinct))
        chosen: set[bytes] = set()
        num_held, names = 0, list(members)
        for index in keyed_order(len(names), seed, 0):
            if num_held < count:
                chosen.add(names[index])
                num_held += len(members[names[index]])
        if not 0 < count < num_distinct or len(chosen) == len(names):
            raise DataError(
                f"{self.name}: a validation part of {size:g} leaves nothing to train on or to validate with; "
                f"there are {num_distinct} different rows of {len(names)} prompts"
            )
        training = [position for position, unit in zip(positions, units, strict=True) if unit not in chosen]
        # A repeated row is validated once.
        first = {digest: position for position, digest in reversed(list(zip(positions, digests, strict=True)))}
        return training, sorted(first[digest] for unit in chosen for digest in members[unit])


class Stream(Generic[Item]):
    """Iterates over a dataset endlessly, in an order by (seed, epoch). Its position is part of a checkpoint."""

    def __init__(self, dataset: RowDataset[Item], seed: int, shuffle: bool = True) -> None:
        if len(dataset) == 0:
            raise DataError(f"{dataset.name}: the dataset has no rows")
        self._dataset: RowDataset[Item] = dataset
        self._seed, self._shuffle = seed, shuffle
        self._position = 0
        self._order_of_epoch: tuple[int, NDArray[np.int64]] | None = None

    @property
    def position(self) -> int:
        """Items handed out so far."""
        return self._position

    def take(self, count: int) -> list[Item]:
        """The next `count` items. `draw` of each is its position in the stream, unique in a run."""
        assert count >= 0
        items = [self.item(position) for position in range(self._position, self._position + count)]
        self._position += count
        return items

    def state_dict(self) -> JsonObject:
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: JsonMapping) -> None:
        """Continues from `state`. Rejects a state of other data, seed or shuffling, whose order would differ."""
        missing = {"position", *self._identity()} - set(state)
        if missing:
            raise DataError(f"the saved data position is incomplete: it lacks {', '.join(sorted(missing))}")
        differences = [
            "its content is another" if name == "fingerprint" else f"{name}: saved {state[name]!r}, now {value!r}"
            for name, value in self._identity().items()
            if name != "dataset" and state[name] != value
        ]
        if differences:
            raise DataError(
                f"the checkpoint's position in the data means nothing here: it was made with {state['dataset']}, "
                f"this is {self._dataset.name}; {'; '.join(differences)}. "
                "Use the data and the seed of that run, or start in a new folder (checkpointing.checkpoint_dir)"
            )
        self._position = int(state["position"])

    def _identity(self) -> JsonObject:
        return {
            "dataset": self._dataset.name,
            "length": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def item(self, position: int) -> Item:
        """The item with `draw` = `position`, handed out or not."""
        epoch, place = divmod(position, len(self._dataset))
        return replace(self._dataset[int(self._order(epoch)[place])], draw=position)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            self._order_of_epoch = (epoch, self._dataset.order(self._seed, epoch))
        return self._order_of_epoch[1]
