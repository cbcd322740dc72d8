"""Jobs of Slurm: the batch script, run with stand-ins of Slurm's commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from gangs import FOREVER, WAIT_S, Gang
from launch_profiles import write_profile

from posttrain.cli.main import main

# sbatch keeps the script; srun starts the tasks of a step and ends with the highest of their codes.
COMMANDS = {
    "sbatch": "echo $2 > $SCENE/submitted; echo 4711",
    "squeue": "cat $SCENE/queued 2>/dev/null || true",
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> $SCENE/requeued; fi',
    "srun": """
worst=0; pids=
for rank in $(seq 0 $((${2#--ntasks=} - 1))); do
    while case $1 in --*) true;; *) false;; esac; do shift; done
    SLURM_PROCID=$rank "$@" & pids="$pids $!"; echo $! > $SCENE/pid_$rank
done
for pid in $pids; do wait $pid; code=$?; [ $code -gt $worst ] && worst=$code; done
exit $worst
""",
}


def profile_of(folder: Path, **changed: Any) -> Path:
    nodes = {"gpus": 0, "cpu": 2, "memory_gib": 4}
    values = {"cluster": {"kind": "slurm"}, "nodes": nodes, "storage": {"mount": str(folder)}, **changed}
    return write_profile(folder, values)


class Job:
    """A run that was submitted to the stand-ins."""

    def __init__(self, folder: Path, num_nodes: int = 1) -> None:
        self.folder = folder
        settings = [f"cluster.num_nodes={num_nodes}", f"checkpointing.checkpoint_dir={folder}/run", "policy.device=cpu"]
        self.code = main(["launch", "--on", str(profile_of(folder)), "--yes", "grpo", *settings, "--name", "job"])

    @property
    def script(self) -> Path:
        return Path((self.folder / "submitted").read_text().strip())

    def start(self, **more: str) -> subprocess.Popen[bytes]:
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[1-2]"}  # its ports differ between workers
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                ["bash", str(self.script)], env={**os.environ, **slurm, **more}, stdout=output, stderr=output
            )

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    gang = Gang(tmp_path)
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / "bin/posttrain").write_text(f'#!/bin/bash\nshift; exec {sys.executable} {tmp_path}/node.py "$@"\n')
    for path in (tmp_path / "bin").iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", gang.environment["PATH"])
    monkeypatch.setenv("SCENE", str(tmp_path))
    yield gang
    gang.close()


def test_a_gang_of_two_machines_ends_with_the_code_of_its_driver(scene: Gang) -> None:
    scene.script("while not os.path.exists(folder + '/ray_worker'): time.sleep(0.02)")
    job = Job(scene.folder, num_nodes=2)
    assert job.code == 0
    assert job.start().wait(WAIT_S) == 0, (scene.folder / "output").read_text()
    assert not job.requeued
    assert "rank 1 has joined" in (scene.folder / "output").read_text()


def test_sigterm_of_one_machine_saves_and_requeues_the_job(scene: Gang) -> None:
    """As `--signal=TERM@120` sends it before the time limit, to all of them."""
    scene.script(FOREVER)
    job = Job(scene.folder, num_nodes=2)
    running = job.start()
    scene.wait_for("driver")
    os.kill(int(scene.wait_for("pid_1")), signal.SIGTERM)
    assert running.wait(WAIT_S) == 85, (scene.folder / "output").read_text()
    assert 0 < float(scene.wait_for("stopped")) < 110
    assert (scene.folder / "requeued").read_text() == f"requeue {os.getpid()}\n"


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(0, 0, False), (64, 0, False), (65, 3, False), (85, 99, True), (1, 0, True), (137, 19, True), (1, 20, False)],
)
def test_what_is_requeued(scene: Gang, code: int, restarts: int, is_requeued: bool) -> None:
    """`restarts`: after crashes."""
    (scene.folder / "bin/posttrain").write_text(f"#!/bin/bash\nexit {code}\n")
    job = Job(scene.folder)
    (job.script.parent / f"crashes-{os.getpid()}").write_text("1\n" * restarts)
    assert job.start().wait(WAIT_S) == code
    assert job.requeued == is_requeued


def test_interruptions_and_crashes_of_other_jobs_are_not_counted(scene: Gang) -> None:
    (scene.folder / "bin/posttrain").write_text("#!/bin/bash\nexit 1\n")
    job = Job(scene.folder)
    (job.script.parent / "crashes-1").write_text("1\n" * 20)
    assert job.start(SLURM_RESTART_COUNT="30").wait(WAIT_S) == 1
    assert job.requeued


@pytest.mark.parametrize("kind", ["link", "foreign"])
def test_a_folder_of_somebody_else_is_refused(
    scene: Gang, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could read the secret, and put another program into the script."""
    elsewhere, folder = scene.folder / "elsewhere", scene.folder / ".posttrain/job"
    elsewhere.mkdir()
    folder.parent.mkdir()
    if kind == "link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert Job(scene.folder).code == 64
    assert str(folder) in capsys.readouterr().err
    assert not list((elsewhere if kind == "link" else folder).iterdir())
    assert not (scene.folder / "submitted").exists()


def test_nobody_else_can_change_the_script_of_a_job(scene: Gang) -> None:
    folder, target = scene.folder / ".posttrain/job", scene.folder / "target"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "job.sh").symlink_to(target)
    assert Job(scene.folder).code == 0
    assert folder.stat().st_mode & 0o022 == 0
    assert not (folder / "job.sh").is_symlink()
    assert not target.exists()


def test_the_script_has_the_settings_of_the_profile_and_no_secret(scene: Gang) -> None:
    """A folder with a space and a quote is written as a shell, and sbatch, read it."""
    shared = scene.folder / "a lab's"
    shared.mkdir()
    slurm = {
        "partition": "h'200",
        "account": "lab",
        "qos": "high",
        "time": "24:00:00",
        "setup": ["source /shared/venv/bin/activate"],
        "sbatch_options": ["--mem=0"],
        "srun_options": ["--container-image=image.sqsh"],
    }
    nodes = {"gpus": 8, "cpu": 96, "memory_gib": 900}
    profile = profile_of(shared, slurm=slurm, nodes=nodes, env={"NCCL_DEBUG": "INFO"})
    run = ["grpo", "cluster.num_nodes=2", "cluster.gpus_per_node=8", f"checkpointing.checkpoint_dir={shared}/run"]
    assert main(["launch", "render", "--on", str(profile), *run, "--to", str(scene.folder / "job")]) == 0
    script = (scene.folder / "job/job.sh").read_text()
    lines = [shlex.split(line) for line in re.findall(r"^#SBATCH --(.+)$", script, re.MULTILINE)]
    options = {name: value for [line] in lines for name, _, value in [line.partition("=")]}
    expected = {"partition": "h'200", "account": "lab", "qos": "high", "time": "24:00:00", "mem": "0", "requeue": ""}
    expected |= {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "signal": "TERM@120"}
    assert PurePosixPath(options["output"]).parent == PurePosixPath(options["chdir"])
    assert PurePosixPath(options["chdir"]).parent == PurePosixPath(shared, ".posttrain")
    assert expected.items() <= options.items()
    assert script.index("source /shared/venv/bin/activate") < script.index("\nsrun --nodes=2 --ntasks=2")
    assert "--container-image=image.sqsh posttrain node\n" in script
    for variable in ("NCCL_DEBUG=INFO", "NCCL_TIMEOUT=7200", "POSTTRAIN_GPUS_PER_NODE=8", "POSTTRAIN_SCHEDULER=slurm"):
        assert f"export {variable}\n" in script
    secret = scene.folder / "job/secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(secret.read_text().strip()) == 64
    assert secret.read_text().strip() not in script


def test_a_job_of_the_same_name_is_refused_and_nothing_is_written(
    scene: Gang, capsys: pytest.CaptureFixture[str]
) -> None:
    (scene.folder / "queued").write_text("12 RUNNING\n13 PENDING\n")
    assert Job(scene.folder).code == 64
    assert "job 12 RUNNING is job already" in capsys.readouterr().err
    assert not (scene.folder / ".posttrain").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"storage": {"mount": "/proc/shared"}}, "must be the file system that all machines"),
        ({"secrets": {"HF_TOKEN": {"secret": "hf", "key": "token"}}}, "environment of the shell that submits it"),
        ({"scheduler": {"kind": "jobset"}}, "leave it out"),
        ({"slurm": {"partion": "a"}}, "did you mean"),
        ({"slurm": {"time": "tomorrow"}}, 'minutes or a time such as "24:00:00"'),
        ({"slurm": {"time": 86400}}, "slurm.time"),  # 24:00:00 without quotes
        ({"slurm": {"sbatch_options": ["mem=0"]}}, "an option such as --mem=0"),
        ({"slurm": {"sbatch_options": ["--signal=KILL@5"]}}, "set by the launcher"),
        ({"slurm": {"sbatch_options": ["-N3"]}}, "set by the launcher"),
        ({"slurm": {"sbatch_options": ["--job-name=x"]}}, "set by the launcher"),
    ],
)
def test_what_cannot_be_submitted_is_said_in_one_line(
    scene: Gang, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], message: str
) -> None:
    mount = changed.get("storage", {"mount": scene.folder})["mount"]
    profile = str(profile_of(scene.folder, **changed))
    run = ["grpo", f"checkpointing.checkpoint_dir={mount}/run", "policy.device=cpu"]
    assert main(["launch", "--on", profile, "--yes", *run]) == 64
    assert message in capsys.readouterr().err
    assert not (scene.folder / "submitted").exists()


def test_without_slurm_the_command_is_named(
    scene: Gang, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(scene.folder))
    assert Job(scene.folder).code == 64
    assert "sbatch is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize("action", [["status", "job"], ["list"], ["doctor"], ["setup"]])
def test_actions_of_kubernetes_name_those_of_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    assert main(["launch", *action, "--on", str(profile_of(tmp_path))]) == 64
    assert "slurm" in capsys.readouterr().err
