"""policy.deterministic: torch's deterministic algorithms are on while training computes, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import save_model
from torch import Tensor

from posttrain.config import load_config
from posttrain.orchestration.rank import Rank
from posttrain.policy.runtime import deterministic_algorithms
from posttrain.policy.trainer import PolicyTrainer, RankSetup
from posttrain.types import TokenBatch

BATCH = TokenBatch(
    prompts=(torch.tensor([5, 6]),),
    responses=(torch.tensor([7, 8]),),
    prompt_of=(0,),
    columns={"mask": torch.ones(2)},
    num_tokens=2.0,
    num_sequences=1.0,
    num_computed_tokens=2.0,
)


def worker(tmp_path: Path, wanted: bool) -> PolicyTrainer:
    words = [f"policy.model_name={save_model(tmp_path)}", "policy.device=cpu", "policy.precision=float32"]
    config = load_config("grpo", None, [*words, f"policy.deterministic={wanted}"]).config
    return PolicyTrainer(RankSetup(config.policy, 0, needs_reference=False))


class Watching:
    """An objective that looks whether the mode is on."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        if len(self.seen) > 1:
            raise RuntimeError("stop")
        loss = logprobs.sum()
        return loss, {"loss": loss.detach()}


@pytest.mark.parametrize("wanted", [True, False])
def test_the_mode_is_on_while_the_policy_is_updated(wanted: bool, tmp_path: Path) -> None:
    rank, objective = worker(tmp_path, wanted), Watching()
    rank.update([BATCH], objective, seed=0)
    assert objective.seen == [wanted]
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="stop"):
        rank.update([BATCH], objective, seed=0)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_the_mode_is_on_while_the_policy_is_validated(wanted: bool, tmp_path: Path) -> None:
    rank, objective = worker(tmp_path, wanted), Watching()
    rank.evaluate([BATCH], objective)
    assert objective.seen == [wanted]
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_engine_of_a_deterministic_policy_is_deterministic(tmp_path: Path) -> None:
    engine = Rank(worker(tmp_path, True)).engine
    assert engine is not None
    assert engine.settings.deterministic


def test_nested_determinism_restores_the_previous_mode() -> None:
    with deterministic_algorithms(True):
        with deterministic_algorithms(False):
            assert torch.are_deterministic_algorithms_enabled()
        with deterministic_algorithms(True):
            pass
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
