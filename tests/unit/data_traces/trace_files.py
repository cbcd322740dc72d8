"""Small files of traces for tests: rows as jsonl, gzip or Parquet, and random sets with everything that can go
wrong."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.data.traces import ReadReport

Rows = Sequence[Mapping[str, Any]]


def is_complete(report: ReadReport) -> bool:
    """The invariant at the end of reading."""
    tallies = [*report.problems.values(), *report.filtered.values()]
    return report.rows == report.kept + sum(tally.count for tally in tallies)


def trace(prompt: str, response: str, reward: Any, **more: Any) -> dict[str, Any]:
    return {"input": prompt, "output": response, "final_reward": reward, **more}


def chat_trace(prompt: str, response: str, reward: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return {"messages": messages, "prompt_len": 1, "final_reward": reward, **more}


def write_lines(path: Path, rows: Rows) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return str(path)


def write_parquet(path: Path, rows: Rows, **options: Any) -> str:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path, **options)
    return str(path)


def random_rows(count: int, prompts: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        trace(
            f"question {rng.randrange(prompts)}",
            f"answer {rng.randrange(40)}",
            rng.randrange(11) / 10,
            trace_id=f"t{n}",
        )
        for n in range(count)
    ]
