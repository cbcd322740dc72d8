"""The fused layers against float64 and against the models' own, in Triton's interpreter on a CPU. Run by
`test_fused_interpreted.py`, in a process of its own: whether kernels are interpreted is decided when Triton is
imported.

The interpreter has no correct rounding for bf16; fp16 stands in for it here, bf16 is tested on a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_references import (
    EPS,
    FUSED_AROUND_MIXERS,
    FUSED_LAYERS,
    angles,
    assert_like_float64,
    assert_near,
    assert_same_model,
    decoder_of,
    family_model,
    noise,
    norm,
    num_fused,
    poisoned_memory,
    rotated,
    states_and_gradients,
    swiglu,
    trainer_logprobs,
)
from kernel_references import mend_interpreter
from peft import LoraConfig, get_peft_model
from tiny_models import LOGPROB_ROUNDING, byte_tokenizer
from torch import Tensor

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.policy.fused import adam_kernels, kernels, ops, softmax
from posttrain.policy.fused.accumulate import joined
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.fused.products import Product
from posttrain.policy.optimizer import compact_adam
from posttrain.policy.optimizer.low_precision import block_size, noise_key
from posttrain.types import NoiseKey, Sampling, Task

mend_interpreter()
FP32 = 2e-6  # largest error of a tensor, in parts of its largest number
FP16 = 4e-3


@pytest.fixture(autouse=True)
def _several_rows_to_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_NORM_BACKWARD_PROGRAMS", 3)


def product(weights: dict[str, Tensor]) -> Product:
    """Of tensors named w0, w1 … and b0, b1 …: not parameters of modules, so that a test can hold on to them."""
    parts = [tensor for name, tensor in weights.items() if name.startswith("w")]
    biases = [tensor for name, tensor in weights.items() if name.startswith("b")]
    return Product(tuple(parts), tuple(biases), joined(parts), joined(biases) if biases else None)


def test_memory_is_poisoned() -> None:
    with poisoned_memory():
        x = torch.empty(3, 2)
        for made in (x, torch.empty_like(x), x.new_empty(4)):
            assert made.isnan().all()


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(7, 33), (1, 130), (4, 3), (5, 64), (0, 33)])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("unused", [(), (0,), (1,)], ids=["both used", "norm alone", "sum alone"])
def test_norm(rows: int, width: int, has_delta: bool, unused: tuple[int, ...]) -> None:
    inputs = {"x": noise(rows, width), "weight": noise(width)}
    if has_delta:
        inputs["delta"] = noise(rows, width, seed=1)

    def ours(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Any:
        return ops.AddNorm.apply(x, delta, weight, EPS, torch.float32)

    def reference(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Any:
        total = x * 1 if delta is None else x + delta
        return total, norm(total, weight)

    assert_like_float64(ours, reference, inputs, FP32, unused=unused)
    if not unused:
        assert_like_float64(ours, reference, inputs, FP32, frozen=["weight"])


def test_norm_between_two_precisions() -> None:
    """The residual in fp32, everything else in half precision: each output and each gradient in its own type."""
    inputs = {"x": noise(6, 40), "weight": noise(40).half(), "delta": noise(6, 40, seed=1).half()}
    total, y = ops.AddNorm.apply(inputs["x"], inputs["delta"], inputs["weight"], EPS, torch.float16)
    assert (total.dtype, y.dtype) == (torch.float32, torch.float16)
    assert_like_float64(
        lambda x, weight, delta: ops.AddNorm.apply(x, delta, weight, EPS, torch.float16),
        lambda x, weight, delta: (x + delta, norm(x + delta, weight)),
        inputs,
        FP16,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 4096, 10_000])
def test_gradients_are_added_up_exactly(count: int, dtype: torch.dtype) -> None:
    total, addend = noise(count), noise(count, seed=1).to(dtype)
    expected = total + addend.float()
    kernels.add_into(total, addend)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("shape", [(3, 512), (2, 40), (4, 37), (5, 8), (1500,)], ids=str)
@pytest.mark.parametrize(
    ("masters", "weights"),
    [(True, torch.float32), (True, torch.float16), (False, torch.float32), (False, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_an_update_of_adam_is_the_one_in_plain_torch(
    moments: Any, masters: bool, weights: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Over several updates, of numbers whose index takes more than 32 bits. Torch's square root on a CPU may miss the
    last bit, which may tip a rounding by chance in rare places.
    """
    results = []
    for update in (adam_kernels.update, compact_adam.update_slice):
        weight = noise(*shape).to(weights)
        state = compact_adam.new_state(weight, compact_adam.StateFormat(moments, masters))
        tensors = [weight, *[state.get(entry) for entry in compact_adam.ENTRIES]]
        if (size := block_size(shape) if moments == "int8" else None) is not None:
            tensors = [None if tensor is None else tensor.view(-1, size) for tensor in tensors[:4]]
            tensors += [state[entry].view(-1) for entry in compact_adam.ENTRIES[3:]]
        for step in range(1, 4):
            gradient = noise(*shape, seed=step).view_as(tensors[0]) * 10.0**-step
            rest = [0.5, 0.99, 0.1, 0.1, 0.999, 0.001, -0.1 / step, 0.03 * step, 1e-8]
            keys = torch.tensor([noise_key(step, what) for what in range(3)])
            update(compact_adam.Slice(tensors[0], gradient, tensors[1:], 2**33 + 5, torch.tensor(rest), keys))
        results.append(tensors)
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            near = torch.isclose(ours.float(), theirs.float(), rtol=1e-6, atol=1e-9)
            assert near.float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 1000), (1, 1), (0, 5), (2, 1024)])
