"""Bytes per token of a pass through the model: activations kept for the backward pass, temporary tensors, and the
traffic of elementwise kernels.

`policy/fused/{ops,layers}.py` decide what a layer keeps, `policy/logprobs.py` what the output head needs: these counts
follow that code. With weights of `element` bytes, products are in that precision and the residual stream is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.policy.memory.model_shape import ModelShape
from posttrain.policy.memory.settings import RunSettings

FP32 = 4
CHUNK_LOGITS = 2**30  # policy/logprobs.py on a GPU
# Families whose layers are not fused keep this many times the bytes for the backward pass (measured, see
# apps/plan/calibration.py).
UNFUSED_ACTIVATIONS = 2.1


@dataclass(frozen=True)
class Pass:
    """One forward pass over a packed row."""

    tokens: float
    responses: float  # response tokens, whose logits are computed
    gathered: float  # keys copied for attention, because they are shared
    pairs: float  # of a token and one that it attends to
    prompts: float = 0.0  # tokens of prompts among them


@dataclass(frozen=True)
class LayerBytes:
    """Of one rank. Those that share layers have parts of the heads, of the MLP and of the vocabulary, but whole
    residuals, unless those are split by tokens; those that share rows have a part of the tokens, and for attention a
    part of the heads."""

    shape: ModelShape
    settings: RunSettings

    @property
    def _parts(self) -> tuple[float, float, float, float]:
        """This rank's width of queries, of keys, and of the MLP; its share of the vocabulary."""
        s, shares = self.shape, self.settings.layer_shares
        return s.query_width / shares, s.kv_width / shares, s.inner / shares, s.vocab / shares

    @property
    def _residual(self) -> float:
        """Numbers of a token's residual on this rank."""
        return self.shape.hidden / (self.settings.layer_shares if self.settings.splits_rows else 1)

    def _own(self, row: Pass) -> Pass:
        shares = self.settings.row_shares
        return Pass(row.tokens / shares, row.responses / shares, row.gathered / shares, row.pairs / shares)

    # -- kept for the backward pass ------------------------------------------------------------------------------------

    def kept_per_token(self) -> float:
        """By one layer without recomputation, copies of shared prompts aside."""
        s, e, shares = self.shape, self.settings.element, self.settings.layer_shares
        query, kv, inner, _ = self._parts
        residuals = 2 * FP32 * self._residual
        qkv = e * (query + 2 * kv)
        if s.family == "qwen3":  # head norms keep their inputs, and their outputs are rotated
            # The inputs are parts of a joined product, or tensors of their own.
            copies = 2 if self.settings.ranks == 1 else 1
            qkv += copies * e * (query + kv) + FP32 * (s.heads + s.kv_heads) / shares
        attended = e * query + FP32 * s.heads / shares
        if self.settings.row_shares > 1:
            attended += e * query  # its output by heads, and again by tokens
        gate_up = 2 * e * inner
        factors = 2 * FP32
        kept = residuals + qkv + attended + gate_up + factors
        if self.settings.lora_rank is not None:
            kept += len(s.linears) * e * self.settings.lora_rank  # the rank-r activations of each adapter
        if self.settings.ranks > 1:
            # Sharded weights cannot be joined: their modules keep two norms and the product inside SwiGLU, which are
            # computed again otherwise.
            kept += 2 * e * s.hidden + e * inner
        return kept if self.shape.fused else UNFUSED_ACTIVATIONS * kept

    def kept_by_layer(self, row: Pass) -> float:
        row = self._own(row)
        return row.tokens * self.kept_per_token() + 2 * self.settings.element * self._parts[1] * row.gathered

    def kept(self, row: Pass) -> float:
        """Everything that is kept when the forward pass reaches the output head."""
        s, e = self.shape, self.settings.element
        layer = (
            FP32 * self._residual * self._own(row).tokens if self.settings.checkpointing else self.kept_by_layer(row)
        )
        row = self._own(row)
        # The last residual. A norm that is not fused keeps itself as well, for the gradient of its weight.
        residuals = 1 if s.fused or self.settings.lora_rank is not None else 2
        end = residuals * FP32 * self._residual * row.tokens + e * s.hidden * row.responses  # the head's input
        return s.layers * layer + end + 2 * FP32 * s.head_dim * row.tokens

    # -- temporary -----------------------------------------------------------------------------------------------------

    def layer_forward(self, row: Pass) -> float:
        """Peak of a pass without gradients: inside the MLP, with the output of attention."""
        s, e = self.shape, self.settings.element
        query, kv, inner, _ = self._parts
        per_token = 2 * FP32 * s.hidden + e * (2 * query + 2 * kv + 3 * inner + 2 * s.hidden)
        end = (2 if s.fused else 4) * FP32 * s.hidden  # the last norm
        return self._own(row).tokens * max(per_token * (1.0 if s.fused else 1.5), end)

    def layer_backward(self, row: Pass) -> float:
        """Peak: the gradients inside SwiGLU, its recomputed product, and the gradient of the residual stream."""
        s, e = self.shape, self.settings.element
        inner = self._parts[2]
        per_token = e * (4 * inner + s.hidden) + FP32 * s.hidden
        moment = self._own(row).tokens * per_token + e * s.hidden * inner
        if self.settings.checkpointing:
            moment += self.kept_by_layer(row)
        return moment

    @property
    def chunk_tokens(self) -> int:
        return self.settings.chunk_tokens or max(16, CHUNK_LOGITS // self.shape.vocab)

    def head_forward(self, row: Pass) -> float:
        """Logits of a chunk in fp32."""
        if self.settings.scores_answers:
            return 0.0
        return FP32 * self._parts[3] * min(self._own(row).responses, self.chunk_tokens)

    def head_backward(self, row: Pass, *, accumulates: bool) -> float:
        """A chunk's logits and their gradient; then, with the logits freed, that gradient and the head's, unless it is
        accumulated into an existing sum: `accumulates`."""
        if self.settings.scores_answers:
            return 0.0
        v, e = self._parts[3], self.settings.element
        weight = v * self.shape.hidden if self.settings.lora_rank is None else 0
        rows = min(self._own(row).responses, self.chunk_tokens)
        has_sum = accumulates and e != FP32 and self.settings.ranks == 1  # else accumulated by autograd
        total = 0.0 if has_sum else FP32 * weight
        from_start = total if self.recomputes_logits(row) else 0.0  # of earlier chunks
        return max((FP32 + e) * v * rows + from_start, e * v * rows + total)

    def compared(self, row: Pass, teacher: ModelShape) -> float:
        """The same where logits are compared with a teacher's: chunks have a quarter of the tokens, and their gradient
        is autograd's (policy/logprobs.py)."""
        vocab = max(self.shape.vocab, teacher.vocab)
        rows = min(self._own(row).responses, self.settings.chunk_tokens or max(16, CHUNK_LOGITS // (4 * vocab)))
        weight = self._parts[3] * self.shape.hidden if self.settings.lora_rank is None else 0
        return FP32 * self.settings.compared_numbers * vocab * rows + (FP32 + self.settings.element) * weight

    def recomputes_logits(self, row: Pass) -> bool:
        return self._own(row).responses > self.chunk_tokens

    # -- moved by elementwise kernels ----------------------------------------------------------------------------------

    def moved_forward(self) -> float:
        """Per layer and token: two norms, rotation, SwiGLU, residual sums; adapters where there are any."""
        s, e = self.shape, self.settings.element
        streams = 5 * FP32 * s.hidden + 4 * e * s.hidden
        return streams + 3 * e * s.inner + 2 * e * (s.query_width + s.kv_width)

    def moved_backward(self) -> float:
        s, e = self.shape, self.settings.element
        norms = (6 + 2 + 1) * FP32 * s.hidden + (3 + 2 + 1) * e * s.hidden
        return norms + 6 * e * s.inner + 2 * e * (s.query_width + s.kv_width)

    def moved_by_quantising(self) -> float:
        """Per layer and token of a backward pass in FP8: gradients of the outputs. The forward pass moves no more than
        bf16."""
        if not self.settings.fp8:
            return 0.0
        return (self.settings.element + 1) * sum(outputs for _, outputs in self.shape.linears)

    def moved_by_adapters(self) -> tuple[float, float]:
        """Forward and backward, per layer and token: inputs read again and outputs added to; the same of gradients."""
        if self.settings.lora_rank is None:
            return 0.0, 0.0
        e = self.settings.element
        inputs = sum(i for i, _ in self.shape.linears)
        outputs = sum(o for _, o in self.shape.linears)
        return e * (inputs + 2 * outputs), e * (3 * inputs + 2 * outputs)
