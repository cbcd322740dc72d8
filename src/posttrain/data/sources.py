"""Reads rows: jsonl, json, csv and parquet, local or wherever fsspec reaches, and Hugging Face datasets.

A row has its origin, so that errors can name the file and the line. Independent of the meaning of fields.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from posttrain.data.errors import DataError, nearest, refuse_half_pairs
from posttrain.data.hub_requests import ask_hub
from posttrain.errors import STORAGE_FAULTS, reason_of
from posttrain.files.json_files import JsonMapping, parse_json

if TYPE_CHECKING:
    import pyarrow as pa

    from posttrain.types import ImageRef

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".csv.gz")
MAX_LINE_BYTES = 256 << 20
MAX_JSON_BYTES = 4 << 30  # of a file that holds one list
HUB_SHARD = re.compile(r"-\d{5}-of-\d{5}\.parquet$")  # as the hub names the files of a split
SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, slots=True)
class Row:
    """One record and where it stands: the line of a text file, otherwise the number of the row, counted from 1."""

    values: JsonMapping
    origin: str
    number: int
    image_column: tuple[ImageRef, ...] = ()  # the images of a column, which the prompt has no parts for
    images: Mapping[str, ImageRef] = field(default_factory=dict)  # all of its images by digest

    @property
    def where(self) -> str:
        return f"{self.origin}, row {self.number}"

    def field(self, *names: str, setting: str = "") -> Any:
        """The first of `names` that this row has; a dot reaches into a record. `setting` chooses the name."""
        for name in names:
            value = self.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                raise DataError(f"{self.where}: {name!r} is {value}; every row needs a value")
            if value is not None:
                return value
        wanted = " or ".join(repr(name) for name in names)
        null = [name for name in names if name in self.values]
        if null:
            raise DataError(f"{self.where}: {wanted} is null; every row needs a value")
        keys = ", ".join(map(repr, self.values)) or "none"
        remedy = f"; name the right one with `{setting}`" if setting else ""
        hint = nearest(names[0], self.values)
        raise DataError(f"{self.where}: no key {wanted}{hint}; the row has the keys {keys}{remedy}")

    def get(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        value: Any = self.values
        for part in name.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value


def looks_like_path(name: str) -> bool:
    """Whether a dataset name can only mean a file or folder."""
    return name.endswith(FORMATS) or name.startswith(("/", "./", "../", "~")) or "://" in name


def read_local(
    path: str, split: str | None = None, subset: str | None = None, default_split: str = "train"
) -> Iterator[Row]:
    """The rows of a file, of a folder's files of a split, or of a pattern such as `s3://b/x/*.parquet`."""
    if split and "[" in split:
        raise DataError(
            f"{path}: split {split!r}: a slice works for hub datasets only; write the rows to a file of their own"
        )
    with explained(path):
        filesystem, root = filesystem_of(path)
        if any(character in root for character in "*?"):
            files = sorted(str(file) for file in filesystem.glob(root) if str(file).endswith(FORMATS))
            if not files:
                raise DataError(f"no data file matches {path}")
        elif filesystem.isdir(root):
            if subset and filesystem.isdir(f"{root}/{subset}"):
                root = f"{root}/{subset}"
            elif subset:
                raise DataError(f"{path}: no folder for the subset {subset!r}")
            if filesystem.exists(f"{root}/state.json") or filesystem.exists(f"{root}/dataset_dict.json"):
                yield from _saved_to_disk(root, split or default_split)
                return
            files = _files_of_split(filesystem, root, split, default_split)
        elif filesystem.exists(root):
            if subset:
                raise DataError(f"{path} is a single file and has no subset {subset!r}; remove the key `subset`")
            files = [root]
        else:
            raise DataError(not_found(path))
        for file in files:
            # Shown as the user wrote it: fsspec makes local paths absolute.
            shown = path.rstrip("/") + file[len(root) :] if file.startswith(root) else file
            yield from read_file(filesystem, file, shown)


