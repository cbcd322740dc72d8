"""`posttrain serve`: an OpenAI-compatible server over a model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.serve.canary import CanaryRules
from posttrain.apps.serve.options import LONGEST_UNASKED_TOKENS, EngineOptions, ServerLimits, is_loopback
from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject, read_at_most
from posttrain.files.redaction import name_secret

if TYPE_CHECKING:
    from posttrain.apps.serve.options import ServeOptions

KEY_VARIABLE = "POSTTRAIN_API_KEY"
_DRAIN_TIMEOUT_S = 120.0
_MAX_KEY_FILE_BYTES = 2**20
# What vLLM's own server does not do.
_NATIVE_ONLY = (
    "canary", "drain_timeout_s", "kv_cache_gib", "max_prefill_tokens",
    "max_queue", "max_body_bytes", "max_completion_tokens", "max_samples", "request_timeout_s", "body_timeout_s",
    "processes", "prefix_cache",
)  # fmt: skip

DESCRIPTION = """\
Serve a model over HTTP with an OpenAI-compatible API: /v1/chat/completions, /v1/completions, /v1/models; also /health,
/metrics (Prometheus) and /v1/feedback.

  posttrain serve models/smollm2-135m-instruct
  posttrain serve registry:maths@production --canary registry:maths@canary --canary-share 0.1
  posttrain serve models/base --adapter polite=results/dpo/step_40 --adapter maths=results/grpo/step_60
  posttrain serve Qwen/Qwen3-0.6B --backend vllm
"""
EPILOG = f"""\
The key is read from --api-key-file or the variable {KEY_VARIABLE}; several keys are separated by commas or lines. SIGTERM or
Ctrl-C: running requests are answered, new ones refused; a second signal ends at once.
exit codes: 0 every request was answered · 1 some were cut off, or the engine has ended · 64 bad input
"""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands, "serve", "an OpenAI-compatible server over a model", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, adapter, checkpoint, run, hub name or registry:NAME@STAGE"
    )
    parser.add_argument(
        "--backend", choices=("native", "vllm"), default="native", help="who samples (default: %(default)s)"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: from MODEL)")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=ADAPTER",
        help="a LoRA adapter as a model: a folder, checkpoint, run or registry:NAME@STAGE; may be repeated",
    )
    parser.add_argument(
        "--registry", metavar="WHERE", help="where the registry is (default: POSTTRAIN_REGISTRY, ./registry)"
    )
    _add_network(parser)
    _add_engine(parser)
    _add_limits(parser)
    _add_canary(parser)
    parser.set_defaults(run=run, output_is_result=False)


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"keys that are accepted; lines with # are comments (default: {KEY_VARIABLE})",
    )
    group.add_argument("--api-key", metavar="KEY", help="the same, but others on this machine can see it")
    group.add_argument("--no-auth", action="store_true", help="serve everyone who can reach --host, without a key")
    group.add_argument(
        "--drain-timeout-s", type=float, metavar="S", help=f"for running requests after SIGTERM ({_DRAIN_TIMEOUT_S:g})"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group, usual = parser.add_argument_group("engine"), EngineOptions()
    group.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help=f"prompt and answer, tokens (default: the model's, ≤ {LONGEST_UNASKED_TOKENS})",
    )
    group.add_argument(
        "--max-batch-size", type=int, metavar="N", help=f"samples that decode together ({usual.max_batch_size})"
    )
    group.add_argument(
        "--max-prefill-tokens", type=int, metavar="N", help=f"prompt tokens in a pass ({usual.max_prefill_tokens})"
    )
    group.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="memory of the KV cache (default: 2 on a CPU)")
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help=f"of a GPU, weights included ({usual.gpu_memory_utilization:g})",
    )
    group.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        default=None,
        help="compute every prompt from its beginning, also where an earlier one began alike",
    )
    group.add_argument(
        "--processes",
        type=int,
        choices=(1, 2),
        help="2: the engine beside HTTP and text, in a process of its own (default: 2 on a GPU, 1 on a CPU)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group, usual = parser.add_argument_group("limits"), ServerLimits()
    group.add_argument(
        "--max-queue", type=int, metavar="N", help=f"samples that may wait; then 429 ({usual.max_queue})"
    )
    group.add_argument(
        "--max-body-bytes", type=int, metavar="N", help=f"larger bodies get 413 ({usual.max_body_bytes / 2**20:g} MiB)"
    )
    group.add_argument(
        "--max-completion-tokens", type=int, metavar="N", help="of one sample (default: what the context leaves)"
    )
    group.add_argument(
        "--max-samples", type=int, metavar="N", help=f"of one request: prompts times n ({usual.max_samples})"
    )
    group.add_argument(
        "--request-timeout-s", type=float, metavar="S", help=f"queue included; then 504 ({usual.request_timeout_s:g})"
    )
    group.add_argument(
        "--body-timeout-s",
        type=float,
        metavar="S",
        help=f"for a head, and for a body, to arrive ({usual.body_timeout_s:g})",
    )


def _add_canary(parser: argparse.ArgumentParser) -> None:
    group, usual = parser.add_argument_group("canary: a second version behind the same name"), CanaryRules()
    group.add_argument("--canary", metavar="MODEL", help="the second version: a model, or the name of an --adapter")
    group.add_argument(
        "--canary-share", type=float, metavar="SHARE", help=f"of users, or of requests ({usual.share:g})"
    )
    group.add_argument(
        "--canary-max-error-rate",
        type=float,
        metavar="RATE",
        help=f"more sends all traffic back ({usual.max_error_rate:g})",
    )
    group.add_argument(
        "--canary-min-requests", type=int, metavar="N", help=f"before that is judged ({usual.min_requests})"
    )
    group.add_argument(
        "--canary-max-kpi-drop",
        type=float,
        metavar="X",
        help="mean score of /v1/feedback below production's (default: off)",
    )
    group.add_argument(
        "--canary-min-feedback", type=int, metavar="N", help=f"scores of each, before that ({usual.min_feedback})"
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    _require_extra()
    from posttrain.run import quieten_libraries

    quieten_libraries()
    options = options_of(args)
    if options.api_keys and options.no_auth:
        raise InputError(f"--no-auth and a key (also in {KEY_VARIABLE}) exclude each other: give one")
    if not options.api_keys and not options.no_auth and not is_loopback(args.host):
        raise InputError(
            f"--host {args.host}: everyone who can reach it could use the server. Set a key with {KEY_VARIABLE} or "
            "--api-key-file, or give --no-auth"
        )
    from posttrain.apps.serve import server

    if args.backend == "vllm":
        from posttrain.apps.serve.vllm_backend import become_vllm

        return become_vllm(options, args.host, args.port, server.say)
    from posttrain.apps.serve.loading import build_service

    with server.listen(args.host, args.port):
        pass  # a port in use is reported before minutes are spent on loading
    service = build_service(options, server.say)
    drain_timeout_s = _DRAIN_TIMEOUT_S if args.drain_timeout_s is None else args.drain_timeout_s
    return server.run(service, args.host, args.port, drain_timeout_s)


def options_of(args: argparse.Namespace) -> ServeOptions:
    from posttrain.apps.serve.options import ServeOptions

    return ServeOptions(
        model=args.model,
        served_name=args.served_model_name,
        adapters=_adapters(args.adapter),
        canary=args.canary,
        canary_rules=CanaryRules(**_canary_options(args)) if args.canary else None,
        engine=EngineOptions(**_given(args, [field.name for field in fields(EngineOptions)])),
        limits=ServerLimits(**_given(args, [field.name for field in fields(ServerLimits)])),
        api_keys=_keys(args.api_key, args.api_key_file),
        no_auth=args.no_auth,
        registry=args.registry,
        **_given(args, ["processes"]),
    )


def _canary_options(args: argparse.Namespace) -> JsonObject:
    """Those that were given, by the names of their rules."""
    given = _given(args, [name for name in vars(args) if name.startswith("canary_")])
    return {name.removeprefix("canary_"): value for name, value in given.items()}


def _given(args: argparse.Namespace, names: Iterable[str]) -> JsonObject:
    """The options that were given; defaults are in the dataclasses."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _adapters(given: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for text in given:
        name, equals, adapter = text.partition("=")
        if not name or not equals or not adapter:
            raise InputError(f"--adapter {text!r}: NAME=ADAPTER is expected")
        if name in adapters:
            raise InputError(f"--adapter: two adapters are called {name!r}")
        adapters[name] = adapter
    return adapters


