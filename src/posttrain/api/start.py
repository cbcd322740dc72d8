"""Starts a training run. The commands `posttrain grpo`, `dpo`, … and `posttrain.grpo(…)` in Python both come through here."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from posttrain.checkpointing.stopping import StopAtOnce
from posttrain.errors import OutOfGpuMemoryError, RankLostError

if TYPE_CHECKING:
    from posttrain.config import LoadedConfig, RunConfig
    from posttrain.run_folder import PreparedFolder

Load = Callable[[Sequence[str]], "LoadedConfig[RunConfig]"]


def start_run(
    kind: str,
    load: Load,
    *,
    accept_changes: bool = False,
    restart: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    prepare: Callable[[LoadedConfig[RunConfig]], None] = lambda loaded: None,
) -> tuple[int, LoadedConfig[RunConfig]]:
    """Train until the end, or until there is a reason to stop. Returns the exit code and the config in force.

    `load` loads the config with additional overrides. `prepare` is called once the folder is chosen and this process may
    write to it, before anything else is read.
    """
    num_restarts = 0
    while True:
        prepared = _prepared(load, accept_changes=accept_changes, restart=restart and num_restarts == 0)
        limit = prepared.loaded.config.cluster.max_restarts
        try:
            return _train(kind, prepared, prepare, quiet=quiet, verbose=verbose), prepared.loaded
        except RankLostError as error:
            if num_restarts == limit or StopAtOnce.is_asked():
                raise
            num_restarts += 1
            print(f"{error}\nrestart {num_restarts} of {limit} (cluster.max_restarts)", file=sys.stderr, flush=True)
        _free_memory()


def _free_memory() -> None:
    """Of a model that this process trained before it was lost. Models contain reference cycles."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _prepared(load: Load, *, accept_changes: bool, restart: bool) -> PreparedFolder:
    from posttrain.models.accepted_names import from_checkpoints
    from posttrain.run_folder import prepare_run_folder

    return prepare_run_folder(from_checkpoints(load), accept_changes=accept_changes, restart=restart)


def _train(
    kind: str,
    prepared: PreparedFolder,
    prepare: Callable[[LoadedConfig[RunConfig]], None],
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
            for warning in loaded.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            if not quiet and sys.stdout.isatty():  # some seconds pass before the header
                print(f"{kind.upper()} of {loaded.config.policy.model_name}: loading data and model", flush=True)

            quieten_libraries()
            from posttrain.build import TrainingRun
            from posttrain.export.convert import PeriodicExport

            return TrainingRun(
                loaded,
                quiet=quiet,
                make_export=PeriodicExport,
                access=prepared.access,
                verbose=verbose,
                plan=planned,
            ).execute()
    except OutOfGpuMemoryError as error:
        from posttrain.planning.out_of_memory import advice
        from posttrain.run_folder import run_folder

        written = run_folder(loaded.config.logger.log_dir, loaded.config.checkpointing.checkpoint_dir)
        if lines := advice(loaded.config, error, written):
            error.add_note(lines)
        raise


def planned(config: RunConfig, device_name: str, max_steps: int) -> str:
    """The prediction of `posttrain plan`; empty for unknown devices, and if it fails."""
    from posttrain.planning.calibration import GPUS
    from posttrain.planning.plan import estimate_run
    from posttrain.policy.memory.rank import GIB

    gpu = next((gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in device_name.lower()), None)
    if gpu is None:
        return ""
    try:
        found = estimate_run(config, gpu)
    except Exception:  # the planner must not keep a run from starting
        return ""
    needed = max(found.needed_bytes(phase) for phase in found.memory.phases) / GIB
    hours = max_steps * found.time.total_s / 3600
    return f"{needed:.0f} of {gpu.memory_bytes / GIB:.0f} GiB of GPU memory, {hours:.2g} hours"


def quieten_libraries() -> None:
    """Their progress bars and advice would break up ours. Set before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
