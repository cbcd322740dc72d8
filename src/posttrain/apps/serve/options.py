"""Options of a server with their defaults. The help of the command line prints them, so nothing heavy is imported."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.apps.serve.canary import CanaryRules

# The default context of models that were made for more tokens.
LONGEST_UNASKED_TOKENS = 8192


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine. None of them changes an answer by more than rounding."""

    precision: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: the model's own, at most LONGEST_UNASKED_TOKENS
    max_batch_size: int = 64
    max_prefill_tokens: int = 4096
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True  # reuse cached prefixes of earlier sequences


@dataclass(frozen=True)
class ServerLimits:
    max_queue: int = 256  # samples that wait, beyond those that run
    max_body_bytes: int = 2 * 2**20
    max_completion_tokens: int | None = None  # per sample; None: what the context leaves
    max_samples: int = 16  # of one request, over all of its prompts
    request_timeout_s: float = 600.0  # waiting included
    body_timeout_s: float = 30.0


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
    # 2: the engine in a separate process; 1: in a thread of the server; None: 2 on a GPU, else 1
    processes: int | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
