"""Run model code that asks for float32 by name in float64, so that algebraic identities can be tested at 1e-10.

Tests use the fixture `in_float64` of conftest.py; data that is made on import and module fixtures use `with
float64():`.

`model.to(torch.float64)` is not enough. These places compute in float32 whatever the dtype of the weights:

- transformers: the RMS norms, the rotary angles, the softmax of eager attention; products of experts, which torch does
  not have for float64;
- posttrain: `policy.head.project`, `policy.logprobs` (logits and their gradient), attention with a soft cap, the
  sampler.

Inside `float64()` each of those requests is answered with float64. The code under test is unchanged, and so are its
shapes, masks, sums and denominators; only the rounding is finer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Relative to the largest magnitude involved. float64 has an epsilon of 2.2e-16, which leaves more than 5 digits for
# sums of a few thousand terms and for cancellation.
TOLERANCE = 1e-10


class _Float32AsFloat64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(_widened(value) for value in args)
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch._grouped_mm:
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_product(x: Tensor, weight: Tensor, offs: Tensor, **_: object) -> Tensor:
    """torch's own is not for float64. Rows after the last end are those of experts on other ranks."""
    parts = x.tensor_split(offs.tolist())
    return torch.cat([*(part @ own for part, own in zip(parts, weight, strict=False)), parts[-1] @ weight[0] * 0])


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float64() -> Iterator[None]:
    """Tensors made inside are float64 by default, and requests for float32 give float64. Holds for this thread."""
    mode = _Float32AsFloat64()
    default, run_backward = torch.get_default_dtype(), torch.autograd._engine_run_backward

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:  # backward() is a torch function, so the mode is off while it runs, but it runs code under test too
            return run_backward(*args, **kwargs)

    torch.set_default_dtype(torch.float64)
    torch.autograd._engine_run_backward = run_backward_in_mode
    try:
        with mode:
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward
        torch.set_default_dtype(default)


def approx(expected: Any) -> Any:
    """`pytest.approx` at the tolerance of float64."""
    return pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal to `TOLERANCE` times the largest entry of all gradients, which must not vanish."""
    assert actual.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-4, "a vanishing gradient shows nothing"
    for name, gradient in expected.items():
        assert actual[name].dtype == gradient.dtype == torch.float64, name
        assert float((actual[name] - gradient).abs().max()) <= TOLERANCE * scale, name
