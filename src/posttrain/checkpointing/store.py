"""A run's checkpoint folder: writing checkpoints, finding the newest good one, removing the surplus.

The folder name shows the state, so that leftovers of a killed writer are recognised:

    step_N            complete; every file listed in its checksums.json
    tmp_step_N.K      being written, by attempt K of the run (tmp_step_N without attempts)
    old_step_N        the previous step_N, for the instant in which a new one takes its name
    removing_step_N   being removed

One process writes to a folder; its `attempt` confirms it before a checkpoint gets its name. Any number may read.
Readers (`latest`, `steps`) change nothing on the disk; leftovers of a killed writer are repaired when the next writer
starts.

The store reads only the metric in `training_info.json` that retention uses.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.checkpointing.integrity import find_damage, seal, total_bytes
from posttrain.errors import CheckpointError, StorageError, Superseded
from posttrain.files import durable
from posttrain.files.json_files import MAX_FILE_BYTES, JsonObject, parse_json, read_at_most
from posttrain.files.run_folder_lock import Attempt

INFO = "training_info.json"
STATUS = "latest_checkpoint_status.json"
_STEP = re.compile(r"(old_)?step_(0|[1-9]\d*)")
_LEFTOVER = re.compile(r"(tmp|removing)_(old_)?step_\d+(?:\.(\d+))?")
_WORTH_A_LINE_BYTES = 2**30  # verifying more than this takes long enough for a message
_FULL_BYTES = 2**20  # a disk with less has no room for a checkpoint of any model
_MAX_CHECKS = 100  # retries if a checkpoint is replaced while it is checked


@dataclass(eq=False)
class CheckpointStore:
    """The defaults are those of a reader."""

    folder: Path
    keep_top_k: int | None = None  # None: all
    metric_name: str | None = None  # in `training_info.json`: what checkpoints are ranked by
    higher_is_better: bool = True
    save_period: int = 1  # steps
    say: Callable[[str], None] = lambda line: None
    attempt: Attempt | None = None  # None: a reader, or a program that has the folder to itself
    damage: dict[int, str] = field(default_factory=dict)  # by step, found here: neither counted nor removed by `retain`
    _last_written: int | None = None
    _being_written: Path | None = None

    def __post_init__(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"checkpointing.checkpoint_dir is {self.folder}, which is a file; accepted: a folder")

    # --- writing ---

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Write a checkpoint's files into the folder that this yields; on leaving it becomes `step_<step>`.

        An exception inside, or while the files are put on the disk, leaves the earlier checkpoints as they were.
        """
        assert step >= 0, step
        self.confirm()
        durable.make_folder(self.folder)
        self._repair()
        # Ranks of an older attempt may still be writing: not into this folder.
        tmp = self.folder / f"tmp_step_{step}{f'.{self.attempt.number}' if self.attempt else ''}"
        tmp.mkdir()
        self._being_written = tmp
        try:
            yield tmp
            seal(tmp)
            self.confirm()
            durable.put_folder(tmp, self.folder / f"step_{step}", self.folder / f"old_step_{step}")
        except BaseException as error:
            full = _full_disk(tmp)  # before the removal makes room
            shutil.rmtree(tmp, ignore_errors=True)
            what = f"while saving checkpoint {self.folder / f'step_{step}'}{full}; earlier checkpoints are untouched"
            if full and not isinstance(error, KeyboardInterrupt | Superseded | OSError):
                raise StorageError(what) from error
            # torch.distributed.checkpoint raises one error for all ranks, with their tracebacks as its text.
            failures: Mapping[int, tuple[BaseException, object]] = getattr(error, "failures", None) or {}
            cause = next((failed for failed, _ in failures.values() if isinstance(failed, OSError)), error)
            cause.add_note(what)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._being_written = None
        self._last_written = step
        self.damage.pop(step, None)
        self._tidy_up_after(step)

    def confirm(self) -> None:
        """Raise Superseded if this process may no longer write; recreate a deleted folder."""
        if self.attempt is not None:
            self.attempt.confirm()

    def save_info(self, tmp: Path, info: Mapping[str, object]) -> None:
        """Write `training_info.json`. NaN and infinities, which JSON does not have, become null."""
        text = json.dumps(_plain(info), indent=2, allow_nan=False)
        (tmp / INFO).write_text(text + "\n", encoding="utf-8")

    def _tidy_up_after(self, step: int) -> None:
        """Cleanup after a complete checkpoint. The state is saved, so errors become messages and fail no run."""
        status = {
            "last_checkpoint_step": step,
            "last_successful_ckpt_save_completion": time.time(),
            "checkpoint": f"step_{step}",
        }
        try:
            self.confirm()  # flushing may have taken minutes
            durable.write_text(self.folder / STATUS, json.dumps(status) + "\n")
            if self.attempt is not None:
                self.attempt.note_checkpoint(step)
            self.retain()
        except OSError as error:
            self.say(f"Checkpoint step_{step} is complete, but tidying up {self.folder} failed: {error}")

    def _repair(self) -> None:
        """Finish or undo the work of a killed writer. Safe to repeat if killed at any point. Folders of a newer attempt
        are not touched.
        """
        for entry in sorted(self.folder.iterdir()):
            match = _STEP.fullmatch(entry.name)
            if match and match[1]:
                self._end_swap(entry, entry.with_name(f"step_{match[2]}"))
            elif (left := _LEFTOVER.fullmatch(entry.name)) and entry != self._being_written:
                if self.attempt is not None and int(left[3] or 0) > self.attempt.number:
                    continue
                if entry.name.startswith("tmp_"):
                    self.say(f"Removing {entry}: the save did not finish")
                self._remove_tree(entry)

    def _end_swap(self, old: Path, current: Path) -> None:
        if current.exists():
            self._remove(old)
            return
        # Killed between the two renames: the earlier checkpoint gets its name back.
        durable.move(old, current)
        self.say(f"Restored checkpoint {current}: the save that was to replace it did not finish")

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint such that a partial one is never taken for complete."""
        doomed = checkpoint.with_name(f"removing_{checkpoint.name}")
        if doomed.exists():
            shutil.rmtree(doomed)
        durable.move(checkpoint, doomed)
        self._remove_tree(doomed)

    def _remove_tree(self, folder: Path) -> None:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # Network filesystems keep files that are open. The next save tries again.
            self.say(f"{folder} could not be removed: {error}")

    # --- reading ---

    def steps(self) -> list[int]:
        """The steps of existing checkpoints, in order. Only names are checked; `latest` verifies contents."""
        # A folder renamed during a listing may be missing under both names. A second listing has it.
        names = {*self._names(), *self._names()}
        return sorted({int(match[2]) for name in names if (match := _STEP.fullmatch(name))})

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are all intact; None if there is none.

        Skipped checkpoints are reported with the problem, and left in place.
        """
        for name in sorted(self._names()):
            if name.startswith("tmp_") and _LEFTOVER.fullmatch(name):
                self.say(f"Skipping {self.folder / name}: the save did not finish")
        for step in reversed(self.steps()):
            folder, problems = self._examine(step)
            if folder is not None and not problems:
                return folder
            if folder is not None:
                self._report(step, folder, problems)
        return None

    def read_info(self, checkpoint: Path) -> JsonObject:
        """The `training_info.json` of a checkpoint."""
        path = checkpoint / INFO
        try:
            info = parse_json(read_at_most(path, MAX_FILE_BYTES))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise CheckpointError(f"{path} holds a {type(info).__name__} instead of an object")
        return info

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []

    def _examine(self, step: int, *, contents: bool = True) -> tuple[Path | None, list[str]]:
        """The path of a step's checkpoint (None if removed) and its problems.

        A writer may replace or remove it during the check. The problems found are then not reliable, and the check is
        repeated.
        """
        problems: list[str] = []
        for _ in range(_MAX_CHECKS):
            found = self._find(step)
            if found is None:
                return None, []
            folder, identity = found
            size = total_bytes(folder) if contents else 0
            if size >= _WORTH_A_LINE_BYTES:
                self.say(f"Verifying checkpoint {folder} ({size / 2**30:.1f} GiB)")
            problems = find_damage(folder, contents=contents)
            if not problems or self._find(step) == (folder, identity):
                return folder, problems
        return folder, problems

    def _find(self, step: int) -> tuple[Path, tuple[int, int, int]] | None:
        """The folder of a step, and which folder that is on the disk: device, inode, and the time of its last entry.

        The inode is not enough: a new folder may get that of the one just removed.
        """
        # The last check is for a swap that ended between the first two.
        for name in (f"step_{step}", f"old_step_{step}", f"step_{step}"):
            try:
                status = (self.folder / name).stat()
            except FileNotFoundError:
                continue
            return self.folder / name, (status.st_dev, status.st_ino, status.st_mtime_ns)
        return None

    def _report(self, step: int, folder: Path, problems: list[str]) -> None:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        self.damage[step] = f"{folder}: {'; '.join(problems[:3])}{more}"
        self.say(f"Skipping damaged checkpoint {self.damage[step]}")

    # --- retention ---

    def retain(self) -> None:
        """Remove the surplus (see `retention`). Damaged checkpoints are neither counted nor touched."""
        self.confirm()
        if self.folder.exists():
            self._repair()
        if self.keep_top_k is None:
            return
        surplus = surplus_steps(
            self._metrics(),
            keep_top_k=self.keep_top_k,
            save_period=self.save_period,
            use_metric=self.metric_name is not None,
            higher_is_better=self.higher_is_better,
            always_keep=() if self._last_written is None else (self._last_written,),
        )
        for step in surplus:
            checkpoint = self.folder / f"step_{step}"
            self.say(f"Removing checkpoint {checkpoint} due to being outside top-{self.keep_top_k}")
            self._remove(checkpoint)

    def _metrics(self) -> dict[int, float | None]:
        """The metric of every checkpoint that is not known to be damaged. Sizes are checked again, which is cheap."""
        metrics: dict[int, float | None] = {}
        for step in self.steps():
            folder, problems = self._examine(step, contents=False)
            if folder is None or step in self.damage:
                continue
            if problems:
                self._report(step, folder, problems)
            else:
                metrics[step] = self._metric(folder)
        return metrics

    def _metric(self, folder: Path) -> float | None:
        try:
            value = self.read_info(folder).get(self.metric_name or "")
        except CheckpointError:
            return None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _full_disk(folder: Path) -> str:
    """torch reports a full disk while writing an archive as an unexpected position in the file."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f": No space left on its disk ({free} bytes)" if free < _FULL_BYTES else ""


def _plain(value: object) -> object:
    """`value` as JSON: one-element tensors and numpy scalars become numbers, non-finite numbers null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- retention ---------------------------------------------------------------------------------------------------------


def surplus_steps(
    metrics: Mapping[int, float | None],  # step -> its metric, for every checkpoint there is
    *,
    keep_top_k: int | None,
    save_period: int,
    use_metric: bool,
    higher_is_better: bool,
    always_keep: Collection[int] = (),
) -> list[int]:
    """The steps to remove, oldest first, by NeMo RL's rule.

    - Steps that are multiples of `save_period` compete for `keep_top_k` places: the best metric first, the newer on a
      tie, a checkpoint without the metric last. With no metric the newest win.
    - Steps in between (saved because the run was interrupted, or ended) are there to resume from; they are surplus as
      soon as a newer one exists.
    - The newest is always kept, whatever its metric, so there can be `keep_top_k` + 1.
    """
    if keep_top_k is None or not metrics:
        return []

    def rank(step: int) -> tuple[float, int]:
        metric = metrics[step]
        if not use_metric or metric is None or math.isnan(metric):
            return -math.inf, step
        return (metric if higher_is_better else -metric), step

    candidates = sorted((step for step in metrics if step % save_period == 0), key=rank, reverse=True)
    kept = {*candidates[:keep_top_k], max(metrics), *always_keep}
    return sorted(step for step in metrics if step not in kept)
