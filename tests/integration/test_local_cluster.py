"""The local cluster in real namespaces: what a pod finds, how it ends, and what is left of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from local_runs import ProgramRun, skip_without_namespaces, wait_for

from posttrain.apps.launch.local.local_cluster import local_folder
from posttrain.apps.launch.workloads import render_run
from posttrain.cli.main import main

SECRET = "c0ffee" * 10 + "7777"
TOKEN = "hf_plantedTokenOfThisTest0123456789abcd"
SOURCES = Path(__file__).parents[2] / "src"

# What a pod finds, into a file on the shared file system.
LOOK = """
import hashlib, json, os, socket, time
head = os.environ["POSTTRAIN_HEAD_HOST"]
while True:
    try:
        address = socket.gethostbyname(head)
        break
    except OSError:
        time.sleep(0.05)
try:
    open("/etc/posttrain/config.yaml", "a")
    writable = True
except OSError:
    writable = False
try:
    socket.create_connection(("192.0.2.1", 80), timeout=20)
    reached = "connected"
except OSError as error:
    reached = type(error).__name__
def can_write(folder):
    try:
        open(folder + "/.trial", "x").close()
        os.unlink(folder + "/.trial")
        return True
    except OSError:
        return False
open("/tmp/mine", "x").close()
open("/dev/shm/mine", "x").close()
found = dict(pid=os.getpid(), user=os.getuid(), host=socket.gethostname(),
    own=socket.gethostbyname(socket.gethostname()),
             head=address, writable=writable, reached=reached, config=open("/etc/posttrain/config.yaml").read(),
             token=hashlib.sha256(os.environ.get("HF_TOKEN", "").encode()).hexdigest(),
             secret=hashlib.sha256(open(os.environ["POSTTRAIN_CONTROL_SECRET_FILE"], "rb").read()).hexdigest(),
             variables=[hashlib.sha256(text.encode()).hexdigest() for text in os.environ.values()],
             written=[folder for folder in ("/", "/etc", "/usr", "/var/tmp", "/root", "/etc/posttrain-control",
                      os.path.dirname(json.__file__), os.environ["HOME"], "/tmp", "/shared", "/dev/shm")
                      if can_write(folder)],
             gpus=os.environ["CUDA_VISIBLE_DEVICES"], host_variable=os.environ.get("OF_THE_HOST"))
with open(f"/shared/{os.environ['JOB_COMPLETION_INDEX']}.new", "w") as file:
    json.dump(found, file)
os.rename(file.name, file.name.replace(".new", ".json"))
while not os.path.exists("/shared/1.json"):  # the end of rank 0 is the end of the run
    time.sleep(0.05)
"""

# Tries the control port of the run grpo-math: as older members joined it, and with the secret of its own run.
FOREIGN = """
import json, os, socket, time
from posttrain.apps.launch.node.session import Session
secret = open(os.environ["POSTTRAIN_CONTROL_SECRET_FILE"], "rb").read()
def line(**fields):
    return json.dumps(fields).encode() + b"\\n"
def proved(challenge, rank):
    nonces = (challenge["nonce"], "n")
    session = Session(secret, is_head=False, run="grpo-math", rank=rank, attempt=challenge["attempt"], nonces=nonces)
    return line(type="join", run="grpo-math", rank=rank, nonce="n", proof=session.proof)
tries = {
    "a rank": lambda challenge: line(type="join", run="grpo-math", rank=2),
    "the driver": lambda challenge: line(type="join", run="x", rank="driver") + line(type="failed", code=0, why="x"),
    "a failure": lambda challenge: line(type="failed", code=0, why="x"),
    "a rank with another secret": lambda challenge: proved(challenge, 2),
    "the driver with another secret": lambda challenge: proved(challenge, "driver"),
}
def attempt(name):
    while True:
        try:
            connection = socket.create_connection(("grpo-math-node-0-0.grpo-math", 6390), timeout=30)
            break
        except OSError:
            time.sleep(0.05)
    with connection, connection.makefile("rb") as lines:
        challenge = json.loads(lines.readline())
        connection.sendall(tries[name](challenge))
        try:
            return lines.readline().decode() or "closed"
        except ConnectionError:
            return "closed"
found = {name: attempt(name) for name in tries}
with open("/shared/tried.new", "w") as file:
    json.dump(found, file)
os.rename("/shared/tried.new", "/shared/tried.json")
time.sleep(600)
"""

# Ends with 85 when its machine is about to end, or SIGTERM comes; with 0 in the second attempt.
SPOT = """
import os, signal, sys, time, urllib.error, urllib.request
index = os.environ.get("JOB_COMPLETION_INDEX", "0")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
count = sum(name.startswith(f"{index}-") for name in os.listdir("/shared"))
if count and index == "0":
    sys.exit(0)
