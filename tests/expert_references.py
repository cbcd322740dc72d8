"""What the kernels of routed experts are tested against, slow and obvious. Used by `unit/policy/interpreted_experts.py`
(Triton's interpreter, on a CPU) and by `gpu/test_experts_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fused_references import noise
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Experts of each token, of which some get no rows, or all."""

    name: str
    tokens: int = 21
    experts: int = 5
    top_k: int = 2

    def chosen(self) -> Tensor:
        scores = noise(self.tokens, self.experts, seed=3)
        if self.name == "none of some":
            scores[:, [0, self.experts - 2]] = -9.0
        if self.name == "all of one":
            scores[:, 2] = 9.0
        return scores.topk(self.top_k).indices


ROUTINGS = {
    routing.name: routing
    for routing in (
        Routing("spread"),
        Routing("none of some"),
        Routing("all of one", tokens=37),
        Routing("one token", tokens=1, experts=3, top_k=1),
        Routing("many experts", tokens=300, experts=96, top_k=8),
    )
}


def gated(gate_up: Tensor, gate: Any) -> Tensor:
    first, up = (gate_up[:, ::2], gate_up[:, 1::2]) if gate.alternates else gate_up.chunk(2, dim=1)
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return first * (gate.alpha * first).sigmoid() * (up + gate.offset)


def slow_experts(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, chosen: Tensor, gate: Any,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Weights are [experts, outputs, inputs]; pair by pair."""
    sums = []
    for token, experts in enumerate(chosen.tolist()):
        total = torch.zeros_like(x[:1])
        for number, expert in enumerate(experts):
            inner = x[token : token + 1] @ gate_up[expert].T
            inner = gated(inner if gate_up_bias is None else inner + gate_up_bias[expert], gate)
            out = inner @ down[expert].T
            out = out if down_bias is None else out + down_bias[expert]
            total = total + out * weights[token, number]
        sums.append(total)
    return torch.cat(sums)


def expert_inputs(routing: Routing, hidden: int, inner: int, *, has_bias: bool) -> Mapping[str, Tensor]:
    """Arguments of `slow_experts`, in fp32."""
    inputs = {
        "x": noise(routing.tokens, hidden),
        "weights": noise(routing.tokens, routing.top_k, seed=1).softmax(1),
        "gate_up": noise(routing.experts, 2 * inner, hidden) / hidden**0.5,
        "down": noise(routing.experts, hidden, inner) / inner**0.5,
    }
    if has_bias:
        inputs["gate_up_bias"] = noise(routing.experts, 2 * inner, seed=5)
        inputs["down_bias"] = noise(routing.experts, hidden, seed=6)
    return inputs


def check_order(pairs: Any, chosen: Tensor, num_experts: int) -> None:
    """A stable order, its inverse, and tiles that cover each place once with its expert."""
    experts = chosen.flatten().cpu()
    order = experts.argsort(stable=True)
    assert torch.equal(pairs.order.cpu().long(), order)
    assert torch.equal(pairs.order.cpu()[pairs.place.cpu().long()].long(), torch.arange(len(experts)))
    ends = torch.bincount(experts, minlength=num_experts).cumsum(0)
    assert torch.equal(pairs.ends.cpu().long(), ends)
    covered = []
    for expert, first, end in pairs.tiles.T.tolist():
        if expert >= 0:
            places = range(first, min(first + pairs.tile.rows, end))
            assert len(places) > 0
            assert all(int(experts[order[place]]) == expert for place in places)
            covered += places
    assert covered == list(range(len(experts)))
