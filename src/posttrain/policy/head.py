"""From hidden states to logits: the last step of a causal language model, on the requested rows only.

The sampler and the trainer both use `OutputHead`, so their logits are the same arithmetic. It reproduces what model
families do after the output projection (Gemma's soft cap, Cohere's and Granite's factor) and refuses anything else:
a missing factor would silently train a different model. `check_logits` compares with the model's own forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.errors import InputError
from posttrain.models.attention_interface import route_latent_layers
from posttrain.models.recurrence_interface import route_recurrent_layers
from posttrain.models.vision import ImageTokens, RowImages, VisionTower, tower_of
from posttrain.policy.fused.accumulate import add_product
from posttrain.policy.parallel.fsdp import local_part
from posttrain.policy.parallel.tensor_group import TensorGroup, group_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Families whose `logits_scaling` is a divisor. HyperCLOVA X has a field of that name and multiplies.
_DIVIDED_BY_LOGITS_SCALING = ("granite",)
# Factors of families that we have not tried; 1 leaves the logits alone.
_UNSUPPORTED_FACTORS = ("output_multiplier", "logits_soft_cap")
# Families that multiply embeddings by `embedding_multiplier` on the way from tokens, and leave given embeddings alone.
_SCALES_OWN_EMBEDDINGS = ("falcon_h1",)


class UnsupportedModelError(InputError):
    """A model that posttrain would compute incorrectly, and therefore rejects."""


class Head(ABC):
    """The decoder body of a model, and what follows it: of a language model, or of a reward model."""

    decoder: Any
    embedding: Any
    module: Any
    is_vocabulary: bool  # the module has a row for each token
    tower: VisionTower | None = None  # None: the model sees no images

    @property
    def image_tokens(self) -> ImageTokens | None:
        return None if self.tower is None else self.tower.tokens

    def hidden(self, input_ids: Tensor, position_ids: Tensor, images: RowImages | None = None) -> Tensor:
        """Hidden states [tokens, hidden size] of one packed row, inside whatever attention context is active.

        `position_ids` is [1, tokens], or [3, 1, tokens] where a token has a place in time, height and width.

        With bf16 weights the matrix products are bf16 and the residual stream stays fp32. Rounding errors of the
        residual stream would accumulate over the layers, differently in the sampler and in the trainer.
        """
        embedded = self.embedding(input_ids)
        config = self.decoder.config
        if config.model_type in _SCALES_OWN_EMBEDDINGS:
            embedded = embedded * config.embedding_multiplier
        deeper: dict[str, Any] = {}
        if self.tower is not None:
            embedded, deeper = self.tower.insert(embedded, images)
        if getattr(self.decoder, "hidden_size_per_layer_input", None):
            # Tokens have an embedding for each layer too, which would be looked up by the nearest embedding otherwise.
            look_up = self.decoder.get_per_layer_inputs
            rest = (embedded,) if "inputs_embeds" in signature(look_up).parameters else ()  # not used beside the ids
            deeper = {**deeper, "per_layer_inputs": look_up(input_ids, *rest)}
        reduced = embedded.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(
            embedded.device.type, embedded.dtype if reduced else None, enabled=reduced, cache_enabled=False
        ):
            output = self.decoder(
                inputs_embeds=embedded.float() if reduced else embedded,
                position_ids=position_ids,
                use_cache=False,
                **deeper,
            )
        return output.last_hidden_state.squeeze(0)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, whatever the family calls their list."""
        if isinstance(layers := getattr(self.decoder, "layers", None), nn.ModuleList):
            return layers
        number = self.decoder.config.get_text_config().num_hidden_layers
        lists = [module for module in self.decoder.modules() if isinstance(module, nn.ModuleList)]
        if (layers := next((each for each in lists if len(each) == number), None)) is None:
            raise UnsupportedModelError(f"{self.decoder.config.model_type}: its layers are not a list of modules")
        return layers

    @abstractmethod
    def check_logits(self, hidden: Tensor, expected: Tensor) -> None:
        """Refuse the model if its own forward pass gives `expected` for `hidden` and ours would not."""


