"""Packed rows of a batch, and attention over them: no padding, and prompts shared by their responses.

Attention is used while training through `models/attention_interface.py`, and by the native engine for prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Unpack, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from posttrain.errors import InputError
from posttrain.models.attention_interface import AttendOptions, AttentionContext, Place, RecurrenceInputs
from posttrain.models.vision import ImageTokens, RowImages
from posttrain.policy.autograd import Context
from posttrain.policy.recurrence import PackedRecurrence, RowPiece
from posttrain.policy.runtime import to_device
from posttrain.types import ImageRef, TokenBatch

# Cumulative lengths of queries and keys, and the longest of each.
VarlenLengths = tuple[Tensor, Tensor, int, int]
_MAX_FLASH_WIDTH = 256  # of a head
_DENSE_BLOCK_TOKENS = 192  # up to this size a masked product over all pairs is cheaper than one call per segment


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a packed row that attend to themselves causally and, before that, to all of the prefix."""

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def prefix_length(self) -> int:
        return self.prefix_end - self.prefix_start


class PackedAttention:
    """Block-diagonal causal attention over one packed row, in which segments may share a prefix.

    A prompt is one segment; each of its responses is a segment whose prefix is the prompt. So the prompt's tokens pass
    through the model once, and every response attends to exactly the same tokens as without sharing.
    """

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, both_ways: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.segments = list(segments)
        self.both_ways = list(both_ways)  # [start, end) of images whose tokens attend to each other in both directions
        self.device = device
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        if _varlen_runs(query, value, options) and not self.both_ways:
            gather, lengths = self._varlen_layout
            if gather is not None:
                key, value = key.index_select(0, gather), value.index_select(0, gather)
            return _varlen(query, key, value, lengths, options)
        return self._per_block(query, key, value, options)

    # -- recurrent layers: a response starts from the state after its prompt -------------------------------------------

    @cached_property
    def _recurrence(self) -> PackedRecurrence:
        at = {segment.start: index for index, segment in enumerate(self.segments)}
        pieces = [RowPiece(s.start, s.end, at[s.prefix_start] if s.prefix_length else None) for s in self.segments]
        return PackedRecurrence(pieces, self.device)

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        return self._recurrence.convolve(x, weight, bias, silu=silu)

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        return self._recurrence.recur(*inputs, None, unit=unit)[0]

    # -- CUDA: one call of torch's variable-length attention ---------------------------------------------------------

    @cached_property
    def _varlen_layout(self) -> tuple[Tensor | None, VarlenLengths]:
        """Indices of each segment's keys, prefixes repeated before them; cumulative lengths of queries and keys."""
        index: list[Tensor] = []
        for s in self.segments:
            index += [torch.arange(s.prefix_start, s.prefix_end), torch.arange(s.start, s.end)]
        queries = [s.length for s in self.segments]
        keys = [s.length + s.prefix_length for s in self.segments]
        shared = any(s.prefix_length for s in self.segments)
        gather = to_device(torch.cat(index), self.device) if shared else None
        return gather, _varlen_lengths(queries, keys, device=self.device)

    # -- everywhere else: a few small attentions per tree --------------------------------------------------------------

    @cached_property
    def _trees(self) -> list[list[Segment]]:
        """The segments grouped by prompt: each prompt's segment with those of its responses."""
        trees: list[list[Segment]] = []
        for segment in self.segments:
            if segment.prefix_length:
                trees[-1].append(segment)
            else:
                trees.append([segment])
        return trees

    @cached_property
    def _blocks(self) -> list[list[list[Segment]]]:
        """Trees that are computed together: one masked product of many small trees costs less than a call for each."""
        blocks: list[list[list[Segment]]] = []
        for tree in self._trees:
            fits = blocks and tree[-1].end - blocks[-1][0][0].start <= _DENSE_BLOCK_TOKENS
            if fits:
                blocks[-1].append(tree)
            else:
                blocks.append([tree])
        return blocks

    def _per_block(self, query: Tensor, key: Tensor, value: Tensor, options: AttendOptions) -> Tensor:
        # split(), not slices: the backward pass of a slice writes a tensor as large as the whole row.
        sizes = [block[-1][-1].end - block[0][0].start for block in self._blocks]
        pieces = [x.transpose(0, 1).unsqueeze(0).split(sizes, dim=2) for x in (query, key, value)]
        outputs = []
        for index, (block, q, k, v) in enumerate(zip(self._blocks, *pieces, strict=True)):
            if sizes[index] <= _DENSE_BLOCK_TOKENS or self.both_ways:
                outputs.append(masked_attention(q, k, v, self._mask(index, options["window"], q), options))
            else:
                outputs += self._per_segment(block[0], q, k, v, options)
        return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)

    def _per_segment(
        self, tree: list[Segment], q: Tensor, k: Tensor, v: Tensor, options: AttendOptions
    ) -> list[Tensor]:
        sizes = [segment.length for segment in tree]
        qs, ks, vs = (x.split(sizes, dim=2) for x in (q, k, v))
        outputs = [causal_attention(qs[0], ks[0], vs[0], options)]
        for q_own, k_own, v_own in zip(qs[1:], ks[1:], vs[1:], strict=True):
            k_all, v_all = torch.cat([ks[0], k_own], dim=2), torch.cat([vs[0], v_own], dim=2)
            outputs.append(causal_attention(q_own, k_all, v_all, options))
        return outputs

    def _mask(self, index: int, window: int | None, like: Tensor) -> Tensor:
        """0 where a token of the block attends to another, -inf elsewhere. Computed once, used by every layer."""
        if (mask := self._masks.get((index, window))) is None:
            block = self._blocks[index]
            first = block[0][0].start
            size = block[-1][-1].end - first
            visible = torch.zeros(size, size, dtype=torch.bool)
            at = torch.zeros(size, dtype=torch.long)
            for s in (segment for tree in block for segment in tree):
                own, prefix = slice(s.start - first, s.end - first), slice(s.prefix_start - first, s.prefix_end - first)
                visible[own, own] = torch.ones(s.length, s.length).tril().bool()
                if s.prefix_length:
                    visible[own, prefix] = True
                at[own] = torch.arange(s.prefix_length, s.prefix_length + s.length)
            if window is not None:
                visible &= at[:, None] - at[None, :] < window
            for start, end in self.both_ways:
                if first <= start < first + size:
                    visible[start - first : end - first, start - first : end - first] = True
            mask = torch.zeros(size, size, dtype=like.dtype).masked_fill(~visible, float("-inf"))
            self._masks[index, window] = mask = to_device(mask, like.device)
        return mask


