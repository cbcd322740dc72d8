"""Starts a training run and starts it again when a rank was lost. Knows no app: those that take part are passed in."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.checkpointing.stopping import StopAtOnce
from posttrain.errors import InputError, OutOfGpuMemoryError, RankLostError

if TYPE_CHECKING:
    from posttrain.build import ExportMaker, Planner
    from posttrain.checkpointing.run_folder import PreparedFolder
    from posttrain.config import LoadedConfig, RunConfig

Load = Callable[[Sequence[str]], "LoadedConfig[RunConfig]"]


@dataclass(frozen=True)
class RunExtensions:
    """What apps add to a run; the core trains without."""

    make_export: ExportMaker | None = None
    plan: Planner | None = None  # the prediction in the header
    advise: Callable[[RunConfig, OutOfGpuMemoryError, Path], str] | None = None  # when GPU memory was not enough


def start_run(
    kind: str,
    load: Load,
    *,
    accept_changes: bool = False,
    restart: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    prepare: Callable[[LoadedConfig[RunConfig]], None] = lambda loaded: None,
    extensions: RunExtensions = RunExtensions(),
) -> tuple[int, LoadedConfig[RunConfig]]:
    """Train until the end, or until there is a reason to stop. Returns the exit code and the config in force.

    `load` loads the config with additional overrides. `prepare` is called once the folder is chosen and this process
    may write to it, before anything else is read.
    """
    num_restarts = 0
    while True:
        prepared = _prepared(load, accept_changes=accept_changes, restart=restart and num_restarts == 0)
        limit = prepared.loaded.config.cluster.max_restarts
        try:
            return _train(kind, prepared, prepare, extensions, quiet=quiet, verbose=verbose), prepared.loaded
        except RankLostError as error:
            if num_restarts == limit or StopAtOnce.is_asked():
                raise
            num_restarts += 1
            print(f"{error}\nrestart {num_restarts} of {limit} (cluster.max_restarts)", file=sys.stderr, flush=True)
        gc.collect()  # models contain reference cycles
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _prepared(load: Load, *, accept_changes: bool, restart: bool) -> PreparedFolder:
    from posttrain.checkpointing.run_folder import prepare_run_folder
    from posttrain.models.accepted_names import from_checkpoints

    return prepare_run_folder(from_checkpoints(load), accept_changes=accept_changes, restart=restart)


def _train(
    kind: str,
    prepared: PreparedFolder,
    prepare: Callable[[LoadedConfig[RunConfig]], None],
    extensions: RunExtensions,
    *,
    quiet: bool,
    verbose: bool,
) -> int:
    loaded = prepared.loaded
    try:
        with prepared.access.ending_on_error():
            prepare(loaded)
            for note in prepared.notes if not quiet else ():
                print(note)
            loaded.print_warnings()
            _refuse_missing(loaded.config)
            if not quiet and sys.stdout.isatty():  # some seconds pass before the header
                print(f"{kind.upper()} of {loaded.config.policy.model_name}: loading data and model", flush=True)

            quieten_libraries()
            from posttrain.build import TrainingRun

            return TrainingRun(
                loaded,
                quiet=quiet,
                make_export=extensions.make_export,
                access=prepared.access,
                verbose=verbose,
                plan=extensions.plan,
            ).execute()
    except OutOfGpuMemoryError as error:
        from posttrain.checkpointing.run_folder import run_folder

        written = run_folder(loaded.config.logger.log_dir, loaded.config.checkpointing.checkpoint_dir)
        if extensions.advise and (lines := extensions.advise(loaded.config, error, written)):
            error.add_note(lines)
        raise


def _refuse_missing(config: RunConfig) -> None:
    """A model or a file of data that is not there, before torch and transformers are imported: it takes seconds."""
    from posttrain.data.errors import DataError
    from posttrain.data.named_datasets import check_dataset_names, named_path
    from posttrain.data.sources import not_found
    from posttrain.models.hub import why_unavailable

    if (reason := why_unavailable(config.policy.model_name)) is not None:
        raise InputError(f"policy.model_name: {reason}")
    check_dataset_names(config)
    for entry in (*config.data.train_sets(), *config.data.validation_sets()):
        path = named_path(entry.filled_from(config.data.default)) or ""
        is_pattern = bool({"*", "?", "["} & set(path)) or "://" in path
        if path and not is_pattern and not Path(path).expanduser().exists():
            raise DataError(not_found(path))


def refuse_missing_model(text: str) -> None:
    """The same for a command that takes a model: a name that is none. Folders are looked at when they are loaded."""
    from posttrain.models.accepted_names import REGISTRY_PREFIX, resolve_model

    if not text.startswith((REGISTRY_PREFIX, "http://", "https://")) and not Path(text).expanduser().is_dir():
        resolve_model(text)


def quieten_libraries() -> None:
    """Their progress bars and advice would break up ours. Set before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
