"""The sizes of a model: from the config.json of a folder, from the hub, or from the table of named shapes. No weights.

Formulas are for dense decoder models with grouped-query attention and a gated MLP, such as Llama, Mistral, Qwen and
Gemma. Of others the modules are counted (`counted_shape.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonMapping, JsonObject, read_json
from posttrain.models.folder_checks import problem_in
from posttrain.models.hub import why_unavailable

# Families whose layers run through the fused kernels (policy/fused/layers.py decides by a trial run).
FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_HEAD_NORMS = ("qwen3",)
_QKV_BIASES = ("qwen2",)
_FOUR_NORMS = ("gemma2", "gemma3_text")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class UnknownModelError(InputError):
    """No config.json was found, or it describes a model that the planner does not support."""


@dataclass(frozen=True)
class TensorKind:
    """Equal weight tensors: `count` of them, each rows x columns; a vector has no columns."""

    rows: int
    columns: int | None
    count: int

    @property
    def num_weights(self) -> int:
        return self.rows * (self.columns or 1) * self.count


@dataclass(frozen=True)
class Tower:
    """What is beside the language model: towers for images and sound, and their projectors."""

    tensors: tuple[TensorKind, ...]
    linears: tuple[TensorKind, ...]  # of these, those that adapters may be put on
    patches_per_token: float = 0.0  # that become one token of a prompt; 0: no images are computed
    seen_patches: float = 0.0  # that a patch attends to; infinite: all of its image
    attention_width: int = 0  # all layers together

    @property
    def num_weights(self) -> int:
        return sum(kind.num_weights for kind in self.tensors)

    def flops(self, tokens: float) -> tuple[float, float]:
        """Of products and of attention, for an image of so many tokens: as if each patch met all weights."""
        patches = self.patches_per_token * tokens
        pairs = patches * min(patches, self.seen_patches)
        return 2.0 * self.num_weights * patches, 4.0 * self.attention_width * pairs

    def kept_numbers(self, tokens: float) -> float:
        """For the backward pass: inputs and outputs of all its products."""
        widths = sum((kind.rows + (kind.columns or 0)) * kind.count for kind in self.linears)
        return self.patches_per_token * tokens * widths

    def live_numbers(self, tokens: float) -> float:
        """Of a pass without gradients; estimate."""
        widest = max((kind.rows + (kind.columns or 0) for kind in self.linears), default=0)
        return 4 * self.patches_per_token * tokens * widest


@dataclass(frozen=True)
class Counted:
    """What the modules of a model say, where formulas of sizes do not: all layers together."""

    tensors: tuple[TensorKind, ...]  # every weight of the language model
    matrices: tuple[tuple[TensorKind, int], ...]  # of the layers, and how many experts each holds: 1 for no expert
    products: int  # weights that a token is multiplied with
    expert_weights: int  # of all experts
    num_experts: int  # of a layer
    experts_per_token: int
    cached: int  # numbers that the KV cache holds of a token
    kv_width: int  # of keys, and of values, that a layer computes; mean of the layers
    query_width: int  # of queries, or of what is convolved; mean of the layers
    state_numbers: int  # in fp32, of a sequence, whatever its length: matrices of recurrent layers
    window_numbers: int  # of a sequence: the last tokens of convolutions
    tower: Tower

    @property
    def layer_weights(self) -> int:
        return sum(kind.num_weights for kind, _ in self.matrices)


@dataclass(frozen=True)
class ModelShape:
    name: str
    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of attention
    mlp_bias: bool = False
    window: int | None = None  # tokens that a token attends to at most
    counted: Counted | None = None

    @property
    def fused(self) -> bool:
        return self.family in FUSED_FAMILIES

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim if self.counted is None else self.counted.query_width

    @property
    def kv_width(self) -> int:
        """Of keys, and of values; the mean of the layers."""
        return self.kv_heads * self.head_dim if self.counted is None else self.counted.kv_width

    @property
    def cached(self) -> int:
        """Numbers that the KV cache holds of a token."""
        return 2 * self.layers * self.kv_width if self.counted is None else self.counted.cached

    @property
    def keeps_latents(self) -> bool:
        """Whether the cache holds what keys and values are made of."""
        return self.cached < 2 * self.layers * self.kv_width

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the products of one layer: q, k, v, o, gate, up, down."""
        h, i, q, kv = self.hidden, self.inner, self.query_width, self.kv_width
        return ((h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h))

    @property
    def tensors(self) -> list[TensorKind]:
        """Every weight of the model."""
        if self.counted is not None:
            return list(self.counted.tensors)
        found = [TensorKind(self.vocab, self.hidden, 1 if self.tied else 2)]
        found += [TensorKind(outputs, inputs, self.layers) for inputs, outputs in self.linears]
        found.append(TensorKind(self.hidden, None, self.layers * (4 if self.family in _FOUR_NORMS else 2) + 1))
        if self.family in (*_HEAD_NORMS, "gemma3_text"):
            found.append(TensorKind(self.head_dim, None, 2 * self.layers))
        if self.qkv_bias:
            found += [TensorKind(self.query_width, None, self.layers), TensorKind(self.kv_width, None, 2 * self.layers)]
        if self.output_bias:
            found.append(TensorKind(self.hidden, None, self.layers))
        if self.mlp_bias:
            found += [TensorKind(self.inner, None, 2 * self.layers), TensorKind(self.hidden, None, self.layers)]
        return found

    @property
    def tower(self) -> Tower:
        return Tower((), ()) if self.counted is None else self.counted.tower

    @property
    def num_weights(self) -> int:
        return sum(kind.num_weights for kind in self.tensors)

    @property
    def layer_products(self) -> int:
        """Weights that a token is multiplied with in all layers, without the output head."""
        if self.counted is not None:
            return self.counted.products
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def layer_weights(self) -> int:
        """Of all layers' products: with the experts that a token does not go to."""
        return self.layer_products if self.counted is None else self.counted.layer_weights

    def weights_read(self, rows: float) -> float:
        """Of all layers' products, by a pass over so many tokens, which go to different experts."""
        if self.counted is None or not self.counted.num_experts:
            return self.layer_weights
        missed = (1 - self.counted.experts_per_token / self.counted.num_experts) ** rows
        return self.layer_weights - missed * self.counted.expert_weights

    def state_bytes(self, element: int) -> int:
        """What recurrent layers keep of a sequence, whatever its length."""
        return 0 if self.counted is None else 4 * self.counted.state_numbers + element * self.counted.window_numbers

    @property
    def head_products(self) -> int:
        return self.vocab * self.hidden

    def without_output_table(self) -> ModelShape:
        """As in a reward model: there is only the input embedding, whether the language model ties it or not."""
        counted, table = self.counted, TensorKind(self.vocab, self.hidden, 2)
        if counted is not None and table in counted.tensors:
            kept = tuple(replace(kind, count=1) if kind == table else kind for kind in counted.tensors)
            counted = replace(counted, tensors=kept)
        return replace(self, tied=True, counted=counted)

    def adapters(self, rank: int, *, on_tower: bool = False) -> list[TensorKind]:
        """LoRA on every linear layer: [rank, inputs] and [outputs, rank]."""
        if on_tower:
            own = [TensorKind(rank, kind.columns, kind.count) for kind in self.tower.linears]
            own += [TensorKind(kind.rows, rank, kind.count) for kind in self.tower.linears]
            return self.adapters(rank) + own
        if self.counted is not None:
            return [
                adapter
                for kind, experts in self.counted.matrices
                for adapter in (
                    TensorKind(rank * experts, kind.columns, kind.count),
                    TensorKind(kind.rows, rank, kind.count),
                )
            ]
        return [
            kind
            for inputs, outputs in self.linears
            for kind in (TensorKind(rank, inputs, self.layers), TensorKind(outputs, rank, self.layers))
        ]


