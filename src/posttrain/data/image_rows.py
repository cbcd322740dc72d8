"""Images in rows: finds them in columns and in parts of messages, and puts them into the conversation of a prompt.

Between the two, a text holds a mark with the image's digest in the place of each image. So prompt files, shared
prompts and answers stay texts for everything in between.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.conversations import is_conversation, shown
from posttrain.data.errors import DataError, nearest
from posttrain.data.image_urls import fetch_image
from posttrain.data.images import ImageStore, decode_data_url
from posttrain.data.sources import Row
from posttrain.types import ImageRef, Message

if TYPE_CHECKING:
    from posttrain.data.entries import Entry
    from posttrain.data.named_datasets import NamedDataset

WRITTEN_MARK = "<image>"  # in texts of rows with a column of images
_PART_KINDS = ("image", "image_url", "input_image")
_EDGE = "\ufffc"  # Unicode's character for an object in a text
_OPEN = f"{_EDGE}image{_EDGE}"  # an image part without its image, which is in the column
_MARK = re.compile(f"{_EDGE}([0-9a-f]{{64}}){_EDGE}")
_ROWS_AT_ONCE = 64


def with_images(rows: Iterable[Row], entry: Entry, known: NamedDataset) -> Iterator[Row]:
    """The rows with their images read: in texts of messages as marks, those of a column in `Row.image_column`."""
    reader = ImageReader(entry, known)
    rows, missing = iter(rows), entry.image_key
    first: Row | None = None
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:  # decoding lets other threads run
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            first = first or chunk[0]
            missing = None if any(missing in row.values for row in chunk) else missing
            if any(map(reader.has_images, chunk)):
                yield from pool.map(reader.read, chunk)
            else:
                yield from chunk
    if missing and first is not None:
        hint = f'{nearest(missing, first.values)}; image_key: "" if the rows have no images'
        raise DataError(f"{first.origin}: image_key: no row has the column {missing!r}{hint}")


class ImageReader:
    def __init__(self, entry: Entry, known: NamedDataset) -> None:
        self._folder = Path(entry.image_dir).expanduser() if entry.image_dir else None
        self._is_local = entry.local_path is not None and "://" not in entry.local_path
        self._allows_urls = bool(entry.allow_image_urls)
        self._columns = (entry.image_key,) if entry.image_key else () if entry.image_key == "" else known.images
        self._prefix = known.image_prefix
        self._is_named = bool(entry.image_key)
        self._store = ImageStore()
        if self._folder is not None and not self._folder.is_dir():
            raise DataError(f"image_dir: no such folder: {entry.image_dir}")

    def has_images(self, row: Row) -> bool:
        return bool(self._column(row)) or any(map(_has_parts, row.values.values()))

    def _column(self, row: Row) -> str | None:
        return next((name for name in self._columns if row.values.get(name) not in (None, "", [])), None)

    def read(self, row: Row) -> Row:
        if not self.has_images(row):
            return row
        images: dict[str, ImageRef] = {}
        column, name = [], self._column(row)
        if name is not None:
            given = row.values[name]
            for place, value in enumerate(given if isinstance(given, list | tuple) else [given], start=1):
                label = f"{name!r} {place}" if isinstance(given, list | tuple) else repr(name)
                found = self._image(value, row, label)
                images[found.digest] = found
                column.append(found)
        values = {
            key: self._marked(value, row, key, images) for key, value in row.values.items() if key not in self._columns
        }
        return replace(row, values=values, image_column=tuple(column), images=images)

    def _marked(self, value: Any, row: Row, key: str, images: dict[str, ImageRef]) -> Any:
        """A conversation or a message with marks for its images; other values as they are."""
        if not _has_parts(value):
            return value
        if isinstance(value, Mapping):
            return self._marked([value], row, key, images)[0]
        turns = []
        for turn in value:
            parts = turn.get("content")
            if _has_image_parts(parts):
                texts = [self._part(part, row, key, images) for part in parts]
                turns.append({**turn, "content": texts})
            else:
                turns.append(turn)
        return turns

    def _part(self, part: Mapping[str, object], row: Row, key: str, images: dict[str, ImageRef]) -> Mapping[str, Any]:
        if part.get("type") not in _PART_KINDS:
            return part
        given = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
        if isinstance(given, Mapping) and "url" in given:
            given = given["url"]
        if given is None:
            return {"type": "text", "text": _OPEN}
        found = self._image(given, row, f"an image of {key!r}")
        images[found.digest] = found
        return {"type": "text", "text": f"{_EDGE}{found.digest}{_EDGE}"}

    def _image(self, value: object, row: Row, label: str) -> ImageRef:
        where = f"{row.where}: {label}"
        if isinstance(value, Mapping):  # as `datasets.Image` stores one
            value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), value)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._store.of_bytes(bytes(value), where)
        if not isinstance(value, str) or not value:
            hint = "" if self._is_named else '; image_key: "" if the column has none'
            raise DataError(f"{where} must be a path, bytes or a data: URL, found {shown(value)}{hint}")
        if value[:5].lower() == "data:":
            return self._store.of_bytes(decode_data_url(value, where), where)
        if scheme := re.match(r"([a-z][a-z0-9+.-]+)://", value, re.IGNORECASE):
            if scheme[1].lower() not in ("http", "https"):
                raise DataError(f"{where}: {shown(value)}: paths, data: URLs, http and https are read")
            if not self._allows_urls:
                raise DataError(
                    f"{where}: {shown(value)} is a URL; set `allow_image_urls: true` for the dataset to fetch images"
                )
            return self._store.of_bytes(fetch_image(value, where), f"{where}: {shown(value)}")
        value = value.removeprefix(self._prefix)
        return self._store.of_file(value, self._folder_of(row, where, value), where)

    def _folder_of(self, row: Row, where: str, value: str) -> Path:
        if self._folder is not None:
            return self._folder
        if not self._is_local:
            raise DataError(
                f"{where} is the path {shown(value)}, and the rows are not in a local file; set `image_dir` to the "
                "folder of the images"
            )
        origin = Path(row.origin).expanduser()
        return origin if origin.is_dir() else origin.parent


def _has_parts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _has_image_parts(value.get("content"))
    return is_conversation(value) and any(_has_image_parts(turn.get("content")) for turn in value)


def _has_image_parts(content: Any) -> bool:
    return is_conversation(content) and any(part.get("type") in _PART_KINDS for part in content)


# -- into a conversation -----------------------------------------------------------------------------------------------


def placed(messages: Sequence[Message], row: Row) -> list[Message]:
    """The conversation with image parts, {"type": "image", "image": ImageRef}, where marks stand in its texts.

    Images of a column go where `<image>` stands or where parts have no image of their own, otherwise before the first
    text of the user.
    """
    texts = [str(message["content"]) for message in messages]
    if not row.images and not any(_OPEN in text for text in texts):
        return list(messages)
    mark = _OPEN if any(_OPEN in text for text in texts) else WRITTEN_MARK
    asked = [place for place, one in enumerate(messages) if mark == _OPEN or one["role"] == "user"]
    num_marks = sum(texts[place].count(mark) for place in asked) if row.image_column or mark == _OPEN else 0
    if num_marks != len(row.image_column) and (num_marks or mark == _OPEN):
        wanted = "parts of type image without an image" if mark == _OPEN else f"marks {WRITTEN_MARK}"
        raise DataError(
            f"{row.where}: the prompt has {num_marks} {wanted}, and the row has {len(row.image_column)} images"
        )
    column = [f"{_EDGE}{image.digest}{_EDGE}" for image in row.image_column]
    if column and not num_marks:
        if any(_MARK.search(text) for text in texts):
            raise DataError(f"{row.where}: has images in the prompt's parts and in a column; keep one of them")
        if not asked:
            raise DataError(f"{row.where}: has images, and no message of the user in which they could stand")
        texts[asked[0]] = "".join(column) + texts[asked[0]]
    elif column:
        left = iter(column)
        for place in asked:
            texts[place] = re.sub(re.escape(mark), lambda _: next(left), texts[place])
    return [_with_parts(message, text, row) for message, text in zip(messages, texts, strict=True)]


def _with_parts(message: Message, text: str, row: Row) -> Message:
    pieces = _MARK.split(text)  # text, digest, text, …
    if len(pieces) == 1 or not all(digest in row.images for digest in pieces[1::2]):
        return message
    if message["role"] != "user":
        raise DataError(f"{row.where}: an image in a message of the role {message['role']!r}; only the user's are read")
    parts: list[Mapping[str, Any]] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append({"type": "image", "image": row.images[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def without_marks(text: str) -> str:
    """For people: a text with `<image>` in the place of an image."""
    return _MARK.sub(WRITTEN_MARK, text).replace(_OPEN, WRITTEN_MARK)


def refuse_marks(text: str, row: Row, what: str) -> None:
    """DataError if there is an image where none can be: in an answer, in a prompt that has its template already."""
    if _MARK.search(text) or _OPEN in text:
        raise DataError(f"{row.where}: an image in {what}; images are read in the user's messages")