class OutputHead(Head):
    """The decoder body of a causal language model and the way from its hidden states to logits.

    `model` may be wrapped by peft; adapters inside the body and on the head stay active. Modules are looked up once,
    weights each time they are used, so that sharding may swap the parameters.
    """

    is_vocabulary = True

    def __init__(self, model: nn.Module) -> None:
        base = without_adapter_wrapper(model)
        route_recurrent_layers(base)
        route_latent_layers(base)
        config: PretrainedConfig = base.config.get_text_config()
        self.decoder, self.embedding = base.get_decoder(), base.get_input_embeddings()
        self.module = base.get_output_embeddings()
        self.tower = tower_of(base)
        if self.decoder in (base, self.module):  # transformers looks for names; it is the part that embeds the tokens
            parts = [part for part in base.children() if any(inner is self.embedding for inner in part.modules())]
            self.decoder = parts[0] if len(parts) == 1 else base
        if self.module is None or self.decoder is base:
            raise UnsupportedModelError(
                f"{config.model_type}: {type(base).__name__} has no output head: a causal language model is needed"
            )
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.factor = _factor(config)

    @property
    def tensor_group(self) -> TensorGroup | None:
        """The ranks that each have the rows of some tokens; None: this one has all rows."""
        return group_of(self.module)

    @property
    def weight(self) -> Tensor:
        """This rank's rows of the output projection."""
        return local_part(self.module.weight)

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection; often more than the tokenizer has tokens."""
        return int(self.module.weight.shape[0])

    @property
    def is_plain_linear(self) -> bool:
        """Whether the logits are hidden @ weight.T and nothing else."""
        return (
            type(self.module) is nn.Linear and self.module.bias is None and self.softcap is None and self.factor == 1.0
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden size] -> [..., vocabulary], as the model itself computes them; fp32 where that costs nothing."""
        if self.is_plain_linear:
            logits = project(hidden, self.weight)
            return logits if self.tensor_group is None else self.tensor_group.beside(logits, self.vocab_size)
        logits = self.module(hidden.to(self.weight.dtype))
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @torch.no_grad()
    def check_logits(self, hidden: Tensor, expected: Tensor) -> None:
        ours, theirs = self.logits(hidden).float(), expected.float()
        # Some families return logits in fp32 of a product in bf16.
        tolerance = 1e-4 if torch.float32 == hidden.dtype == expected.dtype else 3e-2
        spread = float(theirs.abs().max())
        if float((ours - theirs).abs().max()) > tolerance * max(spread, 1e-6):
            raise UnsupportedModelError(
                f"{self.decoder.config.model_type}: this model changes its logits after the output head in a way that "
                f"posttrain does not support (largest logit {spread:.4g} in the model's own forward pass, "
                f"{float(ours.abs().max()):.4g} in ours)"
            )


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T, added up in fp32 and left so, also for bf16 numbers.

    Rounded to bf16, logits of 16 and more would come in steps of 1/8, which is most of what can separate the sampler's
    log-probabilities from the trainer's.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return hidden @ weight.T
    product = _Projection.apply(hidden.to(weight.dtype), weight)
    assert isinstance(product, Tensor)
    return product


class _Projection(torch.autograd.Function):
    """`torch.mm` with `out_dtype` has no derivative. This one multiplies in the weight's type, as `_LinearLogprobs`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.parameter = weight  # has the sum of its gradients; what a checkpoint computes again is detached
        if weight.device.type == "cpu":
            return hidden.float() @ weight.float().T
        return torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        grad_hidden, grad_weight = grad @ weight if needs_hidden else None, None
        if needs_weight:
            left, right = grad.flatten(0, -2).T, hidden.flatten(0, -2)
            if not add_product([ctx.parameter], left, right):
                grad_weight = left @ right
        return grad_hidden, grad_weight


def without_adapter_wrapper(model: nn.Module) -> Any:
    """The `transformers` model inside a PeftModel (with the adapters in its modules), or the model itself."""
    peft_config: PretrainedConfig = getattr(model, "peft_config", None)
    if not peft_config or not hasattr(model, "get_base_model"):
        return model
    for name, adapter in peft_config.items():
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {name!r} is of type {adapter.peft_type}: it prepends tokens in a forward pass that posttrain "
                "does not run. Use LoRA."
            )
    return model.get_base_model()  # type: ignore[operator]


def _factor(config: PretrainedConfig) -> float:
    """The factor that the family applies to its logits."""
    for field in _UNSUPPORTED_FACTORS:
        value = getattr(config, field, None)
        if value not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{config.model_type}: config.{field} is {value}, a change of the logits that posttrain does not "
                "implement"
            )
    factor = 1.0
    for field in ("logit_scale", "lm_head_multiplier"):
        if (scale := getattr(config, field, None)) is not None:
            factor *= float(scale)
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None and float(divisor) != 1.0:
        if not str(config.model_type).startswith(_DIVIDED_BY_LOGITS_SCALING):
            raise UnsupportedModelError(
                f"{config.model_type}: config.logits_scaling is {divisor}; posttrain supports this field for "
                f"{', '.join(_DIVIDED_BY_LOGITS_SCALING)} only"
            )
        factor /= float(divisor)
    return factor
