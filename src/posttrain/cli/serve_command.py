"""`posttrain serve`: an OpenAI-compatible server over a model. `posttrain chat`: talk with one in the terminal."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

from posttrain.apps.serve.canary import CanaryRules
from posttrain.apps.serve.options import ChatOptions, EngineOptions, ServeOptions, ServerLimits, is_loopback
from posttrain.cli.overrides_parser import OverridesParser, add_fields, add_option, given_fields, pairs, read_secret
from posttrain.errors import ExitCode, InputError
from posttrain.files.redaction import name_secret
from posttrain.run import quieten_libraries, refuse_missing_model

KEY_VARIABLE = "POSTTRAIN_API_KEY"
_MAX_KEY_FILE_BYTES = 2**20
# What vLLM's own server does not do.
_NATIVE_ONLY = (
    *("canary", "drain_timeout_s", "kv_cache_gib", "max_prefill_tokens", "processes", "prefix_cache"),
    *(field.name for field in fields(ServerLimits)),
)
MODEL = "a folder, adapter, checkpoint, run, hub name or registry:NAME@STAGE"


def add_arguments(parser: OverridesParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.option("--backend", "sampling engine", choices=("native", "vllm"), default="native")
    parser.option("--served-model-name NAME", "model name for clients (default: from MODEL)")
    parser.option(
        "--adapter NAME=ADAPTER",
        "a LoRA adapter as a model: a folder, checkpoint, run or registry:NAME@STAGE; may be repeated",
        action="append",
        default=[],
    )
    parser.option("--registry WHERE", "where the registry is (default: POSTTRAIN_REGISTRY, ./registry)")
    network = parser.add_argument_group("network")
    add_option(network, "--host", "address to listen at", default="127.0.0.1")
    add_option(network, "--port", "0 takes a free one", default=8000)
    keys = f"keys that are accepted; lines with # are comments (default: {KEY_VARIABLE})"
    add_option(network, "--api-key-file FILE", keys, type=Path)
    add_option(network, "--api-key KEY", "the same on the command line, where other users of this machine can see it")
    network.add_argument(
        "--no-auth", action="store_true", help="serve every client that can reach --host, without a key"
    )
    drain = f"for running requests after SIGTERM ({ServeOptions.drain_timeout_s:g})"
    add_option(network, "--drain-timeout-s S", drain, type=float)
    engine = parser.add_argument_group("engine")
    add_fields(engine, EngineOptions)
    engine.add_argument(
        "--processes",
        type=int,
        choices=(1, 2),
        help="2: the engine in a process of its own (default: 2 on a GPU, 1 on a CPU)",
    )
    add_fields(parser.add_argument_group("limits"), ServerLimits)
    canary = parser.add_argument_group("canary: a second version behind the same name")
    add_option(canary, "--canary MODEL", "the second version: a model, or the name of an --adapter")
    add_fields(canary, CanaryRules, "canary_")
    parser.set_defaults(run=run, output_is_result=False)


def run(args: argparse.Namespace) -> int:
    _check(args)
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"`posttrain serve` needs {package}: pip install 'posttrain[serve]'")
    options = options_of(args)
    if options.api_keys and options.no_auth:
        raise InputError(f"--no-auth and a key (also in {KEY_VARIABLE}) exclude each other: give one")
    if not options.api_keys and not options.no_auth and not is_loopback(args.host):
        raise InputError(
            f"--host {args.host}: everyone who can reach it could use the server. Set a key with {KEY_VARIABLE} or "
            "--api-key-file, or give --no-auth"
        )
    refuse_missing_model(args.model)
    quieten_libraries()
    from posttrain.apps.serve import server

    if args.backend == "vllm":
        from posttrain.apps.serve.vllm_backend import become_vllm

        return become_vllm(options, args.host, args.port, server.say)
    from posttrain.apps.serve.loading import build_service

    with server.listen(args.host, args.port):
        pass  # a port in use is reported before minutes are spent on loading
    return server.run(build_service(options, server.say), args.host, args.port, options.drain_timeout_s)


def options_of(args: argparse.Namespace) -> ServeOptions:
    others = {name: getattr(args, name) for name in ("processes", "drain_timeout_s")}
    return ServeOptions(
        model=args.model,
        served_name=args.served_model_name,
        adapters=pairs("--adapter", args.adapter, "NAME=ADAPTER"),
        canary=args.canary,
        canary_rules=CanaryRules(**given_fields(args, CanaryRules, "canary_")) if args.canary else None,
        engine=EngineOptions(**given_fields(args, EngineOptions)),
        limits=ServerLimits(**given_fields(args, ServerLimits)),
        api_keys=_keys(args.api_key, args.api_key_file),
        no_auth=args.no_auth,
        registry=args.registry,
        **{name: value for name, value in others.items() if value is not None},
    )


def _keys(given: str | None, file: Path | None) -> tuple[str, ...]:
    if given is not None and file is not None:
        raise InputError("--api-key and --api-key-file exclude each other: give one")
    source, text = (KEY_VARIABLE, os.environ.get(KEY_VARIABLE)) if given is None else ("--api-key", given)
    if file is not None:
        source, text = f"--api-key-file {file}", read_secret("--api-key-file", file, _MAX_KEY_FILE_BYTES)
    if text is None:
        return ()
    lines = [line for line in text.splitlines() if file is None or not line.lstrip().startswith("#")]
    keys = tuple(dict.fromkeys(key.strip() for line in lines for key in line.split(",") if key.strip()))
    if not keys:
        raise InputError(f"{source} holds no key: everyone could use the server")
    for key in keys:
        name_secret(key)
    return keys


def _check(args: argparse.Namespace) -> None:
    if not args.canary and (rules := given_fields(args, CanaryRules, "canary_")):
        option = f"--canary-{next(iter(rules)).replace('_', '-')}"
        raise InputError(f"{option} needs --canary MODEL, the second version")
    given = {name: value for name in _NATIVE_ONLY if (value := getattr(args, name)) is not None}
    if args.backend == "vllm" and given:
        options = ", ".join(f"--{'no-' if given[name] is False else ''}{name.replace('_', '-')}" for name in given)
        raise InputError(f"vLLM's server has no counterpart for {options}: leave it out, or use --backend native")
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port is {args.port}: 0 to 65535 is accepted")
    if args.drain_timeout_s is not None and not args.drain_timeout_s >= 0:
        raise InputError(f"--drain-timeout-s is {args.drain_timeout_s}: at least 0 is accepted")


# -- chat: chat with a model in the terminal ---------------------------------------------------------------------------


def add_chat(parser: OverridesParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    add_fields(parser, ChatOptions)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    options = ChatOptions(**given_fields(args, ChatOptions))
    refuse_missing_model(args.model)
    quieten_libraries()
    from posttrain.apps.serve.terminal import converse, open_chat

    conversation = open_chat(args.model, options)
    interactive = sys.stdin.isatty()
    say = partial(print, end="", file=sys.stderr, flush=True)
    if interactive:
        say(f"{conversation.name}. /help lists the commands.\n")
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

    all_answered = converse(conversation, read, partial(print, end="", flush=True), say, has_commands=interactive)
    return 0 if interactive or all_answered else ExitCode.BAD_INPUT


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
