"""The same bits from the same numbers, on a GPU too, for those who want to pay for it.

Nothing of posttrain's own adds up in an order left to chance. Three of torch's operations do on a GPU: the backward pass of
attention and of a lookup add with atomics, and cuBLAS may choose another workspace for a stream. Sampling uses none of them
but the last, so only the passes of training are run with torch's deterministic algorithms; what sampling has to be told is in
`NativeSettings.deterministic`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare_determinism() -> None:
    """Before the first product of matrices in the process: cuBLAS reads its setting once."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    # The mode would also fill every new tensor, in case somebody read it unwritten. Our tests poison memory for that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