def _named(name: str, family: str, sizes: tuple[int, ...], *, tied: bool, head_dim: int | None = None) -> ModelShape:
    vocab, hidden, inner, layers, heads, kv_heads = sizes
    head_dim, bias = head_dim or hidden // heads, family in _QKV_BIASES
    return ModelShape(name, family, hidden, inner, layers, heads, kv_heads, head_dim, vocab, tied, bias)


# The shapes of the benchmarks: Llama 3.1 8B and 70B, Qwen2.5 0.5B and 1.5B, Qwen3 8B, and Llamas like 3.2 1B.
NAMED_SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _named("llama-0.5b", "llama", (128256, 1024, 4096, 24, 16, 8), tied=True),
        _named("llama-1.5b", "llama", (128256, 2048, 8192, 20, 32, 8), tied=True),
        _named("llama-8b", "llama", (128256, 4096, 14336, 32, 32, 8), tied=False),
        _named("llama-70b", "llama", (128256, 8192, 28672, 80, 64, 8), tied=False),
        _named("qwen-0.5b", "qwen2", (151936, 896, 4864, 24, 14, 2), tied=True),
        _named("qwen-1.5b", "qwen2", (151936, 1536, 8960, 28, 12, 2), tied=True),
        _named("qwen-8b", "qwen3", (151936, 4096, 12288, 36, 32, 8), tied=False, head_dim=128),
    )
}


