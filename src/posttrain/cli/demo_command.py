"""`posttrain demo`: a small model learns arithmetic while you watch. No network, no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.overrides_parser import Subparsers
from posttrain.cli.train_command import INTERRUPTED


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "demo",
        help="watch a small model learn arithmetic (CPU, under 5 minutes, no network)",
        description=(
            "Create a small model and a tokenizer, train it on the format of an answer by a short SFT run in which most "
            "answers are wrong, then improve it with GRPO. Shows accuracy on unseen problems before and after."
        ),
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("results/demo"), help="where everything goes (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="another seed makes another model and other problems")
    parser.add_argument(
        "--steps", type=int, default=None, metavar="N", help="steps of GRPO, instead of the usual number"
    )
    parser.set_defaults(run=run, interrupted=INTERRUPTED, output_is_result=False)


def run(args: argparse.Namespace) -> int:
    from posttrain.run import quieten_libraries

    quieten_libraries()
    from posttrain.apps.demo.show import show

    return show(args.folder, args.seed, args.steps)
