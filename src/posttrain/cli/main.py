"""`posttrain`: parses the command line, runs the command, and turns its outcome into an exit code.

The commands that train, `posttrain grpo` and the other kinds of run, and `posttrain node`, which starts them in pods,
are here. Another command is imported when it is chosen, and heavy imports happen once the input is checked: `--help`
answers at once, and so does a refusal.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from posttrain import __version__
from posttrain.checkpointing import CHECKPOINT_THREAD, StopAtOnce
from posttrain.cli.console import ConsoleStream, surviving_console, unwritten
from posttrain.cli.overrides_parser import HELP, OverridesParser, add_command
from posttrain.errors import (
    STOPPED_UNSAVED,
    ExitCode,
    HardwareError,
    InputError,
    StorageError,
    Superseded,
    Terminated,
    path_error,
    printable,
)
from posttrain.processes import THAT_WRITE_NOTHING
from posttrain.recipes import KINDS

if TYPE_CHECKING:
    from posttrain.models.accepted_names import RegisteredVersion

SUMMARY = "Tune language models from rewards, preferences and agents."
# `node` is started by the manifests of `posttrain launch`.
GROUPS = {
    "train": ("demo", "init", "models", *KINDS, "data", "rewards", "agents", "config", "plan", "launch"),
    "look": ("watch", "status", "doctor", "log", "chat", "faults"),
    "decide": ("eval", "gate"),
    "ship": ("convert", "push", "registry", "serve", "pipeline"),
}  # fmt: skip


NEEDS = {"distill": " teacher=Qwen/Qwen3-4B", "ppo": " \\\n    value.optimizer.kwargs.lr=1e-5"}
TRAINING_INTERRUPTED = "stopped at once; nothing was saved since the newest checkpoint, if there is one"


# The function in this package that adds the arguments of a command, and its line of help.
COMMANDS = {
    **{kind: ("main.add_training", described.summary) for kind, described in KINDS.items()},
    "status": ("run_commands.add_status", "state of a run: progress, writing process, reason of its end"),
    "demo": ("start_commands.add_demo", "watch a small model learn arithmetic (CPU, some minutes, no network)"),
    "faults": ("start_commands.add_faults", "kill a run at random moments, resume it, and compare it bit for bit"),
    "init": ("start_commands.add_init", "write a config and data to start from"),
    "agents": ("agents_command.add_arguments", "run an agent without training and show what it did"),
    "config": ("config_command.add_arguments", "show or check the config of a run"),
    "data": (
        "data_command.add_arguments",
        "inspect labelled traces, make preference pairs, pack pairs, screen prompts",
    ),
    "doctor": ("run_commands.add_doctor", "diagnose a run and suggest settings that fix it"),
    "convert": ("convert_command.add_arguments", "a checkpoint to a Hugging Face folder or GGUF"),
    "eval": ("eval_command.add_arguments", "evaluate a model on a benchmark, or compare two evaluations"),
    "gate": (
        "gate_command.add_arguments",
        "decide whether a candidate may ship: promote, reject, or more samples needed",
    ),
    "launch": (
        "launch_command.add_arguments",
        "run on Kubernetes, Slurm or this machine as a cluster; render and check manifests",
    ),
    "log": ("run_commands.add_log", "send a run to TensorBoard, W&B, MLflow, Trackio or SwanLab"),
    "models": ("start_commands.add_models", "fetch a small model for first experiments"),
    "node": ("main.add_node", "the first process of a pod; the manifests of `posttrain launch` start it"),
    "pipeline": (
        "pipeline_command.add_arguments",
        "run traces → dataset → train → convert → evaluate → gate → registry → canary, repeatedly",
    ),
    "plan": ("plan_command.add_arguments", "predict memory and time of a run from its config"),
    "push": ("push_command.add_arguments", "upload an exported model to a repository of the hub, private by default"),
    "rewards": ("rewards_command.add_arguments", "list the types of reward, or try one on stored samples"),
    "registry": (
        "registry_command.add_arguments",
        "keep model versions with lineage and stages; promote and roll back",
    ),
    "serve": ("serve_command.add_arguments", "an OpenAI-compatible server over a model"),
    "chat": ("serve_command.add_chat", "chat with a model in the terminal"),
    "watch": ("watch_command.add_arguments", "runs in the browser, live"),
}


def build_parser() -> OverridesParser:
    listed = [
        "\n".join([f"{group}:", *(f"  {name:<10}{COMMANDS[name][1]}" for name in names)])
        for group, names in GROUPS.items()
    ]
    text = "\n\n".join([SUMMARY, *listed])
    parser = OverridesParser(prog="posttrain", usage="posttrain COMMAND …", description=text)
    parser.add_argument("-V", "--version", action="version", version=f"posttrain {__version__}")
    commands = parser.commands(prog="posttrain", help=argparse.SUPPRESS)  # they are in the description
    for name, (function, summary) in COMMANDS.items():
        add_command(commands, name, summary, fill=partial(_fill, function))
    return parser


def _fill(function: str, parser: OverridesParser) -> None:
    from posttrain.models.accepted_names import connect_registry

    def resolve(reference: str, registry: str | None) -> RegisteredVersion:
        from posttrain.apps.ship.registry import resolve_version

        return resolve_version(reference, registry=registry)

    connect_registry(resolve)  # registry:NAME@STAGE may be named as a model in every command
    module, _, name = function.partition(".")
    getattr(import_module(f"posttrain.cli.{module}"), name)(parser)


def add_training(parser: OverridesParser) -> None:
    from posttrain.config.command_line import ALIASES, short_names
    from posttrain.config.runs import kind_named

    name = parser.prog.split()[-1]
    kind = kind_named(name)
    further = [short for short in short_names(kind) if short in ("reward", "cliprange", *ALIASES.get(kind, ()))]
    of_kind = f"\n  for {name} also {', '.join(further)}" if further else ""
    parser.texts, parser.values = ("training",), {"kind": name, "of_kind": of_kind, "needs": NEEDS.get(name, "")}
    parser.short_names = short_names(kind)
    parser.config_file()
    parser.switch("--verbose", "print the long form of every step, as in logs/train.log, instead of one line")
    parser.switch("--quiet", "print warnings, errors and the end result only")
    parser.switch("--resume-with-changes", "resume although training settings differ; the changes are recorded")
    parser.switch("--restart", "begin at step 1; the run in the folder and its checkpoints move to earlier_NNN/")
    parser.words()
    parser.set_defaults(run=partial(train, name), interrupted=TRAINING_INTERRUPTED, output_is_result=False)


def train(kind: str, args: argparse.Namespace) -> int:
    from posttrain.apps.train import WITH_APPS
    from posttrain.config import load_config
    from posttrain.run import start_run

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


def add_node(parser: OverridesParser) -> None:
    parser.add_argument("part", nargs="?", choices=["driver"], help="only the driver, beside the head of a Ray cluster")
    parser.set_defaults(run=_node)


def _node(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.node.contract import read_settings
    from posttrain.apps.launch.node.driver import DriverMember
    from posttrain.apps.launch.node.head import HeadMember
    from posttrain.apps.launch.node.member import Member

    settings = read_settings(os.environ)
    if args.part == "driver":
        return DriverMember(settings, os.environ).run()
    return (HeadMember if settings.rank == 0 else Member)(settings, os.environ).run()


def run_as_script(*command: str) -> int:
    """For `examples/run_*.py`: the same arguments without naming the command."""
    return main([*command, *sys.argv[1:]])


def main(arguments: list[str] | None = None) -> int:
    """`arguments` None: this is a program, and ends with its command."""
    with StopAtOnce() as stopping:
        try:
            code = _main(sys.argv[1:] if arguments is None else arguments)
        except Terminated as stopped:  # before there was a command
            code = stopped.exit_code
        if arguments is None:
            stopping.ignore_from_now_on()
        if arguments is None and code in (ExitCode.SAVED, ExitCode.INTERRUPTED, *STOPPED_UNSAVED):
            _leave(code)
    return code


def _leave(code: int) -> None:
    """End a stopped program without the seconds in which Python takes modules apart; not while a thread writes."""
    for thread in threading.enumerate():
        may_write = not thread.daemon or thread.name == CHECKPOINT_THREAD
        may_write &= not thread.name.startswith(THAT_WRITE_NOTHING)
        if may_write and thread is not threading.main_thread():
            return
    with suppress(Exception):
        atexit._run_exitfuncs()  # temporary folders, children
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _main(given: list[str]) -> int:
    parser = build_parser()
    with surviving_console() as (out, _):
        if not given:
            print((HELP / "no-command.txt").read_text("utf-8"), end="", file=sys.stderr)
            return ExitCode.BAD_INPUT
        if given[0] == "help":
            given = [*given[1:], "--help"]
        if (code := report_errors(lambda: _check_surroundings(given))) != ExitCode.DONE:
            return code
        try:
            args = parser.parse_args(given)
        except InputError as error:
            print(f"posttrain: error: {error}", file=sys.stderr)
            return error.exit_code
        except SystemExit as ended:
            if ended.code or not unwritten(out):
                raise
            return _code_without_output(out, ExitCode.DONE, is_result=True)  # of --help and --version
        code = report_errors(lambda: int(args.run(args)), getattr(args, "interrupted", "stopped"))
        return _code_without_output(out, code, is_result=getattr(args, "output_is_result", True))


def _code_without_output(out: ConsoleStream, code: int, *, is_result: bool) -> int:
    """The exit code of a command that printed to `out`: output that is the result and did not arrive is no success."""
    problem = unwritten(out)
    if problem and not (is_result and out.is_reader_gone):
        print(f"posttrain: the output could not be written to stdout: {problem}", file=sys.stderr)
    return ExitCode.CRASHED if problem and is_result and code == ExitCode.DONE else code


def _check_surroundings(words: list[str]) -> int:
    """What every command needs: words that can be written to a file, and a working directory."""
    for word in words:
        if not word.isprintable() and printable(word) != word:
            raise InputError(f"command line: {printable(word)} is not UTF-8; rename the file, or give another name")
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(
            f"the working directory does not exist any more ({error.strerror}); change to another"
        ) from error
    return 0


def report_errors(work: Callable[[], int], interrupted: str = "stopped") -> int:
    """The exit code of `work`: its own, or that of the error it ends with, which is printed.

    `interrupted` is printed after Ctrl-C: what was kept.
    """
    try:
        return work()
    except (InputError, Superseded) as error:
        print(f"posttrain: error: {error}", file=sys.stderr)
        return error.exit_code
    except Terminated as stopped:
        print(f"posttrain: {stopped.signal.name}: {interrupted}", file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print(f"posttrain: {interrupted}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (HardwareError, StorageError) as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print("\n".join([f"posttrain: error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if (readable := path_error(error)) is None:
            traceback.print_exc()
            return ExitCode.CRASHED
        print(f"posttrain: error: {readable}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except Exception:
        traceback.print_exc()
        return ExitCode.CRASHED


if __name__ == "__main__":
    sys.exit(main())
