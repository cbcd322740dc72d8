"""A million rows of traces: commands over data read them row by row, in bounded memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from faults.campaign import Case, Part
from faults.lab import Lab

ROWS, SHORT_ROWS = 1_000_000, 20_000
PER_PROMPT = 4
MAX_BYTES = 1 << 30  # resident, imports included
# Starts a command and prints the most memory that it had, in KiB. In a small process of its own: what starts a process
# counts to the memory of that process.
_MEASURED = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode; "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for command in (["inspect", "--json"], ["pairs", "pairs.jsonl"]):
        yield Case(command[0], partial(bounded, lab, command, SHORT_ROWS if short else ROWS))


PART = Part("large", "commands over data take bounded memory, whatever the number of rows", cases, 2)


def traces(folder: Path, count: int) -> Path:
    path = folder / "traces.jsonl"
    with path.open("w") as file:
        for number in range(count):
            question, answer = divmod(number, PER_PROMPT)
            row = {"input": f"What is {question} + 1?", "output": f"{question + answer}", "final_reward": answer % 2}
            file.write(json.dumps(row) + "\n")
    return path


def bounded(lab: Lab, command: list[str], rows: int, folder: Path, chance: random.Random) -> None:
    file = lab.shared(f"traces-{rows}", partial(traces, count=rows))
    name, last = command
    words = [sys.executable, "-c", _MEASURED, sys.executable, "-m", "posttrain", "data", name, str(file), last]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=log)
    output = (folder / "log").read_text(errors="replace")
    assert done.returncode == 0, output[-2000:]
    used = int(done.stdout) << 10
    assert used <= MAX_BYTES, f"{used >> 20} MiB"
    if name == "inspect":
        assert f"{rows}" in output, output[-2000:]
    else:
        assert sum(1 for _ in (folder / "pairs.jsonl").open()) >= rows / PER_PROMPT
