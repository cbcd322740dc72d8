"""Files of traces as blocks of rows: Parquet and jsonl(.gz); a file, folder or pattern, wherever fsspec reaches.

A block is bounded in bytes, so memory does not depend on the size of a file or of a Parquet row group. Only the columns
that were asked for are read. The meaning of the columns is decided elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from posttrain.data.errors import DataError
from posttrain.data.sources import (
    MAX_LINE_BYTES,
    NotParquet,
    explained,
    filesystem_of,
    not_found,
    not_parquet,
    refuse_repeated_fields,
    require_regular,
)
from posttrain.data.traces.report import BROKEN_LINE, NOT_A_RECORD, NOT_UNICODE, ReadReport
from posttrain.files.json_files import JsonMapping, parse_json

if TYPE_CHECKING:
    import pyarrow as pa
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
BLOCK_BYTES = 8 << 20
READ_BYTES = 1 << 20

BrokenFiles = Literal["error", "skip"]
ProgressCall = Callable[[int, int, int], None]  # bytes done, bytes in all, rows so far


@dataclass(frozen=True)
class TraceFile:
    filesystem: AbstractFileSystem
    location: str
    shown: str  # as the user wrote it
    size: int


@dataclass
class Block:
    """Some rows of one file: as Arrow columns where their types allow it, otherwise as records."""

    file: str
    numbers: Sequence[int]  # line of a text file, otherwise number of the row; from 1
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    records: list[JsonMapping] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def array(self, name: str) -> pa.Array | None:
        """The column as Arrow holds it; None where the rows are records."""
        return self.columns.get(name)

    def values(self, name: str) -> list[Any]:
        """The column as Python objects; None where a row lacks it."""
        if self.records is not None:
            return [record.get(name) for record in self.records]
        column = self.columns.get(name)
        return [None] * len(self) if column is None else list(column.to_pylist())

    def place(self, index: int) -> str:
        return f"{self.file}, row {self.numbers[index]}"


# Called once for each file with the columns that it has (and, of text files, with some of its first rows). Answers
# which columns to read, and as which Arrow types they may be parsed ({}: as records).
Choose = Callable[[str, Sequence[str], Sequence[JsonMapping]], tuple[Sequence[str], Mapping[str, "pa.DataType"]]]


def locate(path: str | Sequence[str]) -> list[TraceFile]:
    """The files that `path` means, in the order of their names; of several paths, one after another, each file once."""
    if isinstance(path, str):
        return _locate(path)
    files = [file for one in path for file in _locate(one)]
    return list({(str(file.filesystem.protocol), file.location): file for file in files}.values())


def _locate(path: str) -> list[TraceFile]:
    with explained(path):
        filesystem, root = filesystem_of(path)
        is_pattern = any(character in root for character in "*?[")
        if is_pattern or filesystem.isdir(root):
            listed = filesystem.glob(root) if is_pattern else filesystem.find(root)
            found = sorted(str(file) for file in listed if str(file).endswith(ENDINGS))
        elif filesystem.exists(root):
            if not root.endswith(ENDINGS):
                raise DataError(
                    f"{path}: files of this kind are not read as traces; expected one of {', '.join(ENDINGS)}"
                )
            found = [root]
        else:
            raise DataError(not_found(path))
        if not found:
            raise DataError(f"{path}: no file of traces there; expected files ending in {', '.join(ENDINGS)}")
        for file in found:
            require_regular(filesystem, file, _shown(path, root, file))
        return [TraceFile(filesystem, file, _shown(path, root, file), int(filesystem.size(file))) for file in found]


def _shown(path: str, root: str, file: str) -> str:
    if file == root:
        return path
    if file.startswith(root.rstrip("/") + "/"):
        return path.rstrip("/") + file[len(root.rstrip("/")) :]
    protocol, found, _ = path.partition("://")
    return f"{protocol}://{file}" if found and "://" not in file else file


def read_blocks(
    files: Sequence[TraceFile],
    choose: Choose,
    report: ReadReport,
    *,
    broken_files: BrokenFiles = "error",
    on_progress: ProgressCall | None = None,
) -> Iterator[tuple[int, Block]]:
    """The blocks of all files, each with the index of its file. `report.rows` grows by every row that is found."""
    total, before = sum(file.size for file in files), 0
    for index, file in enumerate(files):
        report.files += 1
        reader = _read_parquet if file.location.endswith(".parquet") else _read_lines
        try:
            for block, position in reader(file, choose, report):
                report.rows += len(block)
                yield index, block
                if on_progress:
                    on_progress(before + min(position, file.size), total, report.rows)
        except _BrokenFile as error:
            report.broken_files[file.shown] = str(error)
            if broken_files == "error":
                raise DataError(
                    f"{file.shown}: {error}. Write or fetch it again, or leave it out; "
                    "to use what can be read, skip broken files"
                ) from error
        before += file.size
        if on_progress:
            on_progress(before, total, report.rows)
    if report.broken_files and not report.rows:
        named = "; ".join(f"{file}: {problem}" for file, problem in report.broken_files.items())
        raise DataError(f"no file can be read: {named}")


class _BrokenFile(DataError):
    """A file that ends early or does not have the format of its name. Rows before the damage are kept."""


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _read_parquet(file: TraceFile, choose: Choose, report: ReadReport) -> Iterator[tuple[Block, int]]:
    from pyarrow import parquet

    try:
        with explained(file.shown), file.filesystem.open(file.location, "rb") as stream, not_parquet():
            # Buffered reading: without it a whole row group of each column is held, however large it is.
            source = parquet.ParquetFile(stream, buffer_size=READ_BYTES, pre_buffer=False)
            names, _ = choose(file.shown, source.schema_arrow.names, [])
            refuse_repeated_fields([field for field in source.schema_arrow if field.name in names], file.shown)
            rows, number = source.metadata.num_rows, 0
            for batch in source.iter_batches(batch_size=_rows_per_batch(source, names), columns=list(names)):
                numbers = range(number + 1, number + 1 + batch.num_rows)
                number += batch.num_rows
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                yield Block(file.shown, numbers, columns), file.size * number // max(rows, 1)
    except NotParquet as error:
        raise _BrokenFile(f"not a readable Parquet file, perhaps cut off ({error})") from error


def _rows_per_batch(source: Any, names: Sequence[str]) -> int:
    """So many rows that a batch of the wanted columns has about BLOCK_BYTES."""
    metadata = source.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    wanted = [column for column in columns if column.path_in_schema.split(".")[0] in names]
    size = sum(column.total_uncompressed_size for column in wanted)
    # Dictionary encoding hides repeated text: assume a factor of two, and bound the rest by the row count.
    return int(min(32_768, max(64, BLOCK_BYTES * metadata.num_rows // (2 * size + 1))))


# -- jsonl -------------------------------------------------------------------------------------------------------------


def _read_lines(file: TraceFile, choose: Choose, report: ReadReport) -> Iterator[tuple[Block, int]]:
    types: Mapping[str, pa.DataType] = {}
    chosen, refusals, first_line = False, 0, 1
    for data, position in _line_blocks(file):
        block: Block | None = None
        if types and refusals < 3:
            block = _parse_columns(data, file.shown, first_line, types)
            refusals = 0 if block else refusals + 1  # a broken line now and then, or types that never fit
        if block is None:
            block = _parse_records(data, file.shown, first_line, report)
        if not chosen and block.records:
            chosen = True
            _, types = choose(file.shown, list(dict.fromkeys(chain.from_iterable(block.records))), block.records)
        first_line += data.count(b"\n")
        if len(block):
            yield block, position


def _line_blocks(file: TraceFile) -> Iterator[tuple[bytes, int]]:
    """Whole lines, about BLOCK_BYTES at a time, and how far in the file they reach."""
    held: list[bytes] = []
    size = 0
    try:
        for chunk, position in _chunks(file):
            held.append(chunk)
            size += len(chunk)
            if size < BLOCK_BYTES:
                continue
            whole, newline, rest = b"".join(held).rpartition(b"\n")
            if newline:
                yield whole + newline, position
            held, size = [rest], len(rest)
            if size > MAX_LINE_BYTES:
                raise _BrokenFile(f"a line of more than {MAX_LINE_BYTES >> 20} MiB, the most that is read")
    except _BrokenFile:
        whole, newline, _ = b"".join(held).rpartition(b"\n")  # the split line is lost
        if newline:
            yield whole + newline, file.size
        raise
    last = b"".join(held)
    if last.strip():
        yield last, file.size


def _chunks(file: TraceFile) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, unpacked. The readable part of a truncated gzip file is returned before the error."""
    with explained(file.shown), file.filesystem.open(file.location, "rb") as stream:
        if file.location.endswith(".gz"):
            yield from _unpacked(stream)
        else:
            while chunk := stream.read(READ_BYTES):
                yield chunk, stream.tell()


