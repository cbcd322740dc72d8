"""Products of fused layers in FP8, with copies of the weights: for a sampler, and for training (`policy.fp8`).

Both quantise the copies from the weights that are trained. A sampler's copies have the lifetime of its KV cache;
`Fp8Weights.refresh` quantises them again into the same memory, so that captured CUDA graphs stay valid. A trainer's
copies exist for one update or one pass over a batch. Adapters, biases, norms, embeddings and the output head stay as
they are: an adapter adds to a product in FP8 what it adds to one in bf16.

y = x W^T has one factor for each row of x and one for W. The gradient of the input, dx = dy W, has one for each row of
dy and one for each input: it uses a second copy, quantised along the other axis. Gradients of weights are computed as
in `Product`, from unquantised activations.

The matrix library is faster without factors of rows, by a third for few rows. So products of few rows in a sampler do
not apply them. They return `ScaledRows`, and the kernel that reads the outputs (norm, SwiGLU, rotation) multiplies by
the row's factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.policy.experts import stacked_experts
from posttrain.policy.fused.adapters import product_of
from posttrain.policy.fused.products import Product

_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper have FP8 tensor cores
_MULTIPLE = 16  # of both sizes of a weight, for the matrix library
_MOST_DEFERRED = 512  # rows of a product that leaves their factors to the next kernel; with more it gains nothing


class ScaledRows(NamedTuple):
    """Rows whose numbers are values times factor."""

    values: Tensor  # [rows, width]: e4m3; the dtype of the weights if a product has not applied the factors
    factors: Tensor  # [rows], fp32


_active: Fp8Weights | None = None


def whole(rows: Tensor | ScaledRows) -> Tensor:
    """The rows with their factors applied."""
    if not isinstance(rows, ScaledRows):
        return rows
    from posttrain.policy.fused.fp8_kernels import apply_factors

    return apply_factors(rows)


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
    device: torch.device, dtype: torch.dtype, *, model_type: str, layers: Sequence[nn.Module], num_fused: int,
    is_sharded: bool,
) -> str | None:  # fmt: skip
    """Why the products of a model cannot be in FP8, `num_fused` of whose layers are fused; None if they can."""
    if device.type != "cuda":
        return f"it needs a GPU with FP8 matrix units (Ada, Hopper or newer), and the model is on {device.type}"
    if torch.version.hip is not None:
        return "its kernels are for GPUs of NVIDIA"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} (compute capability {capability[0]}.{capability[1]}) has no FP8 matrix units; Ada (8.9), Hopper "
            "(9.0) and newer ones have"
        )
    if dtype != torch.bfloat16:
        return f"weights in bfloat16 are quantised, and these are {str(dtype).removeprefix('torch.')}"
    if is_sharded:
        return "weights that are sharded over GPUs cannot be quantised yet"
    if any(stacked_experts(layer) for layer in layers):
        return f"the routed experts of {model_type} cannot be quantised yet"
    if num_fused < len(layers):
        fused = f"{num_fused} of {len(layers)} layers of {model_type}"
        return f"{fused} follow the pattern of Llama whose products can be quantised"
    return None


class Fp8Weights:
    """Copies of the weights of `layers`: the fused decoder layers whose products are to be in FP8. `gradients`: with
    those that gradients of inputs need. `defers`: products of few rows leave the factors of the rows to the kernel that
    reads them.
    """

    def __init__(self, layers: Iterable[nn.Module], *, gradients: bool = False, defers: bool = False) -> None:
        self._layers = list(layers)
        self._gradients = gradients
        self._defers = defers
        self._copies: dict[int, ScaledRows] = {}  # by the address of what they are copies of
        self._transposed: dict[int, ScaledRows] = {}
        self._one: Tensor | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weights as they are now. Weights that have not moved reuse the memory of their copy."""
        from posttrain.policy.fused.fp8_kernels import quantise_columns, quantise_weight

        copies: dict[int, ScaledRows] = {}
        for weight in self._weights():
            held = self._copies.get(weight.data_ptr())
            # The address of a moved weight may now hold another weight.
            fits = held is not None and held.values.shape == weight.shape
            copies[weight.data_ptr()] = quantise_weight(weight, held if fits else None)
            if self._gradients:
                self._transposed[weight.data_ptr()] = quantise_columns(weight)
        self._copies = copies
        if self._defers and copies and self._one is None:
            self._one = torch.ones((), device=next(iter(copies.values())).values.device)

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
        if (copy := self._copies.get(place)) is None:
            return product
        own = (product.weights, product.biases, product.weight, product.bias, product.low_rank)
        return Fp8Product(*own, copy=copy, transposed=self._transposed.get(place), one=self._one)

    @property
    def num_bytes(self) -> int:
        copies = [*self._copies.values(), *self._transposed.values()]
        return sum(copy.values.nbytes + copy.factors.nbytes for copy in copies)


