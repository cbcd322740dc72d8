"""The sizes of any model that `transformers` has: its modules are made without memory, and their weights counted.

For mixtures of experts, recurrent layers, latent attention and towers for images, which `model_shape` has no formulas
for. What a token and a sequence leave in the cache is observed in a pass over one token, as the engine observes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from posttrain.files.json_files import JsonMapping
from posttrain.models.attention_interface import ATTENTION, AttendOptions, Place, attention_context
from posttrain.models.loading import auto_class_of, beside_text, experts_per_token, num_experts_in
from posttrain.models.vision import VISION_FAMILIES
from posttrain.policy.head import OutputHead
from posttrain.policy.memory.model_shape import Counted, ModelShape, TensorKind, Tower, UnknownModelError
from posttrain.policy.model_support import LayerObserver


def counted_shape(name: str, content: JsonMapping, reason: UnknownModelError) -> ModelShape:
    """The shape of the model that a config.json describes; `reason` is raised where it cannot be counted."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = content.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise reason
    try:
        config = CONFIG_MAPPING[kind].from_dict(PretrainedConfig._decode_special_floats(dict(content)))
        with torch.device("meta"):
            model = auto_class_of(config).from_config(config, attn_implementation=ATTENTION)
        return _shape_of(name, model.eval().requires_grad_(False))
    except Exception as error:  # a family with layers that do not run without numbers, or a config of another release
        raise UnknownModelError(f"{reason}, and counting its modules failed: {error}") from error


def _shape_of(name: str, model: Any) -> ModelShape:
    head, text = OutputHead(model), model.config.get_text_config()
    observer = _Observer()
    one = torch.zeros(1, 1, dtype=torch.long, device="meta")
    for module in model.modules():
        if num_experts_in(module):
            module.forward = lambda hidden, *_, **__: hidden  # which experts depends on numbers
    with torch.no_grad(), attention_context(observer):
        head.decoder(inputs_embeds=head.embedding(one), position_ids=one, use_cache=False)
    layers = len(head.layers)
    counted, inner = _count(model, head, observer, layers)
    heads = getattr(text, "num_attention_heads", None) or 1
    return ModelShape(
        name=name,
        family=str(text.model_type),
        hidden=text.hidden_size,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=head.vocab_size,
        tied=head.module.weight is head.embedding.weight,
        counted=counted,
    )


def _count(model: Any, head: OutputHead, observer: _Observer, layers: int) -> tuple[Counted, int]:
    beside, per_token = beside_text(model), experts_per_token(model.config)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(head.module.weight))
    mixers = [part for layer in head.layers for part in layer.children() if hasattr(part, "layer_idx")]
    of_mixers = {id(parameter) for mixer in mixers for parameter in mixer.parameters()}
    tensors: Counter[TensorKind] = Counter()
    matrices: Counter[tuple[TensorKind, int]] = Counter()
    products = expert_weights = mlp_products = num_experts = 0
    seen = {id(parameter) for parameter in beside.values()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:  # of a tower, or tied
                continue
            seen.add(id(parameter))
            kind = _kind(parameter)
            tensors[kind] += 1
            if kind.columns is None or id(parameter) in tables or isinstance(module, nn.Conv1d):
                continue
            experts = num_experts_in(module) if parameter.dim() == 3 else 0
            used = parameter.numel() // experts * per_token if experts else parameter.numel()
            matrices[kind, max(experts, 1)] += 1
            products += used
            mlp_products += used if id(parameter) not in of_mixers else 0
            expert_weights += parameter.numel() if experts else 0
            num_experts = max(num_experts, experts)
    cached = sum(shape.numbers for shape in observer.layers.values())
    keys_and_values = sum((shape.expanded or shape).numbers for shape in observer.layers.values())
    states = [shape.shape for shape in observer.states.values()]
    counted = Counted(
        tensors=_together(tensors),
        matrices=tuple((replace(kind, count=count), experts) for (kind, experts), count in matrices.items()),
        products=products,
        expert_weights=expert_weights,
        num_experts=num_experts,
        experts_per_token=per_token if num_experts else 0,
        cached=cached,
        kv_width=keys_and_values // (2 * layers),
        query_width=sum(observer.widths.values()) // layers,
        state_numbers=sum(math.prod(shape) for shape in states if len(shape) == 3),
        window_numbers=sum(math.prod(shape) for shape in states if len(shape) != 3),
        tower=_tower(model, beside.values()),
    )
    # As wide as a gated MLP of the same cost in every layer.
    return counted, max(mlp_products // (3 * layers * model.config.get_text_config().hidden_size), 1)


def _kind(parameter: nn.Parameter) -> TensorKind:
    columns = None if parameter.dim() < 2 else int(parameter.shape[-1])
    return TensorKind(parameter.numel() // (columns or 1), columns, 1)


def _together(kinds: Mapping[TensorKind, int]) -> tuple[TensorKind, ...]:
    return tuple(replace(kind, count=count) for kind, count in kinds.items())


def _tower(model: Any, beside: Iterable[nn.Parameter]) -> Tower:
    linears = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    of_linears = Counter(_kind(parameter) for parameter in beside if id(parameter) in linears)
    tower = Tower(_together(Counter(map(_kind, beside))), _together(of_linears))
    if model.config.model_type not in VISION_FAMILIES:
        return tower
    vision, seen = model.config.vision_config, math.inf
    per_token = getattr(vision, "spatial_merge_size", getattr(model.config, "scale_factor", 0)) ** 2
    if not hasattr(vision, "spatial_merge_size"):  # images, or their tiles, of one size
        seen = (vision.image_size // vision.patch_size) ** 2
        per_token = per_token or seen / model.config.mm_tokens_per_image
    # Where some layers attend to the whole image, the others attend to few patches.
    layers = len(getattr(vision, "fullatt_block_indexes", ())) or vision.num_hidden_layers
    width = layers * getattr(vision, "embed_dim", vision.hidden_size)
    return replace(tower, patches_per_token=per_token, seen_patches=seen, attention_width=width)


class _Observer(LayerObserver):
    """And how wide the queries are, or what is convolved: what a layer keeps of a token for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: dict[int, int] = {}

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        self.widths[place[0]] = x.shape[1]
        return super().convolve(place, x, weight, bias, silu=silu)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        self.widths[layer] = query.shape[1] * query.shape[2]
        return super().attend(layer, query, key, value, **options)
