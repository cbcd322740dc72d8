"""Whole runs of every preference loss: resumed or not, packed or not, with or without the cache of the reference, in
one process or on two Ray ranks, they are the same run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import LORA, copy_until, dpo, results_of, rows_of, run, same_up_to_rounding, weights_of

from posttrain.algorithms.batches import judged_batch, pair_batch
from posttrain.config import DpoConfig, load_config
from posttrain.config.dpo import LOSSES
from posttrain.data.packing import MicroBatching
from posttrain.orchestration.rank import build_rank
from posttrain.orchestration.sharded import ShardedTrainer
from posttrain.orchestration.workers import LocalWorker, RankLayout, start_workers
from posttrain.policy.objectives import KtoLoss, PreferenceLoss
from posttrain.policy.reference_cache import FILE_NAME
from posttrain.policy.trainer import PolicyTrainer, RankSetup
from posttrain.types import Judged, Pair

STEPS = 6  # of 6 pairs each, from 22: the second pass begins in step 4
SETTINGS: dict[str, list[str]] = {
    "dpo": [],
    "cdpo": ["label_smoothing=0.1"],
    "robust": ["label_smoothing=0.1"],
    "hinge": ["reference_policy_kl_penalty=0.2", "sft_loss_weight=0.1", "sft_token_level_loss=true"],
    "ipo": ["preference_average_log_probs=true", "reference_policy_kl_penalty=1.0"],
    "rpo_sq": ["gt_reward_scale=2.0"],
    "rpo_bwd_kl": ["gt_reward_scale=2.0"],
    "rpo_fwd_kl": ["gt_reward_scale=2.0"],
    "simpo": ["reference_policy_kl_penalty=2.0", "simpo_gamma=1.0"],
    "orpo": ["preference_loss_weight=0.1", "sft_loss_weight=1", "sft_token_level_loss=true"],
    "kto": ["desirable_weight=1.2", "reference_policy_kl_penalty=0.1"],
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of an uninterrupted run of each loss; made when it is first asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            folder = self[name] = tmp_path_factory.mktemp(name) / "whole"
            assert run(arguments(name, model, data, folder)) == 0
            return folder

    return Runs()


def arguments(name: str, model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    """KTO takes both answers of each pair, so it has twice as many rows and draws twice as many."""
    settings = [f"dpo.preference_loss={name}", *(f"dpo.{setting}" for setting in SETTINGS[name])]
    if name == "kto":
        settings.append("policy.train_global_batch_size=12")
    return [*dpo(model, data, folder, steps=STEPS), *settings, *more]


def assert_close(folder: Path, expected: Path, *, but: tuple[str, ...] = ()) -> None:
    """Every number of every step, except those that are to differ."""
    ours, theirs = results_of(folder), results_of(expected)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        # Before the first update all margins are 0 but for rounding, which may make a win of a tie.
        unlike = (*but, "accuracy", "tie_rate") if row["step"] <= 1 else but
        keys = [{key for key in each if not key.endswith(unlike)} for each in (row, other)]
        assert keys[0] == keys[1]
        for key in keys[0]:
            assert row[key] == same_up_to_rounding(other[key]), f"{key} at step {row['step']}"


def test_all_losses_are_here() -> None:
    assert SETTINGS.keys() == LOSSES.keys()


@every_loss
def test_resumed_run_equals_uninterrupted_run(
    name: str, finished: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    whole = finished[name]
    assert len({row["train/loss"] for row in rows_of(whole) if "train/loss" in row}) == STEPS, "losses vary"
    folder = copy_until(2, whole, tmp_path / "resumed")
    assert run(arguments(name, model, data, folder)) == 0
    assert results_of(folder) == results_of(whole)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(whole / f"step_{STEPS}")


@pytest.mark.parametrize("name", LOSSES)
def test_packing_does_not_change_a_run(
    name: str, finished: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "packed"
    packing = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=128"]
    assert run(arguments(name, model, data, folder, *packing)) == 0
    assert_close(folder, finished[name], but=("packing_efficiency", "packing_factor"))


# -- the reference -----------------------------------------------------------------------------------------------------


def cached(folder: Path, prefix: str) -> list[float]:
    return [row[f"{prefix}/reference_cached"] for row in rows_of(folder) if f"{prefix}/reference_cached" in row]


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_reference_cache_does_not_change_results(
    name: str, finished: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    whole, without = finished[name], tmp_path / "without"
    assert run(arguments(name, model, data, without, "dpo.reference_cache_gib=0")) == 0
    assert set(cached(without, "train") + cached(without, "validation")) == {0.0}
    assert not (without / FILE_NAME).exists()
    assert cached(whole, "validation") == [0.0, 1.0, 1.0, 1.0]
    training = cached(whole, "train")
    assert training[:3] == [0.0, 0.0, 0.0]
    assert 0 < training[3] < 1  # 22 rows are not a multiple of 6
    assert training[4:] == [1.0, 1.0]
    assert_close(without, whole, but=("reference_cached",))


def test_adapters_are_disabled_for_reference_logprobs(model: Path, data: Path, tmp_path: Path) -> None:
    whole, without = tmp_path / "whole", tmp_path / "without"
    assert run([*arguments("dpo", model, data, whole), *LORA]) == 0
    assert run([*arguments("dpo", model, data, without, "dpo.reference_cache_gib=0"), *LORA]) == 0
    assert cached(whole, "validation") == [0.0, 1.0, 1.0, 1.0]
    assert_close(without, whole, but=("reference_cached",))
    resumed = copy_until(2, whole, tmp_path / "resumed")
    assert run([*arguments("dpo", model, data, resumed), *LORA]) == 0
    assert results_of(resumed) == results_of(whole)


def test_missing_reference_cache_is_recomputed(
    finished: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    folder = copy_until(4, finished["dpo"], tmp_path / "lost")
    (folder / FILE_NAME).unlink()
    assert run(arguments("dpo", model, data, folder)) == 0
    assert_close(folder, finished["dpo"], but=("reference_cached",))


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_reference_load_no_reference(
    name: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references, init = [], PolicyTrainer.__init__
    build = lambda trainer, *setup: (init(trainer, *setup), references.append(trainer.reference))[0]  # noqa: E731
    monkeypatch.setattr(PolicyTrainer, "__init__", build)
    folder = tmp_path / "run"
    assert run([*arguments(name, model, data, folder), "dpo.max_num_steps=1", "dpo.val_at_start=false"]) == 0
    assert references == [None], "no frozen copy of the model was made"
    assert not cached(folder, "train")
    assert not (folder / FILE_NAME).exists()
    assert "timing/train/policy_and_reference_logprobs" not in rows_of(folder)[0]


def test_accuracy_is_one_when_all_pairs_are_right(finished: dict[str, Path]) -> None:
    values = [v for row in rows_of(finished["dpo"]) for k, v in row.items() if k.endswith("/accuracy")]
    assert values[0] == 0.5  # the validation before training: all ties
    assert max(values) <= 1.0
    assert all(v * 60 == round(v * 60) for v in values), "shares of 5 or 6 pairs"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs={lr: 1e-2}"], ["optimizer.name", "SGD"]),
        (["policy.scheduler=null"], ["policy.scheduler", "LinearLR", "none"]),
    ],
    ids=["optimizer", "schedule"],
)
def test_another_optimizer_or_schedule_cannot_go_on_from_a_checkpoint(
    change: list[str],
    parts: list[str],
    finished: dict[str, Path],
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_until(2, finished["dpo"], tmp_path / "changed")
    assert run([*arguments("dpo", model, data, folder, *change), "--resume-with-changes"]) == 64
    message = capsys.readouterr().err
    for part in parts:
        assert part in message


# -- several ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_two_ranks_equal_one_process_in_a_run(
    name: str, finished: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    """From step 2 on: what one process has written, the reference's log-probabilities too, two ranks go on with."""
    on_two = ["cluster.launcher=ray", "cluster.gpus_per_node=2"]
    folder = copy_until(2, finished[name], tmp_path / "two")
    assert run(arguments(name, model, data, folder, *on_two)) == 0
    assert_close(folder, finished[name])


