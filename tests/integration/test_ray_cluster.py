"""Runs on a Ray cluster of two nodes, which `ray start` makes on this machine as on two: head, worker, driver.

The cluster asks for a token, as a machine's does on which Ray has made one. It records its address where Ray looks by
default, so commands find it without RAY_ADDRESS.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from tiny_runs import (
    assert_same_curves,
    count_rows,
    evaluation,
    grpo,
    questions,
    results_of,
    run,
    save_data,
    weights_of,
    write_rows,
)

from posttrain.apps.evaluate.results import read_evaluation

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKEN = "5eed" * 16
STEPS = 12  # of the run that loses a node


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head; the test that waits for a second node adds it."""
    cluster = RayNodes(TOKEN)
    try:
        cluster.start_head()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def two_nodes(nodes: RayNodes) -> RayNodes:
    """For tests that may run without the one that adds the second node."""
    if nodes.num_nodes == 1:
        nodes.add_node()
    return nodes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_data(tmp_path_factory.mktemp("data"))
    rows = [{"problem": row["input"], "answer": row["output"]} for row in questions(5)]
    write_rows(folder / "sums.jsonl", rows)
    return folder


def start(arguments: list[str | Path], nodes: RayNodes, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**nodes.environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(arguments: list[str | Path], nodes: RayNodes, **variables: str) -> tuple[int, str]:
    process = start(arguments, nodes, **variables)
    shown, _ = process.communicate(timeout=240)
    return process.returncode, shown


def test_head_worker_and_driver_train_on_two_nodes(nodes: RayNodes, model: Path, data: Path, tmp_path: Path) -> None:
    """As printed in the walk-through: `ray start --head`, the command on the head, and `ray start --address=…`
    elsewhere.

    The worker comes last, so the driver has to wait for it.
    """
    arguments = grpo(model, data, tmp_path / "two", steps=2)[1:]
    two = ["cluster.num_nodes=2", "cluster.gpus_per_node=1"]
    driver = start([EXAMPLES / "run_grpo.py", *arguments, *two], nodes, POSTTRAIN_WORKER_DEADLINE_S="120")
    assert driver.stdout is not None
    shown = ""
    for line in driver.stdout:
        shown += line
        if line.startswith("waiting") and "the cluster has 1 (" in line:
            nodes.add_node()
    assert driver.wait() == 0, shown
    assert f"Ray cluster at {nodes.address}: 2 CPU ranks on 2 nodes" in shown
    assert run([*grpo(model, data, tmp_path / "local", steps=2), "cluster.launcher=local"]) == 0
    assert_same_curves(tmp_path / "two", tmp_path / "local")


def test_an_evaluation_on_two_nodes_gives_the_answers_of_one_process(
    two_nodes: RayNodes, model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        settings = ["generation.temperature=1", "eval.num_tests_per_prompt=3", "eval.gpu_hour_price=3600"]
        judge = f"env.mine.function={data / 'rewards.py:odd'}"
        return evaluation(model, data / "sums.jsonl", tmp_path / name, *settings, judge)

    code, shown = output_of(["-m", "posttrain.cli.main", *arguments("two"), "cluster.num_nodes=2"], two_nodes)
    assert code == 0, shown
    assert "2 engines share the problems" in shown
    assert run(arguments("one")) == 0
    two, one = (read_evaluation(tmp_path / name) for name in ("two", "one"))
    assert two.problems == one.problems
    assert two.summary.metrics == one.summary.metrics
    assert two.summary.cost == pytest.approx(2 * two.summary.wall_s), "two engines are paid for"


START = (
    "from posttrain.orchestration.workers import RankLayout, start_workers; start_workers(int, RankLayout({}), 'auto')"
)


def test_a_third_node_that_never_comes_is_an_error_that_says_how_it_joins(nodes: RayNodes) -> None:
    code, shown = output_of(["-c", START.format("num_nodes=3")], nodes, POSTTRAIN_WORKER_DEADLINE_S="1")
    assert code == 1, shown
    assert "InputError: cluster.num_nodes=3 with cluster.gpus_per_node=1 needs 3 nodes" in shown
    assert f"the cluster has {nodes.num_nodes} (" in shown
    assert f"ray start --address={nodes.address}" in shown


def test_a_missing_token_is_an_error_that_says_where_to_get_it(nodes: RayNodes) -> None:
    code, shown = output_of(["-c", START.format("num_nodes=2")], nodes, HOME="/nowhere")
    assert code == 1, shown
    assert f"InputError: the Ray cluster at {nodes.address} asks for a token, and none was found here" in shown
    assert "ray get-auth-token" in shown


def test_a_run_goes_on_by_itself_with_the_same_bits_when_a_node_is_lost_and_another_one_joins(
    two_nodes: RayNodes, model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str | Path]:
        words = [*grpo(model, data, tmp_path / name, steps=STEPS), "cluster.num_nodes=2", "cluster.max_restarts=1"]
        return ["-m", "posttrain.cli.main", *words, "--quiet"]

    nodes = two_nodes
    code, shown = output_of(arguments("whole"), nodes)
    assert code == 0, shown
    driver = start(arguments("lost"), nodes)
    while count_rows(tmp_path / "lost") < 3:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.01)
    nodes.kill_newest_node()
    nodes.add_node()
    shown, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, shown
    assert "restart 1 of 1" in shown
    assert results_of(tmp_path / "lost") == results_of(tmp_path / "whole")
    lost, whole = (weights_of(tmp_path / name / f"step_{STEPS}") for name in ("lost", "whole"))
    assert lost == whole
