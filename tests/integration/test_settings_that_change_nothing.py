"""Settings of speed and memory change neither samples nor learning: whole runs, compared number by number."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import LORA, assert_same_curves, dpo, grpo, results_of, run

STEPS = 4


def arguments_of(kind: str, model: Path, data: Path, folder: Path) -> list[str]:
    arguments = (grpo if kind == "grpo" else dpo)(model, data, folder, steps=STEPS)
    return [*arguments, "checkpointing.enabled=false"]


@pytest.fixture(scope="module")
def plain(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a run with the usual settings, by algorithm."""
    folders = {}
    for kind in ("grpo", "dpo"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        assert run(arguments_of(kind, model, data, folders[kind])) == 0
    return folders


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("grpo", ["policy.train_micro_batch_size=1", "policy.sequence_packing.enabled=false"]),
        ("grpo", ["policy.train_micro_batch_size=8", "policy.sequence_packing.enabled=false"]),
        ("grpo", ["policy.sequence_packing.train_mb_tokens=60", "policy.sequence_packing.algorithm=concatenative"]),
        ("grpo", ["policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false"]),
        ("grpo", ["policy.logprob_batch_size=1", "policy.logprob_chunk_size=5"]),
        ("grpo", ["policy.dtensor_cfg.activation_checkpointing=true"]),
        ("grpo", ["policy.generation.native_cfg.max_batch_size=3", "policy.generation.native_cfg.page_size=4"]),
        ("grpo", ["policy.generation.native_cfg.max_prefill_tokens=7"]),
        ("grpo", ["env.mine.num_workers=3"]),
        ("dpo", ["policy.train_micro_batch_size=1"]),
        ("dpo", ["policy.train_micro_batch_size=6"]),
        ("dpo", ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=128"]),
        ("dpo", ["policy.dtensor_cfg.activation_checkpointing=true"]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_settings_of_speed_and_memory_do_not_change_results(
    kind: str, settings: list[str], plain: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    assert run([*arguments_of(kind, model, data, tmp_path / "run"), *settings]) == 0
    # How full the micro-batches are is about speed, and does change.
    assert_same_curves(tmp_path / "run", plain[kind], but="packing_")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("grpo", ["grpo.seed=43"]),
        ("grpo", ["policy.generation.temperature=0.7"]),
        ("grpo", ["policy.generation.top_k=5"]),
        ("grpo", ["grpo.use_leave_one_out_baseline=false"]),
        ("grpo", ["grpo.normalize_rewards=false"]),
        ("grpo", ["loss_fn.reference_policy_kl_penalty=1.0"]),
        ("grpo", ["loss_fn.token_level_loss=false"]),
        ("grpo", ["policy.train_global_batch_size=16"]),
        ("grpo", ["policy.max_grad_norm=1e-7"]),
        ("grpo", ["data.shuffle=false"]),
        ("grpo", LORA),
        ("dpo", ["dpo.reference_policy_kl_penalty=0.5"]),
        ("dpo", ["dpo.sft_loss_weight=1.0"]),
        ("dpo", ["dpo.preference_average_log_probs=true"]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_setting_of_the_algorithm_does_change_them(
    kind: str, settings: list[str], plain: dict[str, Path], model: Path, data: Path, tmp_path: Path
) -> None:
    """Otherwise the test above would be satisfied by settings that nobody reads."""
    arguments = [*arguments_of(kind, model, data, tmp_path / "run"), *settings]
    assert run([*arguments, f"{kind}.max_num_steps=2"]) == 0
    ours = [row["train/grad_norm"] for row in results_of(tmp_path / "run") if "train/grad_norm" in row]
    theirs = [row["train/grad_norm"] for row in results_of(plain[kind]) if "train/grad_norm" in row]
    assert ours[1] != pytest.approx(theirs[1], rel=1e-4)
