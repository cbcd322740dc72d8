"""The folder of a run: which one a command uses, and whether the run in it may be resumed with the settings given now.

One process at a time has write access (`files/run_folder_lock.py`). The config that steps were trained with is never
replaced. A run is resumed with equal settings, with changes that do not affect training
(`config.changes.FREE_TO_CHANGE`), or with any change if the user asks for it. Changes are recorded with the first step
trained with them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkpointing import CheckpointStore
from posttrain.checkpointing.store import STATUS
from posttrain.config import LoadedConfig, RunConfig
from posttrain.config.base import ConfigError
from posttrain.config.changes import ConfigChange, changes_since
from posttrain.config.tree import DEFAULT, without_marks
from posttrain.config.yaml_files import parse_document
from posttrain.errors import RESTART, RESUME_WITH_CHANGES, FolderHeld, InputError, exit_code_of, reason_of
from posttrain.files.redaction import redact
from posttrain.files.run_folder_lock import Attempt, holder_of
from posttrain.reporting.run_files import CONFIG_FILE, FILES_OF_A_RUN, FINISHED, archive, config_from_step, read_info

CHECKPOINT_DIR = "checkpointing.checkpoint_dir"
RUN_VARIABLE = "POSTTRAIN_RUN"  # the name of the run in a cluster, in its pods
MAX_NAMED = 20


def run_folder(log_dir: str | None, checkpoint_dir: str) -> Path:
    """Where a run writes its metrics: its own folder, by default beside its checkpoints."""
    return Path(log_dir or checkpoint_dir)


@dataclass(frozen=True)
class FolderState:
    """The state of the run in a folder."""

    checkpoints: Path
    step: int  # of the newest checkpoint; 0: there is none
    config: Path | None  # the config in force after that step
    is_finished: bool

    @property
    def holds_run(self) -> bool:
        return self.step > 0 or self.config is not None

    @property
    def scheduler(self) -> object:
        """`policy.scheduler` of the run; None if there is none."""
        text = self.config.read_text("utf-8") if self.config is not None else "{}"
        return without_marks(parse_document(text, str(self.config)).values).get("policy", {}).get("scheduler")

    def changes(self, loaded: LoadedConfig) -> tuple[ConfigChange, ...]:
        if self.config is None:
            return ()
        try:
            return changes_since(self.config.read_text("utf-8"), loaded, str(self.config))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.config} cannot be read: {error}") from error


def inspect_folder(log_dir: str | None, checkpoint_dir: str) -> FolderState:
    checkpoints, folder = Path(checkpoint_dir), run_folder(log_dir, checkpoint_dir)
    step = max(CheckpointStore(checkpoints).steps(), default=0)
    # A change that was accepted after this checkpoint is in force although no checkpoint has it yet.
    places = (
        (folder / config_from_step(step + 1), checkpoints / f"step_{step}" / CONFIG_FILE, folder / CONFIG_FILE)
        if step
        else (folder / CONFIG_FILE,)
    )
    config = next((place for place in places if place.is_file()), None)
    return FolderState(checkpoints, step, config, read_info(folder).get("status") == FINISHED)


# --------------------------------------------------------------------------------------------------- write access


@dataclass(frozen=True)
class WriteAccess:
    """The right of this process to write checkpoints and records; the same attempt where both are in one folder."""

    checkpoints: Attempt
    record: Attempt

    @classmethod
    def take(cls, config: RunConfig) -> WriteAccess:
        """FolderHeld if another process has it."""
        folder = Path(config.checkpointing.checkpoint_dir)
        log = run_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir)
        run = os.environ.get(RUN_VARIABLE)
        checkpoints = Attempt(folder, setting=CHECKPOINT_DIR, run=run)
        if os.path.abspath(log) == os.path.abspath(folder):
            return cls(checkpoints, checkpoints)
        try:
            return cls(checkpoints, Attempt(log, setting="logger.log_dir", run=run))
        except BaseException:
            checkpoints.end(InputError.exit_code)
            raise

    @property
    def has_begun(self) -> bool:
        return self.record.has_begun

    def end(self, exit_code: int | None, error: str | None = None) -> None:
        """`exit_code` None: the run crashed."""
        self.checkpoints.has_begun |= self.record.has_begun
        for attempt in {id(attempt): attempt for attempt in (self.checkpoints, self.record)}.values():
            attempt.end(exit_code, error)

    def end_with(self, error: BaseException) -> None:
        """A stop by a signal is no error."""
        reason = None if isinstance(error, KeyboardInterrupt) else redact(f"{type(error).__name__}: {reason_of(error)}")
        self.end(exit_code_of(error), reason)

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.end_with(error)
            raise


@dataclass(frozen=True)
class PreparedFolder:
    """A folder that this process may write to, and the config with its name."""

    loaded: LoadedConfig
    access: WriteAccess
    notes: list[str]


def prepare_run_folder(
    load: Callable[[Sequence[str]], LoadedConfig], *, accept_changes: bool = False, restart: bool = False
) -> PreparedFolder:
    """Choose the folder, take write access, and check that the run in it may be resumed, or set it aside.

    `load` loads the config with additional overrides.
    """
    while True:
        loaded = load([])
        folder, notes = choose_checkpoint_dir(loaded, accept_changes=accept_changes)
        is_default = loaded.origins.get(CHECKPOINT_DIR) == DEFAULT
        if folder != loaded.config.checkpointing.checkpoint_dir:
            loaded = load([f"{CHECKPOINT_DIR}={folder}"])
        try:
            access = WriteAccess.take(loaded.config)
            break
        except FolderHeld:
            if accept_changes or not is_default or holder_of(Path(folder)) is None:
                raise  # else a default folder was taken a moment ago, and the next one is chosen
    with access.ending_on_error():
        if restart:
            notes = _set_aside(loaded.config)
        notes += check_run_folder(loaded, accept_changes=accept_changes)
    return PreparedFolder(loaded, access, notes)


def _set_aside(config: RunConfig) -> list[str]:
    """Move the run in the folder, with its checkpoints, to `earlier_NNN/`."""
    checkpoints = Path(config.checkpointing.checkpoint_dir)
    log = run_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir)
    names = sorted(
        path.name for path in checkpoints.iterdir() if re.match(r"(tmp_|removing_)?(old_)?step_\d", path.name)
    )
    moved = []
    for folder, also in {log: [], checkpoints: [*names, STATUS]}.items():
        if any((folder / name).exists() for name in [*also, *FILES_OF_A_RUN]):
            moved.append(f"the run in {folder} is set aside in {archive(folder, also=also).name}/")
    return moved


# ---------------------------------------------------------------------------------------------------- default names


def choose_checkpoint_dir(loaded: LoadedConfig, *, accept_changes: bool) -> tuple[str, list[str]]:
    """The folder to use, and a line with the reason if there was a choice.

    A folder that was given is used as given. The default is numbered: of results/grpo, results/grpo-2, ... the newest
    that holds a run with the same training settings, and is not in use, is used, and the next number if there is none.
    """
    base, log_dir = loaded.config.checkpointing.checkpoint_dir, loaded.config.logger.log_dir
    if loaded.origins.get(CHECKPOINT_DIR) != DEFAULT:
        return base, []
    numbers = _numbers(Path(base))
    newest = _numbered(base, numbers[0])
    newest_state = inspect_folder(log_dir, newest)
    if accept_changes and newest_state.holds_run:
        return newest, [f"resuming the run in {newest}, the newest one: {RESUME_WITH_CHANGES} is given"]
    for number in numbers:
        folder = _numbered(base, number)
        state = inspect_folder(log_dir, folder)
        if state.holds_run and not _obstacle(state, loaded):
            return folder, [_why_used(folder, state)]
    obstacle = _obstacle(newest_state, loaded)
    if not newest_state.holds_run and not obstacle:
        return newest, []
    following = _numbered(base, numbers[0] + 1)
    return following, [f"a new run in {following}: {newest} {obstacle}"]


def _numbered(base: str, number: int) -> str:
    return base if number == 1 else f"{base}-{number}"


def _numbers(base: Path) -> list[int]:
    """The numbers of the default folders that exist, the newest first; 1 is always among them."""
    names = [path.name for path in base.parent.glob(f"{base.name}-*") if path.is_dir()] if base.parent.is_dir() else []
    matches = (re.fullmatch(rf"{re.escape(base.name)}-([1-9]\d{{0,3}})", name) for name in names)
    return sorted({1, *(int(match[1]) for match in matches if match)}, reverse=True)


def _why_used(folder: str, state: FolderState) -> str:
    if state.is_finished:
        other = f"for another run name a folder ({CHECKPOINT_DIR}=...)"
        return f"the run in {folder} is finished and has the same settings; {other}"
    if state.step:
        return f"resuming the run in {folder}: it is not finished and has the same settings"
    return f"starting again in {folder}: it has the same settings and no checkpoint"


def _obstacle(state: FolderState, loaded: LoadedConfig) -> str:
    """Why the run in a default folder is not resumed, as the end of a sentence about the folder."""
    if (held := holder_of(state.checkpoints)) is not None:
        return f"is in use by {held.holder}"
    try:
        training = [change for change in state.changes(loaded) if change.is_training]
    except ConfigError as error:
        return f"holds another run: {error}"
    more = f" and {len(training) - 1} more" if len(training) > 1 else ""
    return f"holds a run with other settings ({training[0]}{more})" if training else ""


# ----------------------------------------------------------------------------------------------- resume or refuse


def check_run_folder(loaded: LoadedConfig, *, accept_changes: bool) -> list[str]:
    """Lines that name the settings that differ from those of the run in the folder.

    Raises InputError if the run has a checkpoint, a setting that counts as training differs, and `accept_changes` is
    not given.
    """
    config = loaded.config
    state = inspect_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir)
    try:
        changes = state.changes(loaded)
    except ConfigError as error:
        if not state.step:
            return []  # there is nothing to resume: the files are archived
        raise InputError(f"{error}\n{_REMEDY_FOLDER}, or {_REMEDY_RESTART}") from error
    training = [change for change in changes if change.is_training]
    if training and state.step and not accept_changes:
        raise InputError(
            f"{state.checkpoints} holds a run that was trained with other settings up to step {state.step}:\n"
            f"{_listed(training)}\n"
            f"Give the settings of {state.config}, or {_REMEDY_FOLDER}, or resume from step {state.step} with the new "
            f"settings: {RESUME_WITH_CHANGES}, or {_REMEDY_RESTART}"
        )
    if not changes:
        return []
    since = f"from step {state.step + 1} on" if state.step else "from those of the earlier run, which has no checkpoint"
    return [f"settings that differ {since}:", *_listed(changes).splitlines()]


_REMEDY_FOLDER = f"start a new run in another folder ({CHECKPOINT_DIR}=...)"
_REMEDY_RESTART = f"set the run in the folder aside and begin at step 1: {RESTART}"


def _listed(changes: Sequence[ConfigChange]) -> str:
    lines = [f"  {change}" for change in changes[:MAX_NAMED]]
    if len(changes) > MAX_NAMED:
        lines.append(f"  and {len(changes) - MAX_NAMED} more")
    return "\n".join(lines)
