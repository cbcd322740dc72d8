"""One micro-batch as model input: a single row without padding, in which responses share their prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.models.attention_interface import AttentionContext
from posttrain.policy.attention import PackedAttention, Segment
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class RowShare:
    """Which response tokens of a row this rank computes."""

    own: Tensor
    num_responses: int  # response tokens of all ranks
    group: dist.ProcessGroup

    def gathered(self, values: Tensor) -> Tensor:
        """One number for each response token, gathered over the ranks; this rank has the gradient of its own."""
        return _Gathered.apply(values.new_zeros(self.num_responses).index_copy(0, self.own, values), self.group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)  # each number is on one rank, and zero on the others
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


@dataclass(frozen=True)
class PackedRow:
    input_ids: Tensor  # [1, tokens]
    position_ids: Tensor  # [1, tokens]
    source: Tensor  # [response tokens]: position in the row whose hidden state is read for the token
    targets: Tensor  # [response tokens]
    last: Tensor  # [responses]: which response token is the last of its response
    attention: AttentionContext
    share: RowShare | None = None  # of several ranks with a part of the row each; None: this rank has all of it

    @classmethod
    def build(cls, batch: TokenBatch, device: torch.device, *, reads_own_token: bool = False) -> PackedRow:
        """Lay out each prompt, then its responses.

        The hidden state that is read for a token is that of the token before, which predicts it. A response's last
        token predicts nothing, so it is not fed. With `reads_own_token` all tokens are fed and each is read at its own
        place.
        """
        rows_of: dict[int, list[int]] = {}
        for row, prompt_row in enumerate(batch.prompt_of):
            rows_of.setdefault(prompt_row, []).append(row)

        pieces: list[Tensor] = []
        positions: list[Tensor] = []
        segments: list[Segment] = []
        source: dict[int, Tensor] = {}
        at = 0
        for prompt_index, rows in rows_of.items():
            prompt = batch.prompts[prompt_index]
            length = len(prompt)
            assert length > 0, "a response needs a prompt of at least one token"
            prompt_start, prompt_end = at, at + length
            alone = len(rows) == 1  # then prompt and response are one sequence, and nothing is shared
            if not alone:
                segments.append(Segment(prompt_start, prompt_end))
            pieces.append(prompt)
            positions.append(torch.arange(length))
            at = prompt_end
            for row in rows:
                assert len(batch.responses[row]) > 0, "a response has at least one token"
                fed = batch.responses[row] if reads_own_token else batch.responses[row][:-1]
                before = [] if reads_own_token else [prompt_end - 1]
                source[row] = torch.tensor([*before, *range(at, at + len(fed))])
                if len(fed):
                    if not alone:
                        segments.append(Segment(at, at + len(fed), prompt_start, prompt_end))
                    pieces.append(fed)
                    positions.append(torch.arange(length, length + len(fed)))
                    at += len(fed)
            if alone:
                segments.append(Segment(prompt_start, at))
        return cls(
            input_ids=torch.cat(pieces)[None].to(device),
            position_ids=torch.cat(positions)[None].to(device),
            source=torch.cat([source[row] for row in range(len(batch.responses))]).to(device),
            targets=torch.cat(list(batch.responses)).to(device),
            last=torch.tensor(batch.response_lengths).cumsum(0).sub(1).to(device),
            attention=PackedAttention(segments, device),
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]
