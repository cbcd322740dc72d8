"""`posttrain grpo`, `posttrain dpo` and the other kinds of run: train."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from posttrain.apps.train import WITH_APPS
from posttrain.cli.overrides_parser import OverridesParser
from posttrain.config.command_line import ALIASES_OF_KIND, short_names
from posttrain.run import start_run

EPILOG = """\
settings are given as key=value, with the names that NeMo RL uses:

  posttrain {kind} --config my.yaml policy.model_name=Qwen/Qwen3-0.6B policy.optimizer.kwargs.lr=1e-6

What is typed often has a short name, also as an option (`lr=1e-6 lora=16 steps=200`, or `--lr 1e-6`):
  model, data, lr, lora, steps, epochs, batch_size, max_length, seed, folder, precision{of_kind}
policy.model_name may be the folder of a run: its newest checkpoint.
`posttrain config show {kind}` lists all settings. Without --config the built-in defaults apply. The run's folder
(checkpointing.checkpoint_dir) gets checkpoints, metrics.jsonl, report.html and, with grpo, the samples of every step;
the same command resumes from the newest checkpoint in it. The default folder is numbered: a command with other settings
gets a new one. A run in a given folder is resumed with other training settings only with --resume-with-changes.
One process at a time writes to a folder: a second command is refused with exit code 75 and the name of the first.
"""
INTERRUPTED = "stopped at once; nothing was saved since the newest checkpoint, if there is one"


def add_training(parser: OverridesParser) -> None:
    kind = parser.prog.split()[-1]
    further = [name for name in short_names(kind) if name == "reward" or name in ALIASES_OF_KIND.get(kind, ())]
    of_kind = f"\n  for {kind} also {', '.join(further)}" if further else ""
    parser.epilog = EPILOG.format(kind=kind, of_kind=of_kind)
    parser.short_names = short_names(kind)
    parser.config_file()
    parser.switch("--verbose", "on a terminal: the whole block of every step, as in logs/train.log")
    parser.switch("--quiet", "print warnings, errors and the end result only")
    parser.switch(
        "--resume-with-changes",
        "resume the run in the folder although training settings differ; the changes are recorded",
    )
    parser.switch(
        "--restart", "begin at step 1 after moving the run in the folder, with its checkpoints, to earlier_NNN/ in it"
    )
    parser.words()
    parser.set_defaults(run=partial(run, kind), interrupted=INTERRUPTED, output_is_result=False)


def run(kind: str, args: argparse.Namespace) -> int:
    from posttrain.config import load_config

    code, _ = start_run(
        kind,
        lambda extra: load_config(kind, args.config, [*args.words, *extra]),
        accept_changes=args.resume_with_changes,
        restart=args.restart,
        quiet=args.quiet,
        verbose=args.verbose,
        extensions=WITH_APPS,
    )
    return code


def run_as_script(kind: str) -> int:
    """For `examples/run_*.py`: the same arguments without naming the command."""
    from posttrain.cli.main import main

    return main([kind, *sys.argv[1:]])
