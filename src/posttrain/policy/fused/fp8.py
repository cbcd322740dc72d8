"""Products of fused layers in FP8, with copies of the weights: for a sampler, and for training (`policy.fp8`).

Both quantise the copies from the weights that are trained. A sampler's copies have the lifetime of its KV cache;
`Fp8Weights.refresh` quantises them again into the same memory, so that captured CUDA graphs stay valid. A trainer's
copies exist for one update or one pass over a batch. Adapters, biases, norms, embeddings and the output head stay as
they are: an adapter adds to a product in FP8 what it adds to one in bf16.

y = x W^T has one factor for each row of x and one for each output. The gradient of the input, dx = dy W, sums over the outputs,
so its factors are those of the rows of dy and of the inputs: it needs a second copy, quantised along the other axis.
Gradients of weights are computed as in `Product`, from unquantised activations.

Many rows go through `torch._scaled_mm`, few through a kernel of our own, which reads the weights faster (`fp8_kernels.py`).
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

_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper have FP8 tensor cores
_MULTIPLE = 16  # of both sizes of a weight, for the matrix library
_MOST_FEW_ROWS = 64  # up to here our own kernel is faster
_COLUMNS = 64  # of a tile of that kernel
_PROGRAMS_PER_SM = 1.15  # that a launch of it aims at
_SPARE_COUNTERS = 1024

_active: Fp8Weights | None = None


@contextmanager
def fp8_products(weights: Fp8Weights | None) -> Iterator[None]:
    """Fused layers inside this context use these copies of their weights. None: the weights themselves."""
    global _active
    previous, _active = _active, weights
    try:
        yield
    finally:
        _active = previous


def active_fp8() -> Fp8Weights | None:
    return _active


def fp8_obstacle(
    device: torch.device, dtype: torch.dtype, *, model_type: str, num_layers: int, num_fused: int, is_sharded: bool
) -> str | None:
    """Why the products of a model cannot be in FP8, `num_fused` of whose layers are fused; None if they can."""
    if device.type != "cuda":
        return f"it needs a GPU with FP8 matrix units (Ada, Hopper or newer), and the model is on {device.type}"
    if torch.version.hip is not None:
        return "its kernels are for GPUs of NVIDIA"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} (compute capability {capability[0]}.{capability[1]}) has no FP8 matrix units; Ada (8.9), Hopper (9.0) "
            "and newer ones have"
        )
    if dtype != torch.bfloat16:
        return f"weights in bfloat16 are quantised, and these are {str(dtype).removeprefix('torch.')}"
    if is_sharded:
        return "weights that are sharded over GPUs cannot be quantised yet"
    if num_fused < num_layers:
        return f"{num_fused} of {num_layers} layers of {model_type} follow the pattern of Llama whose products can be quantised"
    return None


class Fp8Weights:
    """Copies of the weights of `layers`: the fused decoder layers whose products are to be in FP8. `gradients`: with those that
    gradients of inputs need."""

    def __init__(self, layers: Iterable[nn.Module], *, gradients: bool = False) -> None:
        self._layers = list(layers)
        self._gradients = gradients
        self._copies: dict[int, Fp8Rows] = {}  # by the address of what they are copies of
        self._transposed: dict[int, Fp8Rows] = {}
        self._counters: Tensor | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weights as they are now. Weights that have not moved reuse the memory of their copy."""
        from posttrain.policy.fused.fp8_kernels import quantise, quantise_columns

        copies: dict[int, Fp8Rows] = {}
        for weight in self._weights():
            held = self._copies.get(weight.data_ptr())
            # The address of a moved weight may now hold another weight.
            fits = held is not None and held.values.shape == weight.shape
            copies[weight.data_ptr()] = quantise(weight, held if fits else None)
            if self._gradients:
                self._transposed[weight.data_ptr()] = quantise_columns(weight)
        self._copies = copies
        if copies and self._counters is None:
            tiles = max(max(copy.values.shape) for copy in copies.values()) // _COLUMNS
            device = next(iter(copies.values())).values.device
            self._counters = torch.zeros(tiles + _SPARE_COUNTERS, dtype=torch.int32, device=device)

    def _weights(self) -> Iterator[Tensor]:
        for layer in self._layers:
            forward: Any = layer.forward
            for modules in forward.module_groups():
                product = product_of(modules)
                if product is not None and not any(size % _MULTIPLE for size in product.weight.shape):
                    yield product.weight

    def product(self, product: Product) -> Product:
        """The same product in FP8, or itself if its weights have no copy."""
        place = product.weight.data_ptr()
        if (copy := self._copies.get(place)) is None or self._counters is None:
            return product
        own = (product.weights, product.biases, product.weight, product.bias, product.low_rank)
        return Fp8Product(*own, copy=copy, transposed=self._transposed.get(place), counters=self._counters)

    @property
    def num_bytes(self) -> int:
        copies = [*self._copies.values(), *self._transposed.values()]
        return sum(copy.values.nbytes + copy.factors.nbytes for copy in copies)


@dataclass(frozen=True, kw_only=True)
class Fp8Product(Product):
    """A product whose weights and inputs are quantised; on the way back the gradient of its outputs."""

    copy: Fp8Rows  # a factor for each output
    transposed: Fp8Rows | None  # [inputs, outputs], a factor for each input; None where no gradient is needed
    counters: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from posttrain.policy.fused.fp8_kernels import quantise

        return self._multiply(quantise(x), x)

    def of_norm(
        self, x: Tensor, delta: Tensor | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(x + delta, the norm's factor of each row, the product with norm(x + delta) * norm_weight, what adapters see of it)."""
        from posttrain.policy.fused.fp8_kernels import norm_quantised

        total, rows, y, scale = norm_quantised(x, delta, norm_weight, eps, self._adapter_dtype)
        return total, scale, *self._multiply(rows, y)

    def of_swiglu(self, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        from posttrain.policy.fused.fp8_kernels import swiglu_quantised

        return self._multiply(*swiglu_quantised(gate_up, self._adapter_dtype))

    def _base_gradient(self, grad_out: Tensor) -> Tensor:
        from posttrain.policy.fused.fp8_kernels import quantise

        assert self.transposed is not None, "these copies are for passes without gradients"
        return multiply(quantise(grad_out), self.transposed, grad_out.dtype, self.counters)

    @property
    def _adapter_dtype(self) -> torch.dtype | None:
        """The dtype of the adapters' input; None without adapters."""
        return None if self.low_rank is None else self.weight.dtype

    def _multiply(self, rows: Fp8Rows, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = multiply(rows, self.copy, self.weight.dtype, self.counters)
        if self.bias is not None:
            out += self.bias
        return out, None if x is None else self.add_adapters(x, out)


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
    """Number of splits of the kernel for few rows, from shapes only. Few outputs give few programs, so inputs are
    split.
    """
    from posttrain.policy.fused.fp8_kernels import ProductTile

    outputs, inputs = weight_shape
    height = next((height for height in (16, 32) if num_rows <= height), 64)
    depth, stages = (128, 6) if height == 64 or inputs % 256 else (256, 4)
    tile = ProductTile(height, _COLUMNS, depth, 4, stages)
    programs = -(-outputs // _COLUMNS) * -(-num_rows // height)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return tile, max(1, min(round(_PROGRAMS_PER_SM * sms / programs), -(-inputs // depth)))