def _keys(given: str | None, file: Path | None) -> tuple[str, ...]:
    if given is not None and file is not None:
        raise InputError("--api-key and --api-key-file exclude each other: give one")
    source, text = (KEY_VARIABLE, os.environ.get(KEY_VARIABLE)) if given is None else ("--api-key", given)
    if file is not None:
        try:
            source, text = f"--api-key-file {file}", read_at_most(file, _MAX_KEY_FILE_BYTES).decode()
        except (OSError, ValueError) as error:
            reason = (
                "it is no UTF-8 text"
                if isinstance(error, UnicodeDecodeError)
                else getattr(error, "strerror", None) or error
            )
            raise InputError(f"--api-key-file {file} cannot be read: {reason}") from error
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
    if args.words:
        raise InputError(f"serve takes one MODEL, and options; unexpected: {args.words[0]!r}")
    if not args.canary and (rules := _canary_options(args)):
        option = f"--canary-{next(iter(rules)).replace('_', '-')}"
        raise InputError(f"{option} needs --canary MODEL, the second version")
    if args.backend == "vllm" and (given := _given(args, _NATIVE_ONLY)):
        options = ", ".join(f"--{'no-' if given[name] is False else ''}{name.replace('_', '-')}" for name in given)
        raise InputError(f"vLLM's server has no counterpart for {options}: leave it out, or use --backend native")
    at_least = {
        "max_batch_size": 1, "max_prefill_tokens": 1, "max_body_bytes": 1, "max_samples": 1, "max_completion_tokens": 1,
        "max_model_len": 2, "max_queue": 0, "drain_timeout_s": 0,
    }  # fmt: skip
    above_zero = ("request_timeout_s", "body_timeout_s", "kv_cache_gib")
    checks = {"port": (0 <= args.port < 2**16, "0 to 65535")}
    checks |= {
        name: (value >= at_least[name], f"at least {at_least[name]}") for name, value in _given(args, at_least).items()
    }
    checks |= {name: (value > 0, "more than 0") for name, value in _given(args, above_zero).items()}
    checks |= {
        name: (0 < value <= 1, "above 0 and at most 1")
        for name, value in _given(args, ["gpu_memory_utilization"]).items()
    }
    for name, (is_fine, accepted) in checks.items():
        if not is_fine:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}: {accepted} is accepted")


def _require_extra() -> None:
    import importlib.util

    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"`posttrain serve` needs {package}: pip install 'posttrain[serve]'")
