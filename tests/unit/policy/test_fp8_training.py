"""`policy.fp8` on a CPU, its kernels and products replaced by torch: what a trainer does, and what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_references import assert_fp8_is_near, even_model, use_torch_fp8
from fused_references import random_batch
from tiny_runs import LORA, assert_resumes, dpo, grpo, run, save_data, save_model
from torch import Tensor

from posttrain.config import load_config
from posttrain.errors import InputError
from posttrain.policy.fused import fp8
from posttrain.policy.trainer import PolicyTrainer, RankSetup
from posttrain.types import TokenBatch

pytest.importorskip("triton", reason="the names of the replaced kernels are in a module that imports it")
PARTS: list[TokenBatch | None] = [random_batch([5, 1], [4, 1, 2], [0, 1, 0]), random_batch([3], [6], [0], seed=1)]
WORDS = ["policy.device=cpu", "policy.precision=bfloat16", "policy.num_threads=1", "policy.optimizer.kwargs.lr=1e-2"]


@pytest.fixture
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_fp8(monkeypatch)


def trainer(folder: Path, *words: str, fp8: bool = True, reference: bool = False) -> PolicyTrainer:
    model = folder / "model"
    if not model.exists():
        save_model(model)
    settings = [f"policy.model_name={model}", *WORDS, f"policy.fp8={fp8}", *words]
    return PolicyTrainer(RankSetup(load_config("grpo", None, settings).config.policy, 0, needs_reference=reference))


class Mean:
    """A loss; keeps the log-probabilities that training saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append(logprobs.detach().clone())
        loss = -logprobs.mean()
        return loss, {"loss": loss.detach()}


def scores(found: list[Tensor | None]) -> Tensor:
    return torch.cat([part for part in found if part is not None])


@pytest.mark.usefixtures("_in_torch")
@pytest.mark.parametrize("words", [[], LORA], ids=["all weights", "LoRA"])
def test_training_is_near_bf16_and_is_scored_with_the_same_products(words: list[str], tmp_path: Path) -> None:
    found = {}
    for name in (True, False):
        rank, loss = trainer(tmp_path, *words, fp8=name), Mean()
        before = scores(rank.logprobs(PARTS))
        metrics = rank.update(PARTS, loss, seed=0)
        assert torch.equal(torch.cat(loss.seen), before), "the first update of a step has ratios of exactly 1"
        found[name] = (before, metrics["grad_norm"], scores(rank.logprobs(PARTS)))
    (before, norm, after), (plain_before, plain_norm, plain_after) = found[True], found[False]
    assert before == pytest.approx(plain_before, rel=0.1, abs=0.15)
    assert norm == pytest.approx(plain_norm, rel=0.1)
    # Adam moves a weight as far for a small gradient, whose sign FP8 may change, as for a large one: single scores
    # differ more.
    assert after == pytest.approx(plain_after, rel=0.2, abs=0.15)
    assert float((after - plain_after).abs().mean()) < 0.2
    for ours, plain in zip(found[True], found[False], strict=True):
        assert ours != pytest.approx(plain, rel=1e-4, abs=1e-4), "products are in FP8"


@pytest.mark.usefixtures("_in_torch")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_states_and_gradients_of_a_model_are_near_those_in_bf16(family: str) -> None:
    """qwen2 has biases, qwen3 norms of heads."""
    assert_fp8_is_near(even_model(family, "cpu"))


@pytest.mark.usefixtures("_in_torch")
def test_weights_are_quantised_again_after_an_update(tmp_path: Path) -> None:
    rank = trainer(tmp_path)
    before = scores(rank.logprobs(PARTS))
    rank.update(PARTS, Mean(), seed=0)
    after = scores(rank.logprobs(PARTS))
    assert not torch.equal(after, before)
    fresh = trainer(tmp_path)
    fresh.model.load_state_dict(rank.model.state_dict())
    assert torch.equal(scores(fresh.logprobs(PARTS)), after)