def test_sum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = {"x": noise(*shape), "delta": noise(*shape, seed=1).to(dtype)}
    tolerance = FP32 if dtype == torch.float32 else FP16
    assert_like_float64(ops.Add.apply, lambda x, delta: x + delta, inputs, tolerance)


def normed_linear(x: Tensor, norm_weight: Tensor, delta: Tensor | None = None, **weights: Tensor) -> Any:
    whole = product(weights)
    return ops.NormedLinear.apply(x, delta, norm_weight, EPS, False, whole, *whole.parts)


def slow_normed_linear(x: Tensor, norm_weight: Tensor, delta: Tensor | None = None, **weights: Tensor) -> Any:
    total = x * 1 if delta is None else x + delta
    out = norm(total, norm_weight) @ torch.cat([w for name, w in weights.items() if name.startswith("w")]).T
    biases = [b for name, b in weights.items() if name.startswith("b")]
    return total, out + torch.cat(biases) if biases else out


def normed_linear_inputs(rows: int, width: int, sizes: list[int], *, bias: bool, delta: bool) -> dict[str, Tensor]:
    inputs = {"x": noise(rows, width), "norm_weight": noise(width)}
    inputs |= {f"w{i}": noise(size, width, seed=i) for i, size in enumerate(sizes)}
    if bias:
        inputs |= {f"b{i}": noise(size, seed=i) for i, size in enumerate(sizes)}
    if delta:
        inputs["delta"] = noise(rows, width, seed=2)
    return inputs


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("delta", [False, True], ids=["x alone", "x + delta"])
@pytest.mark.parametrize(
    ("rows", "width", "sizes"), [(7, 33, [6, 3, 5]), (1, 20, [4, 4]), (0, 20, [4, 4]), (3, 8, [1])]
)
def test_norm_and_product(rows: int, width: int, sizes: list[int], delta: bool, bias: bool) -> None:
    inputs = normed_linear_inputs(rows, width, sizes, bias=bias, delta=delta)
    assert_like_float64(normed_linear, slow_normed_linear, inputs, FP32)


