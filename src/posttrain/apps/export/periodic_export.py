"""A converted copy of the model in each checkpoint, made here or in another process while training continues.

As a program (a checkpoint's folder, and "merge" or "keep" for LoRA) it ends when its standard input does, so that it
does not write into the folder of a run that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.export.convert import ConversionSettings, convert
from posttrain.checkpointing.state import capture_rng, restore_rng
from posttrain.errors import InputError

COPY_FOLDER = "hf"  # in a checkpoint
WARNING = "checkpointing.save_consolidated:"
_PERIOD_S = 0.1


@dataclass(frozen=True)
class PeriodicExport:
    """`checkpointing.save_consolidated`: each checkpoint gets a converted copy of the model, in `step_N/hf`.

    The copy is made while the checkpoint is being written, and is covered by its checksums. If it fails (weights that
    are not finite, a missing base model), the checkpoint is saved without it.
    """

    warn: Callable[[str], None]
    merge_lora: bool = True

    def __call__(self, checkpoint: Path) -> None:
        """Convert the weights in `checkpoint`, which still has its temporary name."""
        name = _step_of(checkpoint)
        shown_as = f"{checkpoint.parent.name}/{name}"
        settings = ConversionSettings(merge_lora=self.merge_lora)
        rng = capture_rng()  # building a model may draw random numbers, and the run must continue as without the copy
        try:
            convert(str(checkpoint), checkpoint / COPY_FOLDER, settings, shown_as=shown_as, say=lambda line: None)
        except InputError as error:
            shutil.rmtree(checkpoint / COPY_FOLDER, ignore_errors=True)
            self.warn(f"{WARNING} {name} is saved without its copy in {COPY_FOLDER}/: {error}")
        finally:
            restore_rng(rng)

    def beside(self, checkpoint: Path, is_given_up: Callable[[], bool]) -> None:
        """The same in another process, until it is over or the run has failed: training continues, with separate random
        numbers.
        """
        command = [sys.executable, "-m", __name__, str(checkpoint), "merge" if self.merge_lora else "keep"]
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
        warnings = [line for line in output.splitlines() if line.startswith(WARNING)]
        if process.returncode != 0:
            shutil.rmtree(checkpoint / COPY_FOLDER, ignore_errors=True)
            if not is_given_up():
                reason = (output.splitlines() or ["?"])[-1]
                warnings.append(f"{WARNING} {_step_of(checkpoint)} is saved without its copy: {reason}")
        for line in warnings:
            self.warn(line)


def _step_of(checkpoint: Path) -> str:
    """The name that the checkpoint will have."""
    return checkpoint.name.removeprefix("tmp_").partition(".")[0]


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    PeriodicExport(lambda line: print(line, file=sys.stderr), sys.argv[2] == "merge")(Path(sys.argv[1]))
