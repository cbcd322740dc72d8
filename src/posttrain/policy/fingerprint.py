"""A digest of everything that decides a model's log-probabilities, whatever the number of ranks it is spread over."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Where a config came from and how it was read; none of it is seen in a number.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_CHUNK_BYTES = 2**24  # hashed in parallel; part of the definition


def model_fingerprint(model: nn.Module, config: Mapping[str, Any], temperature: float) -> str:
    """SHA-256 of the weights under any adapters, their precision, the architecture and the temperature.

    A collective when the weights are sharded: every rank calls it. The answer is that of rank 0; the others return "".
    """
    settings = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    digest = hashlib.sha256(json.dumps([settings, temperature], sort_keys=True, default=str).encode())
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                continue
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if is_first:
                content = _bytes(whole)
                starts = range(0, len(content), _CHUNK_BYTES)
                chunks = pool.map(hashlib.sha256, [content[start : start + _CHUNK_BYTES] for start in starts])
                digest.update(f"{name}:{tuple(whole.shape)}:{whole.dtype};".encode())
                digest.update(b"".join(chunk.digest() for chunk in chunks))
    return digest.hexdigest() if is_first else ""


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