def read_file(
    filesystem: AbstractFileSystem, location: str, file: str, file_format: str | None = None
) -> Iterator[Row]:
    """The rows of the file at `location`; `file` is its name in messages. An empty file is an error.

    `file_format` None: what the name ends in.
    """
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    ending = Path(file.removesuffix(".gz")).suffix if file_format is None else f".{file_format}"
    if ending not in readers:
        raise DataError(f"{file}: files of this kind are not read; expected one of {', '.join(FORMATS)}")
    empty = True
    require_regular(filesystem, location, file)
    try:
        with filesystem.open(location, "rb") as raw:
            # Files of some hosts have no `readline` with a limit.
            stream: Any = gzip.GzipFile(fileobj=raw) if file.endswith(".gz") else io.BufferedReader(raw)
            for number, values in readers[ending](stream, file):
                if not isinstance(values, Mapping):
                    raise DataError(f"{file}:{number}: expected an object with keys, found {type(values).__name__}")
                empty = False
                yield Row(values, file, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: broken gzip file ({error}); fetch or write it again") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise DataError(f"{file}: not a readable CSV file ({error})") from error
    except PermissionError as error:
        raise DataError(f"{file}: may not be read ({error})") from error
    if empty:
        raise DataError(f"{file}: the file is empty")


def read_hub(name: str, subsets: Iterable[str | None], split: str, cache_dir: str | None = None) -> Iterator[Row]:
    """The rows of a dataset on the Hugging Face hub, or in its local cache."""
    import datasets

    problem = _hub_problem(name)
    for subset in subsets:
        label = f"{name}/{subset}[{split}]" if subset else f"{name}[{split}]"
        try:
            # What is in the cache is used all the same.
            with _offline() if problem else nullcontext():
                table = datasets.load_dataset(name, subset, split=split, cache_dir=cache_dir)
        # Whatever goes wrong in there (network, name, split, subset) comes as one of a dozen classes of four packages.
        except Exception as error:
            reason = problem or f"{type(error).__name__}: {reason_of(error)}"
            raise DataError(
                f"dataset {label}: neither a local file or folder nor available from the Hugging Face hub "
                f"({reason}). Point `data_path` at local files, or check name and network"
            ) from error
        for number, values in enumerate(_undecoded(table), start=1):
            yield Row(values, label, number)


def _hub_problem(name: str) -> str | None:
    """Why the hub will not give the dataset: found with one request, where its client would try six times."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    answer = ask_hub("datasets", name)
    if answer.unreachable is not None:
        return f"{constants.ENDPOINT} {answer.unreachable}"
    return f"{constants.ENDPOINT} has no such dataset, or hides it from you" if answer.has_none else None


@contextmanager
def _offline() -> Iterator[None]:
    """The hub's client and `datasets` look into their caches only."""
    from datasets import config
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (config, constants)
    before = [(module, module.HF_HUB_OFFLINE) for module in modules]
    for module, _ in before:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in before:
            module.HF_HUB_OFFLINE = value


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Converts errors of disks, and of remote storage from any library, to an error that names the path."""
    # Another host, an archive or the address itself may hold the data: `https://…`, `zip://…::…`, `data:…`.
    is_elsewhere = re.match(r"[A-Za-z][\w+.-]*:", path) is not None and not path.startswith("file:")
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if not is_elsewhere and (not isinstance(error, OSError) or error.errno in STORAGE_FAULTS):
            raise  # a disk that fails is no bad input
        hint = (
            "; credentials and endpoint come from the environment"
            " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
        )
        reason = f"{path}: cannot be read ({type(error).__name__}: {reason_of(error)})"
        raise DataError(reason + hint * ("://" in path)) from error


def require_regular(filesystem: AbstractFileSystem, location: str, shown: str) -> None:
    """Rejects pipes, which block, and devices, which have no end. The caller handles missing files."""
    if isinstance(filesystem, LocalFileSystem) and os.path.exists(location) and not os.path.isfile(location):
        raise DataError(f"{shown}: not a regular file; a pipe or a device cannot be read as data")


def filesystem_of(path: str) -> tuple[AbstractFileSystem, str]:
    """Where fsspec finds `path`, and what it is called there. Credentials and endpoints come from the environment."""
    try:
        filesystem, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise DataError(f'{path}: {error}. For s3:// install the extra: pip install "posttrain[s3]"') from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    return filesystem, str(root)


def not_found(path: str) -> str:
    """An error message that lists files next to the missing one."""
    message = f"file or folder not found: {path}"
    if "://" in path:
        return message
    missing = Path(path).expanduser()
    entries = sorted(entry.name for entry in missing.parent.iterdir()) if missing.parent.is_dir() else []
    # All files of data end alike: that alone makes no two names alike.
    stem = missing.name.partition(".")[0]
    beside = [name for name in entries if nearest(stem, [name.partition(".")[0]])]
    return message + nearest(missing.name, beside) + ("" if missing.is_absolute() else f"; looked in {Path.cwd()}")


def _files_of_split(filesystem: AbstractFileSystem, root: str, split: str | None, default_split: str) -> list[str]:
    files = sorted(str(file) for file in filesystem.find(root) if str(file).endswith(FORMATS))
    if not files:
        raise DataError(f"{root}: no data file in this folder; expected files ending in {', '.join(FORMATS)}")
    names = {file: file[len(root) :].lstrip("/") for file in files}
    wanted = split or default_split
    chosen = [file for file in files if _has_word(names[file], wanted)]
    if chosen:
        folders = sorted({os.path.dirname(names[file]) for file in chosen if HUB_SHARD.search(file)})
        if len(folders) > 1:
            raise DataError(
                f"{root}: several subsets have the split {wanted!r}: {', '.join(folders)}; choose one with `subset`"
            )
        return chosen
    unmarked = not any(_has_word(names[file], word) for file in files for word in SPLIT_WORDS)
    if len(files) == 1 or (split is None and unmarked):
        return files
    raise DataError(
        f"{root}: no file for the split {wanted!r} among {', '.join(names.values())}; set `split`, or point at one file"
    )


def _has_word(path: str, word: str) -> bool:
    """Whether `word` stands in the path on its own: "train" is in "math_train.jsonl" and not in "training.jsonl"."""
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", path, re.IGNORECASE) is not None


def _saved_to_disk(root: str, split: str) -> Iterator[Row]:
    """A folder that `datasets.Dataset.save_to_disk` wrote."""
    import datasets

    table = datasets.load_from_disk(root)
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise DataError(f"{root}: no split {split!r}; it has {', '.join(table)}")
        table = table[split]
    for number, values in enumerate(_undecoded(table), start=1):
        yield Row(values, root, number)


def _undecoded(table: Any) -> Iterator[Any]:
    """The rows of a table of `datasets`, with images as they are stored."""
    if "Image(" not in str(getattr(table, "features", "")):
        yield from table
        return
    for batch in table.with_format("arrow").iter(batch_size=64):
        yield from batch.to_pylist()


def _json_lines(stream: IO[bytes], file: str) -> Iterator[tuple[int, Any]]:
    # Lines end at line feeds only: text may hold U+2028 and its like, which str.splitlines would cut at.
    for number, line in enumerate(_lines(stream, file), start=1):
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        if text:
            yield number, _parse(text, f"{file}:{number}")


def _lines(stream: Any, file: str) -> Iterator[Any]:
    """Bytes or text by lines, none of them longer than the limit: a compressed file may expand to an endless line."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{file}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB, the most that is read")
        yield line


