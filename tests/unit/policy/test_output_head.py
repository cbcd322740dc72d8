"""The way from hidden states to logits must be the model's own, or be refused."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, tiny_model
from torch import Tensor, nn

from posttrain.policy.head import OutputHead, UnsupportedModelError


def hidden_and_logits(model: nn.Module) -> tuple[Tensor, Tensor]:
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        return model.get_decoder()(input_ids=ids).last_hidden_state, model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_models_own_forward_pass(family: str) -> None:
    model = tiny_model(family, attention="eager")
    hidden, expected = hidden_and_logits(model)
    head = OutputHead(model)
    with torch.no_grad():
        torch.testing.assert_close(head.logits(hidden), expected, rtol=1e-6, atol=1e-6)
        head.check_logits(hidden, expected)
    assert head.vocab_size == expected.shape[-1]


@pytest.mark.parametrize(("family", "plain"), [("llama", True), ("gemma", True), ("gemma2", False), ("granite", False)])
def test_only_a_bare_projection_takes_the_short_way(family: str, plain: bool) -> None:
    assert OutputHead(tiny_model(family)).is_plain_linear is plain


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_a_forgotten_factor_is_noticed(family: str) -> None:
    model = tiny_model(family, attention="eager")
    hidden, expected = hidden_and_logits(model)
    head = OutputHead(model)
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="changes its logits"):
        head.check_logits(hidden, expected * 1.01)


@pytest.mark.parametrize("field", ["lm_head_multiplier", "output_multiplier", "logits_soft_cap"])
def test_factors_of_unknown_families_are_refused_by_name(field: str) -> None:
    model = tiny_model("llama")
    setattr(model.config, field, 0.5)
    with pytest.raises(UnsupportedModelError, match=field):
        OutputHead(model)
    setattr(model.config, field, 1.0)
    OutputHead(model)


def test_a_scaling_that_families_read_differently_is_refused() -> None:
    model = tiny_model("llama")
    model.config.logits_scaling = 2.0
    with pytest.raises(UnsupportedModelError, match="logits_scaling is 2"):
        OutputHead(model)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["body", "body and head"])
def test_adapters_stay_active(targets: list[str]) -> None:
    model = tiny_model("llama", attention="eager")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    head = OutputHead(adapted)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        hidden = head.decoder(input_ids=ids).last_hidden_state
        torch.testing.assert_close(head.logits(hidden), adapted(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert head.is_plain_linear == ("lm_head" not in targets)


def test_adapters_that_prepend_tokens_are_refused() -> None:
    model = tiny_model("llama")
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True, peft_type="PREFIX_TUNING")}
    model.get_base_model = lambda: model
    with pytest.raises(UnsupportedModelError, match="PREFIX_TUNING"):
        OutputHead(model)
