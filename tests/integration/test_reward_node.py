"""Policy and engine on one Ray node, reference and reward model on another: the config of configs/ on CPU ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from tiny_runs import (
    assert_same_curves,
    questions,
    results_of,
    rows_of,
    run,
    save_model,
    save_reward_model,
    weights_of,
    write_rows,
)

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

CONFIG = Path(__file__).parents[2] / "configs" / "grpo_reward_node_2nodes.yaml"
STEPS = 12
ONE_GPU = "resources={num_nodes: 1, gpus_per_node: 1}"
NODES = [f"policy.generation.colocated.{ONE_GPU}", f"policy.reference.colocated.{ONE_GPU}", f"env.helpful.{ONE_GPU}"]
NODES += ["cluster.gpus_per_node=2"]
ALONE = ["policy.generation.colocated={enabled: true, resources: {num_nodes: null, gpus_per_node: null}}"]
ALONE += ["policy.reference.colocated={enabled: true, resources: {num_nodes: null, gpus_per_node: null}}"]
ALONE += ["env.helpful.resources=null", "cluster={num_nodes: 1, gpus_per_node: 1}", "grpo.async_grpo.enabled=false"]


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(cpus_per_node=2)
    try:
        cluster.start_head(cpus=0)  # it can lose any of the others
        cluster.add_node()
        cluster.add_node()
        yield cluster
    finally:
        cluster.close()


def arguments(inputs: Path, folder: Path, *words: str) -> list[str]:
    return [
        "grpo",
        "--config",
        str(CONFIG),
        f"policy.model_name={inputs / 'model'}",
        f"policy.tokenizer.name={inputs / 'model'}",
        f"env.helpful.model_name={inputs / 'reward'}",
        "env.helpful.precision=float32",
        f"data.train.data_path={inputs / 'questions.jsonl'}",
        "data.train.input_key=input",
        "data.train.output_key=output",
        f"checkpointing.checkpoint_dir={folder}",
        "checkpointing.save_period=2",
        "checkpointing.save_consolidated=false",
        "checkpointing.keep_top_k=null",
        f"grpo.max_num_steps={STEPS}",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=16",
        "policy.max_total_sequence_length=48",
        "policy.generation.max_new_tokens=12",
        "policy.precision=float32",
        "policy.num_threads=1",
        "policy.device=cpu",
        "policy.optimizer.kwargs.lr=1e-2",
        *words,
    ]


def start(nodes: RayNodes, words: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "posttrain.cli.main", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"env": nodes.environment, "start_new_session": True, **pipes}
    return subprocess.Popen(command, **options)  # type: ignore[call-overload,no-any-return]


def finished(driver: subprocess.Popen[str]) -> str:
    shown, _ = driver.communicate(timeout=500)
    assert driver.returncode == 0, shown
    return shown


def wait_for_rows(count: int, folder: Path, driver: subprocess.Popen[str]) -> None:
    while not (folder / "metrics.jsonl").exists() or len(rows_of(folder)) < count:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.01)


def process_of_reward(folder: Path) -> int:
    """Of the newest reward worker that the run has seen."""
    rows = [json.loads(line) for line in (folder / "workers.jsonl").read_text().splitlines() if line[-1:] == "}"]
    found = [worker for row in rows for worker in row.get("ranks", ()) if worker["group"] == "reward_helpful"]
    return int(found[-1]["pid"])


def test_four_groups_on_two_nodes_equal_one_process_survive_a_kill_and_a_lost_node(
    nodes: RayNodes, tmp_path: Path
) -> None:
    save_model(tmp_path / "model")
    save_reward_model(tmp_path / "model", tmp_path / "reward")
    write_rows(tmp_path / "questions.jsonl", questions(16))

    # Each step samples its own groups: the curves of one process.
    assert run(arguments(tmp_path, tmp_path / "one", *ALONE)) == 0
    shown = finished(start(nodes, arguments(tmp_path, tmp_path / "same", *NODES, "grpo.async_grpo.enabled=false")))
    assert "1 CPU ranks and 1 engine and 1 reference and 1 reward_helpful on 2 nodes (2 on " in shown
    assert_same_curves(tmp_path / "same", tmp_path / "one")

    # As printed: rounds ahead. The driver is killed; then the node with reference and reward model is lost: they are
    # replaced on another one, and repeat their calls.
    words = arguments(tmp_path, tmp_path / "whole", *NODES)
    finished(start(nodes, words))
    words = arguments(tmp_path, tmp_path / "killed", *NODES)
    driver = start(nodes, words)
    wait_for_rows(3, tmp_path / "killed", driver)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate()
    before = process_of_reward(tmp_path / "killed")
    driver = start(nodes, words)
    while (reward := process_of_reward(tmp_path / "killed")) == before:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.01)
    nodes.kill_node_of(reward)
    nodes.add_node()
    shown = finished(driver)
    for name in ("reward_helpful", "reference"):
        assert f"{name} 0 died during" in shown
    assert "restart 1 of 3" not in shown
    assert results_of(tmp_path / "killed") == results_of(tmp_path / "whole")
    killed, whole = (weights_of(tmp_path / name / f"step_{STEPS}") for name in ("killed", "whole"))
    assert killed == whole
    assert all(row["train/unscored"] == 0 for row in rows_of(tmp_path / "killed"))
