"""Runs stacked experts of `transformers` with the kernels of `expert_kernels.py`.

A module keeps its parameters; only its `forward` is replaced, as for fused layers (`layers.py`), in training and in
sampling. Its gate is recognised by what it computes, and the replaced forward is compared with the original on a few
tokens, without gradients: if they disagree, the original stays. Experts over ranks, sharded weights and fp32 keep the
path of `transformers`.

Without gradients: two products that read rows where they are, the activation inside the first, and a sum. With
gradients: rows in the order of experts, torch's grouped products (which compute gradients of weights only where those
are trained), and one kernel each way for the activation and for the sums. Adapters are multiplied by rows
(`policy/experts.py`) in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from posttrain.policy.autograd import Context
from posttrain.policy.experts import AdaptedExperts, adapters_of, grouped_product, stacked_experts
from posttrain.policy.fused.kernel_trials import Comparison, Trial
from posttrain.policy.fused.trials import is_near
from posttrain.policy.runtime import triton_kernels

_HALF = (torch.bfloat16, torch.float16)
_TRIAL_TOKENS, _TRIAL_EXPERTS = 8, 3
_ALIKE = 256  # sizes of weights that differ by a multiple of it make the same kernels
_SMALLEST_RANK = 16  # of the tensor cores


def fuse_experts(model: nn.Module) -> None:
    """Replace the forward of every module of stacked experts that is of a known kind. May be called again."""
    kernels = triton_kernels("policy.fused.expert_kernels")
    for module in stacked_experts(model).values():
        device, dtype = module.down_proj.device, module.down_proj.dtype
        own = module.__dict__.get("forward")
        is_known = module.has_gate and not getattr(module, "has_post_expert_norm", False)
        is_known = is_known and not isinstance(module.down_proj, DTensor)  # sharded: the trainer has tried before
        if kernels is None or not is_known or not (own is None or isinstance(own, AdaptedExperts)):
            continue
        if (device.type == "cuda" and dtype in _HALF) or kernels.is_interpreted(device):
            gate = _gate_of(module)
            if gate is not None and _agrees(fused := FusedExperts(module, gate), module):
                module.forward = fused


@torch.no_grad()
def _gate_of(module: Any) -> Any:
    """How its activation works, as the kernels have it; None if they do not."""
    from posttrain.policy.fused.expert_kernels import ExpertGate

    x = 20 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).to(module.down_proj.device)

    def named(*names: str) -> list[float]:
        return [float(getattr(module, name)) for name in names if getattr(module, name, None) is not None]

    alphas, limits = [*named("alpha", "swiglu_alpha"), 1.0], [*named("limit", "swiglu_limit"), float("inf")]
    for how in product((False, True), alphas, limits, (0.0, 1.0)):
        if torch.allclose(module._apply_gate(x), _gated(x, gate := ExpertGate(*how)), 1e-4, 1e-5):
            return gate
    return None


def _gated(x: Tensor, how: Any) -> Tensor:
    """In torch: the activation of rows of gate and up."""
    gate, up = (x[:, ::2], x[:, 1::2]) if how.alternates else x.chunk(2, dim=1)
    gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return gate * (how.alpha * gate).sigmoid() * (up + how.offset)


@torch.no_grad()
def _agrees(fused: FusedExperts, module: Any) -> bool:
    from triton.errors import TritonError

    random, down = torch.Generator().manual_seed(0), module.down_proj
    width, top_k = down.shape[2 if module.is_transposed else 1], min(2, module.num_experts)
    hidden = torch.randn(_TRIAL_TOKENS, width, generator=random).to(down)
    chosen = torch.rand(_TRIAL_TOKENS, module.num_experts, generator=random).topk(top_k).indices.to(down.device)
    weights = torch.rand(_TRIAL_TOKENS, top_k, generator=random).to(down)
    try:
        return is_near(fused(hidden, chosen, weights), fused.own_forward(hidden, chosen, weights), down.dtype)
    except TritonError:  # a GPU with too little shared memory
        return False


class FusedExperts:
    """The forward of a module of stacked experts."""

    def __init__(self, module: Any, gate: Any) -> None:
        self.module, self.gate = module, gate
        self.own_forward = module.forward

    @property
    def adapters(self) -> dict[str, Any]:
        """There is none unless peft has given the module adapters (`compute_adapters_by_rows`)."""
        found: dict[str, Any] = self.own_forward.adapters
        return found

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module = self.module
        parameters = list(module._parameters.values())
        if not len(hidden) or any(isinstance(each, DTensor) for each in parameters):
            out: Tensor = self.own_forward(hidden, top_k_index, top_k_weights)
            return out
        adapters = self.low_ranks()
        x, weights = hidden.to(module.down_proj.dtype), top_k_weights.contiguous()
        low_ranks = [matrix for each in adapters.values() for down, up, _ in each for matrix in (down, up)]
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, *parameters, *low_ranks))
        are_plain = all(len(each) <= 1 for each in adapters.values()) and all(t.dtype == x.dtype for t in low_ranks)
        samples = are_plain and not trains
        if not self._fits(weights, adapters, is_trained=not samples):
            plain: Tensor = self.own_forward(hidden, top_k_index, top_k_weights)
            return plain
        compute = self.sampled if samples else self.trained
        return compute(x.contiguous(), top_k_index.contiguous(), weights, adapters).to(hidden.dtype)

    def low_ranks(self) -> dict[str, list[Any]]:
        """Of each weight the adapters that are active."""
        wrappers = getattr(self.own_forward, "adapters", {})
        names = ("gate_up_proj", "down_proj")
        return {name: list(adapters_of(wrappers.get(name), 0, self.module.num_experts)) for name in names}

    def _fits(self, weights: Tensor, adapters: dict[str, list[Any]], *, is_trained: bool) -> bool:
        """Whether the kernels for these arguments compute what torch does, on this GPU."""
        from posttrain.policy.fused.expert_kernels import tile_of

        module, down = self.module, self.module.down_proj
        ranks = tuple(tuple((name, low.shape[2], low.dtype) for low, _, _ in each) for name, each in adapters.items())
        hidden, inner = reversed(down.shape[1:]) if module.is_transposed else down.shape[1:]
        return TRIAL.passes(
            down.device, down.dtype, weights_dtype=weights.dtype, gate=self.gate, is_transposed=module.is_transposed,
            has_bias=module.has_bias, hidden=hidden, inner=inner, num_experts=module.num_experts,
            top_k=weights.shape[1], tile=tile_of(weights.numel(), module.num_experts), adapters=sum(ranks, ()),
            is_trained=is_trained,
        )  # fmt: skip

    def sampled(
        self, x: Tensor, chosen: Tensor, weights: Tensor, adapters: dict[str, list[Any]], tile: Any = None
    ) -> Tensor:
        from posttrain.policy.fused import expert_kernels as kernels

        top_k, parameters = chosen.shape[1], self.module._parameters
        pairs = kernels.sort_pairs(chosen, self.module.num_experts, tile)
        for name, gate in (("gate_up_proj", self.gate), ("down_proj", None)):
            low_rank = _padded(*adapters[name][0]) if adapters[name] else None
            x = kernels.grouped_product(
                x, self._weight(name), pairs, top_k, factors=weights, gate=gate,
                bias=parameters.get("gate_up_proj_bias") if gate is not None else None, low_rank=low_rank,
            )  # fmt: skip
        bias = parameters.get("down_proj_bias")
        of_pairs = None if bias is None else kernels.WeighedBias(bias, chosen, weights)
        return kernels.sum_pairs(x, top_k, x.dtype, bias=of_pairs)

    def _weight(self, name: str) -> Tensor:
        """[experts, outputs, inputs]"""
        weight: Tensor = self.module._parameters[name]
        return weight.transpose(1, 2) if self.module.is_transposed else weight

    def trained(
        self, x: Tensor, chosen: Tensor, weights: Tensor, adapters: dict[str, list[Any]], tile: Any = None
    ) -> Tensor:
        from posttrain.policy.fused import expert_kernels as kernels

        module = self.module
        pairs = kernels.sort_pairs(chosen, module.num_experts, tile)

        def times(name: str, rows: Tensor) -> Tensor:
            out = grouped_product(rows, self._weight(name).transpose(1, 2), pairs.ends)
            for down, up, scaling in adapters[name]:
                low = grouped_product(rows, down, pairs.ends)
                out = out + scaling * grouped_product(low, up, pairs.ends).to(out.dtype)
            return out

        gate_up = times("gate_up_proj", _Gather.apply(x, pairs.order, pairs.place, chosen.shape[1]))
        if module.has_bias:
            gate_up = gate_up + _RowsOfExperts.apply(module.gate_up_proj_bias, chosen.flatten(), pairs.order)
        inner = _Gated.apply(gate_up, weights, pairs.order, self.gate)
        bias = module.down_proj_bias if module.has_bias else None
        out: Tensor = _Sum.apply(times("down_proj", inner), pairs.order, pairs.place, chosen, bias, weights)
        return out


def _padded(down: Tensor, up: Tensor, scaling: float) -> Any:
    """An adapter whose rank is a power of two."""
    from posttrain.policy.fused.expert_kernels import ExpertAdapter

    missing = max(_SMALLEST_RANK, 1 << (up.shape[1] - 1).bit_length()) - up.shape[1]
    if missing:
        down, up = F.pad(down, (0, missing)), F.pad(up, (0, 0, 0, missing))
    return ExpertAdapter(down, up.contiguous(), scaling)


class _Gather(torch.autograd.Function):
    """Rows of tokens in the order of experts; `_Sum` is its transpose."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from posttrain.policy.fused.expert_kernels import sum_pairs

        (place,) = ctx.saved_tensors
        return sum_pairs(grads[0].contiguous(), ctx.top_k, grads[0].dtype, place), None, None, None