@pytest.mark.ray
def test_updates_on_two_ranks_equal_one_process_for_every_loss(model: Path) -> None:
    """One optimizer step after another, each with another loss, on the same weights here and there."""
    loaded = load_config("dpo", None, dpo(model, model, model)[1:])
    setup = RankSetup(loaded.config.policy, seed=0, needs_reference=True)
    workers = start_workers(partial(build_rank, setup), RankLayout(1, 2, device="cpu", num_threads=1), "ray")
    batching = MicroBatching(max_tokens=60)
    here, there = (
        ShardedTrainer(group, batching, batching, seed=0) for group in (LocalWorker(build_rank(setup)), workers)
    )
    assert here.reference_fingerprint() == there.reference_fingerprint()
    for objective in [*OBJECTIVES, KtoLoss(DpoConfig(sft_loss_weight=0.1))]:
        outcomes = []
        for policy in (here, there):
            plain = judged_batch(ANSWERS) if isinstance(objective, KtoLoss) else pair_batch(PAIRS)
            batch = plain.with_columns(
                reference_logprobs=policy.reference_logprobs(plain),
                kl_baseline=torch.full_like(plain.columns["mask"], 0.1),
            )
            outcomes.append(policy.update(batch, objective).metrics)
            policy.end_step()
        assert outcomes[0] == same_up_to_rounding(outcomes[1]), objective
        assert outcomes[0]["grad_norm"] > 0
    workers.close()


def random_ids(count: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(3, 30, (count,), generator=generator).tolist())


GENERATOR = torch.Generator().manual_seed(0)
PAIRS = [
    Pair(i, "", *(random_ids(n, GENERATOR) for n in (2 + i, 3 + i, 7 - i)), chosen_reward=0.2 * i) for i in range(5)
]
ANSWERS = [
    Judged(i, "", random_ids(2 + i, GENERATOR), random_ids(7 - i, GENERATOR), desirable=i % 3 > 0) for i in range(6)
]
OBJECTIVES = [
    PreferenceLoss(DpoConfig(preference_loss=name, label_smoothing=0.1, sft_loss_weight=0.1, sft_token_level_loss=True))
    for name, traits in LOSSES.items()
    if traits.is_paired
]
