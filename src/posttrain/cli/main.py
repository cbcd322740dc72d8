"""`posttrain`: parses the command line, runs the command, and turns its outcome into an exit code.

Heavy imports happen inside the commands, so that `--help` and `config` answer at once.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from posttrain import __version__
from posttrain.cli import config_command, data_command, demo_command, models_command, rewards_command, train_command
from posttrain.cli.overrides_parser import EXIT_BAD_INPUT, OverridesParser
from posttrain.errors import InputError

EXIT_CRASH = 1
EXIT_INTERRUPTED = 130

DESCRIPTION = """\
Tune language models from preferences and rewards.

  posttrain demo                                   watch a small model learn, in a few minutes, on a CPU
  posttrain grpo --config configs/grpo.yaml        reinforcement learning from checkable answers
  posttrain dpo  --config configs/dpo.yaml         preference pairs
  posttrain rm   --config configs/rm.yaml          a reward model from preference pairs, for GRPO to learn from
  posttrain config show grpo --config FILE         every setting, and where it came from
  posttrain data inspect traces.jsonl.gz           what is in labelled traces; advise, pairs and pack go on from there
  posttrain rewards test --type math FILE          does a reward say what it should?
"""

EPILOG = """\
exit codes: 0 done · 64 bad config, data or checkpoint · 85 stopped by SIGTERM after saving · 130 stopped by Ctrl-C
after saving · 1 crash. A run that was stopped or killed goes on when the same command is given again.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = OverridesParser(
        prog="posttrain",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"posttrain {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=OverridesParser)
    for command in (train_command, demo_command, config_command, data_command, models_command, rewards_command):
        command.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except InputError as error:
        print(f"posttrain: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("posttrain: stopped at once; the newest checkpoint is the one that was saved last", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_CRASH  # the reader of our output has gone; there is nobody to tell
    except Exception:
        traceback.print_exc()
        return EXIT_CRASH


if __name__ == "__main__":
    sys.exit(main())
