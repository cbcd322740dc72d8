"""Memory-saving Adam and AdamW: moments in bf16 or 8 bits, weights without fp32 masters, state in
host memory. Any of the three, in any combination.

The arithmetic is that of torch.optim.AdamW in fp32, on slices of a tensor at a time: low-precision state is converted
to fp32, updated, and rounded stochastically (`low_precision`). The noise is keyed by (seed, parameter, number of the
update, index of the number), so a resumed run rounds as the uninterrupted one would have, on any number of ranks. On
CUDA an update is one kernel (`fused/adam_kernels.py`).

State in host memory passes through the device in slices: one is fetched and one written back while a third is computed;
so do weights and gradients that are there (`policy.dtensor_cfg.cpu_offload`).
Results equal those of this class with state on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from posttrain.policy.host_memory import pinned_like
from posttrain.policy.optimizer.low_precision import (
    block_size,
    decode_first_moment,
    decode_second_moment,
    encode_first_moment,
    encode_second_moment,
    noise_key,
    random_words,
    round_to_bf16,
)
from posttrain.policy.optimizer.offload import run_through_device
from posttrain.policy.parallel.fsdp import device_of, first_row, local_part
from posttrain.policy.runtime import triton_kernels

StateDtype = Literal["float32", "bfloat16", "int8"]
_SLICE = 2**23  # numbers; bounds what exists in fp32, or passes through the device, at a time
_WHOLE = 2**30  # of state on the device, whose kernel needs no memory of its own
_HOW_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")  # arguments of torch's that change no result


@dataclass(frozen=True)
class StateFormat:
    """How a run stores its optimizer state."""

    moments: StateDtype = "float32"
    masters: bool = True  # fp32 copies of weights that are in lower precision
    offload: bool = False  # in host memory

    @property
    def is_plain(self) -> bool:
        """torch's own optimizers can do it."""
        return self.moments == "float32" and self.masters and not self.offload


@dataclass(frozen=True)
class Slice:
    """A part of a parameter's numbers. `state` may be in host memory, and so may weight and gradient.

    With 8-bit moments weight, gradient, master and moments are [blocks, size]; otherwise everything has one dimension.
    """

    weight: Tensor
    gradient: Tensor
    state: Sequence[Tensor | None]  # master, first moment, second moment, scales of the first, scales of the second
    start: int  # index of its first number in the whole parameter
    numbers: Tensor  # what the update multiplies with, see `_numbers`
    keys: Tensor  # of the noise that rounds weight, first and second moment


