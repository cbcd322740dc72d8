"""The routers of a mixture of experts: what they choose is watched, recorded, and replayed (R3, arXiv:2510.11370).

Replay: where the sampler's choice of experts is known, the trainer's router takes it. The weights of the experts are
computed by the trainer's own router, with gradients. For that the result of `topk` is replaced in the router's forward
pass, whatever a family does before and after it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posttrain.errors import InputError
from posttrain.policy.experts import count_rows, stacked_experts
from posttrain.policy.packed import PackedRow
from posttrain.types import ROUTES, TokenBatch


class Routers:
    """The routers of a model, in the order of layers."""

    def __init__(self, model: nn.Module, on_choice: Callable[[int, Tensor], None]) -> None:
        """`on_choice(layer, chosen [tokens, experts of a token])` is called in every pass."""
        self.num_experts: dict[int, int] = {}  # by layer
        self.modules: dict[int, Any] = {}
        for name, experts in stacked_experts(model).items():
            layer = int(re.findall(r"\.(\d+)\.", name)[-1])
            outer = name.removesuffix(".base_layer").removesuffix(".base_layer")  # without peft's wrappers
            block = model.get_submodule(outer.rpartition(".")[0])
            self.num_experts[layer] = experts.num_experts
            experts.register_forward_pre_hook(lambda _, args, layer=layer: on_choice(layer, args[1]))
            for child in block.children():
                is_router = any(p.ndim == 2 and len(p) == experts.num_experts for p in child.parameters())
                if is_router and experts not in child.modules():
                    self.modules[layer] = child


class TrainedRouters:
    """Balance of a trained model, and replay. Metrics are those of all ranks, which call `take` together."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._routers = Routers(model, self._count)
        self._layers = sorted(self._routers.num_experts)
        most = max(self._routers.num_experts.values(), default=0)
        self._counts = torch.zeros(len(self._layers), most, dtype=torch.float64, device=device)  # rows of each expert
        # Sum of entropies and their number; tokens whose choice the sampler recorded, and of them those that differ.
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._is_counting = False
        self._replayed: Tensor | None = None  # [tokens of the row, layers, experts of a token], -1: unknown
        self._differs = torch.zeros(0, dtype=torch.bool)  # [tokens of the row]: in some layer
        for layer, module in self._routers.modules.items():
            module.register_forward_hook(self._add_entropy)
            module.forward = _ReplayingRouter(module.forward, layer, self)

    def check_replay(self, model_type: str) -> None:
        if not self._layers or self._layers != sorted(self._routers.modules):
            why = "its routers are not separate modules" if self._layers else "it has no experts"
            raise InputError(f"policy.router_replay.enabled = true: the family {model_type}: {why}; set it to false")

    @contextmanager
    def row(self, part: TokenBatch | None, row: PackedRow, *, trains: bool, replays: bool) -> Iterator[None]:
        """Around the passes over a row; `replays` what the batch has of the sampler's choice."""
        routes = routes_of(part, row) if part is not None and replays else None
        self._is_counting, self._replayed = trains and part is not None, routes
        if routes is not None:
            self._differs = torch.zeros(len(routes), dtype=torch.bool, device=routes.device)
        try:
            yield
            if routes is not None and trains:
                known = routes[:, self._layers].ge(0).flatten(1).all(1)
                self._sums[2:] += torch.stack([known.sum(), (known & self._differs).sum()])
        finally:
            self._is_counting, self._replayed = False, None

    def _count(self, layer: int, chosen: Tensor) -> None:
        if self._is_counting:
            counted = count_rows(chosen.flatten(), self._routers.num_experts[layer])
            self._counts[self._layers.index(layer), : len(counted)] += counted

    @torch.no_grad()
    def _add_entropy(self, _: nn.Module, args: object, out: Any) -> None:
        logits = out[0] if isinstance(out, tuple) else out
        if self._is_counting and logits.shape[-1] > 1:
            logprobs = logits.float().log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1) / math.log(logits.shape[-1])
            self._sums[:2] += torch.stack([entropy.sum(), entropy.new_tensor(float(entropy.numel()))])

    def replayed(self, layer: int) -> Tensor | None:
        """[tokens, experts of a token]: what the sampler chose in this layer."""
        return None if self._replayed is None else self._replayed[:, layer]

    def compare(self, chosen: Tensor, own: Tensor) -> None:
        """The sampler's choice and the trainer's, in any order."""
        self._differs |= (chosen.sort(-1).values != own.sort(-1).values).any(-1) & chosen.ge(0).all(-1)

    def take(self) -> dict[str, float]:
        """Metrics since the last call, the same on each rank; of a model without experts none."""
        if not self._layers:
            return {}
        totals = torch.cat([self._counts.flatten(), self._sums])
        self._counts.zero_()
        self._sums.zero_()
        if dist.is_initialized():
            dist.all_reduce(totals)
        counts = totals[:-4].view_as(self._counts)
        entropies, num_entropies, num_known, num_different = totals[-4:].tolist()
        found = {}
        if float(counts.sum()):
            numbers = torch.tensor([self._routers.num_experts[layer] for layer in self._layers], device=counts.device)
            found["expert_load_max"] = float((counts.amax(1) * numbers / counts.sum(1).clamp(min=1)).max())
        if num_entropies:
            found["router_entropy"] = entropies / num_entropies
        if num_known:
            found["router_mismatch"] = num_different / num_known
        return found