def ask(path, method="GET", **headers):
    request = urllib.request.Request(f"http://169.254.169.254{path}", method=method, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        return error.code
token = ask("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
print("without a token", ask("/latest/meta-data/spot/instance-action"), flush=True)
open(f"/shared/{index}-{count}", "x").close()
told = {}
while True:
    action = ask("/latest/meta-data/spot/instance-action", **{"X-aws-ec2-metadata-token": token})
    preempted = ask("/computeMetadata/v1/instance/preempted", **{"Metadata-Flavor": "Google"})
    if told != (action, preempted):
        told = (action, preempted)
        print(*told, flush=True)
    if action != 404:
        sys.exit(85)
    time.sleep(0.05)
"""

DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("/shared/ready", "a").close()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_namespaces()
    monkeypatch.setenv("POSTTRAIN_LOCAL", str(tmp_path / "local"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def runs() -> Iterator[list[ProgramRun]]:
    started: list[ProgramRun] = []
    yield started
    for run in started:
        run.close()


def begin(runs: list[ProgramRun], folder: Path, scheduler: str, program: str, *overrides: str) -> ProgramRun:
    run = ProgramRun(folder, scheduler, [sys.executable, "-c", program], *overrides)
    runs.append(run)
    run.start()
    return run


def test_a_pod_finds_what_its_manifest_says(
    tmp_path: Path, runs: list[ProgramRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("OF_THE_HOST", "1")
    monkeypatch.setattr("posttrain.apps.launch.local.local_cluster.new_secret", lambda: SECRET)
    run = begin(runs, tmp_path, "jobset", LOOK, "nodes.grace_s=2", "secrets={HF_TOKEN: {secret: hf, key: token}}")
    assert run.wait_for_end() == "Succeeded"
    first, second = (json.loads((run.claim / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first["pid"], first["user"]) == (1, 1000)
    assert [found["host"] for found in (first, second)] == ["grpo-math-node-0-0", "grpo-math-node-0-1"]
    assert first["own"] != second["own"]
    assert first["head"] == second["head"] == first["own"]
    assert not first["writable"]
    assert first["reached"] == "OSError"  # no route, at once
    assert first["config"] == run.objects[0]["data"]["config.yaml"]
    assert first["gpus"] == ""
    assert first["host_variable"] is None
    assert first["token"] == hashlib.sha256(TOKEN.encode()).hexdigest()
    assert not Path("/dev/shm/mine").exists()
    assert first["secret"] == second["secret"] == hashlib.sha256(SECRET.encode()).hexdigest()
    assert first["secret"] not in first["variables"], "it is a file in memory, which no child process inherits"
    assert first["written"] == ["/tmp", "/tmp", "/shared", "/dev/shm"], "the root is read-only, and HOME is /tmp"
    for path in local_folder().rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert TOKEN.encode() not in content, path
        assert SECRET.encode() not in content, path


def test_a_pod_of_another_run_cannot_join_end_or_read_a_gang(tmp_path: Path, runs: list[ProgramRun]) -> None:
    """Two pods of a run wait for their third; a pod of another run, with a secret of its own, shares their network."""
    run = ProgramRun(tmp_path, "jobset", [sys.executable, "-m", "posttrain", "node"], "nodes.grace_s=1", nodes=3)
    runs.append(run)
    jobs = run.objects[-1]["spec"]["replicatedJobs"]
    jobs[0]["template"]["spec"] |= {"completions": 2, "parallelism": 2}
    config, _, other = render_run(replace(run.request, name="other-run", num_nodes=1))
    (foreign,) = other["spec"]["replicatedJobs"]
    foreign["name"] = "foreign"
    foreign["template"]["spec"]["template"]["spec"]["containers"][0]["command"] = [sys.executable, "-c", FOREIGN]
    jobs.append(foreign)
    run.objects.insert(1, config)
    run.start()
    tried = json.loads(wait_for(lambda: _text_of(run.claim / "tried.json"), "the foreign pod has tried"))
    assert len(tried) == 5
    assert {name: answer for name, answer in tried.items() if answer != "closed"} == {}
    gang = [pod for pod in run.pods() if "foreign" not in pod.name]
    assert [(pod.rank, pod.phase) for pod in gang] == [(0, "Running"), (1, "Running")]
    wait_for(lambda: "rank 1 has joined" in run.log(gang[0]), "the member with the secret joins")
    log = run.log(gang[0])
    assert "it has not proved the secret of this run" in log
    assert "exit code" not in log


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("scheduler", ["job", "jobset"])
def test_a_notice_of_the_metadata_service_becomes_a_second_attempt(
    tmp_path: Path, runs: list[ProgramRun], scheduler: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begin(runs, tmp_path, scheduler, SPOT, "nodes.grace_s=2")
    wait_for(lambda: len(list(run.claim.glob("*-0"))) == 2, "both ranks have begun")
    assert main(["launch", "interrupt", run.name, "--rank", "0", "--notice", "600"]) == 0
    assert run.wait_for_end() == "Succeeded"
    ended = [(pod.attempt, pod.rank, pod.exit_code) for pod in run.pods() if pod.rank == 0]
    assert ended == [(1, 0, 85), (2, 0, 0)]
    log = run.log(run.pods()[0])
    assert "without a token 401" in log
    assert "404 FALSE" in log
    assert '"action": "terminate"' in log
    assert "TRUE" in log


def test_sigterm_comes_first_and_sigkill_when_the_grace_period_is_over(tmp_path: Path, runs: list[ProgramRun]) -> None:
    run = begin(runs, tmp_path, "job", DEAF, "nodes.grace_s=1")
    wait_for((run.claim / "ready").exists, "a rank has begun")
    pod = next(pod for pod in run.pods() if pod.rank == 1)
    run.cluster.interrupt(run.workload, pod.body, 0, evict=True)
    wait_for(lambda: any(p.rank == 1 and p.exit_code == 137 for p in run.pods()), "rank 1 is killed")
    told = [event for event in run.cluster.events(run.workload) if "Evicted" in event or "Killed" in event]
    assert [("Evicted" in event, "Killed" in event) for event in told] == [(True, False), (False, True)]
    wait_for(lambda: any(p.rank == 1 and p.attempt == 2 for p in run.pods()), "the index is created again")


def test_a_machine_that_is_lost_without_notice_is_an_end_with_137(tmp_path: Path, runs: list[ProgramRun]) -> None:
    run = begin(runs, tmp_path, "volcano", DEAF, "nodes.grace_s=1")
    wait_for((run.claim / "ready").exists, "a rank has begun")
    run.cluster.interrupt(run.workload, run.pods()[1].body, 0, evict=False)
    wait_for(lambda: len(run.pods()) == 4, "the gang is started again")
    assert [pod.exit_code for pod in run.pods()][:2] == [137, 137]


def test_stop_ends_the_pods_and_keeps_the_claim(tmp_path: Path, runs: list[ProgramRun]) -> None:
    run = begin(runs, tmp_path, "rayjob", DEAF, "nodes.grace_s=1")
    wait_for((run.claim / "ready").exists, "a rank has begun")
    assert main(["launch", "stop", run.name]) == 0
    assert run.cluster.workloads(run.name) == []
    assert (run.claim / "ready").exists()
    assert not (local_folder() / "runs" / run.name).exists()


def test_a_run_whose_process_was_killed_is_lost_and_leaves_no_pod(
    tmp_path: Path, runs: list[ProgramRun], capfd: pytest.CaptureFixture[str]
) -> None:
    run = begin(runs, tmp_path, "job", DEAF, "nodes.grace_s=1")
    wait_for((run.claim / "ready").exists, "a rank has begun")
    marker = str(local_folder() / "runs" / run.name).encode()
    process = next(pid for pid in _pids() if marker in _command_line(pid))
    pods = [pid for pid in _pids() if b"/shared/ready" in _command_line(pid)]
    assert pods
    os.kill(process, signal.SIGKILL)
    run.wait_for_phase("Lost")
    wait_for(lambda: not any(b"/shared/ready" in _command_line(pid) for pid in pods), "its pods are gone")
    assert main(["launch", "status", run.name]) == 0
    assert "Lost" in capfd.readouterr().out
    assert main(["launch", "stop", run.name]) == 0


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_run_goes_on_when_the_command_that_follows_it_is_killed(tmp_path: Path, runs: list[ProgramRun]) -> None:
    run = ProgramRun(tmp_path, "jobset", [sys.executable, "-c", SPOT], "nodes.grace_s=2")
    runs.append(run)
    script = tmp_path / "laptop.py"
    script.write_text(
        "import json, sys\n"
        "from posttrain.apps.launch.submit import follow\n"
        "from posttrain.apps.launch.local.local_cluster import LocalCluster\n"
        "cluster = LocalCluster()\n"
        "cluster.create(json.load(open(sys.argv[1])))\n"
        "follow(cluster, sys.argv[2])\n"
    )
    objects = tmp_path / "objects.json"
    objects.write_text(json.dumps(run.objects))
    laptop = subprocess.Popen(
        [sys.executable, str(script), str(objects), run.name],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        start_new_session=True,
    )
    assert laptop.stdout is not None
    assert b"without a token" in laptop.stdout.readline()  # it follows rank 0
    os.killpg(laptop.pid, signal.SIGKILL)
    laptop.wait()
    wait_for(lambda: len(list(run.claim.glob("*-0"))) == 2, "both ranks have begun")
    run.cluster.interrupt(run.workload, run.pods()[1].body, 0, evict=True)
    assert run.wait_for_end() == "Succeeded"


def test_a_kernel_that_forbids_namespaces_is_a_message_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posttrain.apps.launch.local.local_cluster.namespaces.__file__", "/nonexistent")
    words = ["grpo", "checkpointing.checkpoint_dir=/shared/run", "policy.model_name=/shared/model"]
    assert main(["launch", "--on", "local", "--yes", *words]) == 64
    assert "does not let users make namespaces" in capfd.readouterr().err
    assert not local_folder().exists()


def test_a_secret_that_this_machine_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    profile = tmp_path / "p.yaml"
    profile.write_text("cluster: {kind: local}\nsecrets: {HF_TOKEN: {secret: hf, key: token}}\n")
    words = ["grpo", "checkpointing.checkpoint_dir=/shared/run", "policy.model_name=/shared/model"]
    assert main(["launch", "--on", str(profile), "--yes", *words]) == 64
    assert "secrets.HF_TOKEN" in capfd.readouterr().err