@pytest.mark.usefixtures("_in_torch")
def test_the_policy_as_it_started_is_its_reference_and_the_cache_knows_the_precision(tmp_path: Path) -> None:
    rank = trainer(tmp_path, reference=True)
    assert torch.equal(scores(rank.reference_logprobs(PARTS)), scores(rank.logprobs(PARTS)))
    plain = trainer(tmp_path, fp8=False, reference=True)
    assert not torch.equal(scores(rank.reference_logprobs(PARTS)), scores(plain.reference_logprobs(PARTS)))
    assert rank.reference_fingerprint() != plain.reference_fingerprint()


@pytest.mark.usefixtures("_in_torch")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept activations", "recomputed activations"])
def test_copies_are_gone_before_the_optimizer_steps(
    recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = trainer(tmp_path, f"policy.dtensor_cfg.activation_checkpointing={recompute}")
    assert rank.optimizer is not None
    step, alive = rank.optimizer.step, []

    def num_products() -> int:
        return sum(type(thing) in (fp8.Fp8Product, fp8.Fp8Weights) for thing in gc.get_objects())

    def counting(max_grad_norm: float | None) -> Any:
        alive.append(num_products())
        return step(max_grad_norm)

    monkeypatch.setattr(rank.optimizer, "step", counting)
    gc.disable()
    try:
        rank.update(PARTS, Mean(), seed=0)
        rank.logprobs(PARTS)
        assert [*alive, num_products()] == [0, 0]
    finally:
        gc.enable()


@pytest.mark.usefixtures("_in_torch")
def test_recomputed_activations_have_the_same_gradients(tmp_path: Path) -> None:
    norms = [
        trainer(tmp_path, f"policy.dtensor_cfg.activation_checkpointing={again}").update(PARTS, Mean(), seed=0)
        for again in (False, True)
    ]
    assert norms[0] == norms[1]


@pytest.mark.usefixtures("_in_torch")
def test_copies_hold_two_bytes_for_each_weight_of_the_layers(tmp_path: Path) -> None:
    layers: Any = trainer(tmp_path).model.get_decoder().layers  # type: ignore[operator]
    weights = sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() == 2)
    for gradients, count in ((False, 1), (True, 2)):
        copies = fp8.Fp8Weights(layers, gradients=gradients)
        copies.refresh()
        assert count * weights <= copies.num_bytes < 1.4 * count * weights, "and a factor for each row"


@pytest.mark.usefixtures("_in_torch")
@pytest.mark.parametrize(
    ("kind", "more"),
    [(grpo, ["policy.sequence_packing.enabled=true"]), (dpo, LORA)],
    ids=["grpo, packed", "dpo with adapters"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    kind: Callable[..., list[str]], more: list[str], tmp_path: Path
) -> None:
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def arguments(folder: Path) -> list[str]:
        return [*kind(model, data, folder, steps=4), "policy.precision=bfloat16", "policy.fp8=true", *more]

    assert run(arguments(whole)) == 0
    assert_resumes(arguments, whole, resumed, 4)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_cpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    words = [f"policy.model_name={tmp_path / 'model'}", "policy.fp8=true"]
    config = load_config("grpo", None, words).config.policy.model_copy(update={"device": "cpu"})
    with pytest.raises(InputError, match=r"policy\.fp8 = true: it needs a GPU .* is on cpu; set policy\.fp8=false"):
        PolicyTrainer(RankSetup(config, 0, needs_reference=False))
    PolicyTrainer(RankSetup(config, 0, needs_reference=False, trains=False))  # which only samples


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["policy.precision=float32"], "policy.precision = float32"),
        (["policy.device=cpu"], "policy.device = cpu"),
        (["cluster.gpus_per_node=2"], "trains on one GPU, and this run on 2"),
        ([*LORA, "policy.dtensor_cfg.lora_cfg.dropout=0.1"], r"lora_cfg\.dropout = 0\.1: layers with dropout"),
    ],
)
def test_settings_that_cannot_be_in_fp8_are_refused_when_they_are_read(words: list[str], reason: str) -> None:
    load_config("grpo", None, words)
    with pytest.raises(InputError, match=reason):
        load_config("grpo", None, [*words, "policy.fp8=true"])
