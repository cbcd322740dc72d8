"""Training in FP8 on a GPU: products and their gradients against float64, models against bf16, and a trainer's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_references import assert_fp8_is_near, even_model, rounded, slow_product
from fused_references import EPS, noise, norm, poisoned_memory, random_batch, swiglu
from test_resume_cuda import LONG, assert_resumed_has_the_same_bits
from tiny_models import byte_tokenizer, tiny_model
from tiny_runs import LORA
from torch import Tensor

from posttrain.config import load_config
from posttrain.errors import InputError
from posttrain.policy.trainer import PolicyTrainer, RankSetup
from posttrain.types import TokenBatch

pytest.importorskip("triton")
BF16 = torch.bfloat16
# Norm of an error in parts of the norm: bf16 results, sums in the accumulators of the matrix units, and numbers that
# the kernels round to the neighbour because their scale differs in the last bit.
CLOSE = 1.2e-2


def given(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return (noise(*shape, seed=seed) * size).to("cuda", BF16).requires_grad_()


def fp8_product(weight: Tensor) -> Any:
    from posttrain.policy.fused.fp8 import Fp8Product
    from posttrain.policy.fused.fp8_kernels import quantise_columns, quantise_weight

    whole = weight.detach()
    copies = {"copy": quantise_weight(whole), "transposed": quantise_columns(whole)}
    return Fp8Product((weight,), (), whole, None, **copies)


def assert_close(name: str, ours: Tensor | None, expected: Tensor | None) -> None:
    assert ours is not None, name
    assert expected is not None, name
    assert ours.isfinite().all(), f"{name}: everything was written"
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < CLOSE, f"{name}: relative error {error:.2e}"


def assert_like_float64(ours: Any, reference: Any, *inputs: Tensor) -> None:
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    with poisoned_memory():
        out = ours(*inputs)
        grad = noise(*out.shape, seed=9).to(out)
        out.backward(grad)
    expected = reference(*wide)
    expected.backward(grad.double())
    assert_close("output", out, expected)
    for place, (tensor, want) in enumerate(zip(inputs, wide, strict=True)):
        assert_close(f"gradient {place}", tensor.grad, want.grad)


SHAPES = [(6144, 4096), (1024, 14336), (960, 576), (48, 64), (28672, 256)]  # outputs, inputs


@pytest.mark.parametrize("rows", [1, 64, 65, 130, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_and_its_gradients(rows: int, outputs: int, inputs: int) -> None:
    from posttrain.policy.fused.products import Multiply

    def ours(x: Tensor, weight: Tensor) -> Any:
        product = fp8_product(weight)
        return Multiply.apply(x, product, *product.parts)

    assert_like_float64(ours, slow_product, given(rows, inputs), given(outputs, inputs, seed=1, size=0.02))


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (6144, 4096)])
def test_norm_and_product(rows: int, outputs: int, inputs: int) -> None:
    from posttrain.policy.fused.ops import NormedLinear

    def ours(x: Tensor, weight: Tensor, projection: Tensor) -> Any:
        product = fp8_product(projection)
        return NormedLinear.apply(x, None, weight, EPS, False, product, *product.parts)[1]

    def reference(x: Tensor, weight: Tensor, projection: Tensor) -> Tensor:
        return slow_product(norm(x, weight), projection)

    assert_like_float64(ours, reference, given(rows, inputs), given(inputs), given(outputs, inputs, seed=1, size=0.02))


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize(("outputs", "inner"), [(576, 1536), (4096, 14336)])
def test_swiglu_and_product(rows: int, outputs: int, inner: int) -> None:
    from posttrain.policy.fused.ops import SwigluLinear

    def ours(gate_up: Tensor, projection: Tensor) -> Any:
        product = fp8_product(projection)
        return SwigluLinear.apply(gate_up, product, *product.parts)

    def reference(gate_up: Tensor, projection: Tensor) -> Tensor:
        return slow_product(swiglu(*gate_up.chunk(2, dim=1)), projection)

    assert_like_float64(ours, reference, given(rows, 2 * inner), given(outputs, inner, seed=1, size=0.02))


@pytest.mark.parametrize(
    ("rows", "width"), [(7, 28672), (28672, 4096), (4096, 14336), (5, 57344), (960, 576), (33, 17)]
)
def test_rows_and_columns_are_quantised_as_in_torch(rows: int, width: int) -> None:
    """Gradients of gate and up have the widest rows."""
    from posttrain.policy.fused.fp8_kernels import quantise, quantise_columns

    x = torch.randn(rows, width, device="cuda", dtype=BF16)
    with poisoned_memory():
        found = {"rows": (quantise(x), x), "columns": (quantise_columns(x), x.T)}
    for name, (quantised, wide) in found.items():
        assert_close(name, quantised.values.double() * quantised.factors.double()[:, None], rounded(wide))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_states_and_gradients_of_a_model_are_near_those_in_bf16(family: str) -> None:
    assert_fp8_is_near(even_model(family, "cuda"))


# -- a trainer ---------------------------------------------------------------------------------------------------------

PARTS: list[TokenBatch | None] = [random_batch([90, 20], [60, 40, 50], [0, 1, 0]), random_batch([30], [99], [0], 1)]


def save(folder: Path, family: str) -> Path:
    model = tiny_model(family, hidden_size=256, intermediate_size=528, num_attention_heads=8, head_dim=32)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def trainer(model: Path, *words: str) -> PolicyTrainer:
    settings = [f"policy.model_name={model}", "policy.device=cuda", "policy.fp8=true", *words]
    return PolicyTrainer(RankSetup(load_config("grpo", None, settings).config.policy, 0, needs_reference=True))


def scores(found: list[Tensor | None]) -> Tensor:
    return torch.cat([part for part in found if part is not None])


@pytest.mark.parametrize("words", [[], LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept activations", "recomputed activations"])
def test_a_trainer_scores_with_the_products_it_trains_with(words: list[str], recompute: bool, tmp_path: Path) -> None:
    rank = trainer(
        save(tmp_path, "llama"), *words, f"policy.dtensor_cfg.activation_checkpointing={recompute}",
        "policy.optimizer.kwargs.lr=1e-2",
    )  # fmt: skip
    seen: list[Tensor] = []

    def loss(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(logprobs.detach().cpu())
        value = -logprobs.mean()
        return value, {"loss": value.detach()}

    before = scores(rank.logprobs(PARTS))
    assert torch.equal(scores(rank.reference_logprobs(PARTS)), before)
    losses = [rank.update(PARTS, loss, seed=0)["loss"]]
    assert torch.equal(torch.cat(seen), before), "ratios are exactly 1 before the first update"
    held = torch.cuda.memory_allocated()
    losses += [rank.update(PARTS, loss, seed=0)["loss"] for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert torch.cuda.memory_allocated() <= held + 2**20, "copies are not kept"


def test_models_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policy\.fp8 = true: 0 of 2 layers of gemma2"):
        trainer(save(tmp_path, "gemma2"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("grpo", LONG), ("grpo", [*LONG, "policy.generation.native_cfg.precision=fp8"]), ("dpo", LORA)],
    ids=["grpo", "grpo, sampling in FP8", "dpo with adapters"],
)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(kind: str, settings: list[str], tmp_path: Path) -> None:
    assert_resumed_has_the_same_bits(kind, [*settings, "policy.fp8=true"], tmp_path)