# Of those that are counted: Qwen3-30B-A3B, Qwen3-Next-80B-A3B, and a hybrid in the proportions of Qwen3.5.
_LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128} | {
    "linear_value_head_dim": 128
}
NAMED_CONFIGS: dict[str, JsonObject] = {
    "qwen-30b-a3b": {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False},
    "qwen-80b-a3b": {"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, **_LINEAR}
    | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "tie_word_embeddings": False}
    | {"shared_expert_intermediate_size": 512},
    "qwen-hybrid-4b": {"model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, **_LINEAR}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216}
    | {"num_hidden_layers": 32, "tie_word_embeddings": True},
}


def find_shape(name: str, overrides: JsonMapping | None = None, *, field: str = "policy.model_name") -> ModelShape:
    """The shape of what `field` names: a folder, a named shape, or a model of the hub."""
    if Path(name).is_dir():
        content = _read_config(Path(name) / "config.json", field)
    elif name in NAMED_SHAPES:
        return NAMED_SHAPES[name]
    elif name in NAMED_CONFIGS:
        content = NAMED_CONFIGS[name]
    elif (reason := why_unavailable(name)) is not None:
        names = ", ".join([*NAMED_SHAPES, *NAMED_CONFIGS])
        raise UnknownModelError(f"{field}: {reason}. Shapes that need no model: {names}")
    else:
        content = _read_config(_fetch_config(name, field), field)
    return known_shape(name, {**content, **dict(overrides or {})})


def known_shape(name: str, content: JsonMapping) -> ModelShape:
    """By the formulas, else by counting modules."""
    try:
        if content.get("vision_config"):
            raise UnknownModelError(f"{name}: has a tower for images, which no formula counts")
        return shape_of_config(name, content)
    except UnknownModelError as error:
        if problem_in(content) is not None:
            raise
        from posttrain.policy.memory.counted_shape import counted_shape  # imports torch

        return counted_shape(name, content, error)


def _fetch_config(name: str, field: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        reason = reason_of(error)
        raise UnknownModelError(
            f"{field}: the config.json of {name!r} is neither here nor could it be fetched from the hub: {reason}"
        ) from error


def _read_config(path: Path, field: str) -> JsonObject:
    try:
        return read_json(path, UnknownModelError)
    except UnknownModelError as error:
        raise UnknownModelError(f"{field}: {error}") from error


def shape_of_config(name: str, config: JsonMapping) -> ModelShape:
    """The shape that the contents of a config.json describe."""
    if (problem := problem_in(config)) is not None:
        raise UnknownModelError(f"{name}: config.json: {problem}")
    text = {**config, **(config.get("text_config") or {})}
    kinds = {*(text.get("layer_types") or ()), *(text.get("layers_block_type") or ())}
    is_recurrent = any(key.startswith(("mamba_", "ssm_", "linear_conv", "linear_num", "conv_L_cache")) for key in text)
    if is_recurrent or kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"}:
        raise UnknownModelError(f"{name}: has layers without attention, which no formula counts")
    if lacking := [key for key in _SIZES if not isinstance(text.get(key), int)]:
        raise UnknownModelError(
            f"{name}: config.json has no {', '.join(lacking)}; the planner counts decoder models such as Llama and Qwen"
        )
    family = str(text.get("model_type", ""))
    if experts := next(
        (text[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0
    ):
        raise UnknownModelError(f"{name}: a mixture of {experts} experts, which no formula counts")
    heads = text["num_attention_heads"]
    biased = bool(text.get("attention_bias", False))
    uses_window = text.get("use_sliding_window", family != "qwen2") and text.get("sliding_window")
    return ModelShape(
        name=name,
        family=family,
        hidden=text["hidden_size"],
        inner=text["intermediate_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab=text["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family in _TIED_BY_DEFAULT))),
        qkv_bias=biased or family in _QKV_BIASES,
        output_bias=biased,
        mlp_bias=bool(text.get("mlp_bias", False)),
        window=int(text["sliding_window"]) if uses_window and not text.get("layer_types") else None,
    )