class _Sum(torch.autograd.Function):
    """Of the sorted rows of each token, and of the biases of its experts times their weights, in fp32."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, order: Tensor, place: Tensor, chosen: Tensor, bias: Tensor | None, weights: Tensor
    ) -> Tensor:
        from posttrain.policy.fused.expert_kernels import WeighedBias, sum_pairs

        of_pairs = None if bias is None else WeighedBias(bias, chosen, weights)
        ctx.save_for_backward(order, chosen, bias, weights)
        return sum_pairs(x, chosen.shape[1], x.dtype, place, of_pairs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order, chosen, bias, weights = ctx.saved_tensors
        grad, grad_bias, grad_weights = grads[0], None, None
        if bias is not None:
            if ctx.needs_input_grad[4]:
                of_experts = weights.new_zeros(len(chosen), len(bias)).scatter(1, chosen, weights)
                grad_bias = of_experts.to(grad.dtype).T @ grad
            if ctx.needs_input_grad[5]:
                grad_weights = (grad @ bias.T).gather(1, chosen).to(weights.dtype)
        return grad.index_select(0, order // chosen.shape[1]), None, None, None, grad_bias, grad_weights


class _Gated(torch.autograd.Function):
    """The activation of sorted rows, times the weights of their pairs."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weights: Tensor, order: Tensor, gate: Any) -> Tensor:
        from posttrain.policy.fused.expert_kernels import gate_forward

        ctx.save_for_backward(x, weights, order)
        ctx.gate = gate
        return gate_forward(x, order, weights, gate)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from posttrain.policy.fused.expert_kernels import gate_backward

        x, weights, order = ctx.saved_tensors
        grad, grad_weights = gate_backward(grads[0].contiguous(), x, order, weights, ctx.gate)
        return grad, grad_weights.to(weights.dtype).view_as(weights), None, None


