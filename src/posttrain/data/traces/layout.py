"""Which columns of a file are the prompt, the response, the reward: `TraceColumns` matched with its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from posttrain.data.errors import DataError, nearest
from posttrain.data.traces.values import TraceColumns
from posttrain.files.json_files import JsonMapping

if TYPE_CHECKING:
    import pyarrow as pa

Shape = Literal["messages", "text", "pair"]

_NAMES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
USUAL: Mapping[str, Sequence[str]] = _NAMES["traces"]
OF_A_PAIR: Mapping[str, Sequence[str]] = _NAMES["pairs"]


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
        """The columns to read, each once."""
        named = [value for key, value in vars(self).items() if key not in ("shape", "where") and value]
        return list(dict.fromkeys([*named, *self.where]))


def find_layout(columns: TraceColumns, has: Sequence[str], file: str, where: Sequence[str] = ()) -> Layout:
    """The layout of a file with the columns `has`. One that must be there and is not: an error that lists all."""

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
        names = {"messages": pick("messages", required=True), "prompt_len": pick("prompt_len")}
        reward = _require(columns.reward, "reward", has, file)
        return Layout("messages", **names, reward=reward, where=tuple(where), **common)
    pair = {role: next((name for name in names if name in has), "") for role, names in OF_A_PAIR.items()}
    if pair["chosen"] and pair["rejected"] and not columns.output and columns.reward not in has:
        return Layout("pair", input=pick("input", required=True), where=tuple(where), **pair, **common)
    names = {role: pick(role, required=True) for role in ("input", "output")}
    reward = _require(columns.reward, "reward", has, file)
    return Layout("text", **names, reward=reward, where=tuple(where), **common)


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
    """As which types Arrow may parse the columns of a jsonl file, by its first rows. {}: record by record."""
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
