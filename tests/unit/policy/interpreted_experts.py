"""The kernels of routed experts against slow references, in Triton's interpreter on a CPU. Run by
`test_fused_interpreted.py`, in a process of its own; bf16 is tested on a GPU.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from expert_references import ROUTINGS, Routing, check_order, expert_inputs, slow_experts
from fused_references import (
    assert_like_float64,
    assert_near,
    decoder_of,
    noise,
    num_fused,
    poisoned_memory,
    states_and_gradients,
    trainer_logprobs,
)
from kernel_references import mend_interpreter
from tiny_models import LOGPROB_ROUNDING, byte_tokenizer, tiny_model
from torch import Tensor

from posttrain.config.policy import LoraConfig
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.lora import add_lora
from posttrain.policy.experts import compute_adapters_by_rows, stacked_experts
from posttrain.policy.fused import expert_kernels as kernels
from posttrain.policy.fused import experts
from posttrain.policy.fused.expert_kernels import ExpertGate, ExpertTile
from posttrain.policy.fused.experts import FusedExperts, fuse_experts
from posttrain.policy.fused.kernel_trials import Trial
from posttrain.policy.fused.layers import fuse_layers
from posttrain.types import NoiseKey, Sampling, Task

mend_interpreter()
FP32 = 5e-6
SMALL = ExpertTile(rows=16, width=64, depth=16, num_warps=4, num_stages=2, group=2)
CLAMPED = ExpertGate(alternates=True, alpha=1.702, limit=0.7, offset=1.0)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("at_once", [2**14, 64])
def test_pairs_are_sorted(routing: Routing, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SORTED_AT_ONCE", at_once)
    monkeypatch.setattr(kernels, "_MOST_SORTERS", 5)
    with poisoned_memory():
        check_order(kernels.sort_pairs(routing.chosen(), routing.experts, SMALL), routing.chosen(), routing.experts)


def products(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, gate: ExpertGate) -> Tensor:
    pairs = kernels.sort_pairs(routing.chosen(), routing.experts, SMALL)
    inner = kernels.grouped_product(x, gate_up, pairs, routing.top_k, factors=weights, gate=gate)
    out = kernels.grouped_product(inner, down, pairs, routing.top_k, factors=weights)
    return kernels.sum_pairs(out, routing.top_k, x.dtype)


@pytest.mark.parametrize("gate", [ExpertGate(), CLAMPED], ids=["halves", "alternating"])
@pytest.mark.parametrize("name", ["spread", "none of some", "all of one", "one token"])
def test_products_of_sorted_rows(name: str, gate: ExpertGate) -> None:
    """Sizes that do not divide into tiles."""
    routing = ROUTINGS[name]
    inputs = expert_inputs(routing, 40, 36, has_bias=False)
    with poisoned_memory():
        out = products(**inputs, routing=routing, gate=gate)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    assert_near("out", out, slow_experts(**wide, chosen=routing.chosen(), gate=gate), FP32)


def test_a_row_does_not_depend_on_the_others() -> None:
    routing = ROUTINGS["spread"]
    inputs = {**expert_inputs(routing, 48, 32, has_bias=False)}
    out = products(**inputs, routing=routing, gate=ExpertGate())
    inputs["x"][1:] *= 3.0
    assert torch.equal(products(**inputs, routing=routing, gate=ExpertGate())[0], out[0])


# -- modules -----------------------------------------------------------------------------------------------------------


def fused_module(family: str, **overrides: Any) -> Any:
    model = tiny_model(family, **overrides)
    fuse_experts(model)
    module: Any = next(iter(stacked_experts(model).values()))
    assert isinstance(module.forward, FusedExperts)
    return module


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_modules_and_their_gradients(family: str) -> None:
    module = fused_module(family)
    is_turned, gate = module.is_transposed, module.forward.gate
    routing = Routing("none of some", experts=4)
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    names |= {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"} if module.has_bias else {}
    inputs = {name: getattr(module, parameter).detach() for name, parameter in names.items()}
    inputs = {name: t.transpose(1, 2) if is_turned and t.dim() == 3 else t for name, t in inputs.items()}
    inputs |= {"x": noise(routing.tokens, 32), "weights": noise(routing.tokens, 2, seed=1).softmax(1)}

    def ours(x: Tensor, weights: Tensor, **parts: Tensor) -> Tensor:
        for name, part in parts.items():
            module._parameters[names[name]] = part.transpose(1, 2) if is_turned and part.dim() == 3 else part
        return module(x, routing.chosen(), weights)

    def reference(**parts: Tensor) -> Tensor:
        return slow_experts(**parts, chosen=routing.chosen(), gate=gate)

    for frozen in ([], list(names), ["weights", "x"]):
        assert_like_float64(ours, reference, inputs, FP32, frozen=frozen)
    with torch.no_grad(), poisoned_memory():
        sampled = ours(**inputs)
    assert_near("without gradients", sampled, reference(**{n: t.double() for n, t in inputs.items()}), FP32)


def adapted(family: str) -> Any:
    model = add_lora(tiny_model(family), LoraConfig(enabled=True, dim=3), seed=0)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            parameter.data.copy_(noise(*parameter.shape, seed=place) * 0.2)
    compute_adapters_by_rows(model)
    return model


@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "adapters"])
def test_a_model_in_training_and_in_sampling(is_adapted: bool) -> None:
    model = adapted("qwen3-moe") if is_adapted else tiny_model("qwen3-moe")
    own = copy.deepcopy(model)
    for module in stacked_experts(own).values():  # copies of forwards hold the modules that they were made for
        if is_adapted:
            module.forward.module = module
    fuse_layers(decoder_of(model), may_join=True)
    assert num_fused(model) == 2
    if is_adapted:
        compute_adapters_by_rows(model)  # the engine does it again
    assert all(isinstance(module.forward, FusedExperts) for module in stacked_experts(model).values())
    (values, grads), (want_values, want_grads) = (states_and_gradients(each) for each in (model, own))
    assert grads.keys() == want_grads.keys()
    for name, value in {**values, **grads}.items():
        assert_near(name, value, {**want_values, **want_grads}[name], 2e-5)
    engine = NativeEngine(model, byte_tokenizer(), NativeSettings(page_size=4))
    task = Task(0, "t:0", "", (5, 9, 40, 7))
    completion = engine.generate([task], 1, Sampling(3, ignore_eos=True), NoiseKey(0, 0))[0][0]
    expected = trainer_logprobs(own, [task.prompt_ids], [completion.token_ids], [0])
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=LOGPROB_ROUNDING, rtol=0.0)


def test_adapters_can_be_turned_off() -> None:
    model = adapted("qwen3-moe")
    fuse_experts(model)
    block: Any = model.get_base_model().model.layers[0].mlp
    hidden = noise(1, 9, 32)
    with torch.no_grad():
        with model.disable_adapter():
            off = block(hidden)
        on = block(hidden)
    plain = tiny_model("qwen3-moe").model.layers[0].mlp
    assert_near("off", off, plain(hidden).detach(), FP32)
    assert float((on - off).abs().max()) > 1e-3


def test_modules_of_other_kinds_keep_their_forward() -> None:
    model = tiny_model("qwen3-moe", hidden_act="gelu")
    fuse_experts(model)
    assert all("forward" not in module.__dict__ for module in stacked_experts(model).values())


@pytest.mark.parametrize("ranks", [(), (8,)], ids=["whole", "adapters"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "biases"])
def test_sampling_rounds_where_training_does(has_bias: bool, ranks: tuple[int, ...]) -> None:
    """The interpreter has no bf16, but fp16. Sums of the products are exact in fp32 in any order: what is left are the
    places of rounding."""
    random = torch.Generator().manual_seed(0)

    def dyadic(*shape: int) -> Tensor:
        return (torch.randint(-64, 65, shape, generator=random) / 32).half()

    sizes = {"gate_up_proj": (64, 48), "down_proj": (48, 32)}
    parts: dict[str, Tensor] = {}
    for name, (outputs, inputs) in sizes.items():
        parts[name] = dyadic(3, outputs, inputs) / 8
        parts |= {f"{name}_bias": dyadic(3, outputs)} if has_bias else {}
    for rank in ranks:
        for name, (outputs, inputs) in sizes.items():
            parts |= {f"{name}/0/A": dyadic(3 * rank, inputs) / 8, f"{name}/0/B": dyadic(outputs, 3 * rank) / 8}
    module = experts._stand_in(list(parts), list(parts.values()), CLAMPED, is_transposed=False)
    fused = FusedExperts(module, CLAMPED)
    weights = torch.rand(20, 2, generator=random).half()
    given = dyadic(20, 48), torch.rand(20, 3, generator=random).topk(2).indices, weights, fused.low_ranks()
    with torch.no_grad():
        assert torch.equal(fused.sampled(*given), fused.trained(*given))


# -- trials ------------------------------------------------------------------------------------------------------------

# Of a trial: the kernel with a wrong result, and whether it is one of training.
WRONG = {"grouped_product": False, "sum_pairs": False, "sort_pairs": True, "gate_forward": True, "gate_backward": True}


@pytest.mark.parametrize("name", [None, *WRONG])
def test_torch_computes_where_a_kernel_is_wrong(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = tiny_model("gpt-oss").model.layers[0].mlp.experts
    own, gate = module.forward, experts._gate_of(module)
    module.forward = FusedExperts(module, gate)
    monkeypatch.setattr(experts, "TRIAL", Trial("routed experts", experts._comparisons))
    monkeypatch.setattr(kernels, "TILES", {16: SMALL})
    monkeypatch.setattr(kernels, "tile_of", lambda num_pairs, num_experts: SMALL)
    if name is not None:
        right = getattr(kernels, name)

        def wrong(*args: Any, **options: Any) -> Any:
            out = right(*args, **options)
            whole = out[0] if isinstance(out, tuple) else out
            whole[:2] = whole[:2].flip(0)  # two rows change places
            return out

        monkeypatch.setattr(kernels, name, wrong)
    routing = Routing("spread", experts=4)
    given = noise(routing.tokens, 32), routing.chosen(), noise(routing.tokens, 2, seed=1).softmax(1)
    with warnings.catch_warnings(record=True) as warned, torch.set_grad_enabled(WRONG.get(name or "", True)):
        warnings.simplefilter("always")
        found = module(*given)
        assert_near("out", found.detach(), own(*given).detach(), FP32)
        assert len([one for one in warned if "computed by torch" in str(one.message)]) == (name is not None)
        assert torch.equal(found, own(*given)) or name is None
        module(*given)
    assert len(warned) == (name is not None), "tried once"


def test_another_tile_or_a_first_gradient_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(experts, "TRIAL", Trial("routed experts", lambda *_, **key: asked.append(key) or ()))
    module = fused_module("qwen3-moe")
    for way in ("sampled", "trained"):
        monkeypatch.setattr(FusedExperts, way, lambda self, x, *_: x)
    asked.clear()
    for tokens, trains in ((1, False), (300, False), (300, True), (300, True)):
        with torch.set_grad_enabled(trains):
            module(noise(tokens, 32), noise(tokens, 4).topk(2).indices, noise(tokens, 2).softmax(1))
    assert [(key["tile"].rows, key["is_trained"]) for key in asked] == [(128, False), (128, True)]
