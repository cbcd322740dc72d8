"""Tokens that were drawn on the device and that the host has not seen yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.engines.native.scheduler import Sample


@dataclass
class Drawn:
    """The next token of each sample, and its log-probability, on the way to the host."""

    samples: Sequence[Sample]
    values: Tensor  # [2, samples]; float64 holds every token id and every float32
    arrived: torch.cuda.Event | None = None

    @classmethod
    def under_way(cls, samples: Sequence[Sample], values: Tensor) -> Drawn:
        """`values` may be overwritten by the next step: the copy to the host is in line before it."""
        if not values.is_cuda:
            return cls(samples, values.clone())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(samples, host, arrived)

    def read(self) -> tuple[list[int], list[float]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values[0].long().tolist(), self.values[1].tolist()


@dataclass
class FreshTokens:
    """The last tokens of samples that have just joined: drawn on the device, or known to the host."""

    _drawn: list[Tensor] = field(default_factory=list)
    _place: dict[int, int] = field(default_factory=dict)  # admission -> place
    _count: int = 0

    def add_drawn(self, samples: Sequence[Sample], tokens: Tensor) -> None:
        self._drawn.append(tokens)
        for place, sample in enumerate(samples, start=self._count):
            self._place[sample.admission] = place
        self._count += len(samples)

    def add_known(self, samples: Sequence[Sample], device: torch.device) -> None:
        tokens = torch.tensor([sample.token_ids[-1] for sample in samples], dtype=torch.long)
        self.add_drawn(samples, tokens.to(device))

    def place(self, sample: Sample) -> int:
        return self._place[sample.admission]

    def tokens(self, device: torch.device) -> Tensor:
        return torch.cat([*self._drawn, torch.zeros(1, dtype=torch.long, device=device)])

    def clear(self) -> None:
        self._drawn, self._place, self._count = [], {}, 0
