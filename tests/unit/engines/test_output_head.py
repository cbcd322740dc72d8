"""Hidden states to logits: as each family's own forward pass does it, or not at all."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import FAMILIES, tiny_model
from torch import Tensor, nn

from posttrain.policy.head import OutputHead, UnsupportedModelError


def hidden_and_logits(model: nn.Module) -> tuple[Tensor, Tensor]:
    """What the model's own forward pass computes; stock attention."""
    with torch.no_grad():
        output = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    return output.hidden_states[-1], output.logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_models_own(family: str) -> None:
    model = tiny_model(family, attention="eager")
    hidden, logits = hidden_and_logits(model)
    head = OutputHead(model)
    torch.testing.assert_close(head.logits(hidden), logits, atol=1e-6, rtol=1e-5)
    assert head.vocab_size == logits.shape[-1]
    head.check_logits(hidden, logits)


@pytest.mark.parametrize(
    ("family", "plain"), [("llama", True), ("qwen3", True), ("gemma2", False), ("granite", False), ("cohere", False)]
)
def test_plain_heads_are_a_matrix_product(family: str, plain: bool) -> None:
    model = tiny_model(family, attention="eager")
    head = OutputHead(model)
    assert head.is_plain_linear == plain
    if plain:
        hidden, logits = hidden_and_logits(model)
        torch.testing.assert_close(hidden @ head.weight.T, logits)
        model.config.logits_scaling = 1.0
        assert OutputHead(model).is_plain_linear, "a factor of one changes nothing"
        model.lm_head = nn.Linear(32, 96, bias=True)
        assert not OutputHead(model).is_plain_linear


def test_adapters_on_the_head_are_part_of_it() -> None:
    model = tiny_model(attention="eager")
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    head = OutputHead(adapted)
    assert not head.is_plain_linear
    hidden, logits = hidden_and_logits(adapted)
    torch.testing.assert_close(head.logits(hidden), logits)
    assert not torch.allclose(hidden @ head.weight.T, logits)


def test_unknown_logit_factor_is_detected() -> None:
    model = tiny_model(attention="eager")
    hidden, logits = hidden_and_logits(model)
    with pytest.raises(UnsupportedModelError, match="after the output head"):
        OutputHead(model).check_logits(hidden, logits * 1.5)


@pytest.mark.parametrize("field", ["output_multiplier", "logits_scaling"])
def test_unsupported_logit_factors_are_refused(field: str) -> None:
    model = tiny_model(attention="eager")
    setattr(model.config, field, 2.0)
    with pytest.raises(UnsupportedModelError, match=rf"llama: config\.{field} is 2\.0"):
        OutputHead(model)


def test_prompt_tuning_is_refused() -> None:
    model = tiny_model(attention="eager")
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedModelError, match="Use LoRA"):
        OutputHead(adapted)


def test_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no output head"):
        OutputHead(tiny_model(attention="eager").get_decoder())
