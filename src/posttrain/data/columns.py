"""Which columns of a file are prompt and answer, where its rows do not have the names `input` and `output`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.data.errors import DataError

if TYPE_CHECKING:
    from posttrain.config.data import DatasetConfig
    from posttrain.data.sources import Row

PROMPT_COLUMNS = ("input", "prompt", "question", "problem", "query", "instruction")
REFERENCE_COLUMNS = ("output", "answer", "reference", "reference_answer", "expected_answer", "ground_truth", "solution")
ANSWER_COLUMNS = ("output", "completion", "response", "answer", "solution")  # to imitate
CONVERSATION_COLUMNS = ("messages", "conversations")
KINDS_WITH_COLUMNS = ("grpo", "sft")
DEFAULT_ENVIRONMENT = "math"  # of rows whose dataset names none
_PAIR = {"chosen", "rejected"}


def first_row(path: str) -> Row | None:
    """None where the data is on the hub: which columns it has is found out when it is read."""
    from posttrain.data.sources import looks_like_path, read_local

    if not looks_like_path(path) and not Path(path).exists():
        return None
    return next(iter(read_local(path)), None)


def prompt_column(row: Mapping[str, object]) -> str | None:
    return next((column for column in PROMPT_COLUMNS if column in row), None)


def has_conversations(row: Mapping[str, object]) -> bool:
    """Whether the prompt of the row is a list of messages."""
    column = prompt_column(row)
    return column is not None and isinstance(row[column], Sequence) and not isinstance(row[column], str)


def columns_of(kind: str, row: Mapping[str, object]) -> dict[str, str]:
    """`input_key` and `output_key`, where they are not the usual names."""
    if kind not in KINDS_WITH_COLUMNS or (kind == "sft" and any(column in row for column in CONVERSATION_COLUMNS)):
        return {}
    names = ANSWER_COLUMNS if kind == "sft" else REFERENCE_COLUMNS
    answer = next((column for column in names if column in row), None)
    found = {"input_key": prompt_column(row), "output_key": answer}
    return {key: column for key, column in found.items() if column and column not in (PROMPT_COLUMNS[0], names[0])}


def guessed_columns(kind: str, entry: DatasetConfig) -> dict[str, str]:
    """The same for a file of the user's own rows, where the config names no column and its rows have other names."""
    row = _own_first_row(entry) if kind in KINDS_WITH_COLUMNS and entry.chat_key is None else {}
    found = columns_of(kind, row) if not row.keys() >= _PAIR else {}
    return {key: column for key, column in found.items() if getattr(entry, key) is None}


def asks_in_messages(entry: DatasetConfig) -> bool:
    """Whether the first prompt in a file of the user's own rows is a list of messages."""
    row = _own_first_row(entry)
    return has_conversations({"prompt": row.get(entry.input_key)} if entry.input_key else row)


def _own_first_row(entry: DatasetConfig) -> Mapping[str, object]:
    from posttrain.data.named_datasets import named_path

    path = named_path(entry)
    try:
        row = first_row(path) if path and _has_own_rows(entry) else None
    except DataError:  # reported when the data is checked
        row = None
    return {} if row is None else row.values


def check_first_row(kind: str, entry: DatasetConfig) -> None:
    """DataError if a file of the user's own rows cannot be read, or its first row has no prompt."""
    from posttrain.data.named_datasets import named_path

    path = named_path(entry)
    if not path or "://" in path or not _has_own_rows(entry) or (row := first_row(path)) is None:
        return
    if kind not in KINDS_WITH_COLUMNS or {entry.chat_key, *CONVERSATION_COLUMNS} & row.values.keys():
        return
    prompt = entry.input_key or PROMPT_COLUMNS[0]
    if row.values.keys() >= _PAIR and row.get(prompt) is None:
        raise DataError(
            f"{row.where}: it has 'chosen' and 'rejected': pairs are for `posttrain dpo` and `posttrain rm`"
        )
    row.field(prompt, setting="input_key")


def named_columns(section: str, columns: Mapping[str, str]) -> str:
    """A line that says which columns were chosen."""
    roles = {"input_key": "the prompt", "output_key": "the answer"}
    taken = [f"{column!r} is taken as {roles[key]} ({section}.{key})" for key, column in columns.items() if column]
    return f"{section}: {', '.join(taken)}"


def _has_own_rows(entry: DatasetConfig) -> bool:
    from posttrain.data.named_datasets import RESPONSE_DATASETS, find_spec

    spec = find_spec(entry.dataset_name or "", RESPONSE_DATASETS)
    return entry.subset is None and entry.split is None and (spec is None or spec.name == "ResponseDataset")
