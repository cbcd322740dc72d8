"""`checkpointing.save_consolidated`: each checkpoint gets a copy of the model for use, in `step_N/hf`.

The copy is made while the checkpoint is being written, and is covered by its checksums. If it fails (weights that are not
finite, a missing base model), the checkpoint is saved without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkpointing.state import capture_rng, restore_rng
from posttrain.errors import InputError
from posttrain.export.convert import ConversionSettings, convert

FOLDER = "hf"


@dataclass(frozen=True)
class PeriodicExport:
    warn: Callable[[str], None]
    merge_lora: bool = True

    def __call__(self, checkpoint: Path) -> None:
        """Convert the weights in `checkpoint`, which still has its temporary name."""
        name = checkpoint.name.removeprefix("tmp_")
        shown_as = f"{checkpoint.parent.name}/{name}"
        settings = ConversionSettings(merge_lora=self.merge_lora)
        rng = capture_rng()  # building a model may draw random numbers, and the run must continue as without the copy
        try:
            convert(str(checkpoint), checkpoint / FOLDER, settings, shown_as=shown_as, say=_ignore)
        except InputError as error:
            shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
            self.warn(f"checkpointing.save_consolidated: {name} is saved without its copy in {FOLDER}/: {error}")
        finally:
            restore_rng(rng)


def _ignore(_: str) -> None:
    """The progress of the copy is not printed."""
