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

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from posttrain.policy.autograd import Context
from posttrain.policy.experts import AdaptedExperts, adapters_of, grouped_product, stacked_experts
from posttrain.policy.fused.trials import is_near
from posttrain.policy.runtime import triton_kernels

_HALF = (torch.bfloat16, torch.float16)
_TRIAL_TOKENS = 8
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
    for alternates, alpha, limit, offset in product((False, True), alphas, limits, (0.0, 1.0)):
        gate, up = (x[:, ::2], x[:, 1::2]) if alternates else x.chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if torch.allclose(module._apply_gate(x), gate * (alpha * gate).sigmoid() * (up + offset), 1e-4, 1e-5):
            return ExpertGate(alternates, alpha, limit, offset)
    return None


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
        wrappers = getattr(self.own_forward, "adapters", {})
        adapters = {
            name: list(adapters_of(wrappers.get(name), 0, module.num_experts)) for name in ("gate_up_proj", "down_proj")
        }
        x, weights = hidden.to(module.down_proj.dtype), top_k_weights.contiguous()
        low_ranks = [matrix for each in adapters.values() for down, up, _ in each for matrix in (down, up)]
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, *parameters, *low_ranks))
        are_plain = all(len(each) <= 1 for each in adapters.values()) and all(t.dtype == x.dtype for t in low_ranks)
        compute = self._sampled if are_plain and not trains else self._trained
        return compute(x.contiguous(), top_k_index, weights, adapters).to(hidden.dtype)

    def _sampled(self, x: Tensor, chosen: Tensor, weights: Tensor, adapters: dict[str, list[Any]]) -> Tensor:
        from posttrain.policy.fused import expert_kernels as kernels

        top_k = chosen.shape[1]
        pairs = kernels.sort_pairs(chosen, self.module.num_experts)
        for name, gate in (("gate_up_proj", self.gate), ("down_proj", None)):
            low_rank = _padded(*adapters[name][0]) if adapters[name] else None
            x = kernels.grouped_product(
                x, self._weight(name), pairs, top_k, factors=weights, gate=gate,
                bias=self.module._parameters.get(f"{name}_bias"), low_rank=low_rank,
            )  # fmt: skip
        return kernels.sum_pairs(x, top_k, x.dtype)

    def _weight(self, name: str) -> Tensor:
        """[experts, outputs, inputs]"""
        weight: Tensor = self.module._parameters[name]
        return weight.transpose(1, 2) if self.module.is_transposed else weight

    def _trained(self, x: Tensor, chosen: Tensor, weights: Tensor, adapters: dict[str, list[Any]]) -> Tensor:
        from posttrain.policy.fused import expert_kernels as kernels

        module = self.module
        pairs = kernels.sort_pairs(chosen, module.num_experts)

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
        out = _Sum.apply(times("down_proj", inner), pairs.order, pairs.place, chosen.shape[1])
        if module.has_bias:
            of_experts = weights.new_zeros(len(x), module.num_experts).scatter(1, chosen, weights)
            out = out + of_experts.to(out.dtype) @ module.down_proj_bias
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
    """Of the sorted rows of each token, in fp32."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        from posttrain.policy.fused.expert_kernels import sum_pairs

        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return sum_pairs(x, top_k, x.dtype, place)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order // ctx.top_k), None, None, None


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
