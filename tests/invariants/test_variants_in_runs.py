"""GRPO's variants in whole runs: how a run is cut up, where it runs and whether it was killed makes no difference.

Between them the variants use every estimator that works over a batch, KL in the reward, shaping, dynamic sampling with
a surplus that is kept, sequence ratios, the likelihood term, each normaliser of the loss, and groups that are left out
of updates.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tiny_runs import (
    LORA,
    assert_same_curves,
    count_rows,
    grpo,
    results_of,
    run,
    save_data,
    save_model,
    start,
    wait_until,
    weights_of,
)

STEPS = 4
# Two parts; about half of the groups agree on each of them.
COARSE = """
def coarse(prompt, response, reference):
    return {"long": float(len(response) > 8), "odd": float(sum(map(ord, response)) % 3 == 0)}
"""
VARIANTS: Mapping[str, list[str]] = {
    "dynamic sampling, gdpo, vapo": [
        "grpo.use_dynamic_sampling=true",
        "grpo.batch_multiplier=1.5",
        "grpo.dynamic_sampling_max_gen_batches=50",
        "grpo.adv_estimator={name: gdpo, reward_weights: [1, 2]}",
        "grpo.num_generations_per_prompt=3",
        "policy.train_global_batch_size=6",
        "loss_fn.positive_example_nll_weight=0.1",
    ],
    "dynamic sampling, one update": [
        "preset=verl-dapo",
        "grpo.dynamic_sampling_surplus=keep",
        "grpo.dynamic_sampling_max_gen_batches=50",
        "grpo.reward_shaping.overlong_buffer_length=4",
        "policy.train_global_batch_size=16",
    ],
    "reinforce++": ["preset=openrlhf-rfpp", "grpo.seq_logprob_error_threshold=1.5"],
    "rloo": ["preset=trl-rloo"],
    "dr_grpo": ["grpo.adv_estimator.name=dr_grpo", "grpo.overlong_filtering=true"],
    "groups without gradient": ["loss_fn.reference_policy_kl_penalty=0"],
    "groups without gradient, in rounds": [
        "loss_fn.reference_policy_kl_penalty=0",
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.max_trajectory_age_steps=1",
    ],
    "distillation": ["teacher.model_name={teacher}"],
    "distillation, top k, rewards, adapters": [
        "teacher={model_name: {teacher}, divergence: jsd, over: top_k, top_k: 7, reward_weight: 0.5}",
        *LORA,
    ],
    "ppo": ["grpo.adv_estimator.name=gae", "value.optimizer.kwargs.lr=3e-3"],
    "ppo, warm-up, KL in the reward, adapters": [
        "grpo.adv_estimator={name: gae, gae_lambda: 0.9, gae_gamma: 0.99, whiten_advantages: none}",
        "grpo.policy_training_start_step=1",
        "value.model_name={teacher}",
        "value_loss_fn={scale: 0.5, cliprange: 0.05}",
        "loss_fn.use_kl_in_reward=true",
        "grpo.num_generations_per_prompt=1",
        "policy.train_global_batch_size=2",
        *LORA,
    ],
    "distillation, sampled token": ["teacher={model_name: {teacher}, divergence: forward, over: sampled}"],
}
PARALLEL = "policy.dtensor_cfg"
every_variant = pytest.mark.parametrize("name", VARIANTS)
Arguments = Callable[[str, Path], list[str]]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Arguments:
    model = save_model(tmp_path_factory.mktemp("model"), num_kv_heads=2)
    teacher = save_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, seed=7, num_kv_heads=2)
    data = save_data(tmp_path_factory.mktemp("data"))
    (data / "coarse.py").write_text(COARSE)

    def of(name: str, folder: Path) -> list[str]:
        usual = grpo(model, data, folder, steps=STEPS, reward=str(data / "coarse.py:coarse"))
        return [
            *usual,
            "policy.optimizer.kwargs.lr=1e-3",
            *(word.replace("{teacher}", str(teacher)) for word in VARIANTS[name]),
        ]

    return of


@pytest.fixture(scope="module")
def whole(arguments: Arguments, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the uninterrupted run."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("whole")
            assert run(arguments(name, folder)) == 0
            folders[name] = folder
        return folders[name]

    return of


def assert_same_bits(folder: Path, expected: Path) -> None:
    assert results_of(folder) == results_of(expected)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(expected / f"step_{STEPS}")
    for critic in (expected / f"step_{STEPS}" / "critic" / "weights").rglob("*.safetensors"):
        assert (folder / critic.relative_to(expected)).read_bytes() == critic.read_bytes()
    samples = {path.name: path.read_bytes() for path in (expected / "rollouts").glob("*")}
    assert {path.name: path.read_bytes() for path in (folder / "rollouts").glob("*")} == samples


def test_variants_exercise_their_features(whole: Callable[[str], Path]) -> None:
    """Guards the tests below: batches are really filtered, a surplus is really kept over a checkpoint."""
    for name in ("dynamic sampling, gdpo, vapo", "dynamic sampling, one update"):
        rows = [row for row in results_of(whole(name)) if "train/reward" in row]
        assert any(row["train/groups_with_signal"] < 1 for row in rows)
        assert rows[1]["train/dynamic_sampling_num_surplus_groups"] > 0, "kept when step 2 is saved"
        assert rows[2]["train/dynamic_sampling_num_earlier_groups"] > 0
        assert {"train/filtered_reward", "train/dynamic_sampling_num_gen_batches"} <= rows[0].keys()
    for name in ("groups without gradient", "groups without gradient, in rounds"):
        shares = [row["train/samples_with_gradient"] for row in results_of(whole(name)) if "train/loss" in row]
        assert 0 < min(shares) < 1
    assert "train/positive_nll_loss" in results_of(whole("dynamic sampling, gdpo, vapo"))[-1]
    assert "train/shaped_reward" in results_of(whole("dynamic sampling, one update"))[-1]
    assert "train/kl_penalty" in results_of(whole("rloo"))[-1]
    divergences = [row["train/divergence"] for row in results_of(whole("distillation")) if "train/loss" in row]
    assert divergences[-1] < divergences[0]
    values = [row["train/value_mean"] for row in results_of(whole("ppo")) if "train/loss" in row]
    assert 0 == values[0] < values[-1]
    warm = [row for row in results_of(whole("ppo, warm-up, KL in the reward, adapters")) if "train/reward" in row]
    assert ["train/loss" in row for row in warm] == [False, True, True, True]
    assert all("train/value_loss" in row and "train/kl_penalty" in row for row in warm)
    assert results_of(whole("reinforce++"))[-1]["train/max_seq_mult_prob_error"] == pytest.approx(1, abs=1e-4)


@pytest.mark.invariant
@every_variant
def test_resumed_variant_equals_uninterrupted_run(
    name: str, arguments: Arguments, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole(name), folder)
    shutil.rmtree(folder / f"step_{STEPS}")
    assert run(arguments(name, folder)) == 0
    assert_same_bits(folder, whole(name))


def test_killed_run_resumes_with_its_surplus_groups(
    arguments: Arguments, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    name, folder = "dynamic sampling, gdpo, vapo", tmp_path / "run"
    for rows in (1, 3):
        process = start(arguments(name, folder), tmp_path / f"log_{rows}")
        assert wait_until(lambda enough=rows: count_rows(folder) >= enough, process)  # type: ignore[misc]
        process.kill()
        process.join()
    assert run(arguments(name, folder)) == 0
    assert_same_bits(folder, whole(name))


@every_variant
def test_results_are_independent_of_packing_and_micro_batching(
    name: str, arguments: Arguments, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    one_by_one = [
        "policy.sequence_packing.enabled=false",
        "policy.train_micro_batch_size=1",
        "checkpointing.enabled=false",
    ]
    assert run([*arguments(name, tmp_path / "run"), *one_by_one]) == 0
    assert_same_curves(tmp_path / "run", whole(name), but="packing")


@pytest.mark.ray
@pytest.mark.parametrize(
    "name",
    [
        "dynamic sampling, gdpo, vapo",
        "reinforce++",
        "rloo",
        "distillation",
        "distillation, top k, rewards, adapters",
        "ppo",
        "ppo, warm-up, KL in the reward, adapters",
    ],
)
def test_two_ranks_equal_one_process(
    name: str, arguments: Arguments, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    two = ["cluster.launcher=ray", "cluster.gpus_per_node=2", "grpo.max_val_samples=1", "checkpointing.enabled=false"]
    assert run([*arguments(name, tmp_path / "two"), *two]) == 0
    assert run([*arguments(name, tmp_path / "one"), *two[2:]]) == 0
    assert_same_curves(tmp_path / "two", tmp_path / "one", but="packing")


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("more", [[], [f"{PARALLEL}.sequence_parallel=true", f"{PARALLEL}.cpu_offload=true"]])
@pytest.mark.parametrize("name", ["distillation, top k, rewards, adapters", "ppo, warm-up, KL in the reward, adapters"])
def test_two_ranks_that_share_layers_equal_one_process(
    name: str, more: list[str], arguments: Arguments, tmp_path: Path
) -> None:
    few = ["grpo.max_val_samples=1", "checkpointing.enabled=false"]
    two = ["cluster.launcher=ray", "cluster.gpus_per_node=2", f"{PARALLEL}.tensor_parallel_size=2"]
    assert run([*arguments(name, tmp_path / "two"), *few, *two, *more]) == 0
    assert run([*arguments(name, tmp_path / "one"), *few]) == 0
    assert_same_curves(tmp_path / "two", tmp_path / "one", but="packing")
