"""Parts of `posttrain node`: its environment, checks of the machine, notices of the clouds, attempts
without progress.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fake_metadata import FakeMetadata

from posttrain.apps.launch.node.checks import check_machine
from posttrain.apps.launch.node.contract import NodeSettings, read_settings
from posttrain.apps.launch.node.head import why_no_progress
from posttrain.apps.launch.node.notices import Notice, metadata_service, watch
from posttrain.errors import InputError
from posttrain.files.run_folder_lock import Attempt

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC).timestamp()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "config.yaml"
    config.write_text(f"policy: {{device: auto}}\ncheckpointing: {{checkpoint_dir: {tmp_path}/run}}\n")
    secret = tmp_path / "secret"
    secret.write_text("5" * 64 + "\n")
    return {
        "POSTTRAIN_RUN": "grpo-run",
        "POSTTRAIN_KIND": "grpo",
        "POSTTRAIN_CONFIG": str(config),
        "POSTTRAIN_SCHEDULER": "jobset",
        "POSTTRAIN_NUM_NODES": "3",
        "POSTTRAIN_GPUS_PER_NODE": "8",
        "POSTTRAIN_EFA_DEVICES": "2",
        "POSTTRAIN_SHM_GIB": "0",
        "POSTTRAIN_MOUNT": "/shared",
        "POSTTRAIN_HEAD_HOST": "grpo-run-node-0-0.grpo-run",
        "POSTTRAIN_RAY_PORT": "6379",
        "POSTTRAIN_CONTROL_PORT": "6390",
        "POSTTRAIN_CONTROL_SECRET_FILE": str(secret),
        "POSTTRAIN_GRACE_S": "15",
        "POSTTRAIN_NOTICE": "aws",
        "JOB_COMPLETION_INDEX": "1",
    }


# -- the environment
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "variables", "rank"),
    [
        ("job", {"JOB_COMPLETION_INDEX": "2"}, 2),
        ("jobset", {"JOB_COMPLETION_INDEX": "0"}, 0),
        ("volcano", {"VC_TASK_INDEX": "0"}, 0),
        ("volcano", {"VC_TASK_INDEX": "1", "POSTTRAIN_RANK_OFFSET": "1"}, 2),
        ("rayjob", {"POSTTRAIN_ROLE": "head", "KUBERAY_GEN_RAY_START_CMD": "ray start --head"}, 0),
        (
            "raycluster",
            {"POSTTRAIN_ROLE": "worker", "FQ_RAY_IP": "head", "KUBERAY_GEN_RAY_START_CMD": "ray start"},
            None,
        ),
    ],
)
def test_the_rank_is_read_from_the_schedulers_variables(
    environment: dict[str, str], scheduler: str, variables: dict[str, str], rank: int | None
) -> None:
    del environment["JOB_COMPLETION_INDEX"]
    assert read_settings({**environment, "POSTTRAIN_SCHEDULER": scheduler, **variables}).rank == rank


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("POSTTRAIN_RUN", "", "POSTTRAIN_RUN is missing"),
        ("POSTTRAIN_SCHEDULER", "pbs", "POSTTRAIN_SCHEDULER='pbs': job, jobset"),
        ("POSTTRAIN_NUM_NODES", "two", "POSTTRAIN_NUM_NODES='two': a whole number of at least 1"),
        ("JOB_COMPLETION_INDEX", "3", "rank 3, and POSTTRAIN_NUM_NODES is 3"),
        ("POSTTRAIN_CONFIG", "/missing.yaml", "POSTTRAIN_CONFIG=/missing.yaml cannot be read"),
        ("POSTTRAIN_CONTROL_SECRET_FILE", "", "POSTTRAIN_CONTROL_SECRET_FILE is missing"),
        ("POSTTRAIN_CONTROL_SECRET_FILE", "/missing", "POSTTRAIN_CONTROL_SECRET_FILE=/missing cannot be read"),
        ("POSTTRAIN_CONTROL_SECRET_FILE", "/dev/null", "has 0 characters, and at least 32"),
    ],
)
def test_a_wrong_variable_is_named(environment: dict[str, str], name: str, value: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        read_settings({**environment, name: value})


# -- the machine
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, environment: dict[str, str]) -> tuple[NodeSettings, Path]:
    root = tmp_path / "root"
    for name in ("dev/infiniband", "dev/shm", "shared"):
        (root / name).mkdir(parents=True)
    for name in (
        *(f"dev/nvidia{n}" for n in range(8)),
        "dev/nvidiactl",
        "dev/infiniband/uverbs0",
        "dev/infiniband/uverbs1",
    ):
        (root / name).touch()
    return read_settings(environment), root


def test_a_machine_that_has_everything_is_accepted(machine: tuple[NodeSettings, Path]) -> None:
    settings, root = machine
    check_machine(settings, root, lambda: None)
    check_machine(settings, root, lambda: "".join(f"GPU {n}: NVIDIA H200 (UUID)\n" for n in range(8)))
    assert os.listdir(root / "shared") == [], "the trial file is removed"


def test_everything_that_a_machine_lacks_is_in_one_message(machine: tuple[NodeSettings, Path]) -> None:
    settings, root = machine
    (root / "dev/nvidia3").unlink()
    (root / "dev/infiniband/uverbs1").unlink()
    (root / "shared").rmdir()
    with pytest.raises(InputError) as raised:
        check_machine(replace(settings, shm_gib=2**20), root, lambda: None)
    message = str(raised.value)
    for part in (
        "7 GPUs (/dev/nvidia*), and 8 are needed",
        "1 EFA devices",
        "vpc.amazonaws.com/efa: 2",
        "/dev/shm has",
        "/shared (storage.mount) cannot be written: No such file",
    ):
        assert part in message


def test_a_gpu_that_does_not_answer_is_missing(machine: tuple[NodeSettings, Path]) -> None:
    settings, root = machine
    with pytest.raises(InputError, match=r"7 GPUs .nvidia-smi -L., and 8 are needed"):
        check_machine(settings, root, lambda: "".join(f"GPU {n}: NVIDIA H200\n" for n in range(7)))


def test_a_run_on_cpus_needs_no_gpu(machine: tuple[NodeSettings, Path], environment: dict[str, str]) -> None:
    _, root = machine
    for path in (root / "dev").glob("nvidia*"):
        path.unlink()
    config = Path(environment["POSTTRAIN_CONFIG"])
    config.write_text(config.read_text().replace("auto", "cpu"))
    check_machine(read_settings(environment), root, lambda: None)


# -- notices
# -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def metadata() -> Iterator[FakeMetadata]:
    fake = FakeMetadata()
    yield fake
    fake.close()


def test_aws_notices_an_interruption_with_its_time_and_a_rebalance_without(metadata: FakeMetadata) -> None:
    service = metadata_service(
        "aws", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{metadata.host}"}, 110.0, lambda: NOW
    )
    assert service is not None
    assert service.ask() == []
    metadata.answers["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-16T11:59:00Z"}'
    assert service.ask() == [Notice("rebalance recommendation", None, is_final=False)]
    metadata.answers["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-16T12:02:00Z"}'
    assert service.ask()[0] == Notice("spot/instance-action", 120.0, is_final=True)
    metadata.token = "second"  # the first has expired
    assert len(service.ask()) == 2
    assert metadata.num_tokens == 2


def test_gce_notices_a_preemption_and_warns_of_maintenance(metadata: FakeMetadata) -> None:
    service = metadata_service("gce", {"GCE_METADATA_HOST": metadata.host}, 15.0)
    assert service is not None
    metadata.answers |= {"preempted": "FALSE", "maintenance-event": "NONE"}
    assert service.ask() == []
    metadata.answers["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert service.ask() == []
    metadata.answers["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert service.ask() == [Notice("maintenance-event", None, is_final=False)]
    metadata.answers["preempted"] = "TRUE"
    assert service.ask()[0] == Notice("preempted", 15.0, is_final=True)


def test_a_notice_and_an_unreachable_service_are_each_reported_once() -> None:
    class Service:
        def __init__(self) -> None:
            self.num_asked = 0

        def ask(self) -> list[Notice]:
            self.num_asked += 1
            if self.num_asked <= 2:
                raise OSError("no route to host")
            return [Notice("preempted", 15.0, is_final=True)]

    service = Service()
    reported: list[Notice] = []
    said: list[str] = []
    watch(service, reported.append, said.append, lambda seconds: service.num_asked == 5)
    assert reported == [Notice("preempted", 15.0, is_final=True)]
    assert ["no route to host" in line for line in said] == [True]


# -- progress
# ------------------------------------------------------------------------------------------------------------


def make_attempt(folder: Path, checkpoint: int | None = None) -> None:
    attempt = Attempt(folder)
    attempt.has_begun = True
    if checkpoint is not None:
        attempt.note_checkpoint(checkpoint)
    attempt.end(85)


def test_three_attempts_without_a_new_checkpoint_end_a_run_once(tmp_path: Path) -> None:
    make_attempt(tmp_path, checkpoint=4)
    for _ in range(2):
        make_attempt(tmp_path)
        assert why_no_progress(tmp_path) is None
    make_attempt(tmp_path)
    assert "attempts 2, 3, 4 of the run" in (why_no_progress(tmp_path) or "")
    assert json.loads((tmp_path / "attempts/given_up.json").read_text()) == {"attempt": 4}
    assert why_no_progress(tmp_path) is None, "a new launch may try again"
    for _ in range(3):
        make_attempt(tmp_path)
    assert "attempts 5, 6, 7" in (why_no_progress(tmp_path) or "")


def test_a_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    for checkpoint in (None, None, 6, None, None):
        make_attempt(tmp_path, checkpoint)
    assert why_no_progress(tmp_path) is None
