"""A file of preference pairs in tokens, in packs: Parquet with a row per pair, and a JSON header in its metadata.

`posttrain data pack` writes it and `dataset_name: PackedPairs` reads it. Tokens are valid only for the tokenizer and
chat template that produced them, so the header has a fingerprint of both, and a mismatch is rejected.

Columns: `pack` (packs are numbered from 0 and stand one after another), `id`, `prompt_ids`, `chosen_ids`,
`rejected_ids`, `chosen_reward`, `rejected_reward`. A pair costs its prompt once and both answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from posttrain.data.bin_packing import PackingAlgorithm, PackingStatistics, pack
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.data.readers import Outcome, Read
from posttrain.data.row_dataset import keyed_order
from posttrain.data.sources import NotParquet, not_parquet
from posttrain.errors import reason_of
from posttrain.files import durable
from posttrain.files.json_files import parse_json
from posttrain.types import Pair

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "posttrain packed pairs"
VERSION = 1
METADATA_KEY = b"posttrain"
ENDING = ".parquet"
TOKEN_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
PAIRS_PER_ROW_GROUP = 4096
_REMEDY = "make one with `posttrain data pack`"


@dataclass(frozen=True)
class PackedHeader:
    tokenizer: str  # fingerprints, see ChatFormat.fingerprints
    template: str
    algorithm: str
    seed: int
    statistics: PackingStatistics
    num_packs: int
    num_pairs: int
    source: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)  # rows that are not in the file, by reason

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> PackedHeader:
        values = parse_json(text)
        if values.pop("format", None) != FORMAT or values.pop("version", None) != VERSION:
            raise ValueError("it is of another format or version")
        header = cls(**{**values, "statistics": PackingStatistics(**values["statistics"])})
        counts = {
            "num_packs": header.num_packs,
            "num_pairs": header.num_pairs,
            "pack_size": header.statistics.pack_size,
            **{f"dropped[{reason!r}]": count for reason, count in header.dropped.items()},
        }
        for name, count in counts.items():
            least = 0 if name.startswith("dropped") else 1
            if type(count) is not int or not least <= count < 2**31:
                raise ValueError(f"{name} is {count!r:.80}; a whole number from {least} to {2**31 - 1} is needed")
        return header


@dataclass(frozen=True)
class Packing:
    """Settings of `write_packed`: the room of a pack in tokens, and how pairs are placed."""

    pack_size: int
    algorithm: PackingAlgorithm
    seed: int = 0


class Pairs(Protocol):
    """A sequence of pairs, which may be built on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Pair: ...


def pair_cost(pair: Pair) -> int:
    """Tokens that pass through the model for a pair: its prompt once, and both answers."""
    return len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids)


def write_packed(
    path: str, pairs: Pairs, chat: ChatFormat, packing: Packing, source: str, dropped: Mapping[str, int]
) -> PackedHeader:
    """Packs the pairs that fit and writes them. What does not fit into a pack is left out and counted."""
    if not path.endswith(ENDING):
        raise DataError(f"{path}: packs are written as Parquet; give the file a name that ends in {ENDING}")
    if any(pairs[index].images for index in range(len(pairs))):
        raise DataError(f"{source}: pairs with images cannot be packed ahead of training; train on the rows")
    costs = [pair_cost(pairs[index]) for index in range(len(pairs))]
    fitting = [index for index, cost in enumerate(costs) if cost <= packing.pack_size]
    left_out = dict(dropped)
    if len(fitting) < len(costs):
        left_out[f"larger than a pack of {packing.pack_size} tokens"] = len(costs) - len(fitting)
    if not fitting:
        raise DataError(
            f"{source}: no pair fits into a pack of {packing.pack_size} tokens; the smallest has "
            f"{min(costs, default=0)}. Raise --pack-size"
        )
    sizes = [costs[index] for index in fitting]
    bins = pack(sizes, packing.pack_size, packing.algorithm, packing.seed)
    # Algorithms that start with the largest would otherwise give a file that goes from long pairs to short ones.
    packs = [[fitting[item] for item in bins[place]] for place in keyed_order(len(bins), packing.seed, 1)]
    header = PackedHeader(
        **chat.fingerprints,
        algorithm=packing.algorithm,
        seed=packing.seed,
        statistics=PackingStatistics.of(
            [sum(costs[index] for index in members) for members in packs],
            [len(members) for members in packs],
            max(sizes),
            packing.pack_size,
        ),
        num_packs=len(packs),
        num_pairs=len(fitting),
        source=source,
        dropped=left_out,
    )
    _write(Path(path).expanduser(), header, pairs, packs)
    return header


def _schema() -> pa.Schema:
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    return pa.schema(
        [("pack", pa.int32()), ("id", pa.string()), *((name, tokens) for name in TOKEN_COLUMNS)]
        + [("chosen_reward", pa.float64()), ("rejected_reward", pa.float64())]
    )


