"""The type of `ctx` in our functions for autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    from torch import Tensor


class Context(FunctionCtx):
    """What a forward pass leaves for its backward pass: tensors by `save_for_backward`, and attributes of any name."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
