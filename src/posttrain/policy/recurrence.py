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
import torch.nn.functional as F
from torch import Tensor

from posttrain.policy.runtime import to_device, triton_kernels

# Those of `AttentionContext.recur`, and the states before each piece that follows none.
PieceInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
CHUNK_TOKENS = 64  # tokens whose products are computed together
# Of heads that the kernels are used for: what models have. With widths 72 and 40 Triton 3.6 compiles a kernel for
# Hopper that reads shared memory out of bounds.
KERNEL_WIDTHS = (64, 128, 256)
UNIT_EPS = 1e-6  # added to the squared norm of queries and keys


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
        self._host_taps: dict[int, Tensor] = {}
        self._taps: dict[int, Tensor] = {}
        self._users: dict[int, tuple[Tensor, ...]] = {}

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None = None, *, silu: bool = False
    ) -> Tensor:
        """`windows` [pieces, width - 1, channels]: the tokens before each piece."""
        if _has_kernels(x):
            kernels = triton_kernels("policy.fused.convolution")
            if kernels.fits(x, weight, bias, windows, silu=silu):
                users, taps = self.users_of(weight.shape[1]), self.taps_of(weight.shape[1])
                return kernels.convolve(users, taps, x, weight, bias, windows, silu=silu)
        return self.convolve_in_torch(x, weight, bias, windows, silu=silu)

    def convolve_in_torch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None = None, *, silu: bool = False
    ) -> Tensor:
        channels, width = weight.shape
        before = x.new_zeros(len(self.pieces), width - 1, channels) if windows is None else windows
        rows = torch.cat([x, before.flatten(0, 1).to(x.dtype)])
        taps = [rows[at] for at in self.taps_of(width)]
        out = _weighted([*taps, x], weight, bias)
        return F.silu(out) if silu else out

    def last_tokens(self, x: Tensor, width: int, windows: Tensor | None = None) -> Tensor:
        """[pieces, width - 1, channels]: the tokens before the one that continues each piece."""
        before = x.new_zeros(len(self.pieces), width - 1, x.shape[1]) if windows is None else windows
        rows = torch.cat([x, before.flatten(0, 1).to(x.dtype)])
        ends = self._ends
        # The tokens before the last one of a piece, then that one itself.
        earlier = [at[ends] for at in self.taps_of(width)[1:]] if width > 2 else []
        return rows[torch.stack([*earlier, ends], dim=1)] if width > 1 else before

    @cached_property
    def _ends(self) -> Tensor:
        return to_device(torch.tensor([piece.end - 1 for piece in self.pieces]), self.device)

    def taps_of(self, width: int) -> Tensor:
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
            self._host_taps[width], self._taps[width] = taps, to_device(taps, self.device)
        return self._taps[width]

    def users_of(self, width: int) -> tuple[Tensor, ...]:
        """The inverse of `taps_of` where it leads to another piece: the first entry of each token (and how many there
        are), then of each entry the token, a token that reads it and by which tap."""
        if width not in self._users:
            self.taps_of(width)
            taps, total = self._host_taps[width], self.pieces[-1].end
            elsewhere = (taps < total) & (taps != torch.arange(total) - torch.arange(width - 1, 0, -1)[:, None])
            tap, users = elsewhere.nonzero().unbind(1)
            sources, order = taps[tap, users].sort(stable=True)
            first = torch.searchsorted(sources, torch.arange(total + 1))
            entries = (first, *(F.pad(x, (0, 1)) for x in (sources, users[order], tap[order])))  # never empty
            self._users[width] = tuple(to_device(x.int(), self.device) for x in entries)
        return self._users[width]

    @cached_property
    def chunks(self) -> Chunks:
        return Chunks(self.pieces, self.device)

    @cached_property
    def _waves(self) -> list[_Wave]:
        """The pieces in an order in which each comes after the one that it follows."""
        return [_Wave(self.pieces, members, self.device) for members in _in_order(self.pieces)]

    def recur(self, *inputs: *PieceInputs, unit: bool = False) -> tuple[Tensor, Tensor]:
        """The output of every token, and the state after each piece [pieces, heads, key width, value width]."""
        if _has_kernels(inputs[2]) and all(x.shape[-1] in KERNEL_WIDTHS for x in inputs[1:3]):
            kernels = triton_kernels("policy.fused.recurrence")
            if kernels.fits(*inputs, unit=unit):
                return kernels.recur(self.chunks, *inputs, unit=unit)
        return self.recur_in_torch(*inputs, unit=unit)

    def recur_in_torch(self, *inputs: *PieceInputs, unit: bool = False) -> tuple[Tensor, Tensor]:
        states = inputs[5]
        query, key, value, log_decay, beta = in_exact_types(*inputs[:5], unit=unit)
        query, key = _for_each_head(query, key, value)
        tokens = [query, key, value, log_decay, *([] if beta is None else [beta])]
        # A row of zeros for padding: its keys, values and decays change nothing.
        padded = [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in tokens]
        outputs: list[Tensor] = []
        ends: dict[int, Tensor] = {}
        with torch.autocast(query.device.type, enabled=False):  # which would round the products to 16 bits
            for wave in self._waves:
                before = [
                    ends[follows] if (follows := self.pieces[at].follows) is not None else None for at in wave.order
                ]
                initial = states[wave.rows] if states is not None else None
                if before[0] is not None:
                    initial = torch.stack([one for one in before if one is not None])
                q, k, v, decay, *rate = (x[wave.tokens] for x in padded)
                out, after = chunked_recurrence(q, k, v, decay, rate[0] if rate else None, initial, wave.num_running)
                outputs.append(out.flatten(0, 1))
                ends |= dict(zip(wave.order, after.unbind(0), strict=True))
        return torch.cat(outputs)[self._places], torch.stack([ends[at] for at in range(len(self.pieces))])

    @cached_property
    def _places(self) -> Tensor:
        """Where the output of each token of the row is, among those of all waves."""
        total = self.pieces[-1].end
        places = torch.empty(total + 1, dtype=torch.long)
        tokens = torch.cat([wave.on_host.flatten() for wave in self._waves])
        places[tokens] = torch.arange(len(tokens))
        return to_device(places[:total], self.device)


