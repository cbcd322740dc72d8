"""Fused layers around their kernels: which layers, joined parameters, copies, checkpoints, the sampler. The kernels
themselves stand aside (`use_torch_kernels`), so that models can be in float64 and the comparison exact;
`interpreted_fused.py` has them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_references import (
    FUSED,
    FUSED_AROUND_MIXERS,
    FUSED_BEFORE_EXPERTS,
    FUSED_LAYERS,
    assert_near,
    assert_resumes,
    assert_same_model,
    decoder_of,
    family_model,
    mean_error,
    noise,
    num_fused,
    random_batch,
    states_and_gradients,
    stepped,
    use_torch_kernels,
)
from peft import LoraConfig, get_peft_model
from tiny_models import LOGPROB_ROUNDING, VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.attention_interface import attention_context
from posttrain.policy.checkpoint.writer import CheckpointWriter
from posttrain.policy.fused.accumulate import joined
from posttrain.policy.fused.adapters import product_of
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.packed import PackedAttention, Segment
from posttrain.types import NoiseKey, Sampling, Task

pytest.importorskip("triton", reason="Triton is not installed here (it is on Linux, with the extra dev)")
EXACT = 1e-11
FP64 = torch.float64


@pytest.fixture(autouse=True)
def _torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_kernels(monkeypatch)


def fused_and_own(
    family: str, dtype: torch.dtype = FP64, *, may_join: bool = True, **overrides: Any
) -> tuple[Any, Any]:
    model = family_model(family, dtype, **overrides)
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=may_join)
    return model, own


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    with attention_context(PackedAttention([Segment(0, ids.shape[1])], ids.device)):
        out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


# -- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_join", [True, False], ids=["joined", "not joined"])
@pytest.mark.parametrize("family", FUSED_LAYERS)
def test_fused_model_has_the_same_outputs_and_gradients(family: str, may_join: bool) -> None:
    model, own = fused_and_own(family, may_join=may_join)
    assert num_fused(model) == FUSED_LAYERS[family]
    assert_same_model(model, own, EXACT)


@pytest.mark.parametrize("may_join", [True, False], ids=["joined", "not joined"])
@pytest.mark.parametrize("family", FUSED_BEFORE_EXPERTS)
def test_layers_with_experts_have_the_same_outputs_and_gradients(family: str, may_join: bool) -> None:
    """Their attention is fused, with sinks that are trained; products in FP8 need the MLP, too."""
    model, own = fused_and_own(family, may_join=may_join)
    assert num_fused(model) == 2
    assert fuse_layers(decoder_of(model), may_join=may_join) == 0
    assert_same_model(model, own, EXACT)
    with torch.no_grad():
        for each in (model, own):
            for name, parameter in each.named_parameters():
                parameter += 0.5 if name.endswith("sinks") else 0.0
    assert_same_model(model, own, EXACT)


@pytest.mark.parametrize("may_join", [True, False], ids=["joined", "not joined"])
@pytest.mark.parametrize("family", FUSED_AROUND_MIXERS)
def test_layers_with_other_mixers_have_the_same_outputs_and_gradients(family: str, may_join: bool) -> None:
    """A mixer of the family's own, norms that multiply with 1 + weight; no products in FP8."""
    model, own = fused_and_own(family, may_join=may_join)
    assert num_fused(model) == FUSED_AROUND_MIXERS[family]
    assert fuse_layers(decoder_of(model), may_join=may_join) == 0
    assert_same_model(model, own, EXACT)
    forwards = [layer.forward for layer in decoder_of(model).layers]  # type: ignore[union-attr]
    assert all(forward.successor is not None for forward in forwards) is may_join
    ours, theirs = (normed(decoder_of(each)).last_hidden_state for each in (model, own))
    assert_near("without gradients", ours, theirs, EXACT)


def test_adapters_on_a_mixer_and_around_it() -> None:
    targets = ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "o_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets)
    model: Any = get_peft_model(family_model("qwen3.5", FP64), config, autocast_adapter_dtype=False)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.data = noise(*parameter.shape, seed=place).double() * 0.2
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=True)
    assert num_fused(model) == 3
    assert_same_model(model, own, EXACT)
    with model.disable_adapter(), own.disable_adapter():
        ours, theirs = (states_and_gradients(each, backward=False)[0]["hidden"] for each in (model, own))
    assert_near("without", ours, theirs, EXACT)


