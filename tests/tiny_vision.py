"""Random vision-language models of a few thousand parameters with their processors, and images for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tiny_models import byte_tokenizer, randomise
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from posttrain.data.chat import ChatFormat
from posttrain.data.images import image_of
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.loading import expand_images_for, load_model, load_tokenizer
from posttrain.models.vision import tower_of
from posttrain.types import ImageRef, Message, Task

_TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_SMOL_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
_QWEN_PARTS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_SMOL_PARTS = (
    "<fake_token_around_image>", "<image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)),
)  # fmt: skip


@dataclass(frozen=True)
class VisionFamily:
    model_type: str
    text: dict[str, Any]
    tower: dict[str, Any]
    special_tokens: tuple[str, ...]
    printed: str  # by the template, for an image
    image_token: str
    processor: Callable[[], Any]
    settings: dict[str, Any] = field(default_factory=dict)


def _qwen_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": 48 * 48}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)


def _smol_processor(name: str) -> Any:
    module = import_module(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}")
    made = getattr(module, f"{name}ImageProcessorPil")
    return made(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})


def _qwen(model_type: str, tower: dict[str, Any], **text: Any) -> VisionFamily:
    printed = "<|vision_start|><|image_pad|><|vision_end|>"
    own = {**_TEXT, "rope_parameters": _AXES, **text}
    tower = {**_QWEN_TOWER, **tower}
    return VisionFamily(model_type, own, tower, _QWEN_PARTS, printed, "<|image_pad|>", _qwen_processor)


def _smol(name: str) -> VisionFamily:
    own = {**_TEXT, "model_type": "llama", "vocab_size": 268}
    processor = partial(_smol_processor, name)
    return VisionFamily(name.lower(), own, _SMOL_TOWER, _SMOL_PARTS, "<image>", "<image>", processor)


def _gemma_processor() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})


_GEMMA = VisionFamily(
    "gemma3",
    {**_TEXT, "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    {**_SMOL_TOWER},
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "<start_of_image>",
    "<image_soft_token>",
    _gemma_processor,
    {"mm_tokens_per_image": 4, "boi_token_index": 260, "eoi_token_index": 262, "image_token_index": 261},
)
VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen2.5-vl": _qwen("qwen2_5_vl", {"fullatt_block_indexes": [1], "window_size": 16}),
    "qwen2-vl": _qwen("qwen2_vl", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1}),
    "qwen3-vl": _qwen("qwen3_vl", {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}),
    "smolvlm": _smol("SmolVLM"),
    "idefics3": _smol("Idefics3"),
    "gemma3": _GEMMA,
}


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    tokenizer, made = byte_tokenizer(), VISION_FAMILIES[family]
    tokenizer.add_special_tokens({"additional_special_tokens": list(made.special_tokens)})
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + made.printed + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def tiny_vision_model(family: str = "qwen2.5-vl", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    made, tokenizer = VISION_FAMILIES[family], vision_tokenizer(family)
    names = {"image": made.image_token, "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config = AutoConfig.for_model(
        made.model_type, text_config={**made.text, **overrides}, vision_config=made.tower, **made.settings,
        **{name: number for name, number in ids.items() if number != tokenizer.unk_token_id},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    randomise(model, seed)
    return model.eval()


def save_vision_model(folder: Path, family: str = "qwen2.5-vl", seed: int = 0, **overrides: Any) -> Path:
    """A folder as a published model has it: weights, tokenizer, image processor."""
    tiny_vision_model(family, seed, **overrides).save_pretrained(folder)
    vision_tokenizer(family).save_pretrained(folder)
    VISION_FAMILIES[family].processor().save_pretrained(folder)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def image_ref(width: int, height: int, seed: int = 0) -> ImageRef:
    return image_of(encoded(picture(width, height, seed)), "test")


# -- prompts with images -----------------------------------------------------------------------------------------------

# Small pages, batches and rows: prompts are split inside an image, samples share pages, wait and join.
SETTINGS = NativeSettings(page_size=4, max_batch_size=5, max_prefill_tokens=16)


def make_chat(folder: Path) -> ChatFormat:
    tokenizer = load_tokenizer(str(folder))
    chat = ChatFormat(tokenizer)
    chat.image_tokens = expand_images_for(str(folder), tokenizer)
    return chat


def message(images: Sequence[ImageRef], text: str, before: str = "See ") -> Message:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": before}, *parts, {"type": "text", "text": text}]}


def make_task(chat: ChatFormat, draw: int, images: Sequence[ImageRef], text: str, before: str = "See ") -> Task:
    messages = [message(images, text, before) if images else {"role": "user", "content": text}]
    prompt, ids = chat.prompt(messages)
    return Task(draw, f"t:{draw}", prompt, tuple(ids), images=tuple(images))


def engine_of(model: nn.Module, folder: Path, settings: NativeSettings = SETTINGS) -> NativeEngine:
    return NativeEngine(model, load_tokenizer(str(folder)), settings)


def vision_inputs(folder: Path, task: Task, ids: Tensor) -> dict[str, Tensor]:
    model = load_model(str(folder), torch.float32, torch.device("cpu"))
    tower = tower_of(model)
    assert tower is not None
    if not task.images:
        return {}
    parts = [tower.tokens.pixels(image) for image in task.images]
    if model.config.model_type in ("smolvlm", "idefics3"):  # a batch of one prompt, with the tiles of all its images
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if model.config.model_type == "gemma3":
        return {**inputs, "token_type_ids": (ids == tower.tokens.token_id).int()}
    return {**inputs, "mm_token_type_ids": (ids == tower.tokens.token_id).int()}
