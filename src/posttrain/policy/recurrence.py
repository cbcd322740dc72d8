"""Convolutions and recurrences of recurrent layers, over packed rows and over one token of many sequences.

`Pieces` are the sequences of a packed row. The first tokens of a piece follow nothing, the last tokens of another piece
(a response follows its prompt), or a state that the caller has kept. See `models/recurrence_interface.py` for the
formulas. States have fp32 or wider; the sums of a piece are independent of the other pieces of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.policy.runtime import to_device

_CHUNK = 64  # tokens whose products are computed together


@dataclass(frozen=True)
class RowPiece:
    """Tokens [start, end) of a packed row, in the order of the row."""

    start: int
    end: int
    follows: int | None = None  # the piece before in the same sequence, among those before it in the list

    @property
    def length(self) -> int:
        return self.end - self.start


class PackedRecurrence:
    """The pieces of a packed row, each starting from zeros or where the piece that it `follows` ends."""

    def __init__(self, pieces: Sequence[RowPiece], device: torch.device) -> None:
        self.pieces = list(pieces)
        self.device = device
        self._taps: dict[int, Tensor] = {}

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None = None) -> Tensor:
        """`windows` [pieces, width - 1, channels]: the tokens before each piece."""
        channels, width = weight.shape
        before = x.new_zeros(len(self.pieces), width - 1, channels) if windows is None else windows
        rows = torch.cat([x, before.flatten(0, 1).to(x.dtype)])
        taps = [rows[at] for at in self._taps_of(width)]
        return _weighted([*taps, x], weight, bias)

    def last_tokens(self, x: Tensor, width: int, windows: Tensor | None = None) -> Tensor:
        """[pieces, width - 1, channels]: the tokens before the one that continues each piece."""
        before = x.new_zeros(len(self.pieces), width - 1, x.shape[1]) if windows is None else windows
        rows = torch.cat([x, before.flatten(0, 1).to(x.dtype)])
        ends = torch.tensor([piece.end - 1 for piece in self.pieces], device=x.device)
        # The tokens before the last one of a piece, then that one itself.
        earlier = [at[ends] for at in self._taps_of(width)[1:]] if width > 2 else []
        return rows[torch.stack([*earlier, ends], dim=1)] if width > 1 else before

    def _taps_of(self, width: int) -> Tensor:
        """[width - 1, tokens]: the row's index of the token `width - 1`, …, 1 places before each; behind the row are
        the windows of the pieces."""
        if width not in self._taps:
            total = self.pieces[-1].end
            taps = torch.empty(width - 1, total, dtype=torch.long)
            for number, piece in enumerate(self.pieces):
                window = torch.arange(total + number * (width - 1), total + (number + 1) * (width - 1))
                if piece.follows is not None:
                    end = self.pieces[piece.follows].end
                    window = torch.cat([taps[1:, end - 1], torch.tensor([end - 1])]) if width > 1 else window
                places = torch.cat([window, torch.arange(piece.start, piece.end)])
                for tap in range(width - 1):
                    taps[tap, piece.start : piece.end] = places[tap : tap + piece.length]
            self._taps[width] = to_device(taps, self.device)
        return self._taps[width]

    @cached_property
    def _waves(self) -> list[list[int]]:
        """The pieces in an order in which each comes after the one that it follows."""
        depth: list[int] = []
        for piece in self.pieces:
            depth.append(0 if piece.follows is None else depth[piece.follows] + 1)
        return [[at for at, own in enumerate(depth) if own == wave] for wave in range(max(depth) + 1)]

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output of every token, and the state after each piece [pieces, heads, key width, value width]. `states`
        are those before each piece that follows none."""
        lengths = [piece.length for piece in self.pieces]
        query, key = _for_each_head(query, key, value)
        parts = [x.split(lengths) for x in (query, key, value, log_decay)]
        betas = None if beta is None else beta.split(lengths)
        outputs: list[Tensor | None] = [None] * len(lengths)
        ends: list[Tensor | None] = [None] * len(lengths)
        for wave in self._waves:
            padded = [pad_sequence([part[at] for at in wave], batch_first=True) for part in parts]
            padded_beta = None if betas is None else pad_sequence([betas[at] for at in wave], batch_first=True)
            before = [
                ends[follows] if (follows := self.pieces[at].follows) is not None else _at(states, at) for at in wave
            ]
            initial = (
                None if all(one is None for one in before) else torch.stack([one for one in before if one is not None])
            )
            q, k, v, decay = padded
            out, after = chunked_recurrence(q, k, v, decay, padded_beta, initial)
            for row, at in enumerate(wave):
                outputs[at], ends[at] = out[row, : lengths[at]], after[row]
        return torch.cat([one for one in outputs if one is not None]), torch.stack(
            [one for one in ends if one is not None]
        )


