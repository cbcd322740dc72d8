"""Sizes and limits of a server with their defaults, which the help of the command line prints: so nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

# What a model that was made for more tokens gets unless somebody asks for more.
LONGEST_UNASKED_TOKENS = 8192


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine; none of them changes an answer."""

    precision: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: the model's own, at most LONGEST_UNASKED_TOKENS
    max_batch_size: int = 64
    max_prefill_tokens: int = 4096
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class Limits:
    max_queue: int = 256  # samples that wait beyond those that run
    max_body_bytes: int = 2 * 2**20
    max_completion_tokens: int | None = None  # per sample; None: what the context leaves
    max_samples: int = 16  # of one request, over all of its prompts
    request_timeout_s: float = 600.0  # waiting included
    body_timeout_s: float = 30.0
