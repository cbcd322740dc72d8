"""Pairs as a jsonl file: NeMo-Aligner's columns, or TRL's. The file appears whole or not at all."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from posttrain.data.errors import DataError
from posttrain.data.traces.files import locate
from posttrain.data.traces.grouping import GroupedPart
from posttrain.data.traces.pairs import pair_rows
from posttrain.data.traces.reading import COMPARED, Reading, ordered
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import PairRules
from posttrain.files import durable
from posttrain.files.json_files import JsonMapping, JsonObject

PairFormat = Literal["aligner", "trl"]
ENDINGS = (".jsonl", ".jsonl.gz")
_JSON = json.JSONEncoder(ensure_ascii=False)
SEVERAL_MESSAGES = "an answer of several messages, which NeMo-Aligner's columns cannot hold"


def write_pairs(
    reading: Reading,
    out: Path,
    rules: PairRules,
    form: PairFormat,
    report: ReadReport,
    counts: PairReport,
    *,
    templated: bool = False,
) -> int:
    """Writes the pairs of the traces and returns how many lines there are. No pair at all is an error, and no file.

    `templated`: prompts that are text hold the chat template already, and are written as texts. NeMo-Aligner takes
    texts for that. Otherwise a text is a user's message, and is written as a user's message.
    """
    if not out.name.endswith(ENDINGS):
        raise DataError(f"{out}: pairs are written as jsonl; the name must end in {' or '.join(ENDINGS)}")
    if not out.parent.is_dir():
        raise DataError(f"{out}: the folder {out.parent} does not exist")
    if out.is_dir():
        raise DataError(f"{out}: is a folder; name the file to write")
    files = locate(reading.path)
    if any(Path(file.location) == out.absolute() for file in files):
        raise DataError(f"{out}: is one of the files that are read")

    def json_lines(part: GroupedPart) -> Iterator[tuple[int, bytes]]:
        for place, row in pair_rows(part, rules, counts):
            shaped = _shaped(row, form, templated=templated)
            if isinstance(shaped, str):
                counts.not_writable[shaped] += 1
            else:
                yield place, _JSON.encode(shaped).encode() + b"\n"

    lines = 0
    with durable.replacing(out) as partial:
        with partial.open("wb") as raw:
            # Without a time stamp in it, the same pairs are the same bytes.
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if out.name.endswith(".gz") else None
            for line in ordered(reading, report, json_lines, files, columns=COMPARED):
                (packed or raw).write(line)
                lines += 1
            if packed:
                packed.close()
        if not lines:
            raise DataError(_no_pairs(reading.name, report, counts))
    return lines


def _shaped(row: JsonMapping, form: PairFormat, *, templated: bool) -> JsonObject | str:
    """The row in the columns of a format, or why that is not possible."""
    prompt, chosen, rejected = row["prompt"], row["chosen_response"], row["rejected_response"]
    texts = isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)
    if not texts or (form == "aligner" and not templated):
        prompt, chosen, rejected = _turns(prompt, "user"), _turns(chosen, "assistant"), _turns(rejected, "assistant")
        if form == "aligner":
            if len(chosen) != 1 or len(rejected) != 1:
                return SEVERAL_MESSAGES
            chosen, rejected = chosen[0], rejected[0]
    if form == "trl":
        scores = {"score_chosen": row["chosen_reward"], "score_rejected": row["rejected_reward"]}
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **scores}
    return {**row, "prompt": prompt, "chosen_response": chosen, "rejected_response": rejected}


def _turns(response: str | list[Any], role: str) -> list[Any]:
    return [{"role": role, "content": response}] if isinstance(response, str) else response


def _no_pairs(path: str, report: ReadReport, counts: PairReport) -> str:
    dropped = {reason: tally.count for part in (report.problems, report.filtered) for reason, tally in part.items()}
    why = [f"{count} prompts: {reason}" for reason, count in counts.none.items()]
    why += [f"{count} pairs: {reason}" for reason, count in counts.not_writable.items()]
    why += [f"{count} rows: {reason}" for reason, count in dropped.items()]
    return f"{path}: not one pair among {counts.prompts} prompts ({'; '.join(why)}); see `posttrain data inspect`"