def _in_order(pieces: Sequence[RowPiece]) -> list[list[int]]:
    """The pieces that follow none, those that follow these, and so on."""
    depth: list[int] = []
    for piece in pieces:
        depth.append(0 if piece.follows is None else depth[piece.follows] + 1)
    return [[at for at, own in enumerate(depth) if own == wave] for wave in range(max(depth) + 1)]


def _has_kernels(x: Tensor) -> bool:
    return (
        x.device.type == "cuda" and x.dtype != torch.float64 and triton_kernels("policy.fused.recurrence") is not None
    )


class Chunks:
    """What the kernels know of the pieces of a row. Every piece has chunks of its own."""

    def __init__(self, pieces: Sequence[RowPiece], device: torch.device) -> None:
        followers: list[list[int]] = [[] for _ in pieces]
        for at, piece in enumerate(pieces):
            if piece.follows is not None:
                followers[piece.follows].append(at)
        facts: list[list[int]] = []
        table: list[list[int]] = []
        num_before = 0
        for piece, own in zip(pieces, followers, strict=True):
            follows = -1 if piece.follows is None else piece.follows
            facts.append([piece.start, piece.end, len(table), follows, num_before, num_before + len(own)])
            table += [[start, min(start + CHUNK_TOKENS, piece.end)] for start in
                      range(piece.start, piece.end, CHUNK_TOKENS)]  # fmt: skip
            num_before += len(own)

        def sent(numbers: Sequence[object]) -> Tensor:
            return to_device(torch.tensor(numbers, dtype=torch.int32), device)

        self.num_pieces, self.num_chunks = len(pieces), len(table)
        self.table = sent(table)  # start and end of each chunk
        # Of each piece: start, end, first chunk, the piece that it follows or -1, first and last of its `followers`.
        self.facts = sent(facts)
        self.followers = sent([at for own in followers for at in own] or [0])
        # Pieces that can be computed together, the longest first.
        waves = [sorted(wave, key=lambda at: -pieces[at].length) for wave in _in_order(pieces)]
        self.waves = [sent(wave) for wave in waves]


