"""Which columns of a file are the prompt, the response, the reward: `TraceColumns` matched with the columns of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.data.errors import DataError, nearest
from posttrain.data.traces.values import TraceColumns
from posttrain.files.json_files import JsonMapping

if TYPE_CHECKING:
    import pyarrow as pa

Shape = Literal["messages", "text", "pair"]

USUAL: Mapping[str, tuple[str, ...]] = {
    "input": ("input", "prompt"),
    "output": ("output", "response", "completion"),
    "messages": ("messages",),
    "prompt_len": ("prompt_len",),
    "group_id": ("group_id",),
    "trace_id": ("trace_id", "id"),
    "model": ("model",),
    "time": ("time", "timestamp", "created_at"),
    "reference": ("reference_answer", "reference"),
}
CHOSEN = ("chosen", "chosen_response")
REJECTED = ("rejected", "rejected_response")
CHOSEN_SCORES = ("chosen_reward", "score_chosen", "chosen_score")
REJECTED_SCORES = ("rejected_reward", "score_rejected", "rejected_score")


@dataclass(frozen=True)
class Layout:
    """The columns of one file. An empty name: there is no such column, or it is not used."""

    shape: Shape
    input: str = ""
    output: str = ""
    messages: str = ""
    prompt_len: str = ""
    reward: str = ""
    chosen: str = ""
    rejected: str = ""
    chosen_reward: str = ""
    rejected_reward: str = ""
    group_id: str = ""
    trace_id: str = ""
    model: str = ""
    time: str = ""
    reference: str = ""
    where: tuple[str, ...] = ()  # columns that filters look at

    @property
    def names(self) -> list[str]:
        named = [
            *(self.input, self.output, self.messages, self.prompt_len, self.reward),
            *(self.chosen, self.rejected, self.chosen_reward, self.rejected_reward),
            *(self.group_id, self.trace_id, self.model, self.time, self.reference, *self.where),
        ]
        return [name for name in dict.fromkeys(named) if name]


def find_layout(columns: TraceColumns, has: Sequence[str], file: str, where: Sequence[str] = ()) -> Layout:
    """The layout of a file with the columns `has`. A column that must be there and is not is an error that lists them all."""

    def pick(role: str, *, required: bool = False) -> str:
        wanted = getattr(columns, role)
        if wanted == "" and not required:
            return ""
        if wanted:
            return _require(wanted, role, has, file)
        found = next((name for name in USUAL[role] if name in has), "")
        if required and not found:
            raise _missing(" or ".join(map(repr, USUAL[role])), USUAL[role][0], role, has, file)
        return found

    common = {role: pick(role) for role in ("group_id", "trace_id", "model", "time", "reference")}
    for column in where:
        _require(column, "where", has, file)
    if columns.messages or (not columns.input and not columns.output and pick("messages")):
        return Layout(
            "messages",
            messages=pick("messages", required=True),
            prompt_len=pick("prompt_len"),
            reward=_require(columns.reward, "reward", has, file),
            where=tuple(where),
            **common,
        )
    chosen, rejected = (next((name for name in names if name in has), "") for names in (CHOSEN, REJECTED))
    if chosen and rejected and not columns.output and columns.reward not in has:
        return Layout(
            "pair",
            input=pick("input", required=True),
            chosen=chosen,
            rejected=rejected,
            chosen_reward=next((name for name in CHOSEN_SCORES if name in has), ""),
            rejected_reward=next((name for name in REJECTED_SCORES if name in has), ""),
            where=tuple(where),
            **common,
        )
    return Layout(
        "text",
        input=pick("input", required=True),
        output=pick("output", required=True),
        reward=_require(columns.reward, "reward", has, file),
        where=tuple(where),
        **common,
    )


def _require(wanted: str, role: str, has: Sequence[str], file: str) -> str:
    if wanted not in has:
        raise _missing(repr(wanted), wanted, role, has, file)
    return wanted


def _missing(shown: str, wanted: str, role: str, has: Sequence[str], file: str) -> DataError:
    columns = ", ".join(map(repr, has)) or "none"
    option = f"--{role.replace('_', '-')}"
    remedy = (
        "" if role == "where" else f"; name the right one with `{option}`, or with `trace_columns.{role}` in a config"
    )
    return DataError(
        f"{file}: no column {shown} ({role}){nearest(wanted, has)}; the file has the columns {columns}{remedy}"
    )


def arrow_types(layout: Layout, rows: Sequence[JsonMapping]) -> dict[str, pa.DataType]:
    """As which types Arrow may parse the columns of a jsonl file, judged by its first rows. {}: only record by record."""
    import pyarrow as pa

    if layout.shape != "text":
        return {}
    types: dict[str, pa.DataType] = {}
    for name in layout.names:
        seen = {type(row.get(name)) for row in rows} - {type(None)}
        if seen <= {str}:
            types[name] = pa.large_string()
        elif seen <= {int} and name != layout.reward:
            types[name] = pa.int64()
        elif seen <= {int, float}:
            types[name] = pa.float64()
        elif seen <= {bool}:
            types[name] = pa.bool_()
        else:
            return {}
    texts = (types[layout.input], types[layout.output])
    return types if all(kind == pa.large_string() for kind in texts) else {}