class PackedKeys:
    """Segments with separately packed keys: the queries of each are the last positions among its keys."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        device: torch.device,
        both_ways: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        self.lengths = list(lengths)  # (queries, keys) of each segment
        self.device = device
        # Of each segment, positions [start, end) of images whose tokens attend to each other in both directions.
        self.both_ways = list(both_ways) if any(both_ways) else [()] * len(self.lengths)

    @cached_property
    def _varlen_lengths(self) -> VarlenLengths:
        return _varlen_lengths(*zip(*self.lengths, strict=True), device=self.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        if _varlen_runs(query, value, options) and not any(self.both_ways):
            return _varlen(query, key, value, self._varlen_lengths, options)
        queries, keys = zip(*self.lengths, strict=True)
        outputs = []
        parts = zip(query.split(queries), key.split(keys), value.split(keys), self.both_ways, strict=True)
        for *qkv, both_ways in parts:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
            outputs.append(causal_attention(q, k, v, options, both_ways).squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


def _varlen_runs(query: Tensor, value: Tensor, options: AttendOptions) -> bool:
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    fits = max(query.shape[-1], value.shape[-1]) <= _MAX_FLASH_WIDTH
    return query.device.type == "cuda" and options["softcap"] is None and is_half and fits


def _varlen_lengths(*lengths: Sequence[int], device: torch.device) -> VarlenLengths:
    queries, keys = (
        to_device(torch.tensor([0, *own], dtype=torch.int64).cumsum(0, dtype=torch.int32), device) for own in lengths
    )
    return queries, keys, max(lengths[0]), max(lengths[1])


def _varlen(query: Tensor, key: Tensor, value: Tensor, lengths: VarlenLengths, options: AttendOptions) -> Tensor:
    """torch's variable-length attention: the queries of each segment are the last of its positions."""
    left = -1 if options["window"] is None else options["window"] - 1
    value_dim = value.shape[-1]
    # One width for all three, a multiple of 8.
    width = -(-max(query.shape[-1], value_dim) // 8) * 8
    qkv = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    out: Tensor = _Flash.apply(*qkv, options.get("sinks"), lengths, options["scale"], left)
    return out if value_dim == width else out[..., :value_dim]


class _Flash(torch.autograd.Function):
    """Flash attention. A sink is the score of one more key, whose value is 0: it adds to the log-sum-exp of a query's
    scores and so scales its output. The kernel's backward pass computes softmax weights from the log-sum-exp, and the
    common part of their gradients from the output. So with those that include the sink, its result is exact.
    """

    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, lengths: VarlenLengths,
        scale: float, left: int,
    ) -> Tensor:  # fmt: skip
        # The operators, not `varlen_attn`: that has no gradient by lse, and takes shared key heads from torch 2.12 on
        # only with an argument that 2.11 does not have.
        ctx.lengths = (*lengths, 0.0, left < 0)
        ctx.options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *ctx.lengths, False, **ctx.options
        )
        if sinks is not None:  # lse is [heads, tokens]
            logits = sinks.to(lse.dtype)[:, None]
            out *= torch.sigmoid(lse - logits).t()[..., None]
            lse = torch.logaddexp(lse, logits)
        ctx.save_for_backward(query, key, value, sinks, out, lse, *state)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse, *state = ctx.saved_tensors
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            grad_sinks = -(weights.t() * (grads[0] * out.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)
        of_qkv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), query, key, value, out, lse, *ctx.lengths, *state, **ctx.options
        )
        return *of_qkv, grad_sinks, None, None, None


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, both_ways: Sequence[tuple[int, int]] = ()
) -> Tensor:
    """Attention of the last `q.shape[2]` positions over all `k.shape[2]` of them; [batch, heads, length, head_dim]."""
    num_q, num_k, window = q.shape[2], k.shape[2], options["window"]
    windowed = window is not None and num_k > window
    is_plain = options["softcap"] is None and "sinks" not in options
    if is_plain and not windowed and num_q == num_k and not both_ways:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"], enable_gqa=True)
    at_q = torch.arange(num_k - num_q, num_k, device=q.device)[:, None]
    at_k = torch.arange(num_k, device=q.device)[None, :]
    visible = at_k <= at_q
    if windowed:
        assert window is not None
        visible &= at_k > at_q - window
    for start, end in both_ways:
        visible |= (at_q >= start) & (at_q < end) & (at_k >= start) & (at_k < end)
    mask = torch.zeros(num_q, num_k, dtype=q.dtype, device=q.device).masked_fill(~visible, float("-inf"))
    return masked_attention(q, k, v, mask, options)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttendOptions) -> Tensor:
    """Attention with an additive mask, and with the soft cap on scores or the sinks that some families have."""
    scale, softcap, sinks = options["scale"], options["softcap"], options.get("sinks")
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = scaled(q, k, scale, softcap)
    return softmax_with_sinks(scores + mask, None if sinks is None else sinks[:, None]).to(v.dtype) @ v


