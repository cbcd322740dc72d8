"""LoRA adapters inside fused layers against peft's own forward and backward pass, in float64 unless the point is
another.

The kernels stand aside (`use_torch_kernels`); what is tested is which product is computed, and when the modules are
called.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fused_references import (
    assert_near,
    assert_resumes,
    assert_same_model,
    decoder_of,
    family_model,
    mean_error,
    noise,
    num_fused,
    poisoned_memory,
    states_and_gradients,
    stepped,
    trainer_logprobs,
    use_torch_kernels,
)
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import lora
from tiny_models import LOGPROB_ROUNDING, byte_tokenizer
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.policy.fused.adapters import capture_key, product_of
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.fused.products import Multiply
from posttrain.types import NoiseKey, Sampling, Task

pytest.importorskip("triton", reason="Triton is not installed here (it is on Linux, with the extra dev)")
EXACT = 1e-11
FP64 = torch.float64
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_kernels(monkeypatch)


def adapted(family: str = "llama", dtype: torch.dtype = FP64, targets: list[str] = ALL, **settings: Any) -> Any:
    """With adapters that are far from zero, as after some training."""
    settings = {"r": 3, "lora_alpha": 7, "target_modules": targets, **settings}
    model: Any = get_peft_model(family_model(family, dtype), LoraConfig(**settings), autocast_adapter_dtype=False)
    fill_adapters(model)
    return model.train()


def fill_adapters(model: nn.Module, seed: int = 0) -> None:
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(noise(*parameter.shape, seed=seed + place) * 0.2)


def fused_and_own(*args: Any, **settings: Any) -> tuple[Any, Any]:
    model = adapted(*args, **settings)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == num_fused(model) == 2
    return model, own


def hidden(model: nn.Module) -> Tensor:
    return states_and_gradients(model, backward=False)[0]["hidden"]


@pytest.fixture
def modules_are_not_called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which peft's forward would raise: only the joined product can give an answer."""

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(lora.Linear, "forward", Mock(side_effect=AssertionError("an adapted module was called")))
            yield

    return context


# -- the numbers -------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "all projections": {},
    "queries and values": {"targets": ["q_proj", "v_proj"]},
    "keys alone": {"targets": ["k_proj"]},
    "single products": {"targets": ["o_proj", "down_proj"]},
    "up alone": {"targets": ["up_proj"]},
    "down alone": {"targets": ["down_proj"], "layers_to_transform": [0]},  # then what goes into it has no gradient
    "different ranks": {"rank_pattern": {"k_proj": 1, "up_proj": 5}, "alpha_pattern": {"v_proj": 2, "gate_proj": 11}},
    "rank stabilised": {"use_rslora": True},
    "one layer": {"layers_to_transform": [1]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_numbers_are_those_of_peft(settings: dict[str, Any], modules_are_not_called: Any) -> None:
    model, own = fused_and_own(**settings)
    assert_same_model(model, own, EXACT)
    with modules_are_not_called(), poisoned_memory():
        states_and_gradients(model)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in ("qwen2", "qwen3", "mistral", "llama with biases")),
        *(("llama with biases", {"bias": bias}) for bias in ("lora_only", "all")),  # biases that are trained, too
    ],
)
def test_families(family: str, settings: dict[str, str]) -> None:
    model, own = fused_and_own(family, **settings)
    assert_same_model(model, own, EXACT)


def test_base_weights_that_are_trained_too() -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            "v_proj" in name or "down_proj" in name or "norm" in name or "gate_proj.lora_B" in name
        )
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=True)
    assert_same_model(model, own, EXACT)


def test_activation_checkpointing() -> None:
    model, own = fused_and_own()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_model(model, own, EXACT)


def test_modules_whose_weights_may_not_be_joined_are_called() -> None:
    model = adapted()
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=False)
    assert_same_model(model, own, EXACT)


def test_fp32_to_its_rounding() -> None:
    attention = decoder_of(adapted("qwen2", torch.float32)).layers[0].self_attn  # type: ignore[index, union-attr]
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    product = product_of(modules)
    assert product is not None
    ours, theirs = (noise(9, 24).requires_grad_() for _ in range(2))
    out = Multiply.apply(ours, product, *product.parts)
    expected = torch.cat([module(theirs) for module in modules], dim=1)
    assert_near("product", out, expected, 1e-6)
    grads = []
    for y in (out, expected):
        y.backward(noise(*y.shape, seed=1))
        grads.append([part.grad.clone() for part in product.low_rank.downs + product.low_rank.ups])
        for part in product.parts:
            part.grad = None
    assert_near("gradient of x", ours.grad, theirs.grad, 1e-6)  # type: ignore[arg-type]
    for mine, peft in zip(*grads, strict=True):
        assert_near("gradient", mine, peft, 1e-6)