def _at(states: Tensor | None, index: int) -> Tensor | None:
    return None if states is None else states[index]


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Several heads of values may share one of queries and keys."""
    repeat = value.shape[-2] // key.shape[-2]
    return query.repeat_interleave(repeat, -2), key.repeat_interleave(repeat, -2)


def _weighted(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of `taps` [tokens, channels], each times its column of `weight`."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    total = 0 if bias is None else bias.to(exact)
    for tap, column in zip(taps, weight.to(exact).unbind(1), strict=True):
        total = total + tap.to(exact) * column
    assert isinstance(total, Tensor)
    return total.to(weight.dtype)


def chunked_recurrence(
    query: Tensor,  # [rows, tokens, heads, key width]; rows are padded with zeros at the end
    key: Tensor,
    value: Tensor,  # [rows, tokens, heads, value width]
    log_decay: Tensor,  # [rows, tokens, heads]
    beta: Tensor | None,
    state: Tensor | None,  # [rows, heads, key width, value width]
) -> tuple[Tensor, Tensor]:
    """The recurrence, by products over chunks of tokens: the output of every token and the last state.

    Within a chunk the corrections u of the delta rule solve (I + A) u = beta (v - k S), where A is the part below the
    diagonal of beta (k k^T) times the decay between the two tokens; padding changes nothing, as its keys, values and
    decays are zero.
    """
    rows, length, heads, key_width = key.shape
    size = min(_CHUNK, length)
    padding = -length % size
    query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (query, key, value))
    log_decay = torch.nn.functional.pad(log_decay, (0, 0, 0, padding))
    beta = None if beta is None else torch.nn.functional.pad(beta, (0, 0, 0, padding))
    # [rows, heads, chunks, tokens of the chunk, width]
    query, key, value = (x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4) for x in (query, key, value))
    total = log_decay.unflatten(1, (-1, size)).permute(0, 3, 1, 2).cumsum(-1)  # since the chunk began
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    scores = (query @ key.transpose(-1, -2)) * between
    since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    correction = None
    if beta is not None:
        rate = beta.unflatten(1, (-1, size)).permute(0, 3, 1, 2)[..., None]
        system = (key * rate @ key.transpose(-1, -2)) * between
        wanted = torch.cat([value * rate, key * rate * since_start], dim=-1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        value, correction = solved.split([value.shape[-1], key_width], dim=-1)
    if state is None:
        state = value.new_zeros(rows, heads, key_width, value.shape[-1])
    query, key, last = query * since_start, (key * until_end).transpose(-1, -2), since_start[..., -1:, :]
    outputs = []
    for chunk in range(key.shape[2]):
        added = value[:, :, chunk]
        if correction is not None:
            added = added - correction[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ added)
        state = state * last[:, :, chunk] + key[:, :, chunk] @ added
    out = torch.stack(outputs, dim=2).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return out[:, :length], state


def recurrence_step(
    state: Tensor,  # [rows, heads, key width, value width]
    query: Tensor,  # [rows, key heads, key width]
    key: Tensor,
    value: Tensor,  # [rows, heads, value width]
    log_decay: Tensor,  # [rows, heads]
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence for one more token of every row: its output, and the states after it."""
    query, key = _for_each_head(query, key, value)
    state = state * log_decay.exp()[..., None, None]
    if beta is not None:
        value = (value - (state * key[..., None]).sum(-2)) * beta[..., None]
    state = state + key[..., None] * value[..., None, :]
    return (state * query[..., None]).sum(-2), state


def convolution_step(window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The convolution for one more token of every row, and the window [rows, width - 1, channels] after it."""
    tokens = torch.cat([window, x[:, None].to(window.dtype)], dim=1)
    return _weighted(tokens.unbind(1), weight, bias), tokens[:, 1:]