def _unpacked(stream: Any) -> Iterator[tuple[bytes, int]]:
    unpacker, begun = zlib.decompressobj(wbits=31), False
    while packed := stream.read(READ_BYTES // 4):
        while packed:
            begun = True
            try:
                chunk = unpacker.decompress(packed)
            except zlib.error as error:
                raise _BrokenFile(f"broken gzip file ({error})") from error
            if chunk:
                yield chunk, stream.tell()
            packed = b""
            if unpacker.eof:  # a gzip file may have several parts
                packed, begun = unpacker.unused_data.lstrip(b"\0"), False
                unpacker = zlib.decompressobj(wbits=31)
    if begun:
        raise _BrokenFile("the gzip file is cut off")


def _parse_columns(data: bytes, file: str, first_line: int, types: Mapping[str, pa.DataType]) -> Block | None:
    """Parsed by Arrow, ten times as fast; None where some line is not as expected, or lines are not rows."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    try:
        data.decode()  # Arrow does not check this
        table = arrow_json.read_json(
            pa.BufferReader(data),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 16),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior="ignore"
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    if table.num_rows != lines:
        return None
    columns = {name: table[name].combine_chunks() for name in table.schema.names}
    return Block(file, range(first_line, first_line + lines), columns)


def _parse_records(data: bytes, file: str, first_line: int, report: ReadReport) -> Block:
    """Line by line, so that each broken one is named."""
    numbers: list[int] = []
    records: list[JsonMapping] = []
    for number, line in enumerate(data.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        reason = ""
        try:
            record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if not isinstance(record, dict):
                reason = NOT_A_RECORD
        except UnicodeDecodeError:
            reason = NOT_UNICODE
        except ValueError:
            reason = BROKEN_LINE
        if reason:
            report.rows += 1
            report.problem(reason, 1, [f"{file}, row {number}"])
        else:
            numbers.append(number)
            records.append(record)
    return Block(file, numbers, records=records)