@pytest.mark.parametrize(
    "frozen",
    [
        ["w0", "w2"],
        ["w0", "w1", "w2"],
        ["b1"],
        ["norm_weight"],
        ["x", "delta", "norm_weight"],
        ["w1", "b0", "b1", "b2"],
    ],
    ids=" ".join,
)
def test_norm_and_product_of_which_parts_are_frozen(frozen: list[str]) -> None:
    inputs = normed_linear_inputs(5, 21, [6, 3, 5], bias=True, delta=True)
    unused = (0,) if "x" in frozen else ()
    assert_like_float64(normed_linear, slow_normed_linear, inputs, FP32, frozen=frozen, unused=unused)


@pytest.mark.parametrize("unused", [(0,), (1,)], ids=["product alone", "sum alone"])
def test_norm_and_product_of_which_one_is_used(unused: tuple[int, ...]) -> None:
    inputs = normed_linear_inputs(5, 21, [6, 3], bias=True, delta=True)
    assert_like_float64(normed_linear, slow_normed_linear, inputs, FP32, unused=unused)


def swiglu_linear(gate_up: Tensor, **weights: Tensor) -> Tensor:
    whole = product(weights)
    return ops.SwigluLinear.apply(gate_up, whole, *whole.parts)


@pytest.mark.parametrize("frozen", [[], ["w0"], ["gate_up"]], ids=["", "weight frozen", "input frozen"])
@pytest.mark.parametrize(("rows", "inner", "width"), [(5, 37, 11), (1, 1030, 3), (0, 12, 4)])
def test_swiglu_and_product(rows: int, inner: int, width: int, frozen: list[str]) -> None:
    inputs = {"gate_up": noise(rows, 2 * inner), "w0": noise(width, inner)}
    assert_like_float64(
        swiglu_linear, lambda gate_up, w0: swiglu(*gate_up.chunk(2, dim=1)) @ w0.T, inputs, FP32, frozen=frozen
    )


def test_swiglu_and_product_with_bias() -> None:
    inputs = {"gate_up": noise(4, 30), "w0": noise(7, 15), "b0": noise(7)}
    assert_like_float64(
        swiglu_linear, lambda gate_up, w0, b0: swiglu(*gate_up.chunk(2, dim=1)) @ w0.T + b0, inputs, FP32
    )


@pytest.mark.parametrize(("rows", "inner"), [(5, 37), (1, 1030), (0, 12)])
def test_swiglu(rows: int, inner: int) -> None:
    inputs = {"gate": noise(rows, inner), "up": noise(rows, inner, seed=1)}
    assert_like_float64(ops.Swiglu.apply, swiglu, inputs, FP32)
    together = {"gate_up": noise(rows, 2 * inner)}  # two halves of one product, with gaps between the rows
    assert_like_float64(
        lambda gate_up: ops.Swiglu.apply(*gate_up.chunk(2, dim=1)),
        lambda gate_up: swiglu(*gate_up.chunk(2, dim=1)),
        together,
        FP32,
    )


@pytest.mark.parametrize(
    ("rows", "num_heads", "others", "dim"), [(9, 3, 2, 12), (1, 1, 0, 2), (11, 2, 0, 32), (0, 2, 1, 8)]
)
def test_rotation(rows: int, num_heads: int, others: int, dim: int) -> None:
    cos, sin = angles(rows, dim)
    parts = [num_heads * dim, others * dim]  # as in a layer: rotated together, used apart
    assert_like_float64(
        lambda x: ops.Rotate.apply(x * 1, cos, sin, num_heads).split(parts, dim=1),
        lambda x: rotated(x, cos, sin, num_heads).split(parts, dim=1),
        {"x": noise(rows, sum(parts))},
        FP32,
    )


def test_rotation_leaves_a_gradient_alone_that_others_may_hold() -> None:
    cos, sin = angles(5, 8)
    x = noise(5, 16).requires_grad_()
    grad = noise(5, 16, seed=1)
    ops.Rotate.apply(x * 1, cos, sin, 2).backward(grad)
    assert torch.equal(grad, noise(5, 16, seed=1))