class _Wave:
    """Pieces that are computed together: their tokens in chunks, padded with the index behind the row."""

    def __init__(self, pieces: Sequence[RowPiece], members: Sequence[int], device: torch.device) -> None:
        size = min(CHUNK_TOKENS, max(pieces[at].length for at in members))
        num_chunks = {at: -(-pieces[at].length // size) for at in members}
        self.order = sorted(members, key=lambda at: -num_chunks[at])  # the longest first
        self.rows = to_device(torch.tensor(self.order), device)
        # By place of the chunk in its piece: how many pieces have one there.
        self.num_running = [sum(num_chunks[at] > place for at in members) for place in range(num_chunks[self.order[0]])]
        padding = pieces[-1].end
        tokens = torch.full((sum(self.num_running), size), padding, dtype=torch.long)
        row = 0
        for place, running in enumerate(self.num_running):
            for at in self.order[:running]:
                start = pieces[at].start + place * size
                count = min(size, pieces[at].end - start)
                tokens[row, :count] = torch.arange(start, start + count)
                row += 1
        self.on_host, self.tokens = tokens, to_device(tokens, device)  # [chunks, tokens of a chunk]


def in_exact_types(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, *, unit: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """In fp32 or wider: a state is summed up over thousands of tokens. With `unit` queries and keys are divided by
    their norms, and queries by the root of their width."""
    exact = torch.promote_types(value.dtype, torch.float32)
    q, k = query.to(exact), key.to(exact)
    if unit:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    return q, k, value.to(exact), log_decay.to(exact), None if beta is None else beta.to(exact)


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
    query: Tensor,  # [chunks, tokens of a chunk, heads, key width]: the first chunk of each piece, then the second ones
    key: Tensor,
    value: Tensor,  # [chunks, tokens of a chunk, heads, value width]
    log_decay: Tensor,  # [chunks, tokens of a chunk, heads]
    beta: Tensor | None,
    state: Tensor | None,  # before each piece: [pieces, heads, key width, value width]
    num_running: Sequence[int],  # pieces that have a first chunk, a second one, ...; the longest pieces come first
) -> tuple[Tensor, Tensor]:
    """The recurrence, by products over chunks of tokens: the output of every token, and the state after each piece.

    Within a chunk the corrections u of the delta rule solve (I + A) u = beta (v - k S), where A is the part below the
    diagonal of beta (k k^T) times the decay between the two tokens.
    """
    size, key_width = key.shape[1], key.shape[3]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [chunks, heads, tokens, width]
    total = log_decay.transpose(1, 2).cumsum(-1)  # since the chunk began
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    scores = (query @ key.transpose(-1, -2)) * between
    since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    correction = None
    if beta is not None:
        rate = beta.transpose(1, 2)[..., None]
        system = (key * rate @ key.transpose(-1, -2)) * between
        wanted = torch.cat([value * rate, key * rate * since_start], dim=-1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        value, correction = solved.split([value.shape[-1], key_width], dim=-1)
    if state is None:
        state = value.new_zeros(num_running[0], value.shape[1], key_width, value.shape[-1])
    columns = [query * since_start, (key * until_end).transpose(-1, -2), value, scores, since_start[..., -1:, :]]
    columns += [] if correction is None else [correction]
    outputs: list[Tensor] = []
    ended: list[Tensor] = []
    for step in zip(*(column.split(list(num_running)) for column in columns), strict=True):
        q, k, added, own_scores, decay = step[:5]
        state, past = state.split([len(q), len(state) - len(q)])
        ended.append(past)
        if correction is not None:
            added = added - step[5] @ state
        outputs.append(q @ state + own_scores @ added)
        state = state * decay + k @ added
    return torch.cat(outputs).transpose(1, 2), torch.cat([state, *reversed(ended)])


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
