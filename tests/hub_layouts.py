"""Benchmarks as the hub has them: file names, columns and types, with a row or two in each file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

Rows = list[dict[str, Any]]

COMPETITION: Rows = [
    {"id": 60, "problem": "Find $x$.", "solution": r"So \boxed{204}.", "answer": "204", "url": "u", "year": "2024"},
    {"id": 61, "problem": "Find $y$.", "solution": r"So \boxed{25}.", "answer": "025", "url": "u", "year": "2024"},
]
MMLU: Rows = [
    {
        "question": "Capital of France?",
        "subject": "geography",
        "choices": ["Rome", "Paris", "Bern", "Oslo"],
        "answer": 1,
    }
]
OTHER_SUBJECT: Rows = [{"question": "x?", "subject": "algebra", "choices": ["1", "2", "3", "4"], "answer": 0}]
GPQA = {
    "Record ID": "rec06",
    "Question": "Which particle?",
    "Correct Answer": "the electron\n",
    "Incorrect Answer 1": "the muon",
    "Incorrect Answer 2": "the tau",
    "Incorrect Answer 3": "the pion",
    "Explanation": "It is light.",
    "Subdomain": "Physics (general)",
}
MATH: Rows = [
    {
        "problem": r"Evaluate $\frac{1}{2}+\frac{1}{2}$.",
        "solution": r"It is $\boxed{1}$.",
        "answer": "1",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    }
]
# By benchmark: the files of its repository on the hub, the number of problems, and the first answer.
LAYOUTS: dict[str, tuple[dict[str, Rows], int, object]] = {
    "AIME2024": ({"data/train-00000-of-00001.parquet": COMPETITION}, 2, "204"),
    "AIME2025": (
        {
            "aime2025-I.jsonl": [{"question": "Sum of bases?", "answer": "70"}],
            "aime2025-II.jsonl": [{"question": "Sixes?", "answer": "468"}],
        },
        2,
        "70",
    ),
    "AMC23": (
        {"data/test-00000-of-00001.parquet": [{"id": 0, "answer": 27.0, "url": "u", "question": "Hours?"}]},
        1,
        27.0,
    ),
    "MATH-500": ({"test.jsonl": MATH}, 1, "1"),
    "mmlu": (
        {
            "all/test-00000-of-00001.parquet": MMLU,
            "all/dev-00000-of-00001.parquet": OTHER_SUBJECT,
            "abstract_algebra/test-00000-of-00001.parquet": OTHER_SUBJECT,
        },
        1,
        "B",
    ),
    "mmlu_pro": (
        {
            "data/test-00000-of-00001.parquet": [
                {"question_id": 70, "question": "Q?", "options": list("abcdefghij"), "answer": "I", "answer_index": 8}
            ],
            "data/validation-00000-of-00001.parquet": OTHER_SUBJECT,
        },
        1,
        "I",
    ),
    "mmlu_ZH-CN": (
        {
            "test/mmlu_ZH-CN.csv": [{"Question": "Q?", "A": "1", "B": "2", "C": "3", "D": "4", "Answer": "C"}],
            "test/mmlu_DE-DE.csv": [{"Question": "F?", "A": "1", "B": "2", "C": "3", "D": "4", "Answer": "A"}],
        },
        1,
        "C",
    ),
    "gpqa": ({"gpqa_diamond.csv": [GPQA], "gpqa_main.csv": [GPQA, GPQA], "gpqa_experts.csv": [{"Name": "x"}]}, 1, None),
    "gpqa_main": ({"gpqa_diamond.csv": [GPQA], "gpqa_main.csv": [GPQA, GPQA]}, 2, None),
    "DeepScaleR": ({"deepscaler.json": [{"problem": "2+2?", "answer": "4", "solution": "It is 4."}]}, 1, "4"),
    "gsm8k": (
        {
            "main/test-00000-of-00001.parquet": [{"question": "How many?", "answer": "9 + 9\n#### 18"}],
            "socratic/test-00000-of-00001.parquet": [{"question": "Other?", "answer": "#### 1"}],
        },
        1,
        "18",
    ),
}


def save(folder: Path, files: dict[str, Rows]) -> Path:
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.suffix == ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        else:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder
