"""Images of vision-language models: their placeholder tokens and positions, their pixels, and the tower that turns
pixels into embeddings.

An image stands in a prompt as placeholder tokens, as many as the tower makes embeddings of it. What depends on the
family is in `ImageTokens` subclasses, chosen by `model_type`; transformers' image processors compute the pixels, with
their PIL backend everywhere, so that a run has the same pixels on every machine.

The tower computes each image alone. So its embeddings do not depend on what else is in a batch, and those of a frozen
tower are kept, by the digest of the image.
"""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from posttrain.data.errors import DataError
from posttrain.data.images import open_image
from posttrain.errors import InputError, reason_of
from posttrain.models.hub import processor_files
from posttrain.processes import THAT_WRITE_NOTHING
from posttrain.types import ImageRef

_KEPT_BYTES = 2**30  # embeddings of images of a frozen tower, in host memory
_IMAGES_AHEAD = 16


class PromptImages(NamedTuple):
    """Where the images of a prompt are in it, and the positions of its tokens."""

    images: tuple[ImageRef, ...]
    places: Tensor  # of their placeholder tokens, ascending; all embeddings of the first image come first
    positions: Tensor  # [axes, tokens], or [tokens] where positions have one axis
    offset: int  # of the position of a token after the prompt from its place in the sequence
    key_ids: tuple[int, ...]  # the prompt's tokens, in which images with different contents differ
    # [start, end) of images whose tokens attend to each other in both directions.
    both_ways: tuple[tuple[int, int], ...] = ()

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Which of the placeholders have places in [start, end)."""
        first, last = torch.searchsorted(self.places, torch.tensor([start, end])).tolist()
        return first, last


class RowImages(NamedTuple):
    """Images of one packed row: `parts` are (images of a prompt, their first and last embedding), in the order of the
    places `at`.
    """

    parts: tuple[tuple[tuple[ImageRef, ...], int, int], ...]
    at: Tensor


class ImageEmbeddings(NamedTuple):
    """What the tower makes of an image, one row for each placeholder: what replaces the embedding of the token, and
    what is added to the states after the first layers (Qwen3-VL).
    """

    values: Tensor
    deeper: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.values, *self.deeper))


class ImageTokens(ABC):
    """The images of one model, without its weights: how many tokens stand for an image, and its pixels."""

    both_ways = False  # the tokens of an image attend to each other in both directions

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self.config = config
        self.token_id = int(config.image_token_id)
        self.printed_id = self.token_id  # what the chat template prints for an image
        _, family, kind = VISION_FAMILIES[config.model_type]
        try:
            # Not the automatic class, which asks for torchvision in some versions, and prefers its backend in others.
            found = getattr(
                import_module(f"transformers.models.{family}.image_processing_pil_{family}"), f"{kind}ImageProcessorPil"
            )
            self.processor = found.from_pretrained(name)
        except Exception as error:  # of a file that is valid JSON and describes no processor
            raise InputError(f"the image processor of {name!r} cannot be read: {reason_of(error)}") from error

    @abstractmethod
    def num_tokens(self, image: ImageRef) -> int:
        """Placeholders of an image."""

    @abstractmethod
    def text_of(self, image: ImageRef, token: str) -> str:
        """What stands in the prompt for an image; `token` is the placeholder."""

    @abstractmethod
    def pixels(self, image: ImageRef) -> dict[str, Tensor]:
        """The arguments of the model's `get_image_features`."""

    def expanded(self, tokenizer: PreTrainedTokenizerBase, text: str, images: Sequence[ImageRef]) -> str:
        """A rendered prompt with all the tokens of its images."""
        token = str(tokenizer.convert_ids_to_tokens(self.token_id))
        printed = str(tokenizer.convert_ids_to_tokens(self.printed_id))
        first, *rest = text.split(printed)
        if len(rest) != len(images):
            raise DataError(
                f"{len(images)} images, and the rendered prompt holds {printed!r} {len(rest)} times: its text contains "
                "the token of an image, or the chat template leaves images out"
            )
        return first + "".join(self.text_of(image, token) + after for image, after in zip(images, rest, strict=True))

    def layout(self, prompt_ids: Sequence[int] | Tensor, images: Sequence[ImageRef]) -> PromptImages:
        """Of a prompt, or of a sequence that begins with one: placeholders that were sampled are tokens like others."""
        ids = torch.as_tensor(prompt_ids)
        places = (ids == self.token_id).nonzero().flatten()
        counts = [self.num_tokens(image) for image in images]
        places = places[: sum(counts)]
        if sum(counts) != len(places):
            raise InputError(
                f"a prompt has {len(places)} placeholder tokens, and its {len(images)} images need {sum(counts)}: was "
                "it made for another model?"
            )
        keys, at = ids.tolist(), 0
        spans: list[tuple[int, int]] = []
        for image, count in zip(images, counts, strict=True):
            start = int(places[at])
            keys[start] = -1 - int(image.digest, 16)  # no token has a number below 0
            spans.append((start, start + count))
            at += count
        positions = self._positions(len(ids), places, images)
        offset = int(positions.max()) + 1 - len(ids)
        both_ways = tuple(spans) if self.both_ways else ()
        return PromptImages(tuple(images), places, positions, offset, tuple(keys), both_ways)

    def _positions(self, length: int, places: Tensor, images: Sequence[ImageRef]) -> Tensor:
        return torch.arange(length)


