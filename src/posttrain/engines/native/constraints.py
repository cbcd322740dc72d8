"""Answers that obey a grammar: which tokens may come next, for each sample (decision 60).

`llguidance` compiles a grammar and computes masks on the host. Excluded tokens get the logit `EXCLUDED` before anything
is drawn, so log-probabilities are those of the masked distribution. Only sessions have constraints: training computes
log-probabilities over the whole vocabulary, so `NativeEngine.generate` takes none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import InputError
from posttrain.policy.runtime import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.engines.native.scheduler import Sample

EXCLUDED = -1e30  # finite, so that no difference of two is NaN
# A mask takes at most some milliseconds, and a grammar some 100 ms to compile. One that needs more fails its request.
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000}
_NUM_COMPILED = 64  # grammars that are kept: requests of a client often share one
_COMPILING = threading.Lock()


class Constraint:
    """The state of one sample. `stop_ids` end the answer where the grammar may end. InputError with the reason for a
    grammar that cannot be compiled.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, grammar: str, stop_ids: frozenset[int] = frozenset()
    ) -> None:
        with _COMPILING:
            self.matcher = _compiled(tokenizer, grammar).deep_copy()
            self.vocab_size: int = _vocabulary(tokenizer).vocab_size
        self.stop_ids = stop_ids

    def accept(self, token_id: int) -> None:
        if token_id not in self.stop_ids:
            self.matcher.consume_token(token_id)

    @property
    def error(self) -> str:
        """Why no token can follow; empty if one can."""
        return _reason(self.matcher) if self.matcher.is_error() else ""


def check_grammar(tokenizer: PreTrainedTokenizerBase, grammar: str) -> None:
    """InputError with the reason for a grammar that cannot be compiled, or has no first token."""
    constraint = Constraint(tokenizer, grammar)
    _masks([constraint])
    if constraint.error:
        raise InputError(constraint.error)


@lru_cache(_NUM_COMPILED)
def _compiled(tokenizer: PreTrainedTokenizerBase, grammar: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(_vocabulary(tokenizer), grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
    if matcher.is_error():
        raise InputError(_reason(matcher))
    return matcher


@lru_cache(8)
def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> Any:
    try:
        from llguidance import hf
    except ImportError as error:
        raise InputError(f"constrained answers need llguidance ({error}): pip install 'posttrain[serve]'") from error
    try:
        return hf.from_tokenizer(tokenizer)
    except ValueError as error:
        raise InputError(f"answers of this model's tokenizer cannot be constrained: {error}") from error


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


def _reason(matcher: Any) -> str:
    return str(matcher.get_error()).strip().partition("\n")[0][:200]


def _masks(constraints: Sequence[Constraint]) -> Tensor:
    """Bits of the tokens that may come next, as bytes [constraints, vocabulary / 8]. A grammar that has failed excludes
    nothing.
    """
    bits = torch.full((len(constraints), -(-constraints[0].vocab_size // 32)), -1, dtype=torch.int32)
    working = [(one.matcher, row) for row, one in enumerate(constraints) if not one.matcher.is_error()]
    _executor().unsafe_compute_mask_ptr(working, bits.data_ptr(), bits.shape[1] * bits.itemsize, len(bits))
    bytes_ = bits.view(torch.uint8)
    for row, one in enumerate(constraints):
        if one.matcher.is_error():
            bits[row] = -1
        elif one.matcher.is_accepting():
            for token in one.stop_ids:
                if token < one.vocab_size:
                    bytes_[row, token // 8] |= 1 << token % 8
    return bytes_


def exclude_tokens(samples: Sequence[Sample], logits: Tensor) -> None:
    """Set the logits of the tokens that may not come next, in place."""
    rows = [row for row, sample in enumerate(samples) if sample.constraint is not None]
    if not rows:
        return
    constraints = [sample.constraint for sample in samples if sample.constraint is not None]
    packed, at = to_device(_masks(constraints), logits.device), to_device(torch.tensor(rows), logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((packed[:, :, None] >> places) & 1).bool().flatten(1)[:, : logits.shape[1]]
    excluded = torch.ones(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    excluded[:, : allowed.shape[1]] = ~allowed
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(excluded, EXCLUDED))