@pytest.mark.parametrize(
    ("rows", "width", "block"), [(3, 130, 64), (2, 64, 64), (4, 1, 64), (1, 5000, 4096), (0, 9, 64)]
)
@pytest.mark.parametrize("factor", [1.0, 1.7])
def test_logprobs(rows: int, width: int, block: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "_BLOCK", block)
    logits = (noise(rows, width) * 4 + 30).requires_grad_()
    targets = torch.randint(width, (rows,), generator=torch.Generator().manual_seed(1))
    with poisoned_memory():
        normalisers, chosen = softmax.logprobs(logits.detach(), targets, factor)
    wide = logits.detach().double().requires_grad_()
    expected = (wide * factor).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    # Differences of numbers of about 50: that is what their rounding is relative to.
    torch.testing.assert_close(normalisers.double(), (wide * factor).logsumexp(-1), atol=2e-5, rtol=0.0)
    torch.testing.assert_close(chosen.double(), expected, atol=2e-5, rtol=0.0)
    weights = noise(rows, seed=2)
    expected.backward(weights.double())
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, FP16)):
        with poisoned_memory():
            grad = softmax.logit_gradient(logits.detach(), targets, normalisers, weights, factor, dtype)
        assert grad.dtype == dtype
        assert wide.grad is not None
        assert_near("gradient", grad, wide.grad, tolerance)


def test_logprobs_of_rows_with_impossible_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "_BLOCK", 16)
    logits = torch.full((2, 50), float("-inf"))
    logits[0, 40], logits[1, [3, 33]] = 2.0, 1.0
    normalisers, chosen = softmax.logprobs(logits, torch.tensor([40, 3]), 1.0)
    torch.testing.assert_close(chosen, torch.tensor([0.0, -0.6931472]))
    grad = softmax.logit_gradient(logits, torch.tensor([40, 3]), normalisers, torch.ones(2), 1.0, torch.float32)
    torch.testing.assert_close(grad[1, [3, 33, 4]], torch.tensor([0.5, -0.5, 0.0]))


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED_LAYERS)
def test_fused_model_has_the_same_outputs_and_gradients(family: str) -> None:
    model = family_model(family)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == num_fused(model) == FUSED_LAYERS[family]
    assert_same_model(model, own, 1e-5)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_model_with_other_mixers(family: str) -> None:
    model = family_model(family)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == 0
    assert num_fused(model) == FUSED_AROUND_MIXERS[family]
    assert_same_model(model, own, 1e-4)  # gradients of a recurrence


def test_model_whose_weights_are_not_joined() -> None:
    model = family_model("qwen3")
    own = copy.deepcopy(model)
    fuse_layers(decoder_of(model), may_join=False)
    assert_same_model(model, own, 1e-5)


def test_adapters_in_training_and_in_sampling() -> None:
    """On, off, and after an update, with the kernels around them; everything else is in `test_fused_adapters.py`."""
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model: Any = get_peft_model(family_model("qwen2"), config, autocast_adapter_dtype=False)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(noise(*parameter.shape, seed=place) * 0.2)
    own = copy.deepcopy(model)
    assert fuse_layers(decoder_of(model), may_join=True) == 2
    assert_same_model(model, own, 1e-5)
    with model.disable_adapter(), own.disable_adapter(), torch.no_grad():
        off = [states_and_gradients(each, backward=False)[0]["hidden"] for each in (model, own)]
    assert_near("off", *off, 1e-5)
    with torch.no_grad():
        for each in (model, own):
            for name, parameter in each.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
    engine = NativeEngine(model, byte_tokenizer(), NativeSettings(page_size=4))
    task = Task(0, "t:0", "", (5, 9, 40, 7))
    completion = engine.generate([task], 1, Sampling(3, ignore_eos=True), NoiseKey(0, 0))[0][0]
    for each in (model, own):
        expected = trainer_logprobs(each, [task.prompt_ids], [completion.token_ids], [0])
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=LOGPROB_ROUNDING, rtol=0.0)
