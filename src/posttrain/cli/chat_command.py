"""`posttrain chat`: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from posttrain.apps.serve.options import LONGEST_UNASKED_TOKENS
from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.errors import ExitCode, InputError

DESCRIPTION = """\
Talk with a model. Answers are written as they are sampled; the conversation is remembered until /reset.

  posttrain chat models/smollm2-135m-instruct
  posttrain chat results/grpo/step_60 --temperature 0          a checkpoint, greedy
  posttrain chat registry:maths@production --system "Be brief."
  echo "What is 7 + 5?" | posttrain chat models/mine           each line is the next turn; no commands
"""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "chat", "talk with a model in the terminal", description=DESCRIPTION)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, adapter, checkpoint, run, hub name or registry:NAME@STAGE"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus (default: %(default)s; 1 is off)")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="tokens of one answer at most (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="the same answers every time")
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help=f"tokens of a conversation (default: the model's, ≤ {LONGEST_UNASKED_TOKENS})",
    )
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--registry", metavar="WHERE", help="where the registry is (default: POSTTRAIN_REGISTRY, ./registry)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.words:
        raise InputError(f"chat takes one MODEL, and options; unexpected: {args.words[0]!r}")
    from posttrain.run import quieten_libraries

    quieten_libraries()
    from posttrain.apps.serve.terminal import converse, open_chat

    conversation = open_chat(
        args.model,
        system=args.system,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
        max_model_len=args.max_model_len,
        precision=args.precision,
        device=args.device,
        registry=args.registry,
    )
    interactive = sys.stdin.isatty()
    if interactive:
        _say(f"{conversation.name}. /help lists the commands.\n")
        _remember_lines()

    def read() -> str:
        if interactive:
            return input("> ")
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input is no {error.encoding} text: {error.reason} at byte {error.start}; iconv converts text"
            ) from error
        if not line:
            raise EOFError
        return line

    all_answered = converse(conversation, read, _write, _say, has_commands=interactive)
    return 0 if interactive or all_answered else ExitCode.BAD_INPUT


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _remember_lines() -> None:
    """Input history with arrow keys, also of earlier chats, where readline is available."""
    try:
        import atexit
        import readline
    except ImportError:
        return
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "posttrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "chat_history"
        if file.exists():
            readline.read_history_file(file)
        readline.set_history_length(1000)
        atexit.register(readline.write_history_file, file)
    except OSError:
        return
