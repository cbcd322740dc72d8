"""Each side of a comparison runs in a process of its own: its memory and its compiled code are its own, and so are its
crashes.

A script calls `run_side` with a job, which is JSON; the same script, started with `--job`, does it with `serve_side`
and writes the result. A side that fails is shown as failed and does not stop the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]
_TAIL_LINES = 30


def run_side(script: str | Path, job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Result:
    """The result of the side, or {"error": one line, "output": the end of what it printed}.

    `environment` holds what the side needs unless it is set already.
    """
    with tempfile.TemporaryDirectory(prefix="bench-side-") as scratch:
        job_file, result_file, log_file = (Path(scratch) / name for name in ("job.json", "result.json", "log.txt"))
        job_file.write_text(json.dumps(job))
        here = str(Path(__file__).resolve().parent)
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        with log_file.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(script), "--job", str(job_file)],
                env={**(environment or {}), **os.environ, "PYTHONPATH": paths},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if result_file.exists():
            found: Result = json.loads(result_file.read_text())
            if "error" not in found:
                return found
        else:
            found = {"error": f"ended with exit code {code}"}
        return {**found, "output": "\n".join(log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])}


def serve_side(job_file: Path, work: Callable[[dict[str, Any]], Result]) -> int:
    """Do the job of `run_side` in this process."""
    try:
        result = work(json.loads(job_file.read_text()))
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        result = {"error": f"{type(error).__name__}: {first_line}"[:200]}
    (job_file.parent / "result.json").write_text(json.dumps(result))
    return 1 if "error" in result else 0


def show_failures(results: Mapping[str, Result]) -> None:
    for name, result in results.items():
        if "error" in result:
            print(f"\n{name} failed: {result['error']}\n{result.get('output', '')}", file=sys.stderr)