def test_long_rows_and_rows_of_one_token() -> None:
    model, own = fused_and_own("mistral")
    assert_same_model(model, own, EXACT, random_batch([300, 40, 1], [30, 1, 7, 2, 5], [0, 0, 1, 1, 2]))
    assert_same_model(model, own, EXACT, random_batch([1], [1], [0]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("may_join", [True, False], ids=["joined", "not joined"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3.5"])
def test_activation_checkpointing(
    family: str, may_join: bool, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = fused_and_own(family, may_join=may_join)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    from posttrain.policy.fused import kernels

    computed, forward = [], kernels.swiglu_forward
    monkeypatch.setattr(kernels, "swiglu_forward", lambda *of: (computed.append(1), forward(*of))[1])
    assert_same_model(model, own, EXACT)
    assert len(computed) == 2 * num_fused(model), "once in the pass, once when it is computed again"


def test_similar_families_are_distinguished_by_their_outputs() -> None:
    """Granite without its factor is Llama, with it is not; an activation is not visible in the parts of a layer."""
    assert fuse_layers(decoder_of(family_model("granite", residual_multiplier=1.0)), may_join=True) == 2
    assert fuse_layers(decoder_of(family_model("llama", hidden_act="gelu")), may_join=True) == 0


def test_layers_with_other_arguments_are_not_fused() -> None:
    model = family_model("llama")
    decoder: Any = decoder_of(model)
    rotation = decoder.rotary_emb.forward
    decoder.rotary_emb.forward = lambda x, position_ids, layer_type: rotation(x, position_ids)
    assert fuse_layers(decoder, may_join=True) == 0


def test_several_sequences_at_once_run_through_the_layers_own_forward() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    model = tiny_model("llama", attention="eager").double()
    expected = model(input_ids=ids).logits
    assert fuse_layers(decoder_of(tiny_model("llama")), may_join=True) == 2
    model.set_attn_implementation("posttrain")
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    model.set_attn_implementation("eager")
    assert_near("logits", model(input_ids=ids).logits, expected, EXACT)


def test_fusing_twice_is_fusing_once() -> None:
    model, _ = fused_and_own("llama", torch.float32)
    layers: Any = decoder_of(model).layers
    first = [layer.forward for layer in layers]
    for may_join in (True, False):
        assert fuse_layers(decoder_of(model), may_join=may_join) == 2
    NativeEngine(model, byte_tokenizer(), NativeSettings())
    assert [layer.forward for layer in layers] == first
    assert not any(hasattr(forward.own_forward, "own_forward") for forward in first)


def test_modules_stay_in_the_mode_they_were_in() -> None:
    model = family_model("llama")
    decoder_of(model).layers[1].mlp.eval()  # type: ignore[index, union-attr]
    before = [module.training for module in model.modules()]
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    assert [module.training for module in model.modules()] == before


# -- joined parameters -------------------------------------------------------------------------------------------------


def test_joined_parameters_are_views_of_one_tensor() -> None:
    parts = [nn.Parameter(noise(size, 5, seed=size)) for size in (3, 1, 4)]
    before = [part.detach().clone() for part in parts]
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(before))
    assert not whole.requires_grad
    assert joined(parts).data_ptr() == whole.data_ptr(), "the second time nothing moves"
    with torch.no_grad():
        parts[1].fill_(7.0)
    assert (whole[3] == 7.0).all()
    copies = copy.deepcopy(parts)
    assert torch.equal(joined(copies), whole)
    assert joined(copies).data_ptr() != whole.data_ptr()
    assert joined(parts).data_ptr() == whole.data_ptr()
    parts[2].data = torch.zeros(4, 5)
    assert (joined(parts)[4:] == 0).all()
    assert torch.equal(joined(parts[:2]), whole[:4])
    backwards = [parts[2], parts[0]]  # another order is another place
    assert torch.equal(joined(backwards), torch.cat([p.detach() for p in backwards]))


def test_neighbours_that_were_allocated_apart_are_not_taken_for_joined() -> None:
    memory = torch.arange(12.0)
    parts = [nn.Parameter(memory[:6].view(2, 3)), nn.Parameter(memory[6:].view(2, 3))]
    assert joined(parts).data_ptr() == memory.data_ptr()
    parts[1].data = memory[6:].view(2, 3).t().contiguous().t()  # the same shape, another order in memory
    whole = joined(parts)
    assert torch.equal(whole, torch.cat([part.detach() for part in parts]))
    assert whole.is_contiguous()


def test_which_modules_are_a_product() -> None:
    plain = [nn.Linear(5, size) for size in (3, 2)]
    assert product_of(plain) is not None
    assert product_of([plain[0], nn.Linear(5, 2, bias=False)]) is None
    assert product_of([plain[0], nn.Linear(5, 2).half()]) is None
    assert product_of([plain[0], plain[0]]) is None
    assert product_of([nn.Identity()]) is None
    plain[1].register_forward_hook(lambda *_: None)
    assert product_of(plain) is None


@pytest.mark.parametrize("family", ["qwen2", "llama with biases"])
def test_an_update_in_place_changes_the_joined_product(family: str) -> None:
    model, own = fused_and_own(family)
    before, _ = states_and_gradients(own, backward=False)
    assert_same_model(stepped(model), stepped(own), EXACT)
    after, _ = states_and_gradients(model, backward=False)
    assert (after["hidden"] - before["hidden"]).abs().max() > 1e-2
    attention = decoder_of(model).layers[0].self_attn  # type: ignore[index, union-attr]
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    place = parts[0].data_ptr()
    assert joined(parts).data_ptr() == place, "they still lie together"


@pytest.mark.parametrize("assign", [False, True], ids=["written into the parameters", "put in their place"])
def test_a_saved_state_can_be_loaded(assign: bool, tmp_path: Path) -> None:
    model, _ = fused_and_own("llama with biases")
    torch.save(stepped(model).state_dict(), tmp_path / "state.pt")
    fresh, _ = fused_and_own("llama with biases")
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"), assign=assign)
    assert_same_model(fresh, model, EXACT)


def test_saved_models_are_read_by_transformers(tmp_path: Path) -> None:
    model, _ = fused_and_own("qwen2", torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    CheckpointWriter(model, byte_tokenizer(), None, torch.device("cpu")).save(tmp_path / "ours", optimizer=False)
    for folder in (tmp_path / "theirs", tmp_path / "ours/policy/weights/model"):
        read = type(model).from_pretrained(folder).state_dict()
        assert all(torch.equal(value, read[name]) for name, value in model.state_dict().items())


def test_resumed_training_equals_the_uninterrupted(tmp_path: Path) -> None:
    assert_resumes(lambda: fused_and_own("qwen2", torch.bfloat16)[0], tmp_path)


def test_a_copy_of_a_fused_model_is_a_model_of_its_own() -> None:
    model, own = fused_and_own("llama")
    copied = copy.deepcopy(model)
    assert all(layer.forward.layer is layer for layer in decoder_of(copied).layers)  # type: ignore[union-attr]
    stepped(copied)
    assert_same_model(model, own, EXACT)
    assert_same_model(copied, stepped(own), EXACT)


def test_weights_moved_to_another_type_are_joined_again() -> None:
    model, own = fused_and_own("qwen3")
    assert_same_model(model.float(), own.float(), 1e-5)
    assert_same_model(model.double(), own.double(), EXACT)


def test_frozen_parts_have_no_gradient_and_the_others_the_same() -> None:
    model = family_model("qwen2", FP64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("k_proj", "gate_proj", "input_layernorm", "embed")))
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=True)
    assert_same_model(model, own, EXACT)


def test_bf16_is_as_near_to_fp32_as_the_layers_own_forward() -> None:
    model, own = fused_and_own("llama", torch.bfloat16)
    assert num_fused(model) == 2
    exact = copy.deepcopy(own).float()
    assert mean_error(model, exact) < min(1.2 * mean_error(own, exact), 0.05)


# -- the sampler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FUSED, *FUSED_BEFORE_EXPERTS, *FUSED_AROUND_MIXERS])
def test_sampler_runs_fused_layers_and_agrees_with_the_trainer(family: str) -> None:
    model = family_model(family, tie_word_embeddings=False).eval()
    own = copy.deepcopy(model)
    engine = NativeEngine(model, byte_tokenizer(), NativeSettings(page_size=4))
    assert num_fused(model) == {**FUSED_LAYERS, **FUSED_AROUND_MIXERS}.get(family, 2)
    task = Task(0, "t:0", "", tuple(range(3, 10)))
    completion = engine.generate([task], 1, Sampling(9, ignore_eos=True), NoiseKey(0, 0))[0][0]
    assert max(completion.token_ids) < VOCAB_SIZE
    sequence = torch.tensor([[*task.prompt_ids, *completion.token_ids]])
    for each in (own, model):
        logprobs = logits(each, sequence)[0, 6:-1].log_softmax(-1)
        expected = logprobs.gather(1, sequence[0, 7:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=LOGPROB_ROUNDING, rtol=0.0)


# -- sums that are left to the next norm -------------------------------------------------------------------------------


def sums_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills up with a word for every sum that is computed on its own."""
    from posttrain.policy.fused import kernels

    seen: list[str] = []
    add = kernels.add
    monkeypatch.setattr(kernels, "add", lambda x, delta: (seen.append("sum"), add(x, delta))[1])
    return seen


@pytest.mark.parametrize("family", FUSED_LAYERS)
def test_without_gradients_the_numbers_are_those_with_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = fused_and_own(family, torch.float32)
    seen, ids = sums_of_layers(monkeypatch), torch.arange(3, 40)[None]
    without = logits(model, ids)
    assert_near("logits", without, logits(own, ids), 1e-4)
    if FUSED_LAYERS[family] < len(decoder_of(model).layers):  # type: ignore[arg-type]
        return
    assert seen == [], "the norms add"
    with attention_context(PackedAttention([Segment(0, ids.shape[1])], ids.device)):
        with_gradients = model(input_ids=ids).logits
    assert seen == ["sum"] * FUSED_LAYERS[family]
    assert torch.equal(without, with_gradients.detach())


def test_sharded_layers_and_those_before_a_strange_norm_add_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(3, 20)[None]
    for may_join, strange in ((False, False), (True, True)):
        model = family_model("llama", FP64)
        own = copy.deepcopy(model)
        if strange:
            for each in (model, own):
                norm: Any = decoder_of(each).norm
                norm.forward = lambda states, forward=norm.forward: 2 * forward(states)
        assert fuse_layers(decoder_of(model), may_join=may_join) == 2
        seen = sums_of_layers(monkeypatch)
        assert_near("logits", logits(model, ids), logits(own, ids), EXACT)
        assert len(seen) == 2


@torch.no_grad()
def normed(decoder: Any, **options: Any) -> Any:
    ids = torch.arange(3, 40)[None]
    with attention_context(PackedAttention([Segment(0, ids.shape[1])], ids.device)):
        return decoder(input_ids=ids, use_cache=False, **options)


def test_hooks_see_the_complete_output_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = fused_and_own("llama")
    decoder, plain = decoder_of(model), decoder_of(own)
    seen: list[Tensor] = []
    hook = decoder.layers[0].register_forward_hook(lambda *called: seen.append(called[2]))
    expected = normed(plain, output_hidden_states=True).hidden_states
    assert_near("with a hook", normed(decoder).last_hidden_state, expected[-1], EXACT)
    assert_near("what the hook saw", seen[0], expected[1], EXACT)
    hook.remove()
    found = normed(decoder, output_hidden_states=True).hidden_states
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_near(f"states {number}", ours, theirs, EXACT)
    before = decoder.norm.register_forward_pre_hook(lambda _, args: (args[0].clone(),))  # type: ignore[union-attr]
    assert_near("with a hook before the norm", normed(decoder).last_hidden_state, expected[-1], EXACT)
    before.remove()
    decoder.norm = copy.deepcopy(plain.norm)
    assert_near("with another norm", normed(decoder).last_hidden_state, expected[-1], EXACT)


def test_sums_are_not_deferred_if_a_family_uses_states_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama", FP64)
    layer: Any = decoder_of(model).layers[0]
    called = type(layer).__call__

    def twice(self: Any, states: Tensor, *args: Any, **options: Any) -> Any:
        return called(self, states * 1.0, *args, **options)

    monkeypatch.setattr(type(layer), "__call__", twice)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    assert [each.forward.successor for each in decoder_of(model).layers] == [None, None]  # type: ignore[union-attr]
    assert_near("states", normed(decoder_of(model)).last_hidden_state, normed(decoder_of(own)).last_hidden_state, EXACT)
