"""Program of the process that converts a checkpoint while training continues: the folder, and whether to merge LoRA.

It ends when its standard input does, so that it does not write into the folder of a run that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from posttrain.apps.export.convert import COPY_FOLDER, WARNING, PeriodicExport

_PERIOD_S = 0.1


def convert_beside(
    checkpoint: Path, warn: Callable[[str], None], is_given_up: Callable[[], bool], *, merge_lora: bool
) -> None:
    """Run this program until it is over, or the run has failed."""
    command = [sys.executable, "-m", __name__, str(checkpoint), "merge" if merge_lora else "keep"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    its_end, our_end = os.pipe()  # ours is closed by the kernel if this process is killed
    try:
        process = subprocess.Popen(
            command, stdin=its_end, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(its_end)
        output = ""
        while process.returncode is None:
            if is_given_up():
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, output = process.communicate(timeout=_PERIOD_S)
    finally:
        os.close(our_end)
    if process.returncode != 0:
        shutil.rmtree(checkpoint / COPY_FOLDER, ignore_errors=True)
    warnings = [line for line in output.splitlines() if line.startswith(WARNING)]
    if process.returncode != 0 and not is_given_up():
        step = checkpoint.name.removeprefix("tmp_").partition(".")[0]
        warnings.append(f"{WARNING} {step} is saved without its copy: {(output.splitlines() or ['?'])[-1]}")
    for line in warnings:
        warn(line)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    PeriodicExport(lambda line: print(line, file=sys.stderr), sys.argv[2] == "merge")(Path(sys.argv[1]))
