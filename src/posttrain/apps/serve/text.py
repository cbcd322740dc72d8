"""Incremental detokenisation: incomplete characters, and text that may become a stop string, are held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from posttrain.data.tool_calls import overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_LEVEL: WeakKeyDictionary[PreTrainedTokenizerBase, bool] = WeakKeyDictionary()  # by tokenizer
# A character has at most four bytes, so longer sequences of tokens are no incomplete character.
_MOST_WAITING_TOKENS = 32
_INCOMPLETE = "�"
_NUM_CACHED_TEXTS = 2**15  # of one or two tokens, for each tokenizer: about 8 MB
_MOST_TOKENIZERS = 16  # with a cache; the least recently used one loses its cache


class IncrementalText:
    """The text of one answer, without special tokens, or without those in `hidden`. The pieces together are what
    decoding all tokens at once gives.

    A token's text may depend on its neighbours, so the tokens of the piece before are decoded again as context, and the
    difference is what the new ones add.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int] | None = None) -> None:
        self._decode = _decoder(tokenizer, hidden is None)
        self._hidden = hidden or frozenset()
        self._window: tuple[int, ...] = ()
        self._num_context = 0  # tokens of the window whose text was returned
        self._context = ""

    def push(self, token_id: int) -> str:
        """The text that the token adds; often none yet."""
        if token_id in self._hidden:
            return ""
        self._window += (token_id,)
        text = self._decode(self._window)
        num_new = len(self._window) - self._num_context
        if text.endswith(_INCOMPLETE) and num_new < _MOST_WAITING_TOKENS:
            return ""
        if len(text) <= len(self._context):
            return ""
        added = text[len(self._context) :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context = self._decode(self._window)
        return added

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        return self._decode(self._window)[len(self._context) :]


@lru_cache(_MOST_TOKENIZERS)
def _decoder(tokenizer: PreTrainedTokenizerBase, skips_special: bool) -> Callable[[tuple[int, ...]], str]:
    """Decoding with a cache, because texts repeat their pairs of tokens.

    Calls the backend directly where `transformers` only checks arguments, which takes four times as long as decoding a
    token or two.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    decode = tokenizer.backend_tokenizer.decode if is_plain else tokenizer.decode
    return lru_cache(_NUM_CACHED_TEXTS)(lambda token_ids: str(decode(token_ids, skip_special_tokens=skips_special)))


class StopCut:
    """Passes text on up to the first stop string, without the stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""  # may be the beginning of a stop string
        self.found = False

    def push(self, text: str) -> str:
        if self.found or not self._strings:
            return "" if self.found else text
        text = self._held + text
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = overlap(text, self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """The bytes of a token, which may be part of a character."""
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(piece, str):
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if _is_byte_level(tokenizer):
            byte_of = _byte_of_symbol()
            if all(symbol in byte_of for symbol in piece):
                return bytes(byte_of[symbol] for symbol in piece)
    return str(tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Cached, because finding out means serialising the decoder."""
    if (known := _BYTE_LEVEL.get(tokenizer)) is None:
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        known = _BYTE_LEVEL[tokenizer] = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
    return known


@cache
def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are written as themselves, the others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
