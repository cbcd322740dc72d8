"""Comparisons of kernels with plain torch before they are used: outputs and gradients of a few random numbers.

Whether Triton compiles a kernel right depends on its version, on the GPU and on what the kernel is specialised for. So
a `Trial` runs once for each specialisation, when a run needs it for the first time; the run then uses what the trial
has compiled. If the numbers differ, torch computes instead, and a warning says so. A trial finds wrong numbers. It
cannot contain a kernel that accesses memory out of bounds: such a fault ends the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# By bytes of a number: the largest difference in parts of the largest number, and the mean difference in parts of the
# mean number. A wrong tile among many right ones hides behind the largest number, not behind the mean.
_TOLERANCES = {2: (5e-2, 3e-2), 4: (1e-3, 1e-3)}


@dataclass(frozen=True)
class Comparison:
    """The same outputs computed by kernels, and by torch from `inputs` in fp32 on the host."""

    kernels: Callable[..., Sequence[Tensor]]
    reference: Callable[..., Sequence[Tensor]]
    inputs: Sequence[Tensor | None]  # on the host, in the types that the kernels get
    num_graded: int = 0  # of the first so many outputs gradients are computed and compared too


class Trial:
    def __init__(self, what: str, comparisons: Callable[..., Iterable[Comparison]]) -> None:
        """`what` is computed by torch if they differ; `comparisons` makes them from the arguments of `passes`."""
        self._what, self._comparisons = what, comparisons
        self._agrees = cache(self._run)

    def passes(self, device: torch.device, dtype: torch.dtype, **key: Hashable) -> bool:
        """Whether the kernels of this specialisation may be used. `dtype` is that of their products."""
        try:
            return self._agrees(device, dtype, **key)
        except torch.OutOfMemoryError:  # not tried, which is no reason against them
            return True

    def _run(self, device: torch.device, dtype: torch.dtype, **key: Hashable) -> bool:
        from triton.errors import TritonError

        # In a thread without the hooks and modes of autograd that the caller has set.
        with ThreadPoolExecutor(1) as fresh:
            if device.type == "cuda":
                fresh.submit(torch.cuda.set_device, device)
            try:
                difference = fresh.submit(self._difference, device, dtype, key).result()
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except (TritonError, RuntimeError) as error:  # a GPU with too little shared memory, or an unknown one
                difference = f"cannot run: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
        if difference is not None:
            warnings.warn(
                f"{self._what} are computed by torch, more slowly: on this device their kernels for "
                f"{str(dtype).removeprefix('torch.')} and {key} {difference}",
                stacklevel=3,
            )
        return difference is None

    def _difference(self, device: torch.device, dtype: torch.dtype, key: dict[str, Hashable]) -> str | None:
        largest_allowed, mean_allowed = _TOLERANCES[min(dtype.itemsize, 4)]
        for comparison in self._comparisons(device, dtype, **key):
            ours = _computed(comparison, comparison.kernels, device, None)
            theirs = _computed(comparison, comparison.reference, torch.device("cpu"), torch.float32)
            for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                if not one.numel():
                    continue
                error = (one - other).abs()
                largest = float(error.max() / other.abs().max().clamp_min(1e-12))
                mean = float(error.mean() / other.abs().mean().clamp_min(1e-12))
                if not (largest <= largest_allowed and mean <= mean_allowed):  # not where there are NaNs
                    return f"differ from torch by {largest:.1e}, in the mean {mean:.1e}, in tensor {place}"
        return None


def _computed(
    comparison: Comparison, function: Callable[..., Sequence[Tensor]], device: torch.device, wide: torch.dtype | None
) -> list[Tensor]:
    """Outputs, then gradients of their sum with random weights."""
    leaves: list[Tensor | None] = []
    for given in comparison.inputs:
        is_number = given is not None and given.is_floating_point()
        leaf = None if given is None else given.to(device, wide if is_number else None, copy=True)
        leaves.append(leaf.requires_grad_(is_number and comparison.num_graded > 0) if leaf is not None else None)
    graded = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with torch.set_grad_enabled(bool(graded)):
        outputs = function(*leaves)
    found = list(outputs)
    if graded:
        random = torch.Generator().manual_seed(1)
        weights = [torch.randn(one.shape, generator=random, dtype=torch.float32) for one in outputs]
        ends = list(outputs[: comparison.num_graded])
        into = [weight.to(device, one.dtype) for one, weight in zip(ends, weights, strict=False)]
        found += torch.autograd.grad(ends, graded, into, materialize_grads=True)
    return [one.detach().float().cpu() for one in found]
