"""`posttrain grpo`, `posttrain dpo` and the other kinds of run: train."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.config.aliases import short_names
from posttrain.errors import OutOfGpuMemoryError
from posttrain.recipes import KINDS

if TYPE_CHECKING:
    from posttrain.config import RunConfig

EPILOG = """\
settings are given as key=value, with the names that NeMo RL uses:

  posttrain {kind} --config my.yaml policy.model_name=Qwen/Qwen3-0.6B policy.optimizer.kwargs.lr=1e-6

What is typed often has a short name, also as an option: model, data, lr, lora, steps, epochs, batch_size, seed, folder
(`lr=1e-6 lora=16 steps=200`, or `--lr 1e-6`). policy.model_name may be the folder of a run: its newest checkpoint.
`posttrain config show {kind}` lists all settings. Without --config the built-in defaults apply. The run's folder
(checkpointing.checkpoint_dir) gets checkpoints, metrics.jsonl, report.html and, with grpo, the samples of every step;
the same command resumes from the newest checkpoint in it. The default folder is numbered: a command with other settings
gets a new one. A run in a given folder is resumed with other training settings only with --resume-with-changes.
One process at a time writes to a folder: a second command is refused with exit code 75 and the name of the first.
"""
INTERRUPTED = "stopped at once; nothing was saved since the newest checkpoint, if there is one"


def add_parser(commands: Subparsers) -> None:
    for kind, (summary, _) in KINDS.items():
        parser = add_command(commands, kind, summary, epilog=EPILOG.format(kind=kind))
        parser.short_names = short_names(kind)
        add_arguments(parser)
        parser.set_defaults(run=partial(run, kind), interrupted=INTERRUPTED, output_is_result=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file; what it does not set keeps its default")
    parser.add_argument(
        "--verbose", action="store_true", help="on a terminal: the whole block of every step, as in logs/train.log"
    )
    parser.add_argument("--quiet", action="store_true", help="print warnings, errors and the end result only")
    parser.add_argument(
        "--resume-with-changes",
        action="store_true",
        help="resume the run in the folder although training settings differ; the changes are recorded",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="begin at step 1 after moving the run in the folder, with its checkpoints, to earlier_NNN/ in it",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings that override the file's")


def run(kind: str, args: argparse.Namespace) -> int:
    from posttrain.config import load_config
    from posttrain.models.starting_model import from_checkpoints
    from posttrain.run_folder import prepare_run_folder, run_folder

    prepared = prepare_run_folder(
        from_checkpoints(lambda extra: load_config(kind, args.config, [*args.words, *extra])),
        accept_changes=args.resume_with_changes,
        restart=args.restart,
    )
    loaded = prepared.loaded
    try:
        with prepared.access.ending_on_error():
            for note in prepared.notes if not args.quiet else ():
                print(note)
            for warning in loaded.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            if not args.quiet:
                print(f"{kind.upper()} of {loaded.config.policy.model_name}: loading data and model", flush=True)

            quieten_libraries()
            from posttrain.build import Run
            from posttrain.export.convert import PeriodicExport

            return Run(
                loaded,
                quiet=args.quiet,
                make_export=PeriodicExport,
                access=prepared.access,
                verbose=args.verbose,
                plan=planned,
            ).execute()
    except OutOfGpuMemoryError as error:
        from posttrain.planning.out_of_memory import advice

        written = run_folder(loaded.config.logger.log_dir, loaded.config.checkpointing.checkpoint_dir)
        if lines := advice(loaded.config, error, written):
            error.add_note(lines)
        raise


def planned(config: RunConfig, device_name: str, max_steps: int) -> str:
    """What `posttrain plan` says of the run; empty on devices that it does not know, and if it fails."""
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


def run_as_script(kind: str) -> int:
    """For `examples/run_*.py`: the same arguments without naming the command."""
    from posttrain.cli.main import main

    return main([kind, *sys.argv[1:]])
