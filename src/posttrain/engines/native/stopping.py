"""When a completion ends: stop tokens, stop strings, and its maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.types import FinishReason, Sampling

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def ends_of_sequence(model: nn.Module) -> frozenset[int]:
    """The end-of-sequence tokens of the model's config."""
    generation_config = getattr(model, "generation_config", None)
    listed = getattr(generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list | tuple) else [listed]
    return frozenset(int(token) for token in ids if token is not None)


def stop_token_ids(
    model_ends: frozenset[int], tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> frozenset[int]:
    """Stop tokens of the request, ends of turn, and the end-of-sequence tokens of model and tokenizer."""
    if sampling.ignore_eos:
        return frozenset()
    own = getattr(tokenizer, "eos_token_id", None)
    return model_ends.union(sampling.stop_token_ids, sampling.end_of_turn_ids, () if own is None else (int(own),))


@dataclass(frozen=True)
class StopRules:
    token_ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> StopRules:
        strings = () if sampling.ignore_eos else sampling.stop_strings
        return cls(stop_token_ids(ends_of_sequence(model), tokenizer, sampling), strings, tokenizer)

    def scanner(self) -> StopStringScanner | None:
        return StopStringScanner(self.tokenizer, self.strings) if self.strings else None

    def reason(self, token_ids: Sequence[int], limit: int, scanner: StopStringScanner | None) -> FinishReason | None:
        """Why the completion ends with its last token, or None if it goes on."""
        if token_ids[-1] in self.token_ids:
            return "stop"
        if scanner is not None and scanner.found(token_ids):
            return "stop"
        return "length" if len(token_ids) >= limit else None


class StopStringScanner:
    """Searches a growing completion for stop strings, special tokens included, without decoding all of it again.

    A token's text may depend on its neighbours, so a short window is decoded twice, without and with the new tokens,
    and the difference is what they add. Text that ends in an incomplete character waits for the rest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.window_start = 0  # first token that is decoded for context
        self.num_read = 0  # tokens whose text is in `tail`
        self.tail = ""
        self.keep = max(len(string) for string in self.strings) - 1

    def found(self, token_ids: Sequence[int]) -> bool:
        context = self._decode(token_ids[self.window_start : self.num_read])
        text = self._decode(token_ids[self.window_start :])
        if text.endswith("�") or len(text) <= len(context):
            return False
        seen = self.tail + text[len(context) :]
        self.window_start, self.num_read = self.num_read, len(token_ids)
        self.tail = seen[-self.keep :] if self.keep else ""
        return any(string in seen for string in self.strings)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