@dataclass(frozen=True, kw_only=True)
class Fp8Product(Product):
    """A product whose weights and inputs are quantised; on the way back the gradient of its outputs."""

    copy: ScaledRows
    transposed: ScaledRows | None  # [inputs, outputs], a factor for each input; None where no gradient is needed
    one: Tensor | None = None  # the number 1 on the device, for products that leave factors to their reader

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from posttrain.policy.fused.fp8_kernels import quantise

        return self._multiply(quantise(x), x)

    def of_norm(
        self, x: Tensor, delta: Tensor | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(x + delta, the norm's factor of each row, the product with norm(x + delta) * norm_weight, what adapters see
        of it).
        """
        from posttrain.policy.fused.fp8_kernels import norm_quantised

        total, rows, y, scale = norm_quantised(x, delta, norm_weight, eps, self._adapter_dtype)
        return total, scale, *self._multiply(rows, y)

    def of_swiglu(self, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        from posttrain.policy.fused.fp8_kernels import swiglu_quantised

        return self._multiply(*swiglu_quantised(gate_up, self._adapter_dtype))

    def defers(self, num_rows: int) -> bool:
        return self.one is not None and num_rows <= _MOST_DEFERRED

    def deferred(self, x: Tensor) -> Tensor | ScaledRows:
        """As `forward`, with the factors of the rows left to the reader."""
        from posttrain.policy.fused.fp8_kernels import quantise

        return self._deferred(quantise(x), x)

    def deferred_of_norm(
        self, x: Tensor, delta: Tensor | ScaledRows | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | ScaledRows]:
        from posttrain.policy.fused.fp8_kernels import norm_quantised

        total, rows, y, _ = norm_quantised(x, delta, norm_weight, eps, self._adapter_dtype)
        return total, self._deferred(rows, y)

    def deferred_of_swiglu(self, gate_up: Tensor | ScaledRows) -> Tensor | ScaledRows:
        from posttrain.policy.fused.fp8_kernels import swiglu_quantised

        return self._deferred(*swiglu_quantised(gate_up, self._adapter_dtype))

    def _deferred(self, rows: ScaledRows, x: Tensor | None) -> Tensor | ScaledRows:
        assert self.one is not None, "ask `defers` first"
        assert not torch.is_grad_enabled(), "autograd does not see this product"
        out = torch._scaled_mm(
            rows.values, self.copy.values.T, scale_a=self.one, scale_b=self.copy.factors[0],
            out_dtype=self.weight.dtype, use_fast_accum=True,
        )  # fmt: skip
        if x is not None:
            self.add_adapters(x, out, divisors=rows.factors)
        scaled = ScaledRows(out, rows.factors)
        return scaled if self.bias is None else whole(scaled).add_(self.bias)

    def _base_gradient(self, grad_out: Tensor) -> Tensor:
        from posttrain.policy.fused.fp8_kernels import quantise

        assert self.transposed is not None, "these copies are for passes without gradients"
        return multiply(quantise(grad_out), self.transposed, grad_out.dtype)

    @property
    def _adapter_dtype(self) -> torch.dtype | None:
        """The dtype of the adapters' input; None without adapters."""
        return None if self.low_rank is None else self.weight.dtype

    def _multiply(self, rows: ScaledRows, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = multiply(rows, self.copy, self.weight.dtype)
        if self.bias is not None:
            out += self.bias
        return out, None if x is None else self.add_adapters(x, out)


def multiply(x: ScaledRows, weight: ScaledRows, dtype: torch.dtype) -> Tensor:
    """x @ weight.T in `dtype`, with the factors of both."""
    return torch._scaled_mm(
        x.values, weight.values.T, scale_a=x.factors[:, None], scale_b=weight.factors[None, :], out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
