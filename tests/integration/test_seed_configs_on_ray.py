"""The two-node configs of the guides on a Ray cluster of two nodes: other than the printed ones are the model, the
data, the sizes, and what a case names.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_pythons
from ray_nodes import RayNodes
from tiny_runs import questions, rows_of, save_model, write_rows

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

REPOSITORY = Path(__file__).parents[2]
LORA, FULL = "configs/grpo_lora_7b_2nodes.yaml", "configs/grpo_llama8b_2nodes.yaml"


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(cpus_per_node=2)
    try:
        cluster.start_head()
        cluster.add_node()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks can share, and rows with the columns of OpenMathInstruct-2 and DeepScaler."""
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "model", hidden_size=64, num_kv_heads=2)
    rows = [{"problem": row["input"], "expected_answer": row["output"]} for row in questions(16)]
    write_rows(folder / "questions.jsonl", rows)
    return folder


def train(nodes: RayNodes, config: str, inputs: Path, folder: Path, *words: str) -> tuple[int, str]:
    sizes = [
        f"policy.model_name={inputs / 'model'}",
        f"policy.tokenizer.name={inputs / 'model'}",
        f"data.train.data_path={inputs / 'questions.jsonl'}",
        f"checkpointing.checkpoint_dir={folder}",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=16",
        "policy.max_total_sequence_length=48",
        "policy.generation.max_new_tokens=16",
        "cluster.gpus_per_node=1",
    ]
    command = [sys.executable, "-m", "posttrain.cli.main", "grpo", "--config", config, *sizes, *words]
    ended = subprocess.run(
        command, env=nodes.environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def assert_trained(folder: Path) -> None:
    rows = [row for row in rows_of(folder) if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["train/loss"]) and row["train/num_samples"] == 16 for row in rows)
    assert (folder / "step_2" / "policy" / "weights" / "model").is_dir()


def test_with_an_environment_for_vllm_both_nodes_sample_with_it(nodes: RayNodes, inputs: Path, tmp_path: Path) -> None:
    python = vllm_pythons.REAL or vllm_pythons.stand_in(tmp_path / "stand-in")
    code, shown = train(nodes, FULL, inputs, tmp_path / "run", f"policy.generation.vllm_cfg.python={python}")
    assert code == 0, shown
    assert_trained(tmp_path / "run")
    assert "the trainer's weights go to vLLM" in (tmp_path / "run" / "logs" / "train.log").read_text()
    assert all(row["train/token_mult_prob_error"] < 1.05 for row in rows_of(tmp_path / "run"))


def test_one_node_trains_in_two_parts_and_the_other_samples_ahead_in_two_parts(
    nodes: RayNodes, inputs: Path, tmp_path: Path
) -> None:
    words = [
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "cluster.gpus_per_node=2",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.generation.colocated={enabled: false, resources: {num_nodes: 1}}",
        "grpo.async_grpo.enabled=true",
    ]
    code, shown = train(nodes, FULL, inputs, tmp_path / "run", *words)
    assert code == 0, shown
    assert_trained(tmp_path / "run")
    second = rows_of(tmp_path / "run")[-1]
    assert second["train/trajectory_age_max"] == 1, "sampled while the first step was trained"
    assert second["timing/train/generation_ahead"] > 0


@pytest.mark.parametrize("config", [LORA, FULL])
def test_a_config_as_printed_runs_on_two_nodes_and_says_that_vllm_is_not_there(
    config: str, nodes: RayNodes, inputs: Path, tmp_path: Path
) -> None:
    code, shown = train(nodes, config, inputs, tmp_path / "run")
    assert code == 0, shown
    assert "2 CPU ranks on 2 nodes" in shown
    assert "vllm_cfg.python" in shown, "what to set for vLLM"
    assert_trained(tmp_path / "run")