def test_bf16_is_rounded_less_often_than_by_peft() -> None:
    attention = decoder_of(adapted("qwen2", torch.bfloat16)).layers[0].self_attn  # type: ignore[index, union-attr]
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    product = product_of(modules)
    assert product is not None
    x = noise(200, 24).bfloat16()
    exact = torch.cat([copy.deepcopy(module).double()(x.double()) for module in modules], dim=1)
    theirs = torch.cat([module(x) for module in modules], dim=1)
    ours = Multiply.apply(x, product, *product.parts)
    assert (ours.double() - exact).norm() < 0.95 * (theirs.double() - exact).norm()


def test_bf16_model_is_as_near_to_fp32_as_with_peft() -> None:
    model, own = fused_and_own(dtype=torch.bfloat16)
    exact = copy.deepcopy(own).float()
    assert mean_error(model, exact) < min(1.2 * mean_error(own, exact), 0.08)


# -- what is active ----------------------------------------------------------------------------------------------------


def test_disabled_adapters_take_no_part(modules_are_not_called: Any) -> None:
    model, own = fused_and_own()
    base = family_model("llama", FP64)
    with_adapters = hidden(own)
    with modules_are_not_called():
        with model.disable_adapter():
            assert_near("disabled", hidden(model), hidden(base), EXACT)
        assert_near("enabled again", hidden(model), with_adapters, EXACT)
    assert (with_adapters - hidden(base)).abs().max() > 0.1


@pytest.mark.parametrize("safe", [False, True])
def test_merged_adapters_are_not_added_again(safe: bool, modules_are_not_called: Any) -> None:
    model, own = fused_and_own()
    expected, base = hidden(own), hidden(family_model("llama", FP64))
    model.merge_adapter(safe_merge=safe)
    with modules_are_not_called():
        assert_near("merged", hidden(model), expected, 1e-10)
    with model.disable_adapter():  # takes them out of the weights, as peft does
        assert_near("disabled while merged", hidden(model), base, 1e-10)
        with modules_are_not_called():
            assert_near("disabled and taken out", hidden(model), base, 1e-10)
    assert_near("enabled again", hidden(model), expected, 1e-10)


def test_some_merged_and_some_not() -> None:
    model, own = fused_and_own()
    for each in (model, own):
        each.base_model.model.model.layers[0].self_attn.k_proj.merge()
    assert_same_model(model, own, 1e-10)


def test_another_adapter_and_two_at_once() -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj", "up_proj"]))
    fill_adapters(model.double(), seed=50)
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=True)
    for each in (model, own):
        each.set_adapter("other")
    assert_same_model(model, own, EXACT)
    for each in (model, own):
        each.base_model.set_adapter(["default", "other"])
    assert_same_model(model, own, EXACT)
    for each in (model, own):
        each.base_model.set_adapter("default")
    assert_same_model(model, own, EXACT)


def test_dropout_is_that_of_peft_in_training_and_none_in_evaluation(modules_are_not_called: Any) -> None:
    model, own = fused_and_own(lora_dropout=0.4)
    values = []
    for each in (model, own):
        torch.manual_seed(3)
        values.append(states_and_gradients(each))
    assert_near("hidden", values[0][0]["hidden"], values[1][0]["hidden"], EXACT)
    for name, grad in values[1][1].items():
        assert_near(name, values[0][1][name], grad, EXACT)
    dropped = values[0][0]["hidden"]
    model.eval()
    own.eval()
    assert_same_model(model, own, EXACT)
    with modules_are_not_called():
        assert (hidden(model) - dropped).abs().max() > 0.1


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_adapters_are_called(settings: dict[str, Any]) -> None:
    model, own = fused_and_own("llama with biases", **settings)
    assert_same_model(model, own, 1e-6 if "use_dora" in settings else EXACT)


def test_adapters_in_another_precision_are_called() -> None:
    model: Any = get_peft_model(family_model("llama", torch.bfloat16), LoraConfig(target_modules=ALL))
    projection = decoder_of(model).layers[0].self_attn.q_proj  # type: ignore[index, union-attr]
    assert projection.lora_A["default"].weight.dtype == torch.float32
    assert product_of([projection]) is None


