"""Scalars of TensorBoard's event files, read without TensorBoard.

A file is a sequence of records: length (8 bytes), checksum (4), an `Event` message, checksum (4). Of an `Event`, field 2 is
the step and field 5 the summary; of a value in a summary, field 1 is the tag, field 2 a float, field 8 a tensor. A torn last
record, as of a run that is being written, ends the file. Checksums are not verified.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FLOAT, DOUBLE = 1, 2  # types of a tensor


def scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) in the order of the file."""
    content = path.read_bytes()
    position = 0
    while position + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        start, position = position + 12, position + 12 + length + 4
        if position > len(content):
            return
        yield from _of_event(content[start : start + length])


def _of_event(message: bytes) -> Iterator[tuple[int, str, float]]:
    step, summaries = 0, []
    for number, value in _fields(message):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and isinstance(value, bytes):
                tag, scalar = _of_value(value)
                if scalar is not None:
                    yield step, tag, scalar


def _of_value(message: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8 and isinstance(value, bytes):
            scalar = _of_tensor(value)
    return tag, scalar


def _of_tensor(message: bytes) -> float | None:
    """The one number of a tensor without dimensions, as its content or as a packed list."""
    fields = dict(_fields(message))
    kind = fields.get(1)
    form = {FLOAT: "<f", DOUBLE: "<d"}.get(kind) if isinstance(kind, int) else None
    for number in (4, 5, 6):
        content = fields.get(number)
        if form and isinstance(content, bytes) and len(content) == struct.calcsize(form):
            return float(struct.unpack(form, content)[0])
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of the fields of a message; numbers of a fixed size stay bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        size = 8 if kind == FIXED64 else 4
        if kind == BYTES:
            size, position = _varint(message, position)
        elif kind not in (FIXED64, FIXED32):
            return  # groups, which these messages do not have
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position
