"""A search tool over a file of documents: `env.<name>.turns: search`, `turns_kwargs: {documents: facts.jsonl}`.

The ranking is BM25 (Robertson and Zaragoza, 2009) over lower-case words, with k1 1.5 and b 0.75. Everything is in
memory, in every worker: this is for thousands of documents, not for millions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from posttrain.environments.turns.tools import ToolEnvironment, ToolError, schema_of
from posttrain.files.json_files import JsonMapping, parse_json

_K1, _B = 1.5, 0.75
_SCHEMA = schema_of("search", "Looks for texts about a few words.", "query", "a few words")


class Search(ToolEnvironment):
    """`documents` is a jsonl file with `text` and perhaps `title` in each line."""

    def __init__(self, documents: str, num_results: int = 3, max_characters: int = 500, describe: bool = True) -> None:
        self.documents = _read(Path(documents).expanduser())
        self.num_results, self.max_characters = num_results, max_characters
        self.index = Index([f"{title} {text}" for title, text in self.documents])
        self.tools = (_SCHEMA,) if describe else ()

    def call(self, state: Any, name: str, arguments: JsonMapping) -> str:
        query = arguments.get("query")
        if name != "search" or not isinstance(query, str):
            raise ToolError('the only tool is search, with one argument: {"query": "..."}')
        found = self.index.best(query, self.num_results)
        if not found:
            raise ToolError("nothing was found")
        lines = []
        for title, text in (self.documents[number] for number in found):
            cut = text if len(text) <= self.max_characters else text[: self.max_characters] + "…"
            lines.append(f"{title}: {cut}" if title else cut)
        return "\n".join(lines)


class Index:
    """Which documents a query is about. Equal scores keep the order of the file."""

    def __init__(self, texts: list[str]) -> None:
        self.counts = [Counter(_words(text)) for text in texts]
        self.lengths = [sum(counts.values()) for counts in self.counts]
        self.mean_length = sum(self.lengths) / max(1, len(texts))
        self.containing: dict[str, list[int]] = {}
        for number, counts in enumerate(self.counts):
            for word in counts:
                self.containing.setdefault(word, []).append(number)

    def best(self, query: str, count: int) -> list[int]:
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(_words(query)):
            holders = self.containing.get(word, [])
            rarity = math.log(1 + (len(self.counts) - len(holders) + 0.5) / (len(holders) + 0.5))
            for number in holders:
                times = self.counts[number][word]
                stretch = _K1 * (1 - _B + _B * self.lengths[number] / self.mean_length)
                scores[number] += rarity * times * (_K1 + 1) / (times + stretch)  # type: ignore[assignment]
        return sorted(scores, key=lambda number: (-scores[number], number))[:count]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _read(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise ValueError(f"documents: there is no file {path} (looked in {Path.cwd()})")
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            documents.append((str(row.get("title") or ""), str(row["text"])))
        except (ValueError, AttributeError, KeyError):
            raise ValueError(f"documents: {path}, line {number}: an object with 'text' is needed") from None
    if not documents:
        raise ValueError(f"documents: {path} is empty")
    return documents