def _write(path: Path, header: PackedHeader, pairs: Pairs, packs: Sequence[Sequence[int]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = _schema().with_metadata({METADATA_KEY: header.to_json().encode()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            durable.replacing(path) as partial,
            parquet.ParquetWriter(partial, schema, compression="zstd") as writer,
        ):
            members = [(number, index) for number, chosen in enumerate(packs) for index in chosen]
            for start in range(0, len(members), PAIRS_PER_ROW_GROUP):
                part = [(number, pairs[index]) for number, index in members[start : start + PAIRS_PER_ROW_GROUP]]
                columns: dict[str, list[Any]] = {
                    name: [getattr(pair, name) for _, pair in part] for name in schema.names if name != "pack"
                }
                columns["pack"] = [number for number, _ in part]
                writer.write_table(pa.table(columns, schema=schema))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error})") from error


@dataclass(frozen=True)
class PackedFile:
    """A file whose tokens are the ones that `open`'s chat format would make."""

    path: str
    header: PackedHeader
    num_tokens: int  # of the vocabulary

    @classmethod
    def open(cls, path: str, chat: ChatFormat) -> PackedFile:
        header = read_header(path)
        for what, current in chat.fingerprints.items():
            if getattr(header, what) != current:
                named = {"tokenizer": "another tokenizer", "template": "another chat template"}[what]
                raise DataError(
                    f"{path}: its tokens were made with {named} than this run's (policy.tokenizer); "
                    "pack the pairs again with this one, or train with the rows they were made of"
                )
        return cls(path, header, 1 + max(chat.tokenizer.get_vocab().values()))

    def outcomes(self, name: str, max_total_tokens: int, first_pack: int) -> Iterator[Outcome[Pair]]:
        """The pairs in the order of the file, their packs numbered from `first_pack`."""
        from pyarrow import parquet

        # Pairs skipped when the file was written are not in it; the run still reports their number.
        for reason, count in self.header.dropped.items():
            yield from [reason] * count
        row, pack = 0, 0
        try:
            with not_parquet(), parquet.ParquetFile(Path(self.path).expanduser()) as file:
                for batch in file.iter_batches(batch_size=PAIRS_PER_ROW_GROUP):
                    self._check(batch, row, pack)
                    yield from _pairs_of(batch, max_total_tokens, first_pack)
                    row, pack = row + batch.num_rows, batch.column("pack")[-1].as_py()
        except NotParquet as error:
            raise DataError(f"{self.path}: cannot be read as Parquet ({error}); {_REMEDY}") from error
        if (row, pack + 1) != (self.header.num_pairs, self.header.num_packs):
            raise DataError(
                f"{self.path}: {row} pairs in {pack + 1} packs, and its header says {self.header.num_pairs} in "
                f"{self.header.num_packs}; {_REMEDY}"
            )

    def _check(self, batch: pa.RecordBatch, before: int, pack: int) -> None:
        """DataError for a row that `write_packed` would not have written. `before`: the rows before the batch."""

        def refuse(index: int, problem: str) -> NoReturn:
            raise DataError(f"{self.path}, row {before + index + 1}: {problem}; {_REMEDY}")

        for name in (*TOKEN_COLUMNS, "pack", "id"):
            column = batch.column(name)
            if column.null_count:
                refuse(column.is_null().index(True).as_py(), f"{name} is null")
        for name in TOKEN_COLUMNS:
            column = batch.column(name)
            tokens, ends = column.flatten().fill_null(-1).to_numpy(), np.cumsum(column.value_lengths().to_numpy())
            if (empty := np.flatnonzero(np.diff(ends, prepend=0) == 0)).size:
                refuse(int(empty[0]), f"{name} is empty")
            if (wrong := np.flatnonzero((tokens < 0) | (tokens >= self.num_tokens))).size:
                index = int(np.searchsorted(ends, wrong[0], side="right"))
                limits = f"the tokenizer has tokens from 0 to {self.num_tokens - 1}"
                refuse(index, f"{name} has the token {tokens[wrong[0]]}; {limits}")
        for index, number in enumerate(batch.column("pack").to_pylist()):
            if number not in (pack, pack + 1) or (before + index == 0 and number != 0):
                refuse(index, f"pack is {number} after {pack}; packs are numbered from 0 and stand one after another")
            pack = number


def _pairs_of(batch: pa.RecordBatch, max_total_tokens: int, first_pack: int) -> Iterator[Outcome[Pair]]:
    tokens: dict[str, list[Any]] = {}  # one numpy array per row, without a Python object per token
    for name in TOKEN_COLUMNS:
        values = batch.column(name).values.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
        tokens[name] = [values[start:stop] for start, stop in pairwise(batch.column(name).offsets.to_numpy())]
    plain = {name: batch.column(name).to_pylist() for name in ("pack", "id", "chosen_reward", "rejected_reward")}
    for index in range(batch.num_rows):
        row = {name: column[index] for name, column in tokens.items()}
        if len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) > max_total_tokens:
            yield f"longer than {max_total_tokens} tokens"
            continue
        rewards = plain["chosen_reward"][index], plain["rejected_reward"][index]
        yield Read(Pair(-1, plain["id"][index], (), (), (), *rewards, first_pack + plain["pack"][index]), row)


def read_header(path: str) -> PackedHeader:
    """The header of a file; DataError if it is not one of packed pairs."""
    import pyarrow
    from pyarrow import parquet

    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"file of packed pairs not found: {path}; {_REMEDY}")
    try:
        schema = parquet.read_schema(file)
        metadata = schema.metadata or {}
        if METADATA_KEY not in metadata:
            raise ValueError("it has no header of posttrain")
        for column in _schema():
            if column.name not in schema.names or schema.field(column.name).type != column.type:
                found = schema.field(column.name).type if column.name in schema.names else "missing"
                raise ValueError(f"its column {column.name} is {found}; {column.type} is needed")
        return PackedHeader.from_json(metadata[METADATA_KEY].decode())
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not a file of packed pairs ({reason_of(error)}); {_REMEDY}") from error
