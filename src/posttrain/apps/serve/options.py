"""Options of a server with their defaults. The help of the command line prints them, so nothing heavy is imported."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from posttrain.apps.options import Option, check_ranges
from posttrain.apps.serve.canary import CanaryRules

# The default context of models that were made for more tokens.
LONGEST_UNASKED_TOKENS = 8192
_CONTEXT = f"prompt and answer, tokens (default: the model's, ≤ {LONGEST_UNASKED_TOKENS})"


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine. None of them changes an answer by more than rounding."""

    precision: Annotated[str, Option(choices=("auto", "bfloat16", "float32"))] = "auto"
    device: Annotated[str, Option(choices=("auto", "cpu", "cuda"))] = "auto"
    max_model_len: Annotated[int | None, Option(_CONTEXT, at_least=2)] = None
    max_batch_size: Annotated[int, Option("samples that decode together", at_least=1)] = 64
    max_prefill_tokens: Annotated[int, Option("prompt tokens in a pass", at_least=1)] = 4096
    kv_cache_gib: Annotated[
        float | None, Option("memory of the KV cache (default: 2 on a CPU)", "GIB", more_than=0)
    ] = None
    gpu_memory_utilization: Annotated[float, Option("of a GPU, weights included", "SHARE", more_than=0, at_most=1)] = (
        0.9
    )
    prefix_cache: Annotated[
        bool, Option("compute every prompt from its beginning, also where an earlier one began alike")
    ] = True  # reuse cached prefixes of earlier sequences

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ServerLimits:
    max_queue: Annotated[int, Option("samples that may wait, beyond those that run; then 429", at_least=0)] = 256
    max_body_bytes: Annotated[int, Option("larger bodies get 413", at_least=1)] = 2 * 2**20
    max_completion_tokens: Annotated[
        int | None, Option("of one sample (default: what the context leaves)", at_least=1)
    ] = None
    max_samples: Annotated[int, Option("of one request: prompts times n", at_least=1)] = 16
    request_timeout_s: Annotated[float, Option("queue included; then 504", "S", more_than=0)] = 600.0
    body_timeout_s: Annotated[float, Option("for a head, and for a body, to arrive", "S", more_than=0)] = 30.0

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ChatOptions:
    """Of a conversation in the terminal or in Python."""

    system: Annotated[str | None, Option("the system message", "TEXT")] = None
    temperature: Annotated[float, Option("0 is greedy", at_least=0, at_most=10)] = 0.7
    top_p: Annotated[float, Option("nucleus; 1 is off", more_than=0, at_most=1)] = 0.95
    max_tokens: Annotated[int, Option("tokens of one answer at most", at_least=1)] = 512
    seed: Annotated[int | None, Option("the same answers every time")] = None
    max_model_len: Annotated[int | None, Option(_CONTEXT, at_least=8)] = None
    precision: Annotated[str, Option(choices=("auto", "bfloat16", "float32"))] = "auto"
    device: Annotated[str, Option(choices=("auto", "cpu", "cuda"))] = "auto"
    registry: Annotated[
        str | None, Option("where the registry is (default: POSTTRAIN_REGISTRY, ./registry)", "WHERE")
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ServeOptions:
    model: str
    served_name: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> model reference
    canary: str | None = None  # a model, or the name of an adapter
    canary_rules: CanaryRules | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: ServerLimits = field(default_factory=ServerLimits)
    api_keys: Sequence[str] = ()
    no_auth: bool = False  # without a key, for everyone who can reach the address
    registry: str | None = None
    processes: int | None = None  # 2: the engine in one of its own; 1: in a thread; None: 2 on a GPU, else 1
    drain_timeout_s: float = 120.0  # for running requests after SIGTERM


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return ipaddress.ip_address(host).is_loopback if is_ip_address(host) else host.lower() == "localhost"


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(header: str) -> str:
    """The host in a `Host` header, without the port; empty if it names none. A URL's parser would find the host ::1 in
    `[::1].example`, and localhost in `x@localhost`."""
    found = re.fullmatch(r"(?:\[([\da-f:.]+)\]|([^\s:/?#@\\\[\]]+))(?::\d*)?", header.lower())
    return (found[1] or found[2]) if found else ""
