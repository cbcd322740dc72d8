"""FP8 copies of the weights of fused layers, and the products of a sampler that uses them.

The copies belong to a sampler; the trainer never sees them. `Fp8Weights.refresh` quantises them again from the weights that are
trained, into the same memory, so that captured CUDA graphs stay valid. Adapters, biases, norms, embeddings and the output head
stay as they are: an adapter adds to a product in FP8 what it adds to one in bf16.

Many rows go through `torch._scaled_mm` with a factor per row and per output, few through a kernel of our own, which reads the
weights faster (`fp8_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.policy.fused.adapters import product_of
from posttrain.policy.fused.products import Product

if TYPE_CHECKING:
    from posttrain.policy.fused.fp8_kernels import Fp8Rows

_MULTIPLE = 16  # of both sizes of a weight, for the matrix library
_MOST_FEW_ROWS = 64  # up to here our own kernel is faster
_COLUMNS = 64  # of a tile of that kernel
_PROGRAMS_PER_SM = 1.15  # that a launch of it aims at
_SPARE_COUNTERS = 1024

_active: Fp8Weights | None = None


@contextmanager
def fp8_products(weights: Fp8Weights | None) -> Iterator[None]:
    """Fused layers that run inside multiply with these copies of their weights. None: with the weights themselves."""
    global _active
    previous, _active = _active, weights
    try:
        yield
    finally:
        _active = previous


def active_fp8() -> Fp8Weights | None:
    return _active


class Fp8Weights:
    """Copies of the weights of `layers`: the fused decoder layers whose products are to be in FP8."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._copies: dict[int, Fp8Rows] = {}  # by the address of what they are copies of
        self._counters: Tensor | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weights as they are now. Weights that stayed where they were are copied to where their copy was."""
        from posttrain.policy.fused.fp8_kernels import quantise

        copies: dict[int, Fp8Rows] = {}
        for weight in self._weights():
            held = self._copies.get(weight.data_ptr())
            # Other weights may have come to lie where some were that moved.
            fits = held is not None and held.values.shape == weight.shape
            copies[weight.data_ptr()] = quantise(weight, held if fits else None)
        self._copies = copies
        if copies and self._counters is None:
            tiles = max(len(copy.values) for copy in copies.values()) // _COLUMNS
            device = next(iter(copies.values())).values.device
            self._counters = torch.zeros(tiles + _SPARE_COUNTERS, dtype=torch.int32, device=device)

    def _weights(self) -> Iterator[Tensor]:
        for layer in self._layers:
            forward: Any = layer.forward
            for modules in forward.module_groups():
                product = product_of(modules)
                if product is not None and not any(size % _MULTIPLE for size in product.weight.shape):
                    yield product.weight

    def product(self, product: Product) -> Fp8Product | None:
        """The same product in FP8; None if its weights have no copy."""
        copy = self._copies.get(product.weight.data_ptr())
        return None if copy is None or self._counters is None else Fp8Product(product, copy, self._counters)

    @property
    def num_bytes(self) -> int:
        return sum(copy.values.nbytes + copy.factors.nbytes for copy in self._copies.values())


@dataclass(frozen=True)
class Fp8Product:
    """A product whose weights and inputs are quantised. For one call, and without gradients."""

    product: Product
    weight: Fp8Rows
    counters: Tensor

    def of_norm(self, x: Tensor, delta: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, the product with norm(x + delta) * norm_weight)."""
        from posttrain.policy.fused.fp8_kernels import norm_quantised

        total, rows, y = norm_quantised(x, delta, norm_weight, eps, self._adapter_dtype)
        return total, self._multiply(rows, y)

    def of_swiglu(self, gate_up: Tensor) -> Tensor:
        from posttrain.policy.fused.fp8_kernels import swiglu_quantised

        return self._multiply(*swiglu_quantised(gate_up, self._adapter_dtype))

    def of(self, x: Tensor) -> Tensor:
        from posttrain.policy.fused.fp8_kernels import quantise

        return self._multiply(quantise(x), x)

    @property
    def _adapter_dtype(self) -> torch.dtype | None:
        """In which adapters want the input; None where there are none."""
        return None if self.product.low_rank is None else self.product.weight.dtype

    def _multiply(self, rows: Fp8Rows, x: Tensor | None) -> Tensor:
        out = multiply(rows, self.weight, self.product.weight.dtype, self.counters)
        if self.product.bias is not None:
            out += self.product.bias
        if x is not None:
            self.product.add_adapters(x, out)
        return out


def multiply(x: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype, counters: Tensor) -> Tensor:
    """x @ weight.T in `dtype`, with the factors of both."""
    num_rows = len(x.values)
    if num_rows > _MOST_FEW_ROWS and x.values.is_cuda:
        return torch._scaled_mm(
            x.values, weight.values.T, scale_a=x.factors[:, None], scale_b=weight.factors[None, :], out_dtype=dtype,
            use_fast_accum=True,
        )  # fmt: skip
    from posttrain.policy.fused.fp8_kernels import few_rows_product

    return few_rows_product(
        x, weight, dtype, counters, *tile_and_splits(num_rows, weight.values.shape, x.values.device)
    )


def tile_and_splits(num_rows: int, weight_shape: Sequence[int], device: torch.device) -> tuple[Any, int]:
    """Of the kernel for few rows, by shapes alone. Few outputs make few programs: then the inputs are split."""
    from posttrain.policy.fused.fp8_kernels import ProductTile

    outputs, inputs = weight_shape
    height = next((height for height in (16, 32) if num_rows <= height), 64)
    depth, stages = (128, 6) if height == 64 or inputs % 256 else (256, 4)
    tile = ProductTile(height, _COLUMNS, depth, 4, stages)
    programs = -(-outputs // _COLUMNS) * -(-num_rows // height)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return tile, max(1, min(round(_PROGRAMS_PER_SM * sms / programs), -(-inputs // depth)))
