"""Labelled traces at scale: writes N synthetic traces, then times `posttrain data pairs` and `data inspect` on them.

    .venv/bin/python bench/traces.py                              5 million traces in Parquet, about 3 GB of text
    .venv/bin/python bench/traces.py --rows 200000 --format jsonl
    .venv/bin/python bench/traces.py --folder /data/tmp --json traces.json

Each command runs in a process of its own. Rows per second are rows of the input over its whole wall-clock time, from
the start of the interpreter to the end of writing; on a busy machine look at rows per second of CPU time. Memory is the
most that the process held (ru_maxrss). Exits with 1 if that passes --limit-gib. The traces of a prompt lie scattered
over all files, which is the hard case for grouping.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS_PER_BATCH = 50_000
ROWS_PER_FILE = 500_000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000, metavar="N", help="traces (default: 5000000)")
    parser.add_argument("--answers", type=int, default=8, metavar="N", help="traces a prompt (default: 8)")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--limit-gib", type=float, default=2.0, metavar="G", help="most memory (default: 2)")
    parser.add_argument("--folder", type=Path, help="where files go while it runs (default: the system's place)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    parser.add_argument("--write-to", type=Path, metavar="FOLDER", help="only write the traces, into an empty folder")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="measure on traces that --write-to wrote before")
    args = parser.parse_args(arguments)
    if args.write_to:
        args.write_to.mkdir(parents=True, exist_ok=True)
        write_traces(args.write_to, args.rows, args.answers, args.format)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-traces-", dir=args.folder) as folder:
        return measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> int:
    traces = args.traces or folder / "traces"
    if not args.traces:
        size = ["--rows", str(args.rows), "--answers", str(args.answers), "--format", args.format]
        # In a child, so that this process stays small: a child's ru_maxrss begins with what its parent held.
        run_measured([sys.executable, __file__, *size, "--write-to", str(traces)])
    stored = sum(file.stat().st_size for file in traces.iterdir())
    print(f"{args.rows:,} traces, {args.answers} a prompt, {stored / 1e9:.2f} GB of {args.format}")

    command = [sys.executable, "-m", "posttrain.cli.main", "data"]
    scratch = ["--scratch", str(folder), "--json"]
    jobs = {
        "pairs": [*command, "pairs", str(traces), str(folder / "pairs.jsonl"), *scratch],
        "inspect": [*command, "inspect", str(traces), *scratch],
    }
    results: dict[str, Any] = {"rows": args.rows, "format": args.format, "stored_bytes": stored}
    for name, job in jobs.items():
        seconds, cpu_s, peak_bytes, output = run_measured(job)
        numbers = json.loads(output)
        read, pairs = numbers["read"], numbers["pairs"]
        assert read["rows"] == read["kept"] == args.rows, read
        results[name] = {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "rows_per_s": args.rows / seconds,
            "rows_per_cpu_s": args.rows / cpu_s,
            "peak_gib": peak_bytes / 2**30,
            "prompts": pairs["prompts"],
            "pairs": pairs["pairs"],
        }
        print(
            f"{name:<8} {seconds:6.1f} s, {cpu_s:6.1f} s of CPU  {args.rows / seconds:9,.0f} rows/s, "
            f"{args.rows / cpu_s:9,.0f} rows per CPU second  peak {peak_bytes / 2**30:.2f} GiB  "
            f"{pairs['prompts']:,} prompts  {pairs['pairs']:,} pairs"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    worst = max(results[name]["peak_gib"] for name in jobs)
    if worst > args.limit_gib:
        print(f"more than {args.limit_gib:g} GiB")
        return 1
    return 0


def run_measured(command: list[str]) -> tuple[float, float, int, str]:
    """Wall-clock seconds, CPU seconds, peak resident bytes and standard output of a command."""
    with tempfile.TemporaryFile("w+") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        output.seek(0)
        scale = 1 if sys.platform == "darwin" else 1024
        return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale, output.read()


def write_traces(folder: Path, rows: int, answers: int, form: str) -> None:
    """Prompts of about 180 characters, responses of about 420, rewards in steps of 0.01; nothing in an order that
    helps.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, length)) for length in rng.integers(2, 9, 4000)], dtype=object)

    def sentence(count: int) -> str:
        return " ".join(words[rng.integers(0, len(words), count)].tolist())

    bodies = [sentence(26) for _ in range(4096)]
    num_prompts = max(1, rows // answers)
    # A stride without a common factor visits every place once, and the answers to a prompt far apart from each other.
    stride = 2_654_435_761
    for part, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        name = folder / f"part-{part:05d}.{form}"
        writer: Any = None
        for begin in range(start, min(start + ROWS_PER_FILE, rows), ROWS_PER_BATCH):
            numbers = np.arange(begin, min(begin + ROWS_PER_BATCH, start + ROWS_PER_FILE, rows))
            prompts = (numbers * stride) % num_prompts
            columns = {
                "trace_id": [f"trace-{number}" for number in numbers],
                "input": [f"Question {prompt}: {bodies[prompt % len(bodies)]}?" for prompt in prompts.tolist()],
                "output": [sentence(count) for count in rng.integers(40, 100, len(numbers)).tolist()],
                "final_reward": rng.integers(0, 101, len(numbers)) / 100,
            }
            table = pa.table(columns)
            if form == "parquet":
                writer = writer or parquet.ParquetWriter(name, table.schema)
                writer.write_table(table)
            else:
                writer = writer or name.open("w", encoding="utf-8")
                writer.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
        writer.close()


if __name__ == "__main__":
    sys.exit(main())
