"""Runs the decoder body of a `transformers` model with an attention context of ours, and finds out what its layers keep.

Knows nothing of sequences or pages: tokens and positions in, hidden states out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.models.attention_interface import ATTENTION, AttentionContext, attention_context
from posttrain.policy.head import OutputHead, UnsupportedModelError, without_adapter_wrapper
from posttrain.policy.model_support import LayerShape, check_length, observe_layers

if TYPE_CHECKING:
    from posttrain.engines.native.attention import DenseDecode, PagedDecode
    from posttrain.engines.native.scheduler import Sample


class ForwardPass:
    def __init__(self, model: nn.Module) -> None:
        self.base = without_adapter_wrapper(model)
        self.config: Any = self.base.config.get_text_config()
        implementation = getattr(self.config, "_attn_implementation", None)
        if implementation != ATTENTION:
            raise UnsupportedModelError(
                f"the model's attention is {implementation!r}: load it with attn_implementation={ATTENTION!r}"
            )
        self.head = OutputHead(model)
        self._layers: dict[tuple[torch.device, torch.dtype], dict[int, LayerShape]] = {}

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def _embedding(self) -> Tensor:
        weight: Tensor = self.base.get_input_embeddings().weight
        return weight

    def hidden(self, context: AttentionContext, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [tokens, hidden size] of one packed row; `context` decides who sees whom."""
        with attention_context(context):
            return self.head.hidden(token_ids[None], positions[None])

    def next_logits(self, decode: DenseDecode | PagedDecode, samples: Sequence[Sample]) -> Tensor:
        """[samples, vocabulary] after the newest token of each, whose keys and values go into its pages."""
        size = decode.cache.page_size
        last = [sample.token_ids[-1] for sample in samples]
        at = [sample.num_cached for sample in samples]
        slots = [
            sample.pages[position // size] * size + position % size
            for sample, position in zip(samples, at, strict=True)
        ]
        inputs = torch.tensor([last, at, slots], dtype=torch.long).to(decode.cache.device, non_blocking=True)
        decode.prepare(samples, inputs[2])
        return self.head.logits(self.hidden(decode, inputs[0], inputs[1]))

    def layers(self) -> dict[int, LayerShape]:
        """What each attention layer keeps of a token, seen by running one. Also compares our logits with the model's."""
        place = (self.device, self._embedding.dtype)
        if place not in self._layers:
            self._layers[place] = observe_layers(self.base, self.head)
        return self._layers[place]

    def working_bytes(self, num_tokens: int, num_rows: int) -> int:
        """About what a pass over `num_tokens` and the logits of `num_rows` take at their highest."""
        config = self.config
        widest = max(int(getattr(config, "intermediate_size", 0) or 0), config.hidden_size)
        per_token = 4 * config.hidden_size * 4 + 4 * widest * self._embedding.element_size()
        return num_tokens * per_token + 3 * num_rows * self.head.vocab_size * 4

    def check_length(self, longest: int) -> None:
        """Refuse lengths at which the model's positions would depend on which sequences run together."""
        check_length(self.config, longest)