def test_adapters_that_are_put_on_a_fused_model() -> None:
    base = family_model("llama", FP64)
    assert fuse_layers(decoder_of(base), may_join=True) == 2
    model: Any = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, target_modules=ALL), autocast_adapter_dtype=False)
    fill_adapters(model)
    assert_same_model(model.train(), adapted(), EXACT)
    bare = model.unload()
    assert_near("without them again", hidden(bare), hidden(family_model("llama", FP64)), EXACT)


def test_a_captured_pass_is_valid_until_adapters_or_addresses_change() -> None:
    model, _ = fused_and_own()
    state = capture_key(model)
    hidden(model)
    fill_adapters(model, seed=70)
    assert capture_key(model) == state, "new values in the same place"
    with model.disable_adapter():
        assert capture_key(model) != state
    assert capture_key(model) == state
    model.merge_adapter()
    assert capture_key(model) != state
    model.unmerge_adapter()
    assert capture_key(model) == state
    next(iter(model.parameters())).data = next(iter(model.parameters())).data.clone()
    assert capture_key(model) != state


# -- they change -------------------------------------------------------------------------------------------------------


def test_an_update_in_place_changes_the_joined_product() -> None:
    model, own = fused_and_own()
    attention = decoder_of(model).layers[0].self_attn  # type: ignore[index, union-attr]
    place = attention.q_proj.lora_A["default"].weight.data_ptr()
    before = hidden(model)
    assert_same_model(stepped(model), stepped(own), 1e-9)
    assert (hidden(model) - before).abs().max() > 1e-2
    product = product_of([attention.q_proj, attention.k_proj, attention.v_proj])
    assert product is not None
    assert product.low_rank is not None
    assert product.low_rank.down.data_ptr() == place == attention.q_proj.lora_A["default"].weight.data_ptr()


def test_a_copy_of_a_fused_model_is_a_model_of_its_own() -> None:
    model, own = fused_and_own()
    copied = copy.deepcopy(model)
    stepped(copied)
    assert_same_model(model, own, EXACT)
    assert_same_model(copied, stepped(own), 1e-9)


def test_saved_adapters_can_be_loaded(tmp_path: Path) -> None:
    model = stepped(fused_and_own()[0])
    expected = hidden(model)
    saved = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    assert len(saved) == 2 * 2 * len(ALL)
    fresh, _ = fused_and_own()
    set_peft_model_state_dict(fresh, saved)
    assert_near("loaded into a fused model", hidden(fresh), expected, EXACT)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    read = PeftModel.from_pretrained(family_model("llama", FP64), tmp_path, autocast_adapter_dtype=False).double()
    assert_near("read by peft", hidden(read), expected, 1e-6)  # the file may hold fp32


def test_resumed_training_equals_the_uninterrupted(tmp_path: Path) -> None:
    assert_resumes(lambda: fused_and_own(dtype=torch.bfloat16)[0], tmp_path)


# -- the sampler -------------------------------------------------------------------------------------------------------


def test_sampler_uses_the_adapters_as_the_trainer_does(modules_are_not_called: Any) -> None:
    model, own = fused_and_own("qwen2", torch.float32, lora_dropout=0.5)
    engine = NativeEngine(model, byte_tokenizer(), NativeSettings(page_size=4))
    task = Task(0, "t:0", "", tuple(range(3, 9)))

    def sampled() -> tuple[list[int], Tensor]:
        completion = engine.generate([task], 1, Sampling(7, ignore_eos=True), NoiseKey(0, 0))[0][0]
        return list(completion.token_ids), torch.tensor(completion.logprobs)

    def scored(tokens: list[int], each: Any) -> Tensor:
        return trainer_logprobs(each, [task.prompt_ids], [tokens], [0])

    with modules_are_not_called():
        tokens, logprobs = sampled()
        assert model.training, "dropout is back"
        torch.testing.assert_close(logprobs, scored(tokens, model), atol=LOGPROB_ROUNDING, rtol=0.0)
        with model.disable_adapter():
            base_tokens, base_logprobs = sampled()
            torch.testing.assert_close(base_logprobs, scored(base_tokens, model), atol=LOGPROB_ROUNDING, rtol=0.0)
    assert (tokens, logprobs.tolist()) != (base_tokens, base_logprobs.tolist())
    torch.testing.assert_close(logprobs, scored(tokens, own), atol=LOGPROB_ROUNDING, rtol=0.0)
