"""Forward passes of a `transformers` model over the paged cache: prefill of prompts, and one token per sample.

Decode backends without CUDA graphs read dense copies of the pages on a CPU, or the pages in place. All of them write to
the same pages, which hold every key and value. A dense copy is a faster view of the pages. It may be dropped at any
time, and must be dropped after steps that did not update it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from posttrain.engines.native.attention import DenseDecode, PagedDecode, PrefillAttention, PrefillPiece
from posttrain.engines.native.cuda_graph_cache import GraphCaptureError
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.scheduler import Prefill, PromptGroup, Sample, pages_for
from posttrain.errors import InputError
from posttrain.models.attention_interface import ATTENTION, AttentionContext, attention_context
from posttrain.models.vision import PromptImages, RowImages
from posttrain.policy.fused.fp8 import Fp8Weights, fp8_products
from posttrain.policy.head import OutputHead, UnsupportedModelError, without_adapter_wrapper
from posttrain.policy.model_support import SequenceShapes, observe_layers
from posttrain.policy.packed import joined_positions
from posttrain.policy.parallel.fsdp import device_of
from posttrain.policy.recurrence import CHUNK_TOKENS
from posttrain.policy.routing import RouteRecorder
from posttrain.policy.runtime import to_device
from posttrain.types import ImageRef, Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ForwardPass:
    def __init__(self, model: nn.Module) -> None:
        self.base = without_adapter_wrapper(model)
        self.config: PretrainedConfig = self.base.config.get_text_config()
        implementation = getattr(self.config, "_attn_implementation", None)
        if implementation != ATTENTION:
            raise UnsupportedModelError(
                f"the model's attention is {implementation!r}: load it with attn_implementation={ATTENTION!r}"
            )
        self.head = OutputHead(model)
        self._shapes: dict[tuple[torch.device, torch.dtype], SequenceShapes] = {}
        self.fp8: Fp8Weights | None = None  # replacement weights for the matrix products
        self.routes: RouteRecorder | None = None  # of steps without CUDA graphs

    @property
    def device(self) -> torch.device:
        return device_of(self._embedding)

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""
        group = self.head.tensor_group
        heads = getattr(self.config, "num_attention_heads", 0)  # none in a model of recurrent layers only
        return int(heads) // (1 if group is None else group.size)

    @property
    def _embedding(self) -> Tensor:
        return self.base.get_input_embeddings().weight

    def hidden(
        self, context: AttentionContext, token_ids: Tensor, positions: Tensor, images: RowImages | None = None
    ) -> Tensor:
        """Hidden states [tokens, hidden size] of one packed row; `context` computes the attention. Positions are
        [tokens] or [3, 1, tokens].
        """
        with attention_context(context), fp8_products(self.fp8):
            return self.head.hidden(token_ids[None], positions if positions.dim() > 1 else positions[None], images)

    def layout(self, task: Task) -> PromptImages | None:
        """Of the images in the task's prompt; None if it has none."""
        if not task.images:
            return None
        if (tokens := self.head.image_tokens) is None:
            raise InputError(f"task {task.id!r} has images, and {self.base.config.model_type} is used for text alone")
        return tokens.layout(task.prompt_ids, task.images)

    def next_logits(self, decode: DenseDecode | PagedDecode, samples: Sequence[Sample]) -> Tensor:
        """[samples, vocabulary] after the last token of each; the token's keys and values are written to its pages."""
        size = decode.cache.page_size
        last = [sample.token_ids[-1] for sample in samples]
        at = [sample.num_cached for sample in samples]
        slots = [
            sample.pages[position // size] * size + position % size
            for sample, position in zip(samples, at, strict=True)
        ]
        turned = [position + sample.group.offset for sample, position in zip(samples, at, strict=True)]
        inputs = to_device(torch.tensor([last, turned, slots], dtype=torch.long), decode.cache.device)
        decode.prepare(samples, inputs[2])
        hidden = self.hidden(decode, inputs[0], inputs[1])
        if self.routes is not None:
            self.routes.add((sample, at[row], row, 1) for row, sample in enumerate(samples))
        return self.head.logits(hidden)

    def shapes(self) -> SequenceShapes:
        """What the layers store, found by a forward pass over one token. Also compares our logits with the model's."""
        place = (self.device, self._embedding.dtype)
        if place not in self._shapes:
            self._shapes[place] = observe_layers(self.base, self.head)
        return self._shapes[place]

    def working_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Estimated peak memory of a pass over `num_tokens` and of the logits of `num_rows`."""
        config = self.config
        inner = getattr(config, "intermediate_size", None) or 0
        widest = max(*(inner if isinstance(inner, list) else [inner]), config.hidden_size)  # a list: one for each layer
        per_token = 4 * config.hidden_size * 4 + 4 * widest * self._embedding.element_size()
        per_row = 3 * self.head.vocab_size * 4
        if states := [each for each in self.shapes().states.values() if len(each.shape) == 3]:
            heads, key_width, value_width = max((each.shape for each in states), key=math.prod)
            # Queries, keys, values and what is solved for, three matrices of a chunk; a few copies of a state.
            per_token += 4 * heads * (5 * key_width + 4 * value_width + 3 * CHUNK_TOKENS)
            per_row += 4 * max(each.num_bytes for each in states)
        return num_tokens * per_token + num_rows * per_row


def prefill(forward: ForwardPass, cache: PagedKvCache, jobs: Sequence[Prefill], max_tokens: int) -> None:
    """Compute prompts into the cache: several in one packed row; a prompt that is longer than a row is split.

    Does not synchronise with the device.
    """
    for row in packed_rows(jobs, max_tokens):
        tokens: list[int] = []
        positions: list[Tensor] = []
        images: list[tuple[tuple[ImageRef, ...], int, int]] = []
        image_places: list[Tensor] = []
        pieces: list[PrefillPiece] = []
        ends: list[tuple[PromptGroup, int]] = []
        for job, begin, end in row:
            spans = () if job.images is None else job.images.both_ways
            start, stop = job.start + begin, job.start + end
            inside = tuple(span for span in spans if span[0] < stop and span[1] > start)
            piece = PrefillPiece(len(tokens), end - begin, start, job.pages, job.state_slot, inside)
            pieces.append(piece)
            if (seen := job.images) is None:
                positions.append(torch.arange(piece.start, piece.end))
            elif job.start >= seen.positions.shape[-1]:  # tokens of an answer
                positions.append(torch.arange(piece.start, piece.end) + seen.offset)
            else:
                positions.append(seen.positions[..., piece.start : piece.end])
                first, last = seen.within(piece.start, piece.end)
                if first < last:
                    images.append((seen.images, first, last))
                    image_places.append(seen.places[first:last] + (piece.offset - piece.start))
            tokens += job.token_ids[begin:end]
            if job.group is not None and end == len(job.token_ids):
                ends.append((job.group, len(tokens) - 1))
        token_ids = to_device(torch.tensor(tokens, dtype=torch.long), cache.device)
        placed_at = to_device(joined_positions(positions), cache.device)
        in_row = RowImages(tuple(images), to_device(torch.cat(image_places), cache.device)) if images else None
        hidden = forward.hidden(PrefillAttention(cache, pieces), token_ids, placed_at, in_row)
        if forward.routes is not None:
            placed = zip(row, pieces, strict=True)
            prompts = ((one.group, piece) for (one, _, _), piece in placed if one.group is not None)
            forward.routes.add((group, piece.start, piece.offset, piece.length) for group, piece in prompts)
        if not ends:
            continue
        places = to_device(torch.tensor([at for _, at in ends]), hidden.device)
        # A copy of these vectors only: a view of `hidden` would keep the whole row alive.
        for (group, _), vector in zip(ends, hidden.index_select(0, places), strict=True):
            group.last_hidden = vector


def first_logits(forward: ForwardPass, samples: Sequence[Sample]) -> Tensor:
    """[samples, vocabulary]: all samples of a group draw their first token from one row of logits."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    row_of = {group: row for row, group in enumerate(groups)}
    last = [group.last_hidden for group in groups if group.last_hidden is not None]
    assert len(last) == len(groups), "a prompt is computed before its samples start"
    logits = forward.head.logits(torch.stack(last))
    rows = to_device(torch.tensor([row_of[sample.group] for sample in samples]), logits.device)
    return logits.index_select(0, rows)


def packed_rows(jobs: Sequence[Prefill], max_tokens: int) -> Iterator[list[tuple[Prefill, int, int]]]:
    """Rows of at most `max_tokens`, each a list of (job, begin, end). A job is split only if it is
    longer than a row.
    """
    row: list[tuple[Prefill, int, int]] = []
    used = 0
    for job in jobs:
        length = len(job.token_ids)
        if row and used + length > max_tokens:
            yield row
            row, used = [], 0
        begin = 0
        while length - begin > max_tokens:
            end = _outside_images(job, begin, begin + max_tokens)
            yield [(job, begin, end)]
            begin = end
        row.append((job, begin, length))
        used += length - begin
    if row:
        yield row


def _outside_images(job: Prefill, begin: int, end: int) -> int:
    """`end`, or where an image whose tokens see each other both ways begins or, if it does at `begin`, ends."""
    for first, last in () if job.images is None else job.images.both_ways:
        if first < job.start + end < last:
            return first - job.start if first > job.start + begin else last - job.start
    return end


# A dense copy grows in steps of about this many tokens; see `DenseDecode`.
_DENSE_HEADROOM_TOKENS = 96


class Decoding(Protocol):
    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        """[samples, vocabulary], valid until the next call. `adapter` is active."""

    def drop_copies(self) -> None:
        """Drop dense copies whose pages were cleared or written without updating the copy."""


@dataclass
class SingleBackend:
    """One decode backend for all steps and all adapters."""

    forward: ForwardPass
    backend: DenseDecode | PagedDecode

    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        return self.forward.next_logits(self.backend, samples)

    def drop_copies(self) -> None:
        if isinstance(self.backend, DenseDecode):
            self.backend.forget_rows()


class BackendPerAdapter:
    """A decode backend for each adapter. `num_pages` counts pages for sequences; the cache has one more for padding."""

    def __init__(
        self, forward: ForwardPass, cache: PagedKvCache, num_pages: int, max_rows: int, max_total_tokens: int
    ) -> None:
        self._forward, self._cache, self._num_pages = forward, cache, num_pages
        self._max_total_tokens = max_total_tokens
        self.copies: dict[str, DenseDecode] = {}  # by adapter
        self._paged = self.new_paged(max_rows)

    def next_logits(self, adapter: str, samples: Sequence[Sample]) -> Tensor:
        longest = 1 + max(sample.num_cached for sample in samples)
        return self._forward.next_logits(self.decode_backend_for(adapter, len(samples), longest), samples)

    def drop_copies(self) -> None:
        self.copies.clear()

    def forget_rows(self) -> None:
        """Later samples may have the admission numbers of earlier ones."""
        self.drop_copies()
        self._paged.forget_rows()

    def decode_backend_for(self, adapter: str, num_rows: int, longest: int) -> DenseDecode | PagedDecode:
        """On a CPU the dense copies together never take more memory than the pages."""
        if self._cache.device.type != "cpu":
            return self._paged
        size, longest_ever = self._cache.page_size, self._max_total_tokens
        limit = self._num_pages * size
        rows, length = num_rows, pages_for(min(longest + _DENSE_HEADROOM_TOKENS, longest_ever), size) * size
        if rows * length > limit:  # a long answer among many short ones: read the pages in place
            self.copies.pop(adapter, None)  # the copy would miss the tokens of these steps
            return self._paged
        if (copy := self.copies.get(adapter)) is not None:
            rows, length = max(rows, copy.num_rows), max(length, copy.row_length)
        held = sum(copy.num_rows * copy.row_length for name, copy in self.copies.items() if name != adapter)
        if rows * length + held > limit:
            self.drop_copies()  # refilled on next use
        return self.copies.setdefault(adapter, DenseDecode(self._cache, longest_ever))

    def new_paged(self, max_rows: int) -> PagedDecode:
        most = pages_for(self._max_total_tokens, self._cache.page_size) + 1
        return PagedDecode(self._cache, max_rows, most)


def warn_without_graphs(error: GraphCaptureError) -> None:
    warnings.warn(f"decoding continues without CUDA graphs, more slowly: {error}", stacklevel=3)
