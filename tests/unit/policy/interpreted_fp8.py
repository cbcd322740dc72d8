"""FP8 products and quantised activations against float64, in Triton's interpreter on a CPU. Run by
`test_fp8_interpreted.py`, in a process of its own: whether kernels are interpreted is decided when Triton is imported.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fp8_references import slow_product
from fused_references import (
    EPS,
    assert_like_float64,
    assert_near,
    noise,
    norm,
    poisoned_memory,
    swiglu,
    trainer_logprobs,
)
from kernel_references import mend_interpreter
from peft import LoraConfig, get_peft_model
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings, kernels
from posttrain.engines.native import attention as engine_attention
from posttrain.engines.native import fp8 as engine_fp8
from posttrain.engines.native.engine import Workspace
from posttrain.policy.fused import fp8_kernels, ops
from posttrain.policy.fused.accumulate import joined
from posttrain.policy.fused.adapters import product_of
from posttrain.policy.fused.fp8 import Fp8Product, Fp8Weights, ScaledRows, whole
from posttrain.policy.fused.fp8_kernels import FP8, LARGEST
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.fused.products import LowRank, Multiply, Product
from posttrain.types import Completion, NoiseKey, OpenGroup, Sampling, Task, Unfinished

mend_interpreter()
ONE_ROUNDING = 2**-4  # of e4m3, relative to the number, or to the smallest normal one of its row
SMALLEST_NORMAL = 2**-6 / LARGEST  # in parts of the largest number of a row


def meant(rows: ScaledRows) -> Tensor:
    return rows.values.double() * rows.factors.double()[..., None]


def assert_rounded_once(rows: ScaledRows, expected: Tensor) -> None:
    assert rows.values.dtype == FP8
    assert rows.factors.isfinite().all(), "every factor was written"
    largest = expected.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    allowed = expected.abs().clamp_min(SMALLEST_NORMAL * largest) * ONE_ROUNDING * (1 + 1e-4)
    assert ((meant(rows) - expected).abs() <= allowed).all()
    assert torch.allclose(rows.factors.double() * LARGEST, largest[..., 0], rtol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(7, 33), (1, 130), (40, 16), (5, 2100), (0, 33)])
def test_rows_come_back_to_one_rounding(rows: int, width: int) -> None:
    x = noise(rows, width) * (10.0 ** noise(rows, 1, seed=2))
    with poisoned_memory():
        assert_rounded_once(fp8_kernels.quantise(x), x.double())
    again = fp8_kernels.quantise(meant(fp8_kernels.quantise(x)).float())
    assert torch.equal(meant(again).float(), meant(fp8_kernels.quantise(x)).float()), (
        "quantised numbers stay what they are"
    )


@pytest.mark.parametrize(("rows", "columns"), [(7, 33), (40, 16), (513, 35), (2, 40)])
def test_columns_are_quantised_as_rows_of_the_transpose(rows: int, columns: int) -> None:
    x = noise(rows, columns) * (10.0 ** noise(1, columns, seed=2))
    x[rows // 2, 3] = float("nan")
    with poisoned_memory():
        found = fp8_kernels.quantise_columns(x)
    expected = fp8_kernels.quantise(x.T.contiguous())
    assert torch.equal(found.factors, expected.factors)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert found.values[3].float().isnan().sum() == 1


def test_a_row_of_zeros_stays_zero_and_nan_stays_nan() -> None:
    x = torch.zeros(3, 20)
    x[1, 4], x[2, 5] = float("nan"), float("inf")
    found = meant(fp8_kernels.quantise(x))
    assert (found[0] == 0).all()
    assert found[1].isnan().sum() == 1
    assert found[2].isnan().any(), "an overflow does not look like a number"


def test_heads_of_tokens_go_to_their_slots() -> None:
    wide = noise(5, 3 * 3 * 8)
    x = wide[:, 24:48].unflatten(1, (3, 8))  # as keys are, between queries and values
    pool = torch.full((4, 2, 3, 8), float("nan")).to(FP8)
    factors = torch.full((4, 2, 3), float("nan"))
    slots = torch.tensor([7, 0, 3, 2, 5])
    fp8_kernels.quantise_into(x, pool, factors, slots)
    written = ScaledRows(pool.flatten(0, 1).view(torch.uint8)[slots].view(FP8), factors.flatten(0, 1)[slots])
    assert_rounded_once(written, x.double())
    others = torch.tensor([1, 4, 6])
    assert factors.flatten(0, 1)[others].isnan().all(), "nothing else was written"


@pytest.mark.parametrize(("rows", "width"), [(7, 33), (1, 130), (0, 33)])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_norm(rows: int, width: int, has_delta: bool, dtype: torch.dtype | None) -> None:
    x, weight = noise(rows, width), noise(width)
    delta = noise(rows, width, seed=1).half() if has_delta else None
    with poisoned_memory():
        total, quantised, y, scale = fp8_kernels.norm_quantised(x, delta, weight, EPS, dtype)
    wide = x.double() if delta is None else x.double() + delta.double()
    assert_near("sum", total, wide, 2e-6)
    assert_rounded_once(quantised, norm(total.double(), weight.double()))
    assert_near("factor of the norm", scale, (wide.square().mean(-1) + EPS).rsqrt(), 2e-6)
    assert (y is None) == (dtype is None)
    if y is not None:
        assert_near("norm", y, norm(wide, weight.double()), 4e-3)


@pytest.mark.parametrize(("rows", "width"), [(7, 33), (3, 130), (0, 16)])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_swiglu(rows: int, width: int, dtype: torch.dtype | None) -> None:
    gate_up = noise(rows, 2 * width).half()
    with poisoned_memory():
        quantised, y = fp8_kernels.swiglu_quantised(gate_up, dtype)
    expected = swiglu(*gate_up.double().chunk(2, dim=1))
    assert_rounded_once(quantised, expected)
    if y is not None:
        assert_near("swiglu", y, expected, 4e-3)


@pytest.mark.parametrize(("outputs", "inputs"), [(7, 33), (40, 16), (5, 2100)])
def test_a_weight_has_one_factor(outputs: int, inputs: int) -> None:
    weight = noise(outputs, inputs)
    with poisoned_memory():
        found = fp8_kernels.quantise_weight(weight)
    largest = weight.double().abs().max()
    assert torch.allclose(found.factors.double() * LARGEST, largest.expand(outputs), rtol=1e-5)
    allowed = weight.double().abs().clamp_min(SMALLEST_NORMAL * largest) * ONE_ROUNDING * (1 + 1e-4)
    assert ((meant(found) - weight.double()).abs() <= allowed).all()
    kept = fp8_kernels.quantise_weight(2 * weight, found)
    assert kept.values.data_ptr() == found.values.data_ptr()
    assert torch.allclose(kept.factors.double() * LARGEST, 2 * largest.expand(outputs), rtol=1e-5)
    weight[outputs // 2, 3] = float("nan")
    assert fp8_kernels.quantise_weight(weight).values.float().isnan().any(), "an overflow does not look like a number"


def scaled(rows: int, width: int, seed: int = 0) -> ScaledRows:
    """As a product leaves them, with factors that differ by orders of magnitude."""
    factors = 10.0 ** (3 * noise(rows, seed=seed + 1).clamp(-1, 1))
    return ScaledRows((noise(rows, width, seed=seed) / factors[:, None]).half(), factors)


@pytest.mark.parametrize(("rows", "width"), [(7, 33), (3, 2100), (0, 16)])
def test_factors_that_a_product_has_not_applied_are_applied_by_its_reader(rows: int, width: int) -> None:
    x, weight, delta, gate_up = noise(rows, width), noise(width), scaled(rows, width), scaled(rows, 2 * width)
    with poisoned_memory():
        assert_near("rows", whole(delta), meant(delta), 1e-3)
        total, quantised, *_ = fp8_kernels.norm_quantised(x, delta, weight, EPS, None)
        activated, _ = fp8_kernels.swiglu_quantised(gate_up, None)
    assert_near("sum", total, x.double() + meant(delta), 2e-6)
    assert_rounded_once(quantised, norm(total.double(), weight.double()))
    assert_rounded_once(activated, swiglu(*meant(gate_up).chunk(2, dim=1)))


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "LoRA"])
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_a_product_that_defers_its_factors_equals_one_that_applies_them(adapted: bool, bias: bool) -> None:
    """In fp32, where factors before and after a rounding make no difference."""
    weight, offset = noise(48, 32), noise(48, seed=1) if bias else None
    low_rank = None
    if adapted:
        down, up = noise(4, 32, seed=2), noise(16, 4, seed=3)
        low_rank = LowRank((down,), (up,), down, ((32, 16),), (0.5,))
    own = ((weight,), () if offset is None else (offset,), weight, offset, low_rank)
    product = Fp8Product(*own, copy=fp8_kernels.quantise_weight(weight), transposed=None, one=torch.ones(()))
    x, delta, norm_weight, gate_up = noise(5, 32), noise(5, 32, seed=4), noise(32, seed=5), noise(5, 64, seed=6)
    with torch.no_grad():
        assert_near("product", whole(product.deferred(x)), product.forward(x)[0].double(), 1e-5)
        total, out = product.deferred_of_norm(x, delta, norm_weight, EPS)
        expected = product.of_norm(x, delta, norm_weight, EPS)
        assert torch.equal(total, expected[0])
        assert_near("of the norm", whole(out), expected[2].double(), 1e-5)
        found = whole(product.deferred_of_swiglu(gate_up))
        assert_near("of SwiGLU", found, product.of_swiglu(gate_up)[0].double(), 1e-5)
    assert isinstance(out, ScaledRows) is not bias


# -- gradients ---------------------------------------------------------------------------------------------------------

CLOSE = 2e-5  # of the largest number: fp32, and the same e4m3 values as in float64


def fp8_product(*weights: Tensor) -> Fp8Product:
    joint = joined(weights)
    copies = {"copy": fp8_kernels.quantise_weight(joint), "transposed": fp8_kernels.quantise_columns(joint)}
    return Fp8Product(weights, (), joint, None, **copies)


def normed(x: Tensor, delta: Tensor, weight: Tensor, w0: Tensor, w1: Tensor) -> Any:
    product = fp8_product(w0, w1)
    return ops.NormedLinear.apply(x, delta, weight, EPS, False, product, *product.parts)


def slow_normed(x: Tensor, delta: Tensor, weight: Tensor, w0: Tensor, w1: Tensor) -> Any:
    return x + delta, slow_product(norm(x + delta, weight), torch.cat([w0, w1]))


@pytest.mark.parametrize("frozen", [[], ["w0", "w1"], ["x", "delta", "weight"]], ids=["all", "inputs", "weights"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(7, 48, (32, 16)), (1, 16, (16, 16)), (33, 64, (16, 64))])
def test_gradients_of_norm_and_product(rows: int, inputs: int, outputs: tuple[int, int], frozen: list[str]) -> None:
    given = {"x": noise(rows, inputs), "delta": noise(rows, inputs, seed=1), "weight": noise(inputs)}
    given |= {f"w{i}": noise(size, inputs, seed=2 + i) for i, size in enumerate(outputs)}
    unused = (0,) if "x" in frozen else ()
    assert_like_float64(normed, slow_normed, given, CLOSE, frozen=frozen, unused=unused)


@pytest.mark.parametrize(("rows", "inner", "outputs"), [(5, 48, 32), (1, 16, 16)])
def test_gradients_of_swiglu_and_product(rows: int, inner: int, outputs: int) -> None:
    def ours(gate_up: Tensor, w0: Tensor) -> Any:
        product = fp8_product(w0)
        return ops.SwigluLinear.apply(gate_up, product, *product.parts)

    given = {"gate_up": noise(rows, 2 * inner), "w0": noise(outputs, inner)}
    assert_like_float64(ours, lambda gate_up, w0: slow_product(swiglu(*gate_up.chunk(2, dim=1)), w0), given, CLOSE)


def test_gradients_of_a_product() -> None:
    def ours(x: Tensor, w0: Tensor) -> Any:
        product = fp8_product(w0)
        return Multiply.apply(x, product, *product.parts)

    given = {"x": noise(9, 32), "w0": noise(48, 32)}
    assert_like_float64(ours, lambda x, w0: slow_product(x, w0), given, CLOSE)
    plain = Product((w := given["w0"],), (), w, None)
    error = (ours(given["x"], w) - plain.forward(given["x"])[0]).norm() / plain.forward(given["x"])[0].norm()
    assert 1e-3 < error < 0.06, "quantised, and near the product that is not"


# -- a sampler ---------------------------------------------------------------------------------------------------------

PROMPTS = ((5, 9, 40, 7, 11, 2, 30), (17, 3, 50))
SAMPLING = Sampling(4, ignore_eos=True)
# A prompt goes through in two pieces: the second reads what the first has written.
SETTINGS = NativeSettings(page_size=4, max_prefill_tokens=4, precision="fp8", kv_cache_gib=0.001)
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def _way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads pages in place with the kernels, and keeps its memory."""
    monkeypatch.setattr(engine_fp8, "fp8_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(engine_attention, "_load_kernel", lambda device: kernels)


def half_model(family: str = "llama") -> Any:
    return tiny_model(family, dtype=torch.float16, **SMALL)


def sampler(model: nn.Module, **options: object) -> NativeEngine:
    engine = NativeEngine(model, byte_tokenizer(), SETTINGS.model_copy(update=options))
    engine._keeps_workspace = True
    return engine


def workspace(engine: NativeEngine) -> Workspace:
    assert engine._workspace is not None
    return engine._workspace


def sampled(engine: NativeEngine) -> list[Completion]:
    tasks = [Task(draw, f"t:{draw}", "", prompt) for draw, prompt in enumerate(PROMPTS)]
    return [group[0] for group in engine.generate(tasks, 1, SAMPLING, NoiseKey(0, 0))]


def gap(model: nn.Module, completions: list[Completion]) -> float:
    """Mean exp of the absolute difference to the trainer's log-probabilities."""
    theirs = trainer_logprobs(model, PROMPTS, [c.token_ids for c in completions], range(2))
    ours = torch.tensor([logprob for c in completions for logprob in c.logprobs])
    return float((ours - theirs.float()).abs().exp().mean())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_samples_are_near_the_trainers_and_not_equal(family: str) -> None:
    """qwen2 has biases, qwen3 norms of heads."""
    model = half_model(family)
    assert 1.005 < gap(model, sampled(sampler(model))) < 2.0


def test_copies_follow_the_weights_and_are_released() -> None:
    model = half_model()
    engine = sampler(model)
    before = sampled(engine)
    scored = gap(model, before)
    copies = workspace(engine).fp8
    assert copies is not None
    addresses = {copy.values.data_ptr() for copy in copies._copies.values()}
    held = engine.num_held_bytes
    assert held == workspace(engine).cache.num_bytes + copies.num_bytes
    assert gap(model, before) == scored, "the trainer does not see them"
    with torch.no_grad():
        for parameter in model.get_decoder().layers.parameters():
            parameter.mul_(1.2)
    after = sampled(engine)
    assert {copy.values.data_ptr() for copy in copies._copies.values()} == addresses, "as captured steps need it"
    assert after != before
    engine.release()
    assert engine.num_held_bytes == 0
    assert engine.forward.fp8 is None
    assert sampled(engine) == after
    assert engine.num_held_bytes == held


def test_drafts_change_no_token() -> None:
    """A finished answer to the same prompt is the draft of the other, which is equal to it at temperature 0."""
    model, greedy = half_model(), Sampling(5, temperature=0.0, ignore_eos=True)
    task = Task(0, "t:0", "", (5, 9))
    (finished,) = sampler(model).generate([task], 1, greedy, NoiseKey(0, 0))[0]
    begun = Unfinished(finished.token_ids[:1], finished.logprobs[:1])
    engine = sampler(model, num_speculative_tokens=3)
    (group,) = engine.sample_round([OpenGroup(task, 0, (finished, begun))], greedy, seed=0)
    assert group.answers[1].token_ids == finished.token_ids
    assert engine.drafted == (4, 1), "one step draws the four tokens that are left"


def test_layers_left_in_bf16_keep_their_cache() -> None:
    model = half_model()
    engine = sampler(model, num_last_layers_in_bf16=1)
    some = sampled(engine)
    assert [pool.dtype for pool in workspace(engine).cache.keys.values()] == [FP8, torch.float16]
    engine = sampler(model, num_last_layers_in_bf16=1, kv_cache_dtype="bfloat16")
    others = sampled(engine)
    assert {pool.dtype for pool in workspace(engine).cache.keys.values()} == {torch.float16}
    assert [c.logprobs for c in some] != [c.logprobs for c in others]


def fused_decoder(model: Any) -> Any:
    decoder = model.get_decoder()
    assert fuse_layers(decoder, may_join=True) == len(decoder.layers)
    return decoder


def test_adapters_are_not_quantised() -> None:
    torch.manual_seed(0)
    model = get_peft_model(half_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).half()
    decoder = fused_decoder(model.get_base_model())
    copies = Fp8Weights(decoder.layers)
    copies.refresh()
    modules = decoder.layers[0].forward.module_groups()[0]  # queries, keys and values
    x = noise(5, 32).half()
    found = {}
    for name in ("on", "off"):
        with torch.no_grad(), model.disable_adapter() if name == "off" else nullcontext():
            product = product_of(modules)
            assert product is not None
            in_fp8 = copies.product(product)
            assert isinstance(in_fp8, Fp8Product)
            found[name] = in_fp8.forward(x)[0].double()
    adapters = [module.scaling["default"] * _low_rank(module, x) for module in modules]
    assert_near("what adapters add", found["on"] - found["off"], torch.cat(adapters, dim=1), 1e-2)
    engine = sampler(model)
    on = sampled(engine)
    with model.disable_adapter():
        assert sampled(engine) != on


def _low_rank(module: Any, x: Tensor) -> Tensor:
    down, up = (getattr(module, name)["default"].weight.detach().double() for name in ("lora_A", "lora_B"))
    return x.double() @ down.T @ up.T


def test_a_copy_is_not_written_beyond_its_end() -> None:
    """Weights that moved leave their place to others, which may be larger."""
    model = half_model()
    copies = Fp8Weights(list(fused_decoder(model).layers))
    copies.refresh()
    first, *others = copies._copies.values()
    larger = max(others, key=lambda copy: copy.values.numel())
    address = next(address for address, copy in copies._copies.items() if copy is larger)
    copies._copies[address] = small = fp8_kernels.new_rows(1, 16, torch.device("cpu"))
    copies.refresh()
    assert copies._copies[address] is not small
    assert copies._copies[address].values.shape == larger.values.shape
    assert any(copy.values.data_ptr() == first.values.data_ptr() for copy in copies._copies.values())