class QwenImageTokens(ImageTokens):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a grid of patches, of which several are merged into one token; positions have
    three axes (time, height, width).
    """

    def _grid(self, image: ImageRef) -> tuple[int, int]:
        """Rows and columns of tokens."""
        processor = self.processor
        unit = processor.patch_size * processor.merge_size
        height, width = image.height, image.width
        if processor.do_resize:
            sizes: Any = sys.modules[type(processor).__module__]
            try:
                height, width = sizes.smart_resize(
                    height, width, factor=unit,
                    min_pixels=processor.size["shortest_edge"], max_pixels=processor.size["longest_edge"],
                )  # fmt: skip
            except ValueError as error:
                raise DataError(f"{image.where}: the image has {width} × {height} pixels: {error}") from error
        return height // unit, width // unit

    def num_tokens(self, image: ImageRef) -> int:
        return math.prod(self._grid(image))

    def text_of(self, image: ImageRef, token: str) -> str:
        return token * self.num_tokens(image)

    def pixels(self, image: ImageRef) -> dict[str, Tensor]:
        made = self.processor(images=[open_image(image)], return_tensors="pt")
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}

    def _positions(self, length: int, places: Tensor, images: Sequence[ImageRef]) -> Tensor:
        """Text advances all axes by 1. The tokens of an image have the time of its start, and their row and column
        beside it; text goes on after the larger of both.
        """
        pieces: list[Tensor] = []
        done, position, at = 0, 0, 0
        for rows, columns in map(self._grid, images):
            start = int(places[at])
            pieces.append(torch.arange(position, position + start - done).expand(3, -1))
            position += start - done
            row = torch.arange(rows).repeat_interleave(columns)
            column = torch.arange(columns).repeat(rows)
            pieces.append(position + torch.stack([torch.zeros_like(row), row, column]))
            position += max(rows, columns)
            at += rows * columns
            done = start + rows * columns
        pieces.append(torch.arange(position, position + length - done).expand(3, -1))
        return torch.cat(pieces, dim=1)


class SmolImageTokens(ImageTokens):
    """SmolVLM, Idefics3: a large image is cut into tiles, which stand before the whole in a smaller size; each is
    announced by a token of its own.
    """

    def _tiles(self, image: ImageRef) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0): it is not cut."""
        processor = self.processor
        if not processor.do_image_splitting:
            return 0, 0
        edge = processor.max_image_size["longest_edge"]
        height, width = image.height, image.width
        if processor.do_resize:
            sizes: Any = sys.modules[type(processor).__module__]
            blank = np.broadcast_to(np.uint8(0), (3, height, width))
            height, width = sizes.get_resize_output_image_size(blank, processor.size["longest_edge"])
        ratio = width / height
        if width >= height:
            width = math.ceil(width / edge) * edge
            height = math.ceil(int(width / ratio) / edge) * edge
        else:
            height = math.ceil(height / edge) * edge
            width = math.ceil(int(height * ratio) / edge) * edge
        return (height // edge, width // edge) if max(height, width) > edge else (0, 0)

    @property
    def _tokens_per_tile(self) -> int:
        patches = self.processor.max_image_size["longest_edge"] // self.config.vision_config.patch_size
        return int(patches**2 / self.config.scale_factor**2)

    def num_tokens(self, image: ImageRef) -> int:
        rows, columns = self._tiles(image)
        return (rows * columns + 1) * self._tokens_per_tile

    def text_of(self, image: ImageRef, token: str) -> str:
        rows, columns = self._tiles(image)
        edge, tile = "<fake_token_around_image>", token * self._tokens_per_tile
        lines = [
            "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{edge}<global-img>{tile}{edge}"

    def pixels(self, image: ImageRef) -> dict[str, Tensor]:
        made = self.processor(images=[[open_image(image)]], return_tensors="pt")
        return {"pixel_values": made["pixel_values"], "pixel_attention_mask": made["pixel_attention_mask"]}


class GemmaImageTokens(ImageTokens):
    """Gemma 3: every image has the same size and number of tokens, between two tokens that announce and end it."""

    both_ways = True

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        super().__init__(name, config)
        self.printed_id = int(config.boi_token_index)
        if self.processor.do_pan_and_scan:
            raise InputError(
                f"preprocessor_config.json of {name!r}: do_pan_and_scan, crops of images, is not supported"
            )

    def num_tokens(self, image: ImageRef) -> int:
        return int(self.config.mm_tokens_per_image)

    def text_of(self, image: ImageRef, token: str) -> str:
        return f"\n\n<start_of_image>{token * self.num_tokens(image)}<end_of_image>\n\n"

    def pixels(self, image: ImageRef) -> dict[str, Tensor]:
        return {"pixel_values": self.processor(images=[open_image(image)], return_tensors="pt")["pixel_values"]}


# Families whose images are computed, with the module and the class of transformers that compute pixels with PIL. Those
# of others are refused by name.
VISION_FAMILIES: Mapping[str, tuple[type[ImageTokens], str, str]] = {
    "qwen2_vl": (QwenImageTokens, "qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": (QwenImageTokens, "qwen2_vl", "Qwen2VL"),
    "qwen3_vl": (QwenImageTokens, "qwen2_vl", "Qwen2VL"),
    "gemma3": (GemmaImageTokens, "gemma3", "Gemma3"),
    "idefics3": (SmolImageTokens, "idefics3", "Idefics3"),
    "smolvlm": (SmolImageTokens, "smolvlm", "SmolVLM"),
}


def refuse_images(config: PretrainedConfig, name: str) -> str:
    """Why the model cannot see images; empty if it can."""
    if config.get_text_config() is config:
        return f"{config.model_type} is a language model without a vision tower"
    if config.model_type not in VISION_FAMILIES:
        return f"images of {config.model_type} are not supported (of {', '.join(VISION_FAMILIES)} they are)"
    if not processor_files(name):
        return f"{name!r} has no preprocessor_config.json, which says how images become pixels"
    return ""


def image_tokens(name: str, config: PretrainedConfig) -> ImageTokens:
    return VISION_FAMILIES[config.model_type][0](name, config)


def expander(
    name: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[str, Sequence[ImageRef]], str]:
    """Writes the placeholders of images into a rendered prompt. DataError at its first use if the model sees none."""
    if not (reason := refuse_images(config, name)):
        return partial(image_tokens(name, config).expanded, tokenizer)

    def refuse(text: str, images: Sequence[ImageRef]) -> str:
        raise DataError(f"the prompt has images, and {reason}")

    return refuse


@dataclass(eq=False)
class VisionTower:
    """The vision tower and projector inside `model`, a `transformers` model, with or without adapters."""

    model: Any
    tokens: ImageTokens
    kept: KeptEmbeddings = field(default_factory=lambda: KeptEmbeddings())
    ahead: PixelsAhead = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = PixelsAhead(self.tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> VisionTower:
        """That of a copy of the model; threads are not copied."""
        return VisionTower(deepcopy(self.model, memo), self.tokens)

    def prepare(self, images: Iterable[ImageRef]) -> None:
        """These are needed soon, in about this order: their pixels are computed on threads, a few ahead."""
        distinct = {image.digest: image for image in images}
        self.ahead.begin([i for i in distinct.values() if self.is_trained or self.kept.find(i.digest) is None])

    @cached_property
    def parts(self) -> list[nn.Module]:
        decoder = self.model.get_decoder()
        inner = self.model.model
        return [part for part in inner.children() if part is not decoder]

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for part in self.parts for parameter in part.parameters())

    def insert(self, embedded: Tensor, row: RowImages | None) -> tuple[Tensor, dict[str, Any]]:
        """The embeddings of a row's tokens, [1, tokens, hidden size], with those of its images in their places; and
        further arguments of the decoder.
        """
        if row is None:
            if self.is_trained and torch.is_grad_enabled():  # ranks with images wait for the gradients of those without
                sums = [p.sum() * 0.0 for part in self.parts for p in part.parameters() if p.requires_grad]
                embedded = embedded + sum(sums[1:], sums[0]).to(embedded.dtype)
            return embedded, {}
        seen = self._embed_all(row, embedded.device)
        embedded = embedded.index_copy(1, row.at, seen.values.to(embedded.dtype)[None])
        if not seen.deeper:
            return embedded, {}
        is_image = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        is_image[:, row.at] = True
        return embedded, {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(seen.deeper)}

    def _embed_all(self, row: RowImages, device: torch.device) -> ImageEmbeddings:
        """The embeddings of a row's images at its places, one after another."""
        pieces: list[ImageEmbeddings] = []
        for images, first, last in row.parts:
            begin = 0
            for image in images:
                count = self.tokens.num_tokens(image)
                cut = slice(max(first - begin, 0), max(min(last - begin, count), 0))
                if cut.start < cut.stop:
                    whole = self._embed(image, device)
                    assert len(whole.values) == count, f"{count} placeholders, {len(whole.values)} embeddings"
                    pieces.append(ImageEmbeddings(whole.values[cut], tuple(part[cut] for part in whole.deeper)))
                begin += count
        deeper = zip(*(piece.deeper for piece in pieces), strict=True)
        return ImageEmbeddings(
            torch.cat([piece.values for piece in pieces]), tuple(torch.cat(parts) for parts in deeper)
        )

    def _embed(self, image: ImageRef, device: torch.device) -> ImageEmbeddings:
        if self.is_trained:
            return self._compute(image, device)
        if (kept := self.kept.find(image.digest)) is None:
            with torch.no_grad():
                computed = self._compute(image, device)
            kept = ImageEmbeddings(computed.values.cpu(), tuple(part.cpu() for part in computed.deeper))
            self.kept.add(image.digest, kept)
        return ImageEmbeddings(kept.values.to(device), tuple(part.to(device) for part in kept.deeper))

    def _compute(self, image: ImageRef, device: torch.device) -> ImageEmbeddings:
        inputs = {name: values.to(device) for name, values in self.ahead.take(image).items()}
        with torch.autocast(device.type, enabled=False):
            output = self.model.get_image_features(**inputs, return_dict=True)
        deeper = getattr(output, "deepstack_features", None) or ()
        return ImageEmbeddings(_joined(output.pooler_output), tuple(_joined(part) for part in deeper))

    def forget(self) -> None:
        """The weights of the tower are others now."""
        self.kept = KeptEmbeddings()


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[tokens, hidden size]; some versions of transformers divide features by images."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


class PixelsAhead:
    """Pixels of the next images, computed while the device is busy with earlier ones. Its threads write nothing."""

    _threads: ClassVar[ThreadPoolExecutor] = ThreadPoolExecutor(min(os.cpu_count() or 1, 8), THAT_WRITE_NOTHING)

    def __init__(self, tokens: ImageTokens) -> None:
        self._tokens = tokens
        self._waiting: deque[ImageRef] = deque()
        self._started: dict[str, Future[dict[str, Tensor]]] = {}  # by digest

    def begin(self, images: Iterable[ImageRef]) -> None:
        """Those of an earlier call that were not taken are forgotten."""
        self._waiting, self._started = deque(images), {}
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._started) < _IMAGES_AHEAD:
            image = self._waiting.popleft()
            self._started[image.digest] = self._threads.submit(self._tokens.pixels, image)

    def take(self, image: ImageRef) -> dict[str, Tensor]:
        started = self._started.pop(image.digest, None)
        self._start()
        return self._tokens.pixels(image) if started is None else started.result()


class KeptEmbeddings:
    """In host memory, by the digest of the image; the least recently used are given up."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[str, ImageEmbeddings] = OrderedDict()

    def find(self, digest: str) -> ImageEmbeddings | None:
        if (found := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return found

    def add(self, digest: str, embeddings: ImageEmbeddings) -> None:
        self._kept[digest] = embeddings
        self._num_bytes += embeddings.num_bytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes


_ATTRIBUTE = "_posttrain_tower"  # of the model: tower and model end together


def add_tower(model: Any, tokens: ImageTokens, like: VisionTower | None = None) -> None:
    """From here on `tower_of` finds the tower of the model. Its attention is torch's own: nothing is packed there.

    `like`: that of the model that this one is a copy of; embeddings of a frozen one are those of both.
    """
    model.set_attn_implementation({"vision_config": "sdpa"})
    tower = VisionTower(model, tokens)
    if like is not None and not like.is_trained:
        tower.kept = like.kept
    setattr(model, _ATTRIBUTE, tower)


def tower_of(model: nn.Module) -> VisionTower | None:
    """Of a `transformers` model, without the wrapper of adapters; None if it sees no images."""
    return getattr(model, _ATTRIBUTE, None)
