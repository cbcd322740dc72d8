"""Floating-point operations of a token: weights that it is multiplied with, six times."""

from __future__ import annotations

import pytest
from tiny_models import VOCAB_SIZE, tiny_model

from posttrain.models.loading import flops_per_token

FAMILIES = ["llama", "llama-tied", "qwen3-moe", "mixtral", "phi3", "gpt-oss", "deepseek-v3", "glm4-moe", "qwen3.5-moe"]


@pytest.mark.parametrize("family", [*FAMILIES, "granite-hybrid", "nemotron-h", "gemma4", "qwen3.5-vision"])
def test_weights_that_a_token_does_not_meet_are_not_counted(family: str) -> None:
    model = tiny_model(family)
    unused = (
        0 if model.config.tie_word_embeddings else VOCAB_SIZE * model.config.get_text_config().hidden_size
    )  # the look-up
    for name, parameter in model.named_parameters():
        if ".experts." in name or "block_sparse_moe.input_linear" in name or "block_sparse_moe.output_linear" in name:
            unused += parameter.numel() // 2  # each token goes to two of four
        if ".visual." in name or name.endswith("embed_tokens_per_layer.weight"):
            unused += parameter.numel()
    total = model.num_parameters()
    assert flops_per_token(model) == 6 * (total - unused)