def scaled(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores [..., queries, keys] in fp32, also where products are 16 bits wide otherwise."""
    with torch.autocast(q.device.type, enabled=False):
        products = q.float() @ k.float().transpose(-1, -2)
    return products * scale if softcap is None else softcap * torch.tanh(products * (scale / softcap))


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """[…, queries, keys]; `sinks` [heads, queries or 1] are logits of a key whose value is 0."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


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
    def forward(ctx: Context, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)  # each number is on one rank, and zero on the others
        return total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def joined_positions(pieces: Sequence[Tensor]) -> Tensor:
    """Positions of a packed row for the decoder: [1, tokens], or [3, 1, tokens] where a piece is [3, tokens]."""
    if all(piece.dim() == 1 for piece in pieces):
        return torch.cat(list(pieces))[None]
    return torch.cat([piece.expand(3, -1) for piece in pieces], dim=1)[:, None]


@dataclass(frozen=True)
class PackedRow:
    input_ids: Tensor  # [1, tokens]
    position_ids: Tensor  # [1, tokens], or [3, 1, tokens]
    source: Tensor  # [response tokens]: position in the row whose hidden state is read for the token
    targets: Tensor  # [response tokens]
    last: Tensor  # [responses]: which response token is the last of its response
    attention: AttentionContext
    share: RowShare | None = None  # of several ranks with a part of the row each; None: this rank has all of it
    prompt_starts: Mapping[int, int] = field(default_factory=dict)  # where each prompt of the batch begins
    images: RowImages | None = None  # of prompts

    @classmethod
    def build(
        cls,
        batch: TokenBatch,
        device: torch.device,
        *,
        reads_own_token: bool = False,
        image_tokens: ImageTokens | None = None,
    ) -> PackedRow:
        """Lay out each prompt, then its responses.

        The hidden state that is read for a token is that of the token before, which predicts it. A response's last
        token predicts nothing, so it is not fed. With `reads_own_token` all tokens are fed and each is read at its own
        place. `image_tokens` are those of the model, if it sees images.
        """
        if batch.prompt_images and image_tokens is None:
            raise InputError("the batch has images, and the model is used for text alone")
        rows_of: dict[int, list[int]] = {}
        for row, prompt_row in enumerate(batch.prompt_of):
            rows_of.setdefault(prompt_row, []).append(row)

        pieces: list[Tensor] = []
        positions: list[Tensor] = []
        segments: list[Segment] = []
        source: dict[int, Tensor] = {}
        starts: dict[int, int] = {}
        images: list[tuple[tuple[ImageRef, ...], int, int]] = []
        image_places: list[Tensor] = []
        both_ways: list[tuple[int, int]] = []
        at = 0
        for prompt_index, rows in rows_of.items():
            prompt = batch.prompts[prompt_index]
            length = len(prompt)
            assert length > 0, "a response needs a prompt of at least one token"
            prompt_start, prompt_end = starts[prompt_index], _ = at, at + length
            alone = len(rows) == 1  # then prompt and response are one sequence, and nothing is shared
            if not alone:
                segments.append(Segment(prompt_start, prompt_end))
            pieces.append(prompt)
            turned, offset = torch.arange(length), 0
            if batch.prompt_images and (own := batch.prompt_images[prompt_index]):
                assert image_tokens is not None
                # Later turns of a conversation may have images too.
                sequence = torch.cat([prompt, batch.responses[rows[0]]]) if alone else prompt
                seen = image_tokens.layout(sequence, own)
                images.append((own, 0, len(seen.places)))
                image_places.append(at + seen.places)
                both_ways += [(at + start, at + end) for start, end in seen.both_ways]
                turned, offset = seen.positions, seen.offset
            positions.append(turned[..., :length])
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
                    after = offset + torch.arange(length, length + len(fed))
                    positions.append(turned[..., length : length + len(fed)] if turned.shape[-1] > length else after)
                    at += len(fed)
            if alone:
                segments.append(Segment(prompt_start, at))
        return cls(
            input_ids=torch.cat(pieces)[None].to(device),
            position_ids=joined_positions(positions).to(device),
            source=torch.cat([source[row] for row in range(len(batch.responses))]).to(device),
            targets=torch.cat(list(batch.responses)).to(device),
            last=torch.tensor(batch.response_lengths).cumsum(0).sub(1).to(device),
            attention=PackedAttention(segments, device, both_ways),
            prompt_starts=starts,
            images=RowImages(tuple(images), torch.cat(image_places).to(device)) if images else None,
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]
