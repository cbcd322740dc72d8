"""Starts a training run and starts it again when a rank was lost. Knows no app: those that take part are passed in."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.checkpointing.stopping import StopAtOnce
from posttrain.errors import InputError, OutOfGpuMemoryError, RankLostError

if TYPE_CHECKING:
    from posttrain.build import ExportMaker, Planner
    from posttrain.checkpointing.run_folder import PreparedFolder
    from posttrain.config import LoadedConfig, RunConfig

Load = Callable[[Sequence[str]], "LoadedConfig[RunConfig]"]
Prepare = Callable[["LoadedConfig[RunConfig]"], Callable[[], None] | None]


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
    prepare: Prepare = lambda loaded: None,
    extensions: RunExtensions = RunExtensions(),
) -> tuple[int, LoadedConfig[RunConfig]]:
    """Train until the end, or until there is a reason to stop. Returns the exit code and the config in force.

    `load` loads the config with additional overrides. `prepare` is called once the folder is chosen and this process
    may write to it, before anything else is read. What it returns is called if the run does not begin.
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

    return prepare_run_folder(from_checkpoints(fitted(load)), accept_changes=accept_changes, restart=restart)


def fitted(load: Load) -> Load:
    """`load`, with settings that the user has not set chosen by the machine and by the data.

    The columns of a file are guessed, a reward with TRL's signature gets messages where the prompts are messages, and
    a run on CPUs computes in float32: bfloat16 is slower there.
    """

    def loaded(extra: Sequence[str]) -> LoadedConfig[RunConfig]:
        from posttrain.config.rewards import PythonRewardConfig
        from posttrain.config.tree import DEFAULT
        from posttrain.data.columns import DEFAULT_ENVIRONMENT, asks_in_messages, guessed_columns, named_columns
        from posttrain.environments.python_function import is_written_for_batches

        found = load(extra)
        config, words, notes = found.config, [], []
        if found.origins.get("policy.precision") == DEFAULT and not config.policy.fp8 and _trains_on_cpus(config):
            words.append("policy.precision=float32")
        for name in ("train", "validation"):
            entry = getattr(config.data, name)
            if entry is None or isinstance(entry, list):
                continue
            if columns := guessed_columns(found.kind, entry.filled_from(config.data.default)):
                notes.append(named_columns(f"data.{name}", columns))
                words += [f"data.{name}.{key}={json.dumps(column)}" for key, column in columns.items()]
        for name, environment in getattr(config, "environments", {}).items():
            batched = {
                part: reward.function
                for part, reward in environment.reward_configs(name).items()
                if isinstance(reward, PythonRewardConfig) and "as_messages" not in reward.model_fields_set
                if is_written_for_batches(reward.function, Path.cwd())
            }
            rows = [entry.filled_from(config.data.default) for entry in config.data.train_sets() if batched]
            if any(asks_in_messages(entry) for entry in rows if (entry.env_name or DEFAULT_ENVIRONMENT) == name):
                for part, function in batched.items():
                    path = f"env.{name}.rewards.{part}" if part else f"env.{name}"
                    notes.append(f"{path}: prompts are messages, so {function} gets messages ({path}.as_messages)")
                    own = {"as_messages": True}
                    words.append(f"env.{name}={json.dumps({'rewards': {part: own}} if part else own)}")
        again = load([*extra, *words]) if words else found
        return replace(again, warnings=[*again.warnings, *notes])

    return loaded


def _trains_on_cpus(config: RunConfig) -> bool:
    from posttrain.reporting.machines import open_nvml

    cluster = config.cluster
    if config.policy.device != "auto":
        return config.policy.device == "cpu"
    if cluster.num_workers > 1 or cluster.launcher == "ray":  # a Ray cluster may have GPUs where this machine has none
        has_cluster = os.environ.get("RAY_ADDRESS", "local") != "local" or Path("/tmp/ray/ray_current_cluster").exists()
        if cluster.num_nodes > 1 or has_cluster:
            return False
    return open_nvml() is None and not Path("/dev/kfd").exists()  # NVIDIA's and AMD's


def _train(
    kind: str,
    prepared: PreparedFolder,
    prepare: Prepare,
    extensions: RunExtensions,
    *,
    quiet: bool,
    verbose: bool,
) -> int:
    loaded, withdraw = prepared.loaded, None
    try:
        with prepared.access.ending_on_error():
            withdraw = prepare(loaded)
            _refuse_missing(loaded.config)
            for note in prepared.notes if not quiet else ():
                print(note)
            loaded.print_warnings()
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
    except InputError:
        if withdraw is not None and not prepared.access.has_begun:
            withdraw()
            for attempt in (prepared.access.record, prepared.access.checkpoints):
                attempt.remove_created()
        raise
    except OutOfGpuMemoryError as error:
        from posttrain.checkpointing.run_folder import run_folder

        written = run_folder(loaded.config.logger.log_dir, loaded.config.checkpointing.checkpoint_dir)
        if extensions.advise and (lines := extensions.advise(loaded.config, error, written)):
            error.add_note(lines)
        raise


def _refuse_missing(config: RunConfig) -> None:
    """A model, a file of data or a function that is not there, or a first row without a prompt, before torch and
    transformers are imported: it takes seconds."""
    from posttrain.data.columns import check_first_row
    from posttrain.data.errors import DataError
    from posttrain.data.named_datasets import check_dataset_names, named_path
    from posttrain.data.sources import not_found
    from posttrain.environments.python_function import why_absent
    from posttrain.models.hub import why_unavailable

    if (reason := why_unavailable(config.policy.model_name)) is not None:
        raise InputError(f"policy.model_name: {reason}")
    check_dataset_names(config)
    for entry in (*config.data.train_sets(), *config.data.validation_sets()):
        entry = entry.filled_from(config.data.default)
        path = named_path(entry) or ""
        is_pattern = bool({"*", "?", "["} & set(path)) or "://" in path
        if path and not is_pattern and not Path(path).expanduser().exists():
            raise DataError(not_found(path))
        check_first_row(config.kind, entry)
    for name, environment in getattr(config, "environments", {}).items():
        for key in ("function", "agent"):
            given = getattr(environment, key)
            if isinstance(given, str) and (reason := why_absent(given, Path.cwd())) is not None:
                raise InputError(f"env.{name}.{key} is {given!r}: {reason}")


def refuse_missing_model(text: str) -> None:
    """The same for a command that takes a model: a name that is none. Folders are looked at when they are loaded."""
    from posttrain.models.accepted_names import REGISTRY_PREFIX, resolve_model

    if not text.startswith((REGISTRY_PREFIX, "http://", "https://")) and not Path(text).expanduser().is_dir():
        resolve_model(text)


def quieten_libraries() -> None:
    """Their progress bars and advice would break up ours. Set before they are imported."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft's use of transformers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