class _ReplayingRouter:
    def __init__(self, forward: Callable[..., Any], layer: int, owner: TrainedRouters) -> None:
        self.forward, self.layer, self.owner = forward, layer, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self.owner.replayed(self.layer)
        if chosen is None:
            return self.forward(*args, **kwargs)
        with _ReplayedTopk(chosen, self.owner.compare):
            return self.forward(*args, **kwargs)


class _ReplayedTopk(TorchFunctionMode):
    """Inside, `topk` over the experts chooses what was chosen before, where that is known."""

    def __init__(self, chosen: Tensor, compare: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.chosen, self.compare = chosen, compare

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Routers of groups of experts use it for the groups too: those have other shapes.
        if func not in (torch.topk, Tensor.topk) or out.indices.shape != self.chosen.shape:
            return out
        self.compare(self.chosen, out.indices)
        chosen = self.chosen.where(self.chosen >= 0, out.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class RouteRecorder:
    """What the routers choose while sampling, by prompt or answer, and position."""

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        self._routers = Routers(model, self._note)
        self._num_layers = num_layers
        self._chosen: dict[int, Tensor] = {}  # of the current pass, by layer
        self._found: dict[object, list[tuple[int, Tensor]]] = {}

    def _note(self, layer: int, chosen: Tensor) -> None:
        self._chosen[layer] = chosen

    def add(self, pieces: Iterable[tuple[object, int, int, int]]) -> None:
        """After a pass: of an owner from a position on, the row of the pass that it begins with, and how many."""
        rows, size = next(iter(self._chosen.values())).shape
        chosen = torch.full((rows, self._num_layers, size), -1, dtype=torch.int16)
        for layer, own in self._chosen.items():
            chosen[:, layer] = own.to("cpu", torch.int16)
        for owner, position, first, number in pieces:
            self._found.setdefault(owner, []).append((position, chosen[first : first + number]))

    def take(self, owners: Sequence[object], num_tokens: int) -> Tensor | None:
        """[tokens, layers, experts of a token] of a prompt and its answer, -1 where nothing was computed."""
        found = [part for owner in owners for part in self._found.get(owner, ())]
        if not found:
            return None
        routes = torch.full((num_tokens, *found[0][1].shape[1:]), -1, dtype=torch.int16)
        for position, part in found:
            routes[position : position + len(part)] = part[: max(num_tokens - position, 0)]
        return routes

    def clear(self) -> None:
        self._found.clear()


def routes_of(batch: TokenBatch, row: PackedRow) -> Tensor | None:
    """[tokens of the row, layers, experts of a token] of what the sampler recorded; -1 where it did not."""
    of_responses = batch.columns.get(ROUTES)
    if of_responses is None:
        return None
    routes = torch.full((row.num_tokens, *of_responses.shape[1:]), -1, dtype=torch.long)
    routes[row.source.cpu()] = of_responses.long()
    for prompt, start in row.prompt_starts.items():
        own = batch.prompt_routes[prompt] if batch.prompt_routes else None
        if own is not None:
            routes[start : start + len(own)] = own.long()
    return routes.to(row.input_ids.device)