def _json(stream: IO[bytes], file: str) -> Iterator[tuple[int, Any]]:
    """A list of objects; also one object a line, which many people save under this ending."""
    content = bytearray()
    while chunk := stream.read(1 << 20):  # a larger piece would take its memory whatever the file has
        content += chunk
        if len(content) > MAX_JSON_BYTES:
            raise DataError(
                f"{file}: more than {MAX_JSON_BYTES >> 30} GiB of JSON in one; write one object a line (.jsonl)"
            )
    if not content.strip():
        return
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from enumerate(_parse(content.decode("utf-8-sig"), file), start=1)
    else:
        yield from _json_lines(io.BytesIO(content), file)


def _parse(text: str, where: str) -> Any:
    try:
        value = parse_json(text)
        if "\\ud" in text or "\\uD" in text:
            refuse_half_pairs(json.dumps(value, ensure_ascii=False), f"{where}: ")
        return value
    except DataError:
        raise
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: broken JSON at column {error.colno}: {error.msg}") from error
    except ValueError as error:
        raise DataError(f"{where}: broken JSON: {error}") from error


def _csv(stream: IO[bytes], file: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.DictReader(_lines(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), file))
    refuse_repeats([name for name in reader.fieldnames or () if name], file)  # columns without a name cannot be meant
    for values in reader:
        if None in values:
            raise DataError(f"{file}:{reader.line_num}: more cells than the heading has columns")
        yield reader.line_num, values


def _parquet(stream: IO[bytes], file: str) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet

    try:
        with not_parquet():
            source = parquet.ParquetFile(stream)
            refuse_repeated_fields(source.schema_arrow, file)
            has_bytes = any("binary" in str(column.type) for column in source.schema_arrow)  # images, mostly
            batches = source.iter_batches(batch_size=64 if has_bytes else 4096)
            yield from enumerate((values for batch in batches for values in batch.to_pylist()), start=1)
    except NotParquet as error:
        raise DataError(f"{file}: not a readable parquet file ({error})") from error


def refuse_repeats(names: Sequence[str], file: str) -> None:
    """Of two columns with one name, a reader would use one and say nothing."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{file}: has two columns {twice!r}; rename or remove one of them")


def refuse_repeated_fields(fields: Iterable[pa.Field], file: str, outer: str = "") -> None:
    """The same for the columns of Parquet, and for the fields of records in them."""
    fields = list(fields)
    refuse_repeats([f"{outer}{one.name}" for one in fields], file)
    for one in fields:
        inner = [one.type.field(place) for place in range(one.type.num_fields)]
        refuse_repeated_fields(inner, file, f"{outer}{one.name}.")


class NotParquet(DataError):
    """Content that Arrow cannot read. The text is Arrow's reason."""


@contextmanager
def not_parquet() -> Iterator[None]:
    """Converts errors of Arrow to NotParquet. It raises OSError for damaged pages too; one of the disk has an errno."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise NotParquet(reason_of(error)) from error
