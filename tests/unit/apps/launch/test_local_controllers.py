"""State machines of the local cluster, over a machine that only remembers what was asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch_profiles import make_request

from posttrain.apps.launch.local.controllers import Controller
from posttrain.apps.launch.local.pods import Command, Pod
from posttrain.apps.launch.local.process import controller_of
from posttrain.apps.launch.runs import pods_by_rank, state_of
from posttrain.apps.launch.workloads import render_run

LOCAL: dict[str, Any] = {"cluster": {"kind": "local"}}


class FakeCommand:
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


class FakeMachine:
    """Pods run until the test ends them."""

    def __init__(self) -> None:
        self.pods: list[Pod] = []
        self.commands: list[FakeCommand] = []
        self.notes: list[str] = []

    def start(self, pod: Pod) -> None:
        pod.uid, pod.created, pod.phase = str(len(self.pods)), float(len(self.pods)), "Running"
        self.pods.append(pod)

    def end(self, pod: Pod) -> None:
        pod.is_deleted = True

    def begin_command(self, pod: Pod, command: str) -> Command:
        self.commands.append(FakeCommand())
        return self.commands[-1]

    def note(self, reason: str, message: str) -> None:
        self.notes.append(f"{reason}: {message}")

    @property
    def alive(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.is_over]

    def finish(self, pod: Pod, code: int, *, disrupted: bool = False) -> None:
        pod.exit_code, pod.finished, pod.is_disrupted = code, 0.0, disrupted
        pod.phase = "Succeeded" if code == 0 else "Failed"


class Scene:
    """A run on two machines, rendered as for any cluster."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        request = make_request(folder, LOCAL, f"scheduler.kind={scheduler}", run=("cluster.gpus_per_node=1",))
        self.workload = render_run(request)[-1]
        self.machine = FakeMachine()
        self.controller: Controller = controller_of(self.workload, self.machine, backoff_scale=1.0)
        self.now = 0.0
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for _ in range(3):
            self.controller.reconcile(self.now)

    @property
    def phase(self) -> str:
        return state_of({**self.workload, "status": self.controller.status()}).phase

    def ranks(self) -> list[tuple[int, int]]:
        pods = [pod.as_object("default") for pod in self.machine.pods]
        return [(pod.attempt, pod.rank) for pod in pods_by_rank(pods)]

    def end_all(self, code: int) -> None:
        for pod in self.machine.alive:
            self.machine.finish(pod, code)


@pytest.fixture(params=["job", "jobset", "volcano", "rayjob"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(tmp_path, request.param)


def test_all_ranks_are_started_once(scene: Scene) -> None:
    assert scene.ranks() == [(1, 0), (1, 1)]
    scene.turn(1000)
    assert len(scene.machine.pods) == 2
    assert scene.phase == "Running"


def test_success_of_rank_0_ends_the_others(scene: Scene) -> None:
    head, worker = scene.machine.pods
    if scene.machine.commands:
        scene.machine.commands[0].code = 0
    else:
        scene.machine.finish(head, 0)
    scene.turn()
    assert worker.is_deleted
    assert not scene.controller.is_over
    scene.end_all(85)
    scene.turn(1000)
    assert scene.controller.is_over
    assert scene.phase == "Succeeded"
    assert len(scene.machine.pods) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_machine_becomes_a_second_attempt_of_every_rank(scene: Scene, rank: int) -> None:
    scene.machine.finish(scene.machine.pods[rank], 137, disrupted=True)
    scene.turn()
    scene.end_all(85)  # posttrain node ends the gang
    scene.turn()
    scene.turn(1000)
    assert (2, 0) in scene.ranks()
    assert (2, 1) in scene.ranks()
    assert scene.phase == "Running"


def test_the_next_attempt_starts_after_all_pods_of_the_previous_have_ended(tmp_path: Path) -> None:
    for scheduler in ("jobset", "volcano"):
        scene = Scene(tmp_path, scheduler)
        head, worker = scene.machine.pods
        scene.machine.finish(worker, 85)
        scene.turn(1000)
        assert head.is_deleted, scheduler
        assert len(scene.machine.pods) == 2, scheduler
        scene.machine.finish(head, 85)
        scene.turn(1000)
        assert len(scene.machine.pods) == 4, scheduler


def test_a_rayjob_retries_with_a_new_cluster_beside_pods_that_are_still_ending(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "rayjob")
    scene.machine.commands[0].code = 1
    scene.turn()
    assert [pod.is_deleted for pod in scene.machine.pods] == [True, True, False, False]
    assert "FQ_RAY_IP" in scene.machine.pods[3].env
    assert scene.machine.pods[3].env["FQ_RAY_IP"] != scene.machine.pods[1].env["FQ_RAY_IP"]
    tokens = [pod.env["RAY_AUTH_TOKEN"] for pod in scene.machine.pods]  # one a cluster
    assert tokens[:2] + tokens[2:] == [tokens[0]] * 2 + [tokens[2]] * 2
    assert tokens[0] != tokens[2]


@pytest.mark.parametrize("code", [64, 65])
@pytest.mark.parametrize("scheduler", ["job", "jobset", "volcano"])
def test_bad_input_and_no_progress_end_the_run(tmp_path: Path, scheduler: str, code: int) -> None:
    scene = Scene(tmp_path, scheduler)
    scene.machine.finish(scene.machine.pods[0], code)
    scene.turn()
    scene.end_all(code)
    scene.turn(1000)
    assert scene.controller.is_over
    assert scene.phase == "Failed"
    assert len(scene.machine.pods) == 2


@pytest.mark.parametrize("scheduler", ["job", "jobset", "rayjob"])
def test_interruptions_are_not_counted_and_crashes_are(tmp_path: Path, scheduler: str) -> None:
    scene = Scene(tmp_path, scheduler)
    if scheduler != "rayjob":  # which cannot tell one from the other
        for _ in range(50):
            scene.end_all(85)
            scene.turn(1000)
            scene.turn(1000)
        assert scene.phase == "Running"
    for _ in range(30):
        scene.end_all(1)
        scene.turn(1000)
        scene.turn(1000)
    assert scene.phase == "Failed"


def test_volcano_counts_interruptions_up_to_max_retry(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "volcano")
    scene.workload["spec"]["maxRetry"] = 3
    for _ in range(3):
        assert scene.phase == "Running"
        scene.end_all(85)
        scene.turn()
    assert scene.phase == "Failed"


def test_a_job_waits_longer_after_each_failure(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "job")
    waits = []
    for _ in range(4):
        scene.machine.finish(scene.machine.alive[0], 1)
        number, waited = len(scene.machine.pods), 0
        while len(scene.machine.pods) == number:
            scene.turn(1)
            waited += 1
        waits.append(waited)
        scene.machine.pods.sort(key=lambda pod: pod.is_over)
    assert waits == [11, 21, 41, 81]
