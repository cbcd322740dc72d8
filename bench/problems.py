"""Problems of GSM8K's form, and whether an answer is right: the number after its last `####` is that of
`final_answer`.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

_LAST = re.compile(r"####\s*([^\n]+)\s*$")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_problems(path: Path) -> list[dict[str, str]]:
    """JSON lines, .gz or not."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def right_answer(prompt: str, response: str, reference: object) -> float:
    written = _LAST.search(response.strip())
    if written is None or (found := _NUMBER.search(written[1])) is None:
        return 0.0
    return float(_value(found[0]) == _value(str(reference)))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
