"""Floating-point operations of a token: weights that it is multiplied with, six times."""

from __future__ import annotations

import pytest
from tiny_models import VOCAB_SIZE, tiny_model

from posttrain.models.loading import flops_per_token


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3-moe", "mixtral", "phi3"])
def test_weights_that_a_token_does_not_meet_are_not_counted(family: str) -> None:
    model = tiny_model(family)
    unused = 0 if model.config.tie_word_embeddings else VOCAB_SIZE * model.config.hidden_size  # the look-up
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            unused += parameter.numel() // 2  # each token goes to two of four
    total = model.num_parameters()
    assert flops_per_token(model.config.to_dict(), total) == 6 * (total - unused)