class CompactAdam(Optimizer):
    """Over the trainable parameters of a model, by name. Set `gradients` and `gradient_scale` before each `step`.

    The state of a parameter is made in its first update: `step`, `exp_avg`, `exp_avg_sq` as torch names them, with 8
    bits also `exp_avg_scale` and `exp_avg_sq_scale`, and `master` where there is one. Of a sharded parameter it is this
    rank's part.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        form: StateFormat,
        *,
        seed: int,
        decoupled: bool,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        **others: object,
    ) -> None:
        unknown = sorted(name for name, value in others.items() if name not in _HOW_TO_COMPUTE and value)
        if unknown:
            raise TypeError(f"{', '.join(unknown)} is not supported with state_dtype, master_weights or offload_states")
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas) and len(betas) == 2):
            raise ValueError(f"lr={lr}, betas={betas}, eps={eps}: needs lr and eps of at least 0, two betas in [0, 1)")
        decay = (0.01 if decoupled else 0.0) if weight_decay is None else weight_decay
        super().__init__(list(named.values()), {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": decay})
        self.named = dict(named)
        self.form = form
        self.seed = seed
        self.decoupled = decoupled
        self.torch_class = AdamW if decoupled else Adam  # whose arithmetic this is
        self.gradients: dict[str, Tensor] = {}  # fp32, where the parameters are
        self.gradient_scale = 1.0  # they are multiplied with it on their way
        self.device = device_of(next(iter(self.named.values())))
        kernels = triton_kernels("policy.fused.adam_kernels") if self.device.type == "cuda" else None
        self._compute: Callable[[Slice], None] = update_slice if kernels is None else kernels.update
        self._slice = _WHOLE if kernels is not None and not form.offload else _SLICE

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        names = [name for name in self.named if name in self.gradients]
        if not names:
            return
        for name in names:
            state = self._state_of(name)
            state["step"] += 1
        numbers = torch.tensor([self._numbers(name) for name in names], dtype=torch.float32).to(self.device)
        keys = torch.tensor([self._keys(name) for name in names], dtype=torch.int64).to(self.device)
        slices = (part for row, name in enumerate(names) for part in self._slices(name, numbers[row], keys[row]))

        def compute(part: Slice, tensors: Sequence[Tensor | None]) -> None:
            gradient, weight, *state = tensors
            assert gradient is not None
            assert weight is not None
            self._compute(replace(part, gradient=gradient, weight=weight, state=state))

        run_through_device(
            slices, lambda part: (part.gradient, part.weight, *part.state), compute, self.device, num_read=1
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    def _state_of(self, name: str) -> dict[str, Tensor]:
        parameter = self.named[name]
        state = self.state[parameter]
        if "exp_avg" in state:
            return state
        made = new_state(local_part(parameter.detach()), self.form)
        state.update({"step": torch.zeros(()), **self._at_home(made)})
        return state

    def put_state(self, name: str, entries: Mapping[str, Tensor]) -> None:
        """State as it was saved, this rank's part of it."""
        rest = {entry: tensor for entry, tensor in entries.items() if entry != "step"}
        self.state[self.named[name]] = {"step": entries["step"].cpu(), **self._at_home(rest)}

    def _at_home(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.form.offload:
            return state
        hosted = dict(zip(state, pinned_like(list(state.values())), strict=True))
        for entry, tensor in hosted.items():
            tensor.copy_(state[entry])
        return hosted

    # -- one update ----------------------------------------------------------------------------------------------------

    def _numbers(self, name: str) -> list[float]:
        """What the update of a parameter multiplies with, each worked out in double precision as torch does."""
        group = self.param_groups[0]
        rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        step = float(self.state[self.named[name]]["step"])
        keep, coupled = (1 - rate * decay, 0.0) if self.decoupled else (1.0, decay)
        step_size = rate / (1 - beta1**step)
        root = math.sqrt(1 - beta2**step)
        return [self.gradient_scale, keep, coupled, 1 - beta1, beta2, 1 - beta2, -step_size, root, group["eps"]]

    def _keys(self, name: str) -> list[int]:
        """For rounding the weight and the two moments."""
        step = int(self.state[self.named[name]]["step"])
        return [noise_key(self.seed, name, step, what) for what in ("weight", "exp_avg", "exp_avg_sq")]

    def _slices(self, name: str, numbers: Tensor, keys: Tensor) -> Iterator[Slice]:
        parameter = self.named[name]
        state = self.state[parameter]
        entries = [state.get(entry) for entry in ENTRIES]
        weight, gradient = local_part(parameter.detach()), local_part(self.gradients[name])
        if weight.numel() == 0:
            return
        row_size = math.prod(parameter.shape[1:])
        in_blocks = state["exp_avg"].dtype == torch.int8
        size = (block_size(tuple(weight.shape)) if in_blocks else None) or 1
        per_slice = max(1, self._slice // size)
        for begin in range(0, weight.numel() // size, per_slice):
            end = begin + per_slice

            def cut(tensor: Tensor, begin: int = begin, end: int = end) -> Tensor:
                return tensor.view(-1, size)[begin:end] if in_blocks else tensor.view(-1)[begin:end]

            scales = [None if scale is None else scale.view(-1)[begin:end] for scale in entries[3:]]
            first = first_row(parameter) * row_size + begin * size
            yield Slice(
                weight=cut(weight),
                gradient=cut(gradient),
                state=(*[None if entry is None else cut(entry) for entry in entries[:3]], *scales),
                start=first,
                numbers=numbers,
                keys=keys,
            )


ENTRIES = ("master", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


def new_state(weight: Tensor, form: StateFormat) -> dict[str, Tensor]:
    """The state of a parameter that was never updated."""
    state: dict[str, Tensor] = {}
    if form.masters and weight.dtype != torch.float32:
        state["master"] = weight.float()
    size = block_size(tuple(weight.shape)) if form.moments == "int8" else None
    if size is not None:
        scales = torch.zeros(*weight.shape[:-1], weight.shape[-1] // size, device=weight.device)
        state["exp_avg"] = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
        state["exp_avg_sq"] = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
        return {**state, "exp_avg_scale": scales, "exp_avg_sq_scale": scales.clone()}
    # Tensors not worth quantising are small: biases and norms.
    dtype = torch.bfloat16 if form.moments == "bfloat16" else torch.float32
    for entry in ("exp_avg", "exp_avg_sq"):
        state[entry] = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    return state


def update_slice(part: Slice) -> None:
    """One update of some numbers of one parameter, in place, in plain torch."""
    weight, gradient = part.weight, part.gradient
    master, first, second, first_scales, second_scales = part.state
    assert first is not None
    assert second is not None
    scale, keep, coupled, weight1, beta2, weight2, minus_step, root, eps = part.numbers.unbind()
    index = part.start + torch.arange(weight.numel(), device=weight.device).view(weight.shape)
    value = weight.float() if master is None else master
    moment = first.float() if first_scales is None else decode_first_moment(first, first_scales)
    square = second.float() if second_scales is None else decode_second_moment(second, second_scales)

    gradient = gradient.float() * scale + coupled * value
    moment = moment + weight1 * (gradient - moment)
    square = square * beta2 + weight2 * gradient * gradient
    value = value * keep + minus_step * (moment / (square.sqrt() / root + eps))

    if master is not None:
        master.copy_(value)
        weight.copy_(value)
    elif weight.dtype == torch.bfloat16:
        weight.copy_(round_to_bf16(value, random_words(part.keys[0], index)))
    else:
        weight.copy_(value)
    if first_scales is not None and second_scales is not None:
        for codes, scales, encoded in (
            (first, first_scales, encode_first_moment(moment, random_words(part.keys[1], index))),
            (second, second_scales, encode_second_moment(square, random_words(part.keys[2], index))),
        ):
            codes.copy_(encoded[0])
            scales.copy_(encoded[1])
    elif first.dtype == torch.bfloat16:
        first.copy_(round_to_bf16(moment, random_words(part.keys[1], index)))
        second.copy_(round_to_bf16(square, random_words(part.keys[2], index)))
    else:
        first.copy_(moment)
        second.copy_(square)
