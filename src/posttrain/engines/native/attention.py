"""Attention over the paged cache: three contexts for `policy/packed.py`.

`PrefillAttention` takes packed rows of new tokens. Decoding, one token per sequence, has two. `PagedDecode` reads the
pages in place (with a GPU kernel, or a gather where there is none). `DenseDecode`, for CPUs, keeps a dense copy of the
active sequences, because gathering the pages for every token costs more there than the attention itself. Both write
each token's keys and values to the pages first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engines.native.cuda_graph_cache import Staging
from posttrain.engines.native.kv_cache import PagedKvCache, dequantised, pools_of
from posttrain.engines.native.recurrent_states import DecodeRecurrence, PrefillRecurrence
from posttrain.engines.native.scheduler import Sample, pages_for
from posttrain.models.attention_interface import AttendOptions, Latent, Place, RecurrenceInputs
from posttrain.policy.latent import Absorbed, expanded, stored
from posttrain.policy.packed import PackedAttention, PackedKeys, Segment, scaled, softmax_with_sinks
from posttrain.policy.recurrence import RowPiece
from posttrain.policy.runtime import to_device, triton_kernels

if TYPE_CHECKING:
    from posttrain.engines.native.kernels import PrefixTiles

HeadNorms = tuple[Tensor, Tensor, float]  # weights of the norms of queries and keys, and their epsilon

# Rows read a window up to this length themselves: it leaves the shared prompt soon, and one launch costs less than two.
_SHORT_WINDOW = 256
# Growing a dense copy refills it from the pages, so it grows in larger steps.
_HEADROOM_TOKENS = 64


class _OverCache:
    """The recurrent layers of a context are computed by its `recurrence`, latent attention over its cache."""

    cache: PagedKvCache
    expands = False
    recurrence: PrefillRecurrence | DecodeRecurrence | None = None

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        assert self.recurrence is not None, "the cache has states for recurrent layers"
        return self.recurrence.convolve(place, x, weight, bias, silu=silu)

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        assert self.recurrence is not None, "the cache has states for recurrent layers"
        return self.recurrence.recur(place, *inputs, unit=unit)

    def keeps_latent(self, layer: int) -> bool:
        return self.cache.layers[layer].expanded is not None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        raise NotImplementedError

    def attend_latent(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, latent: Latent, **options: Unpack[AttendOptions]
    ) -> Tensor:
        """`attend` of heads that share one key head, the latent vectors."""
        absorbed, rows = Absorbed.of(latent.up, key.shape[1], value.shape[2]), stored(latent, key, value)
        values = rows[..., : self.cache.layers[layer].value_dim]
        return absorbed.outputs(self.attend(layer, absorbed.queries(query), rows, values, **options))


@dataclass(frozen=True)
class PrefillPiece:
    """Tokens [offset, offset + length) of a packed row: positions from `start` on of the sequence in `pages`."""

    offset: int
    length: int
    start: int
    pages: Sequence[int]
    state_slot: int = -1
    both_ways: Sequence[tuple[int, int]] = ()  # positions of images whose tokens attend to each other both ways

    @property
    def end(self) -> int:
        return self.start + self.length


class PrefillAttention(_OverCache):
    """New tokens attend to the cached positions of their sequence, then to themselves. Whole prompts do not read the
    cache. Layers that keep latent vectors expand them.
    """

    expands = True

    def __init__(self, cache: PagedKvCache, pieces: Sequence[PrefillPiece]) -> None:
        self.cache = cache
        self.pieces = pieces
        self.slots = self._slots([(piece.start, piece.end) for piece in pieces])
        self.packed: PackedAttention | None = None
        if all(piece.start == 0 for piece in pieces):
            segments = [Segment(piece.offset, piece.offset + piece.length) for piece in pieces]
            spans = [(p.offset + start, p.offset + end) for p in pieces for start, end in p.both_ways]
            self.packed = PackedAttention(segments, cache.device, spans)
        else:
            self.all_slots = self._slots([(0, piece.end) for piece in pieces])
            lengths = [(piece.length, piece.end) for piece in pieces]
            self.packed_keys = PackedKeys(lengths, cache.device, [piece.both_ways for piece in pieces])
        self.recurrence = None
        if cache.states is not None:
            own = [(RowPiece(p.offset, p.offset + p.length), p.state_slot, p.start == 0) for p in pieces]
            self.recurrence = PrefillRecurrence(cache.states, own)

    def _slots(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        slots = [
            self.cache.slots(piece.pages, start, end) for piece, (start, end) in zip(self.pieces, ranges, strict=True)
        ]
        return to_device(torch.from_numpy(np.concatenate(slots)), self.cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        self.cache.write(layer, self.slots, key, value)
        if self.packed is not None:
            return self.packed.attend(layer, query, key, value, **options)
        keys, values = self.cache.read(layer, self.all_slots, key.dtype)
        return self.packed_keys.attend(query, keys, values, **options)

    def attend_latent(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, latent: Latent, **options: Unpack[AttendOptions]
    ) -> Tensor:
        rows = stored(latent, key, value)
        self.cache.write(layer, self.slots, rows, rows)
        if self.packed is not None:
            return self.packed.attend(layer, query, key, value, **options)
        rows, _ = self.cache.read(layer, self.all_slots, key.dtype)
        keys, values = expanded(latent.up, rows, key.shape[1], value.shape[2])
        return self.packed_keys.attend(query, keys, values, **options)


class DenseDecode(_OverCache):
    """Decoding on a CPU, over a dense copy of the active sequences' pages.

    Row r is a copy of the r-th active sample. It is filled from the pages when the sample in that row changes; after
    that each step appends its token. Rows grow with the longest sequence, up to `max_length`.
    """

    def __init__(self, cache: PagedKvCache, max_length: int) -> None:
        self.cache = cache
        self.max_length = max_length
        self.keys: dict[int, Tensor] = {}  # layer -> [rows, length, heads, dim]
        self.values: dict[int, Tensor] = {}
        self.num_rows, self.row_length = 0, 0
        self.admissions: list[int] = []  # admission number of the sample in each row

    def prepare(self, samples: Sequence[Sample], slots: Tensor) -> None:
        """Prepare one step of `samples`, whose new tokens go into `slots`."""
        self.recurrence = _states_of(self.cache, samples)
        positions = [sample.num_cached for sample in samples]
        self._grow(len(samples), max(positions) + 1)
        changed = [
            row
            for row, sample in enumerate(samples)
            if row >= len(self.admissions) or self.admissions[row] != sample.admission
        ]
        if changed:
            self._load(changed, [samples[row] for row in changed])
        self.admissions = [sample.admission for sample in samples]
        self.slots = slots
        self.lengths = torch.tensor(positions)[:, None] + 1
        self.longest = max(positions) + 1
        self.places = torch.tensor([row * self.row_length + position for row, position in enumerate(positions)])
        self.masks: dict[int | None, Tensor] = {}

    def forget_rows(self) -> None:
        """Fill all rows from the pages again."""
        self.admissions = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        self.cache.write(layer, self.slots, key, value)
        keys, values = self.keys[layer], self.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.places, key)
        if not self.keeps_latent(layer):
            values.flatten(0, 1).index_copy_(0, self.places, value)
        window = options["window"]
        if window not in self.masks:
            self.masks[window] = visible_positions(self.lengths, self.longest, window)
        rows = len(query)
        k, v = keys[:rows, : self.longest], values[:rows, : self.longest]
        return attend_to_rows(query, k, v, self.masks[window], options)

    def _grow(self, num_rows: int, length: int) -> None:
        if num_rows <= self.num_rows and length <= self.row_length:
            return
        page_size = self.cache.page_size
        if length > self.row_length:
            roomy = max(length + _HEADROOM_TOKENS, self.row_length * 3 // 2)
            self.row_length = pages_for(min(roomy, self.max_length), page_size) * page_size
        self.num_rows = max(num_rows, self.num_rows)
        self.forget_rows()
        for layer, shape in self.cache.layers.items():
            size = (self.num_rows, self.row_length, shape.num_heads)
            self.keys.pop(layer, None)
            self.values.pop(layer, None)
            self.keys[layer], self.values[layer] = pools_of(shape, size, self.cache.device)

    def _load(self, rows: Sequence[int], samples: Sequence[Sample]) -> None:
        size = self.cache.page_size
        used = [sample.pages[: pages_for(sample.num_cached, size)] for sample in samples]
        most = max(len(pages) for pages in used)
        # Padded with the scratch page, not with another sequence's: should that one overflow, 0 * inf would give NaN
        # here.
        padding = [self.cache.scratch_page]
        table = torch.tensor([pages + padding * (most - len(pages)) for pages in used], dtype=torch.long)
        at = torch.tensor(rows)
        for dense, paged in ((self.keys, self.cache.keys), (self.values, self.cache.values)):
            for layer, pool in paged.items():
                if dense is self.keys or not self.keeps_latent(layer):
                    dense[layer][at, : most * size] = pool[table].flatten(1, 2)


class PagedDecode(_OverCache):
    """Decoding from the pages in place, on a GPU. No step synchronises with the device."""

    def __init__(self, cache: PagedKvCache, max_rows: int, max_pages_per_row: int, num_heads: int = 0) -> None:
        self.cache = cache
        self.num_heads = num_heads  # query heads
        self.host_table = np.full((max_rows, max_pages_per_row), cache.scratch_page, dtype=np.int32)
        self.admissions = [-1] * max_rows
        self.num_filled = [0] * max_rows
        self.num_sent = -1  # rows of the table on the device
        self.shared: PrefixTiles | None = None  # rows that share prompt pages, which are read once per group
        self.kernel = _load_kernel(cache.device)

    def forget_rows(self) -> None:
        """Clear the rows: samples of another call may have the same admission numbers."""
        self.admissions = [-1] * len(self.admissions)
        self.num_sent = -1
        self.shared = None

    def update_table(self, samples: Sequence[Sample]) -> bool:
        """Enter the pages that `samples` got since the last step; returns whether there were any."""
        changed = False
        for row, sample in enumerate(samples):
            if self.admissions[row] != sample.admission:
                self.admissions[row], self.num_filled[row] = sample.admission, 0
                self.host_table[row, len(sample.pages) :] = self.cache.scratch_page  # not pages of the previous sample
            filled = self.num_filled[row]
            if filled < len(sample.pages):
                self.host_table[row, filled : len(sample.pages)] = sample.pages[filled:]
                self.num_filled[row] = len(sample.pages)
                changed = True
        return changed

    def send_table(self, samples: Sequence[Sample], staged: Staging, target: Tensor) -> None:
        """The table of `samples` to `target` on the device, if it has changed since the last call."""
        count = len(samples)
        if not self.update_table(samples) and count == self.num_sent:
            return
        self.num_sent = count
        table = staged.fill()
        table[:count], table[count:] = self.host_table[:count], self.cache.scratch_page
        staged.send(target)

    def point_at(self, table: Tensor, position: Tensor) -> None:
        """Prepare one step of rows whose pages are in `table` and whose new tokens are at `position`.

        Runs on the device; the host does not read the positions.
        """
        size = self.cache.page_size
        self.table = table
        if self.kernel is not None:
            self.slots, self.lengths = self.kernel.places(table, position, size)
            return
        page = table.gather(1, (position // size)[:, None]).squeeze(1)
        self.lengths = (position + 1).int()
        self.slots = page.long() * size + position % size

    def prepare(self, samples: Sequence[Sample], slots: Tensor) -> None:
        """Prepare one step of `samples`, whose new tokens go into `slots`."""
        self.update_table(samples)
        self.recurrence = _states_of(self.cache, samples)
        device = self.cache.device
        lengths = [sample.num_cached + 1 for sample in samples]
        self.longest = max(lengths)
        used = pages_for(self.longest, self.cache.page_size)
        # A copy: the transfer may still be running when the next step changes the host's table.
        self.table = to_device(torch.from_numpy(self.host_table[: len(samples), :used].copy()), device)
        self.lengths = to_device(torch.tensor(lengths, dtype=torch.int32), device)
        self.slots = slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        self.cache.write(layer, self.slots, key, value)
        return self._attend(layer, query, **options)

    def attend_unrotated(
        self,
        layer: int,
        query: Tensor,  # [tokens, heads * head_dim]; all three may be views of one fused projection
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        norms: HeadNorms | None,
        row_factors: Tensor | None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """`attend` for queries and keys before norm and rotation: one launch makes both and fills the cache.

        `row_factors`, if given, are still to be multiplied with the rows of all three."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        query_norm, key_norm, eps = norms or (None, None, 0.0)
        query = self.kernel.write_kv_rope(
            query, key, value, cos, sin, keys, values, self.slots, exact_like_torch=False,
            query_norm=query_norm, key_norm=key_norm, norm_eps=eps, row_factors=row_factors,
            factors=self.cache.factors.get(layer),
        )  # fmt: skip
        return self._attend(layer, query, **options)

    def _attend(self, layer: int, query: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        keys, values, factors = self.cache.keys[layer], self.cache.values[layer], self.cache.factors.get(layer)
        paged = (keys, values, self.table, self.lengths)
        is_plain = options["window"] is options["softcap"] is None and "sinks" not in options
        if self.kernel is not None and self.keeps_latent(layer) and is_plain:
            latent: Tensor = self.kernel.latent_attention(
                query.contiguous(), keys, values.shape[-1], *paged[2:], scale=options["scale"]
            )
            return latent
        if self.kernel is None or not self.kernel.supports(query, keys, values):
            return gathered_attention(query, *paged, factors=factors, **options)
        query = query.contiguous()
        window = options["window"]
        if self.shared is not None and (window is None or window > _SHORT_WINDOW):
            out: Tensor = self.kernel.shared_prefix_attention(query, *paged, self.shared, factors=factors, **options)
        else:
            out = self.kernel.paged_attention(query, *paged, factors=factors, **options)
        return out


def gathered_attention(
    query: Tensor,  # [rows, heads, dim]
    keys: Tensor,  # [pages, page size, kv heads, dim]
    values: Tensor,
    table: Tensor,  # [rows, most pages]
    lengths: Tensor,  # [rows]: tokens of each row, the new one included
    *,
    factors: tuple[Tensor, Tensor] | None = None,  # scales of FP8 keys and values
    **options: Unpack[AttendOptions],
) -> Tensor:
    """One token per row over its pages, in plain torch: the kernel's reference, and its fallback."""
    at = table.long()
    if factors is None:
        k, v = keys[at].flatten(1, 2), values[at].flatten(1, 2)
    else:
        k, v = (
            dequantised(pool, factor, at, query.dtype).flatten(1, 2)
            for pool, factor in zip((keys, values), factors, strict=True)
        )
    visible = visible_positions(lengths.long()[:, None], k.shape[1], options["window"])
    return attend_to_rows(query, k, v, visible, options)


def visible_positions(lengths: Tensor, longest: int, window: int | None) -> Tensor:
    """[rows, 1, 1, longest]: the positions visible to the last token of each row; `lengths` is [rows, 1]."""
    position = torch.arange(longest, device=lengths.device)
    visible = position < lengths
    if window is not None:
        visible &= position >= lengths - window
    return visible[:, None, None, :]


def attend_to_rows(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, options: AttendOptions) -> Tensor:
    """One token per row over a dense row of keys; query [rows, heads, dim], keys [rows, length, kv heads, dim]."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    # Query heads that share keys become several queries of one head, so keys are not repeated in memory.
    q = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    scale, softcap, sinks = options["scale"], options["softcap"], options.get("sinks")
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    else:
        scores = scaled(q, k, scale, softcap).masked_fill(~visible, float("-inf"))
        of_heads = None if sinks is None else sinks.view(kv_heads, -1)
        out = softmax_with_sinks(scores, of_heads).to(v.dtype) @ v
    return out.reshape(rows, heads, v.shape[-1])


def _states_of(cache: PagedKvCache, samples: Sequence[Sample]) -> DecodeRecurrence | None:
    if cache.states is None:
        return None
    slots = torch.tensor([sample.state_slot for sample in samples])
    return DecodeRecurrence(cache.states, to_device(slots, cache.device))


def _load_kernel(device: torch.device) -> Any:
    return triton_kernels("engines.native.kernels") if device.type == "cuda" else None