class _RowsOfExperts(torch.autograd.Function):
    """The bias of each sorted row. Its gradient is a product with ones: sums of rows without atomics."""

    @staticmethod
    def forward(ctx: Context, bias: Tensor, experts: Tensor, order: Tensor) -> Tensor:
        of_rows = experts.index_select(0, order)
        ctx.save_for_backward(of_rows)
        ctx.num_experts = len(bias)
        return bias.index_select(0, of_rows)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_rows,) = ctx.saved_tensors
        numbers = torch.arange(ctx.num_experts, device=of_rows.device)
        return (numbers[:, None] == of_rows).to(grads[0].dtype) @ grads[0], None, None


# -- trials ------------------------------------------------------------------------------------------------------------


def _stand_in(names: Sequence[str], tensors: Sequence[Tensor], gate: Any, *, is_transposed: bool) -> Any:
    """A module of few experts: parameters by their names, and of each adapter "weight/A" and "weight/B"."""
    given = dict(zip(names, tensors, strict=True))
    wrappers: dict[str, Any] = {}
    for place, (name, tensor) in enumerate(given.items()):
        if name.endswith("/A"):
            target, number, _ = name.split("/")
            wrapper = wrappers.setdefault(target, SimpleNamespace(
                num_experts=_TRIAL_EXPERTS, lora_A={}, lora_B={}, active_adapters=[], disable_adapters=False,
                merged=False, scaling={},
            ))  # fmt: skip
            wrapper.lora_A[number], wrapper.lora_B[number] = (
                SimpleNamespace(weight=each) for each in (tensor, tensors[place + 1])
            )
            wrapper.active_adapters.append(number)
            wrapper.scaling[number] = 0.7
    module = SimpleNamespace(
        num_experts=_TRIAL_EXPERTS, is_transposed=is_transposed, has_bias="down_proj_bias" in given, has_gate=True,
        down_proj=given["down_proj"], down_proj_bias=given.get("down_proj_bias"), _parameters=given,
        gate_up_proj_bias=given.get("gate_up_proj_bias"), _apply_gate=lambda x: _gated(x, gate),
    )  # fmt: skip
    module.forward = AdaptedExperts(module, wrappers)
    return module


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _comparisons(
    device: torch.device, dtype: torch.dtype, *, weights_dtype: torch.dtype, gate: Any, is_transposed: bool,
    has_bias: bool, hidden: int, inner: int, num_experts: int, top_k: int, tile: Any,
    adapters: tuple[tuple[str, int, torch.dtype], ...], is_trained: bool,
) -> Iterator[Comparison]:  # fmt: skip
    """Sorting with as many pairs as the tile is for; a module of three experts, each with more rows than a tile has;
    activation and sums of whole rows."""
    generator = torch.Generator().manual_seed(0)

    def chosen(rows: int, top_k: int, num_experts: int = num_experts) -> Tensor:
        return torch.rand(rows, num_experts, generator=generator, dtype=torch.float32).topk(top_k).indices

    yield _comparison_of_sorting(chosen(-(-tile.rows * num_experts // top_k), top_k), num_experts, tile)

    some = chosen(2 * tile.rows, 2, _TRIAL_EXPERTS)
    small, narrow = (size if size < 2 * _ALIKE else _ALIKE + size % _ALIKE for size in (hidden, inner))
    sizes = {"gate_up_proj": (2 * narrow, small), "down_proj": (small, narrow)}
    parts: dict[str, Tensor] = {}
    for name, (outputs, width) in sizes.items():
        weight = _random(generator, _TRIAL_EXPERTS, outputs, width).to(dtype) * width**-0.5
        parts[name] = weight.transpose(1, 2).contiguous() if is_transposed else weight
        parts |= {f"{name}_bias": _random(generator, _TRIAL_EXPERTS, outputs).to(dtype)} if has_bias else {}
    for number, (name, rank, of_adapter) in enumerate(adapters):
        outputs, width = sizes[name]
        down = _random(generator, _TRIAL_EXPERTS * rank, width) * width**-0.5
        up = _random(generator, outputs, rank * _TRIAL_EXPERTS) * rank**-0.5
        parts |= {f"{name}/{number}/A": down.to(of_adapter), f"{name}/{number}/B": up.to(of_adapter)}
    own = some.to(device)

    def fused(x: Tensor, weights: Tensor, *given: Tensor) -> tuple[Tensor]:
        whole = FusedExperts(_stand_in(list(parts), given, gate, is_transposed=is_transposed), gate)
        compute = whole.trained if is_trained else whole.sampled
        return (compute(x, own, weights, whole.low_ranks(), tile),)

    def reference(x: Tensor, weights: Tensor, *given: Tensor) -> tuple[Tensor]:
        return (_stand_in(list(parts), given, gate, is_transposed=is_transposed).forward(x, some, weights),)

    x, weights = _random(generator, len(some), small).to(dtype), _random(generator, *some.shape).sigmoid()
    yield Comparison(fused, reference, [x, weights.to(weights_dtype), *parts.values()], int(is_trained))

    bias = _random(generator, num_experts, hidden).to(dtype) if has_bias else None
    some = chosen(2 * tile.rows, top_k)
    out, gate_up = (_random(generator, some.numel(), width).to(dtype) for width in (hidden, 2 * inner))
    inputs = [out, _random(generator, *some.shape).sigmoid().to(weights_dtype), bias]
    yield _comparison_of_sums(some, some.to(device), inputs, is_sorted=is_trained)
    if is_trained:
        order = torch.randperm(some.numel(), generator=generator)
        on_device = order.to(device)
        yield Comparison(
            lambda gate_up, weights: (_Gated.apply(gate_up, weights, on_device, gate),),
            lambda gate_up, weights: (_gated(gate_up, gate) * weights.flatten()[order, None],),
            [gate_up, inputs[1]],
            1,
        )


def _comparison_of_sums(
    chosen: Tensor, on_device: Tensor, inputs: Sequence[Tensor | None], *, is_sorted: bool
) -> Comparison:
    from posttrain.policy.fused import expert_kernels as kernels

    place = torch.randperm(chosen.numel(), generator=torch.Generator().manual_seed(0))
    order = place.argsort()

    def sums(out: Tensor, weights: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        if is_sorted:
            return (_Sum.apply(out, order.to(out.device), place.to(out.device), on_device, bias, weights),)
        of_pairs = None if bias is None else kernels.WeighedBias(bias, on_device, weights)
        return (kernels.sum_pairs(out, chosen.shape[1], out.dtype, bias=of_pairs),)

    def reference(out: Tensor, weights: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        of_pairs = out[place] if is_sorted else out
        of_pairs = of_pairs if bias is None else of_pairs + bias[chosen.flatten()] * weights.view(-1, 1)
        return (of_pairs.unflatten(0, chosen.shape).sum(1),)

    return Comparison(sums, reference, inputs, int(is_sorted))


def _comparison_of_sorting(chosen: Tensor, num_experts: int, tile: Any) -> Comparison:
    from posttrain.policy.fused import expert_kernels as kernels

    def sorted_pairs(chosen: Tensor) -> tuple[Tensor, ...]:
        pairs = kernels.sort_pairs(chosen, num_experts, tile)
        return pairs.order, pairs.place, pairs.ends

    def reference(chosen: Tensor) -> tuple[Tensor, ...]:
        order = chosen.flatten().argsort(stable=True)
        return order, order.argsort(), torch.bincount(chosen.flatten(), minlength=num_experts).cumsum(0)

    return Comparison(sorted_pairs, reference, [chosen])


TRIAL = Trial("routed experts", _comparisons)
