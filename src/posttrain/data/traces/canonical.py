"""Converts blocks of rows of any shape to one Arrow schema, and such tables to `Trace` values.

In the table, prompts and responses are texts (chat_text.py); `*_is_chat` marks those that are the JSON of a
conversation. Rows that cannot be used are counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from posttrain.data.reward_values import MAX_REWARD
from posttrain.data.traces import report as reasons
from posttrain.data.traces.chat_text import (
    Unusable,
    decoded,
    encode_prompt,
    encode_response,
    split_conversation,
    without_prompt,
)
from posttrain.data.traces.files import Block
from posttrain.data.traces.layout import Layout
from posttrain.data.traces.report import ReadReport
from posttrain.data.traces.values import Trace
from posttrain.files.digests import blake2_of
from posttrain.files.json_files import JsonMapping

# A row is known by one number that grows in the order of the files: file, line, and which answer of a preference row.
FILE_SHIFT, LINE_SHIFT = 40, 1
TEXT = pa.large_string()
STRINGS = (pa.string(), TEXT)
_NUMBERS = (pa.types.is_floating, pa.types.is_integer, pa.types.is_decimal, pa.types.is_boolean)
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("group", pa.uint64()),  # hash of the group id, or of the prompt where there is none
        ("prompt_hash", pa.uint64()),
        ("prompt", TEXT),
        ("prompt_is_chat", pa.bool_()),
        ("response", TEXT),
        ("response_is_chat", pa.bool_()),
        ("reward", pa.float64()),
        ("group_id", TEXT),
        ("trace_id", TEXT),
        ("model", TEXT),
        ("time", pa.timestamp("us", tz="UTC")),
        ("reference", TEXT),
    ]
)

Encoded = TypeVar("Encoded", bound=tuple[object, ...])


@dataclass
class Draft:
    """The columns of some rows before they are a table. `problem`: why a row cannot be used, or ""."""

    rows: NDArray[np.int64]
    prompt: pa.Array
    prompt_is_chat: pa.Array
    response: pa.Array
    response_is_chat: pa.Array
    reward: NDArray[np.float64]
    problem: NDArray[np.object_]


def canonical_table(
    block: Block, layout: Layout, file_index: int, report: ReadReport
) -> tuple[pa.Table, NDArray[np.int64]]:
    """The usable rows of a block, and the place of each in the block."""
    lines = np.asarray(block.numbers, dtype=np.int64)
    rows = (np.int64(file_index) << FILE_SHIFT) | (lines << LINE_SHIFT)
    if layout.shape == "messages":
        drafts = [_from_messages(block, layout, rows)]
    elif layout.shape == "text":
        drafts = [_from_texts(block, layout.input, layout.output, rows, *_rewards(block, layout.reward))]
    else:
        report.rows += len(block)  # each row is two traces
        sides = (layout.chosen, layout.chosen_reward, 1.0), (layout.rejected, layout.rejected_reward, 0.0)
        drafts = [
            _from_texts(block, layout.input, name, rows + side, *_rewards(block, reward, default))
            for side, (name, reward, default) in enumerate(sides)
        ]
    parts, places = zip(*(_finish(draft, block, layout, report) for draft in drafts), strict=True)
    table, place = pa.concat_tables(parts), np.concatenate(places)
    if len(parts) > 1:
        order = np.argsort(table["row"].to_numpy(), kind="stable")
        table, place = table.take(pa.array(order)), place[order]
    return table, place


def _finish(draft: Draft, block: Block, layout: Layout, report: ReadReport) -> tuple[pa.Table, NDArray[np.int64]]:
    bad = np.flatnonzero(draft.problem != "")
    for reason in dict.fromkeys(draft.problem[bad].tolist()):
        which = bad[draft.problem[bad] == reason]
        report.problem(reason, len(which), (block.place(int(index)) for index in which[: reasons.EXAMPLES_PER_REASON]))
    keep = np.flatnonzero(draft.problem == "")
    table = pa.table(
        {
            "row": draft.rows,
            "prompt": draft.prompt,
            "prompt_is_chat": draft.prompt_is_chat,
            "response": draft.response,
            "response_is_chat": draft.response_is_chat,
            "reward": draft.reward,
            "time": _times(block, layout.time),
            **{
                name: _text_column(block, getattr(layout, name))
                for name in ("group_id", "trace_id", "model", "reference")
            },
        }
    )
    if len(keep) < len(draft.rows):
        table = table.take(pa.array(keep))
    prompt_hash, spare = _hashes(table["prompt"])
    group = spare
    if layout.group_id:
        named, _ = _hashes(table["group_id"])
        group = np.where(table["group_id"].is_null().to_numpy(), spare, named)
    table = table.append_column("group", pa.array(group)).append_column("prompt_hash", pa.array(prompt_hash))
    return table.select(SCHEMA.names).cast(SCHEMA), keep.astype(np.int64)


def _hashes(column: pa.ChunkedArray) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Two 64-bit hashes of each text. Equal texts are hashed once."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    texts = encoded.dictionary.cast(pa.large_binary()).to_pylist()  # bytes: no decoding and encoding on the way
    digests = [blake2_of(text or b"", 16) for text in texts]
    pairs = np.frombuffer(b"".join(digests) or bytes(16), dtype=np.uint64).reshape(-1, 2)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return pairs[codes, 0], pairs[codes, 1]


# -- rewards -----------------------------------------------------------------------------------------------------------


def _rewards(block: Block, name: str, default: float = 0.0) -> tuple[NDArray[np.float64], NDArray[np.object_]]:
    """Rewards, and what is wrong with them. A truth value counts as 1 or 0; a number in quotes is not a number.

    `default` is the reward where the file has no column with it.
    """
    problem = np.full(len(block), "", dtype=object)
    if not name:
        return np.full(len(block), default), problem
    column = block.array(name)
    if column is not None and any(is_number(column.type) for is_number in _NUMBERS):
        problem[column.is_null().to_numpy(zero_copy_only=False)] = reasons.NO_REWARD
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        reward = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
    else:
        values = block.values(name)
        reward = np.zeros(len(values))
        for index, value in enumerate(values):
            if value is None:
                problem[index] = reasons.NO_REWARD
            elif isinstance(value, int | float):
                # A whole number may be beyond 1e308.
                reward[index] = float(value) if abs(value) <= MAX_REWARD else np.inf
            else:
                problem[index] = reasons.REWARD_NOT_A_NUMBER
    problem[~(np.abs(reward) <= MAX_REWARD)] = reasons.REWARD_NOT_FINITE
    return reward, problem


# -- texts and conversations -------------------------------------------------------------------------------------------


def _from_texts(
    block: Block,
    prompt_name: str,
    response_name: str,
    rows: NDArray[np.int64],
    reward: NDArray[np.float64],
    problem: NDArray[np.object_],
) -> Draft:
    prompt, prompt_is_chat = _texts(block, prompt_name, encode_prompt, reasons.NO_PROMPT, problem)
    response, response_is_chat = _texts(block, response_name, encode_response, reasons.NO_RESPONSE, problem)
    if pc.any(response_is_chat).as_py():
        response, response_is_chat = _answers(prompt, prompt_is_chat, response, response_is_chat, problem)
    problem[pc.equal(prompt, "").to_numpy(zero_copy_only=False) & (problem == "")] = reasons.NO_PROMPT
    return Draft(rows, prompt, prompt_is_chat, response, response_is_chat, reward, problem)


def _texts(
    block: Block, name: str, encode: Callable[[object], tuple[str, bool]], absent: str, problem: NDArray[np.object_]
) -> tuple[pa.Array, pa.Array]:
    column = block.array(name)
    if column is not None and pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column is not None and column.type in STRINGS:
        if _is_unicode(column):
            problem[column.is_null().to_numpy(zero_copy_only=False) & (problem == "")] = absent
            return column.cast(TEXT).fill_null(""), pa.array(np.zeros(len(block), dtype=bool))
        values: list[Any] = column.cast(pa.large_binary()).to_pylist()
    else:
        values = block.values(name)

    def encoded(value: object) -> tuple[str, bool]:
        if value is None:
            raise Unusable(absent)
        return encode(value)

    rows = _each(encoded, [(value,) for value in values], ("", False), problem)
    return pa.array([text for text, _ in rows], TEXT), pa.array([is_chat for _, is_chat in rows], pa.bool_())


def _each(
    encode: Callable[..., Encoded], rows: Iterable[Any], otherwise: Encoded, problem: NDArray[Any]
) -> list[Encoded]:
    """`encode` of each row; for one that is unusable the reason is noted, unless it has a problem already."""
    found = []
    for index, row in enumerate(rows):
        try:
            found.append(encode(*row))
        except Unusable as error:
            problem[index] = problem[index] or error.args[0]
            found.append(otherwise)
    return found


def _answers(
    prompt: pa.Array, prompt_is_chat: pa.Array, response: pa.Array, is_chat: pa.Array, problem: NDArray[np.object_]
) -> tuple[pa.Array, pa.Array]:
    """Responses that are conversations, without the prompt where they repeat it, as preference data often does."""
    texts, chats = response.to_pylist(), is_chat.to_pylist()
    for index in np.flatnonzero((problem == "") & np.array(chats, dtype=bool)).tolist():
        asked = decoded(prompt[index].as_py(), prompt_is_chat[index].as_py())
        try:
            texts[index], chats[index] = without_prompt(asked, decoded(texts[index], True))
        except Unusable as error:
            problem[index] = error.args[0]
    return pa.array(texts, TEXT), pa.array(chats, pa.bool_())


def _is_unicode(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _from_messages(block: Block, layout: Layout, rows: NDArray[np.int64]) -> Draft:
    reward, problem = _rewards(block, layout.reward)
    lengths = block.values(layout.prompt_len) if layout.prompt_len else [-1] * len(block)
    split = _each(
        split_conversation, zip(block.values(layout.messages), lengths, strict=True), ("", "", False), problem
    )
    prompts, responses = (pa.array([row[column] for row in split], TEXT) for column in (0, 1))
    always, chats = pa.array(np.ones(len(block), dtype=bool)), pa.array([row[2] for row in split], pa.bool_())
    return Draft(rows, prompts, always, responses, chats, reward, problem)


# -- ids and times -----------------------------------------------------------------------------------------------------


def _text_column(block: Block, name: str) -> pa.Array:
    """An id as text; numbers are written out.

    Rows that belong together may come as Arrow columns here and as records there, so what is not text or a whole number
    is written by one and the same code: Arrow's 2.0 is "2" and its true is "true", Python's are "2.0" and "True".
    """
    if not name:
        return pa.nulls(len(block), TEXT)
    column = block.array(name)
    if column is not None and column.type in STRINGS and not _is_unicode(column):
        column = column.cast(pa.large_binary())
    if column is not None and (column.type in STRINGS or pa.types.is_integer(column.type)):
        return column.cast(TEXT)
    values = block.values(name) if column is None else column.to_pylist()
    return pa.array([None if value is None or value != value else _id_text(value) for value in values], TEXT)


def _id_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():  # pandas turns whole numbers with gaps into floats
        value = int(value)
    return str(value).encode(errors="replace").decode()


def _times(block: Block, name: str) -> pa.Array:
    """Moments in UTC; null where there is none or it cannot be read."""
    kind = SCHEMA.field("time").type
    if not name:
        return pa.nulls(len(block), kind)
    column = block.array(name)
    if column is not None and (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        return column.cast(pa.timestamp("us", tz=getattr(column.type, "tz", None)), safe=False).cast(kind)
    return pa.array([_moment(value) for value in block.values(name)], kind)


def _moment(value: object) -> datetime | None:
    """From ISO text, or from seconds or milliseconds since 1970."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = datetime.fromtimestamp(value / 1000 if abs(value) >= 1e11 else value, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    if not isinstance(value, datetime):
        return None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# -- back --------------------------------------------------------------------------------------------------------------


def place_of(row: int, files: Sequence[str]) -> str:
    line = (row & ((1 << FILE_SHIFT) - 1)) >> LINE_SHIFT
    return f"{files[row >> FILE_SHIFT]}, row {line}"


def trace_of(values: JsonMapping, files: Sequence[str]) -> Trace:
    return Trace(
        prompt=decoded(values["prompt"], values["prompt_is_chat"]),
        response=decoded(values["response"], values["response_is_chat"]),
        reward=values["reward"],
        trace_id=values["trace_id"],
        group_id=values["group_id"],
        model=values["model"],
        time=values["time"],
        reference=values["reference"],
        origin=place_of(values["row"], files),
    )
