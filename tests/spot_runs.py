"""A tiny GRPO run on two nodes of the local cluster, whose machines are taken away at random moments."""

from __future__ import annotations

import gzip
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tiny_runs
from local_runs import wait_for

from posttrain.apps.launch.launch_request import request_run
from posttrain.apps.launch.local.local_cluster import FOLDER_VARIABLE, LocalCluster, claim_folder
from posttrain.apps.launch.runs import ENDED, RunPod, pods_by_rank, state_of
from posttrain.apps.launch.workloads import render_run
from posttrain.config import load_config
from posttrain.config.cluster_profile import ClusterProfile

SCHEDULERS = ("job", "jobset", "volcano", "rayjob")
HOWS = ("notice", "SIGTERM", "SIGKILL")
NOTICE_S = 30.0
MAX_FRUITLESS = 2  # interruptions in a row before a new checkpoint; a third ends the run, as it should
LIMIT_S = 1200.0
TOKEN = "hf_plantedTokenOfAWholeRun0123456789abcd"


@dataclass(frozen=True)
class Interruption:
    how: str  # of HOWS
    rank: int
    num_checkpoints: int  # new ones of this attempt that are waited for
    delay_s: float  # then

    @classmethod
    def draw(cls, chance: random.Random, num_fruitless: int) -> Interruption:
        least = 0 if num_fruitless < MAX_FRUITLESS else 1
        num_checkpoints = chance.choice([least, 1, 1, 2])
        delay_s = chance.uniform(0.0, 20.0 if num_checkpoints == 0 else 1.5)
        return cls(chance.choice(HOWS), chance.randrange(2), num_checkpoints, delay_s)


class SpotRun:
    """`folder` is that of the local cluster. Runs of several schedulers may share it, one after the other."""

    def __init__(self, folder: Path, scheduler: str, model: Path, data: Path, *, steps: int) -> None:
        os.environ |= {FOLDER_VARIABLE: str(folder), "HF_TOKEN": TOKEN}
        profile = ClusterProfile.model_validate(
            {
                "cluster": {"kind": "local"},
                "scheduler": {"kind": scheduler},
                "secrets": {"HF_TOKEN": {"secret": "hf", "key": "token"}},
            }
        )
        self.steps = steps
        self.name = f"spot-{scheduler}"
        mount = Path(profile.storage.mount)
        kind, *settings = tiny_runs.grpo(model, data, mount / self.name, steps=steps)
        settings += ["cluster.num_nodes=2", "checkpointing.save_period=1", "grpo.val_period=5"]
        self.objects = render_run(request_run(load_config(kind, None, settings), profile, self.name))
        self.folder = claim_folder(profile.storage.claim) / self.name
        self.cluster = LocalCluster()

    @contextmanager
    def started(self) -> Iterator[None]:
        self.cluster.create(self.objects)
        try:
            yield
        finally:
            for workload in self.cluster.workloads(self.name):
                self.cluster.delete(workload)

    def pods(self) -> list[RunPod]:
        return [
            pod for workload in self.cluster.workloads(self.name) for pod in pods_by_rank(self.cluster.pods(workload))
        ]

    @property
    def phase(self) -> str:
        (workload,) = self.cluster.workloads(self.name)
        return state_of(workload).phase

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.folder.glob("step_*")}

    def interrupt(self, one: Interruption, done: set[str]) -> bool:
        """Once both ranks of a new attempt run. `done`: pods of attempts before. False: the run was over first."""

        def fresh() -> dict[int, RunPod] | bool:
            alive = {
                pod.rank: pod
                for pod in self.pods()
                if pod.phase == "Running" and pod.body["metadata"]["uid"] not in done
            }
            return alive if len(alive) == 2 else self.phase in ENDED

        pods = wait_for(fresh, f"both ranks of {self.name}", LIMIT_S)
        if pods is True:
            return False
        before = self.checkpoints()
        wait_for(
            lambda: len(self.checkpoints() - before) >= one.num_checkpoints or self.phase in ENDED,
            f"{one.num_checkpoints} new checkpoints of {self.name}",
            LIMIT_S,
        )
        time.sleep(one.delay_s)
        pod = pods[one.rank]
        if self.phase in ENDED:
            return False
        (workload,) = self.cluster.workloads(self.name)
        self.cluster.interrupt(workload, pod.body, NOTICE_S if one.how == "notice" else 0.0, evict=one.how == "SIGTERM")
        done |= {other.body["metadata"]["uid"] for other in self.pods()}
        return True

    def finish(self) -> None:
        """To the end of the run."""
        wait_for(lambda: self.phase in (*ENDED, "Lost"), f"the end of {self.name}", LIMIT_S)
        assert self.phase == "Succeeded", self.story()
        wait_for(lambda: not any(pod.is_alive for pod in self.pods()), "its pods end")
        for path in Path(os.environ[FOLDER_VARIABLE]).rglob(
            "*"
        ):  # manifests, status, events, logs, the run's own folder
            if path.is_file():
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                assert TOKEN.encode() not in content, f"the token is in {path}"

    def story(self) -> str:
        """Events, and the end of each pod's output."""
        (workload,) = self.cluster.workloads(self.name)
        lines = [state_of(workload).message, *self.cluster.events(workload)]
        for pod in self.pods():
            text = "".join(self.cluster.log(pod.body, follow=False))
            lines += [f"-- attempt {pod.attempt}, rank {pod.rank}, exit code {pod.exit_code}", text[-1500:]]
        return "\n".join(lines)


def run_through(run: SpotRun, interruptions: Sequence[Interruption]) -> int:
    """The run, with these interruptions. Returns how many there were before it was over."""
    done: set[str] = set()
    count = 0
    with run.started():
        for one in interruptions:
            if not run.interrupt(one, done):
                break
            count += 1
        run.finish()
    return count


def assert_same_end(run: SpotRun, whole: SpotRun) -> None:
    """Every number of every row, every sample, the bytes of the last weights."""
    ours, expected = tiny_runs.results_of(run.folder), tiny_runs.results_of(whole.folder)
    assert [row["step"] for row in ours] == [row["step"] for row in expected], "rows are missing or twice"
    for row, other in zip(ours, expected, strict=True):
        assert row == other, f"step {row['step']} differs"
    last = f"step_{run.steps}"
    assert tiny_runs.weights_of(run.folder / last) == tiny_runs.weights_of(whole.folder / last), "other weights"
    samples = {path.name: path.read_bytes() for path in (whole.folder / "rollouts").glob("*")}
    assert {path.name: path.read_bytes() for path in (run.folder / "rollouts").glob("*")} == samples, "other samples"
