"""A gang of two `posttrain node` processes on this machine, with a scripted driver and a stand-in for Ray."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from control_peers import ControlPeer
from fake_metadata import FakeMetadata
from gangs import FOREVER, SECRET, WAIT_S, Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    scene = Gang(tmp_path)
    yield scene
    scene.close()


def test_all_pods_end_with_the_code_of_the_driver_and_leave_no_process(gang: Gang) -> None:
    gang.script("while not os.path.exists(folder + '/ray_worker'): time.sleep(0.02)")
    gang.start(1, 0)
    assert gang.codes() == {1: 0, 0: 0}, gang.logs()
    head, worker = gang.wait_for("ray_head").split(), gang.wait_for("ray_worker").split()
    port = gang.environment["POSTTRAIN_RAY_PORT"]
    assert {"start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-gpus=0"} <= set(head)
    assert {"start", f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.1"} <= set(worker)
    assert gang.wait_for("driver") == f"127.0.0.1:{port}"
    assert gang.orphans() == []


def test_bad_input_of_the_driver_ends_all_pods_with_64(gang: Gang) -> None:
    gang.script("sys.exit(64)")
    gang.start(0, 1)
    assert gang.codes() == {0: 64, 1: 64}, gang.logs()


def test_sigterm_of_a_worker_lets_the_driver_save_and_ends_all_with_85(gang: Gang) -> None:
    gang.script(FOREVER)
    gang.start(0, 1)
    gang.wait_for("driver")
    gang.pods[1].send_signal(signal.SIGTERM)
    assert gang.codes() == {0: 85, 1: 85}, gang.logs()
    assert 0 < float(gang.wait_for("stopped")) < 40, "the driver knows how much of the grace period is left"


def test_a_killed_worker_ends_the_gang_without_waiting(gang: Gang) -> None:
    gang.script(FOREVER)
    gang.start(0, 1)
    gang.wait_for("driver")
    gang.pods[1].kill()
    assert gang.pods[0].wait(WAIT_S) == 85, gang.logs()
    assert not (gang.folder / "stopped").exists(), "ranks are lost: nothing can be saved"


def test_a_killed_head_ends_the_workers_with_85(gang: Gang) -> None:
    gang.script(FOREVER)
    gang.start(0, 1)
    gang.wait_for("driver")
    gang.pods[0].kill()
    assert gang.pods[1].wait(WAIT_S) == 85, gang.logs()


def test_a_driver_that_does_not_stop_in_time_is_ended(gang: Gang) -> None:
    gang.script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(folder + '/deaf', 'w').write('1')\n" + FOREVER)
    gang.start(0, 1, POSTTRAIN_GRACE_S="3")
    gang.wait_for("deaf")
    gang.pods[0].send_signal(signal.SIGTERM)
    assert gang.codes() == {0: 85, 1: 85}, gang.logs()


def test_a_machine_without_gpus_ends_with_64_before_anything_starts(gang: Gang) -> None:
    gang.script(FOREVER)
    config = gang.folder / "config.yaml"
    config.write_text(config.read_text().replace("cpu", "cuda"))
    gang.start(0, POSTTRAIN_GPUS_PER_NODE="99")
    assert gang.codes() == {0: 64}
    assert "99 are needed" in gang.logs()
    assert not (gang.folder / "ray_head").exists()


def test_ray_ending_early_is_a_crash_with_the_end_of_its_output(gang: Gang) -> None:
    gang.script(FOREVER)
    (gang.folder / "bin/ray").write_text(f"#!{sys.executable}\nimport sys; print('no port is free'); sys.exit(3)\n")
    gang.start(0, 1)
    assert gang.codes() == {0: 1, 1: 1}, gang.logs()
    assert gang.logs().count("the ray process ended with 3\n  no port is free") == 2, "rank 1 knows it, too"


def test_a_worker_waits_for_the_node_of_the_head(gang: Gang) -> None:
    gang.script("while not os.path.exists(folder + '/ray_worker'): time.sleep(0.02)")
    ray, first = gang.folder / "bin/ray", gang.folder / "first"
    ray.rename(ray.with_name("ready"))
    fails = "echo No node info found for head node in GCS; exit 1"
    early = f"[ $2 = --head ] || [ -e {first} ] || {{ touch {first}; {fails}; }}"
    ray.write_text(f'#!/bin/sh\n{early}\nexec {ray.with_name("ready")} "$@"\n')
    ray.chmod(0o755)
    gang.start(1, 0)
    assert gang.codes() == {1: 0, 0: 0}, gang.logs()
    assert first.exists()


def test_a_run_without_progress_ends_with_65(gang: Gang) -> None:
    folder = gang.folder / "run/attempts"
    folder.mkdir(parents=True)
    holder = {"host": "gone", "pid": 1, "machine": "gone", "created": 0.0, "command": "posttrain grpo", "since": ""}
    for number in (1, 2, 3):
        record = {"number": number, "token": "t", "holder": holder, "heartbeat": 0.0}
        (folder / f"{number:04d}.json").write_text(json.dumps(record))
    gang.start(0)
    assert gang.codes() == {0: 65}
    assert "made no new checkpoint" in gang.logs()


ATTEMPT = {"number": 1, "token": "t", "heartbeat": 0.0, "ended": "2026-11-18T00:00:00Z", "exit_code": 0}
HOLDER = {"host": "here", "pid": 1, "machine": "here", "created": 0.0, "command": "posttrain grpo", "since": ""}


def test_an_interruption_while_a_finished_driver_closes_down_restarts_nothing(gang: Gang) -> None:
    record = json.dumps({**ATTEMPT, "holder": HOLDER})
    write = f"os.makedirs(folder + '/run/attempts')\nopen(folder + '/run/attempts/0001.json', 'w').write({record!r})\n"
    gang.script(f"{write}open(folder + '/over', 'w').write('1')\n{FOREVER}")
    gang.start(0, 1)
    gang.wait_for("over")
    gang.pods[1].send_signal(signal.SIGTERM)
    assert gang.codes() == {0: 0, 1: 0}, gang.logs()


def test_an_earlier_attempt_that_was_done_does_not_end_this_one(gang: Gang) -> None:
    (gang.folder / "run/attempts").mkdir(parents=True)
    (gang.folder / "run/attempts/0001.json").write_text(json.dumps({**ATTEMPT, "holder": HOLDER}))
    gang.script(FOREVER)
    gang.start(0, 1)
    gang.wait_for("driver")
    gang.pods[0].send_signal(signal.SIGTERM)
    assert gang.codes() == {0: 85, 1: 85}, gang.logs()


def test_under_kuberay_the_driver_joins_the_head_and_an_interrupted_worker_stops_it(gang: Gang) -> None:
    gang.script(FOREVER)
    ray = {"POSTTRAIN_SCHEDULER": "rayjob", "KUBERAY_GEN_RAY_START_CMD": "ray start --block", "FQ_RAY_IP": "127.0.0.1"}
    gang.run("head", [], POSTTRAIN_ROLE="head", **ray)
    gang.run("worker", [], POSTTRAIN_ROLE="worker", **ray)
    gang.run("driver", ["driver"], POSTTRAIN_ROLE="head", **ray, POSTTRAIN_RUN="a-job-of-the-cluster")
    gang.wait_for("driver")
    gang.until(lambda: "joined" in (gang.folder / "worker.log").read_text(), "the worker")
    gang.pods["worker"].send_signal(signal.SIGTERM)
    assert gang.pods["driver"].wait(WAIT_S) == 85, gang.logs()
    assert gang.pods["worker"].wait(WAIT_S) == 85, gang.logs()
    assert float(gang.wait_for("stopped")) > 0
    assert gang.pods["head"].poll() is None, "KubeRay ends the head itself"
    gang.pods["head"].send_signal(signal.SIGTERM)
    assert gang.pods["head"].wait(WAIT_S) == 85


# -- peers of the control port
# --------------------------------------------------------------------------------------------


def first_answer(gang: Gang, *lines: dict[str, object]) -> bytes:
    """What rank 0 answers to a peer without the secret, until it closes the connection or welcomes the peer."""
    end, answer = time.monotonic() + WAIT_S, b""
    with socket.create_connection(("127.0.0.1", gang.control_port), timeout=WAIT_S) as peer, suppress(ConnectionError):
        for line in lines:
            peer.sendall(json.dumps(line).encode() + b"\n")
        while b"welcome" not in answer and b"ping" not in answer and (piece := peer.recv(65536)):
            assert time.monotonic() < end
            answer += piece
    return answer


def test_a_peer_without_the_secret_gets_no_token_and_ends_nothing(gang: Gang) -> None:
    gang.script("while not os.path.exists(folder + '/ray_worker'): time.sleep(0.02)")
    gang.start(0)
    for rank in (1, "driver", 0, None):
        answer = first_answer(
            gang, {"type": "join", "run": "run", "rank": rank}, {"type": "failed", "code": 0, "why": "done"}
        )
        assert [json.loads(line)["type"] for line in answer.splitlines()] in ([], ["challenge"])
        assert b"token" not in answer
    gang.start(1)
    assert gang.codes() == {0: 0, 1: 0}, gang.logs()
    assert "done" not in gang.logs()
    assert SECRET not in gang.logs()


def test_a_failure_with_code_0_is_a_crash(gang: Gang) -> None:
    gang.script(FOREVER)
    gang.start(0, POSTTRAIN_NUM_NODES="3")
    peer = ControlPeer(gang.control_port)
    session = peer.join(SECRET.encode(), rank=2)
    peer.send(session.seal({"type": "failed", "code": 0, "why": "done"}))
    assert gang.codes() == {0: 1}, gang.logs()


def test_a_rank_that_joins_twice_or_is_none_is_refused_and_the_run_goes_on(gang: Gang) -> None:
    gang.script("while not os.path.exists(folder + '/go_on'): time.sleep(0.02)")
    gang.start(0, 1)
    gang.wait_for("driver")
    for rank, why in ((1, "has joined already"), (2, "not a part"), (0, "not a part"), ("driver", "not a part")):
        peer = ControlPeer(gang.control_port)
        session = peer.join(SECRET.encode(), rank)
        while (answer := session.unseal(peer.lines.readline()[:-1]))["type"] == "ping":
            pass
        assert answer["type"] == "refused"
        assert why in str(answer["why"])
        peer.send(session.seal({"type": "failed", "code": 0, "why": "done"}))
        peer.rest()
    (gang.folder / "go_on").touch()
    assert gang.codes() == {0: 0, 1: 0}, gang.logs()


def test_a_warning_lets_the_driver_save_and_go_on(gang: Gang) -> None:
    metadata = FakeMetadata()
    try:
        gang.script("while not os.path.exists(folder + '/asked_to_save'): time.sleep(0.02)")
        gang.start(0, 1, POSTTRAIN_NOTICE="aws", AWS_EC2_METADATA_SERVICE_ENDPOINT=f"http://{metadata.host}")
        gang.wait_for("driver")
        metadata.answers["events/recommendations/rebalance"] = "{}"
        gang.wait_for("asked_to_save")
        assert gang.codes() == {0: 0, 1: 0}, gang.logs()
    finally:
        metadata.close()
