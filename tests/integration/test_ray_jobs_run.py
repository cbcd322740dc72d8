"""Runs submitted over the Jobs API of a real Ray cluster: the head of a rendered RayCluster, as processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes
from tiny_runs import ODD_CHARACTERS, count_rows, grpo, save_data, save_model

from posttrain.apps.launch.launch_request import request_run
from posttrain.apps.launch.ray_jobs import RayJobs
from posttrain.apps.launch.runs import ClusterUnreachable
from posttrain.apps.launch.workloads import render_run
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.loader import load_standalone
from posttrain.files.run_folder_lock import read_attempts

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")
pytest.importorskip("aiohttp_cors", reason="Ray has no dashboard (ray[default])")

TOKEN = "5eed" * 16
LIMIT_S = 240.0


def wait_for(condition: Callable[[], Any], alive: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert alive.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.1)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """What the pods mount, with a model and the data's folder beside it."""
    save_model(tmp_path / "shared" / "model")
    (tmp_path / "reward.py").write_text(ODD_CHARACTERS)
    save_data(tmp_path)
    return tmp_path / "shared"


@pytest.fixture
def profile(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A profile whose cluster runs: `posttrain node` with the rendered head's variables, and what KubeRay adds."""
    sockets = [socket.socket() for _ in range(4)]
    for one in sockets:
        one.bind(("", 0))
    ray_port, dashboard, agent, control = (one.getsockname()[1] for one in sockets)
    file = shared.parent / "cluster.yaml"
    file.write_text(
        f"cluster: {{kind: kubernetes}}\nimage: {{name: 'posttrain:1'}}\nnodes: {{gpus: 0, cpu: 2, memory_gib: 4}}\n"
        f"scheduler: {{kind: raycluster, ray_address: 'http://127.0.0.1:{dashboard}'}}\n"
        f"storage: {{claim: shared, mount: {shared}}}\n"
    )
    config = [f"checkpointing.checkpoint_dir={shared}/none", "policy.device=cpu"]
    request = request_run(load_config("grpo", None, config), load_standalone(ClusterProfile, file), "stays")
    head = render_run(request)[-1]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (shared.parent / "config.yaml").write_text(request.config_text)
    (shared.parent / "secret").write_text("5" * 64)
    nodes = RayNodes(TOKEN)  # its folders, its environment and its way of cleaning up
    start = f"ray start --head --port={ray_port} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
    variables = {
        **nodes.environment,
        **{entry["name"]: entry["value"] for entry in head["env"]},
        "HOME": nodes.environment["HOME"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "POSTTRAIN_CONFIG": str(shared.parent / "config.yaml"),
        "POSTTRAIN_SHM_GIB": "0",
        "POSTTRAIN_CONTROL_PORT": str(control),
        "POSTTRAIN_CONTROL_SECRET_FILE": str(shared.parent / "secret"),
        "KUBERAY_GEN_RAY_START_CMD": f"ulimit -n 65536; {start} --num-cpus=1 --num-gpus=0 "
        "--object-store-memory=80000000 --block",
    }
    for one in sockets:
        one.close()
    log = nodes.folder / "node.log"
    with log.open("wb") as output:
        node = subprocess.Popen(
            [sys.executable, "-m", "posttrain", "node"], env=variables, stdout=output, stderr=output
        )
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(RayJobs, "poll_s", 0.1)
    try:
        wait_for(lambda: _answers(file), node, log)
        yield file
        assert node.poll() is None, log.read_text(errors="replace")  # drivers come and go, the cluster stays
    finally:
        node.terminate()
        try:
            node.wait(timeout=30)
        finally:
            nodes.close()


def _answers(profile: Path) -> bool:
    address = load_standalone(ClusterProfile, profile).scheduler.ray_address
    try:
        return bool(RayJobs(address).workloads() == [])
    except ClusterUnreachable:
        return False


def settings(shared: Path, folder: str, steps: int) -> list[str]:
    run = grpo(shared / "model", shared.parent, shared / folder, steps=steps, reward=f"{shared.parent}/reward.py:odd")
    return [*run, "cluster.launcher=ray", "checkpointing.save_period=1"]


def test_a_run_is_submitted_followed_found_and_removed(
    shared: Path, profile: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on, run = ["--on", str(profile)], settings(shared, "math", steps=2)
    assert main(["launch", *on, *run, "--yes"]) == 0
    out, err = capfd.readouterr()
    assert "as a job of the Ray cluster at http://127.0.0.1:" in out
    assert "posttrain node driver: the driver ended with 0" in out
    assert "-- grpo-math: Succeeded" in err
    assert count_rows(shared / "math") == 2
    config = (shared / "math" / "config.yaml").read_text()
    assert "reward.py:odd" in config
    assert str(shared.parent / "reward.py") not in config  # the file has travelled

    assert main(["launch", "list", *on]) == 0
    assert "Ray job     Succeeded" in capfd.readouterr().out
    assert main(["launch", "status", "grpo-math", *on]) == 0
    assert "attempt 1, rank 0: Succeeded, exit code 0" in capfd.readouterr().out
    assert main(["launch", "checkpoints", "grpo-math", *on]) == 0
    assert "step 2 " in capfd.readouterr().out
    assert main(["launch", *on, *run, "--yes"]) == 64
    assert "launch stop grpo-math" in capfd.readouterr().err
    assert main(["launch", "stop", "grpo-math", *on]) == 0
    assert main(["launch", "list", *on]) == 0
    assert "no runs" in capfd.readouterr().out

    # Asked to stop, a job saves before it ends.
    assert main(["launch", *on, *settings(shared, "long", steps=500), "--yes", "--detach"]) == 0
    end = time.monotonic() + LIMIT_S
    while count_rows(shared / "long") < 1:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert main(["launch", "stop", "grpo-long", *on]) == 0
    assert [attempt.exit_code for attempt in read_attempts(shared / "long")] == [85]
