"""The controllers of Volcano and KubeRay as small state machines (see controllers.py)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from posttrain.apps.launch.local.controllers import Backoff, Controller
from posttrain.apps.launch.local.pods import Command, Machine, Object, Pod
from posttrain.apps.launch.pod_template import RAY_PORT


@dataclass
class VolcanoController(Controller):
    """A Volcano Job. The first policy that fits decides, those of the task before those of the job."""

    name: str
    spec: Object
    machine: Machine
    num_retries: int = 0
    pods: list[tuple[Object, Pod]] = field(default_factory=list)  # with their tasks, of this attempt
    _seen: set[str] = field(default_factory=set)

    @property
    def all_pods(self) -> list[Pod]:
        return [pod for _, pod in self.pods]

    def reconcile(self, now: float) -> None:
        if not self.pods:
            self._start_all()
        if self.ending is None and not self.is_restarting:
            self._judge()
        self.end_or_restart(self._start_all)

    def _start_all(self) -> None:
        self.pods = []
        hosts = {
            task["name"]: [f"{self.name}-{task['name']}-{index}.{self.name}" for index in range(task["replicas"])]
            for task in self.spec["tasks"]
        }
        env: dict[str, str] = {}
        for task, names in hosts.items():
            key = task.upper().replace("-", "_")
            env |= {f"VC_{key}_HOSTS": ",".join(names), f"VC_{key}_NUM": str(len(names))}
        for task in self.spec["tasks"]:
            for index, host in enumerate(hosts[task["name"]]):
                pod = Pod(
                    name=f"{self.name}-{task['name']}-{index}",
                    template=task["template"],
                    hostname=f"{self.name}-{task['name']}-{index}",
                    aliases=(host,),
                    labels={
                        "volcano.sh/job-name": self.name,
                        "volcano.sh/task-spec": task["name"],
                        "volcano.sh/task-index": str(index),
                    },
                    annotations={"volcano.sh/job-version": str(self.num_retries)},
                    env={**env, "VC_TASK_INDEX": str(index), "VK_TASK_INDEX": str(index)},
                )
                self.pods.append((task, pod))
                self.machine.start(pod)

    def _judge(self) -> None:
        for task, pod in self.pods:
            if not pod.is_over or pod.uid in self._seen:
                continue
            self._seen.add(pod.uid)
            if pod.is_disrupted:
                self._act(self._action(task, "PodEvicted", pod.exit_code), f"pod {pod.name} was evicted")
            elif pod.exit_code != 0:
                self._act(self._action(task, "PodFailed", pod.exit_code), f"pod {pod.name} ended with {pod.exit_code}")
            elif all(other.exit_code == 0 for owner, other in self.pods if owner is task):
                self._act(self._action(task, "TaskCompleted", None), f"task {task['name']} completed")
            if self.ending is not None or self.is_restarting:
                return
        if all(pod.is_over for _, pod in self.pods):
            succeeded = sum(pod.exit_code == 0 for _, pod in self.pods)
            enough = succeeded >= int(self.spec.get("minSuccess") or self.spec.get("minAvailable") or len(self.pods))
            phase = "Completed" if enough else "Failed"
            self.end(phase, phase, f"{succeeded} of {len(self.pods)} pods succeeded")

    def _action(self, task: Object, event: str, exit_code: int | None) -> str | None:
        for policy in [*task.get("policies", []), *self.spec.get("policies", [])]:
            events = policy.get("events", [policy["event"]] if "event" in policy else [])
            if event in events or "*" in events or (exit_code and policy.get("exitCode") == exit_code):
                return str(policy["action"])
        return None

    def _act(self, action: str | None, why: str) -> None:
        if action == "RestartJob":
            self.num_retries += 1
            if self.num_retries >= self.spec.get("maxRetry", 3):
                self.end("Failed", "Failed", f"maxRetry is reached: {why}")
                return
            self.is_restarting = True
            self.machine.note("Restarting", f"Job {self.name}: retry {self.num_retries}: {why}")
        elif action is not None:
            phase = {"AbortJob": "Aborted", "CompleteJob": "Completed"}.get(action, "Terminated")
            self.end(phase, phase, why)

    def status(self) -> Object:
        phase = "Restarting" if self.is_restarting else "Running"
        state = {"phase": self.ending.kind, "message": self.ending.message} if self.ending else {"phase": phase}
        return {"state": state, "retryCount": self.num_retries}


@dataclass
class RayJobController(Controller):
    """A RayJob: a Ray cluster, and the entrypoint on its head, as Ray's Jobs API starts it. A failure is retried with a
    new cluster, which does not wait for the pods of the old one."""

    name: str
    namespace: str
    spec: Object
    machine: Machine
    backoff_scale: float
    num_failures: int = 0
    head: Pod | None = None
    workers: list[Pod] = field(default_factory=list)
    old: list[Pod] = field(default_factory=list)
    entrypoint: Command | None = None
    _start_at: dict[int, float] = field(default_factory=dict)  # of workers, by their place
    kind = "RayJob"

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.backoff_scale)

    @property
    def all_pods(self) -> list[Pod]:
        return [*self.old, *self.workers, *([self.head] if self.head is not None else [])]

    def reconcile(self, now: float) -> None:
        if self.ending is not None:
            self.end_pods()
            return
        if self.head is None:
            self._start_cluster()
        assert self.head is not None
        code = self.entrypoint.poll() if self.entrypoint is not None else None
        if code == 0:
            self.end("Complete", "JobSucceeded", "the entrypoint ended with 0")
        elif code is not None:
            self._on_failure(f"the entrypoint ended with {code}")
        elif self.head.is_over:
            self._on_failure(f"the head ended with {self.head.exit_code}")
        elif self.entrypoint is None and all(pod.phase == "Running" for pod in (self.head, *self.workers)):
            self.entrypoint = self.machine.begin_command(self.head, self.spec["entrypoint"])
        else:
            self._replace_workers(now)

    def _replace_workers(self, now: float) -> None:
        """KubeRay recreates a worker that has ended, independent of the job."""
        for place, pod in enumerate(self.workers):
            if not pod.is_over:
                continue
            if place not in self._start_at:
                self._start_at[place] = now + self._backoff.next_s()
            elif now >= self._start_at[place]:
                del self._start_at[place]
                self.old.append(pod)
                self.workers[place] = self._worker(place)
                self.machine.start(self.workers[place])

    def _start_cluster(self) -> None:
        cluster = self.spec["rayClusterSpec"]
        has_token = cluster.get("authOptions", {}).get("mode") == "token"
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if has_token else {}
        self.cluster_name = f"{self.name}-{self.num_failures + 1:05d}"
        service = f"{self.cluster_name}-head-svc"
        self._address = f"{service}.{self.namespace}.svc.cluster.local"
        head = cluster["headGroupSpec"]
        start = f"--head {_options(head)} --port={RAY_PORT}"
        self.head = self._pod("head", "head", "headgroup", head["template"], "127.0.0.1", start)
        self.head.aliases = (service, f"{service}.{self.namespace}", self._address)
        self.machine.start(self.head)
        groups = cluster.get("workerGroupSpecs", [])
        self._groups = [group for group in groups for _ in range(group["replicas"])]
        self.workers = [self._worker(place) for place in range(len(self._groups))]
        for pod in self.workers:
            self.machine.start(pod)

    def _worker(self, place: int) -> Pod:
        group = self._groups[place]
        name, start = group["groupName"], f"{_options(group)} --address={self._address}:{RAY_PORT}"
        pod = self._pod(f"{name}-{place}", "worker", name, group["template"], self._address, start)
        pod.env["RAY_IP"] = self._address.partition(".")[0]
        return pod

    def _pod(self, name: str, kind: str, group: str, template: Object, ray_host: str, start: str) -> Pod:
        return Pod(
            name=f"{self.cluster_name}-{name}",
            template=template,
            hostname=f"{self.cluster_name}-{name}",
            labels={"ray.io/cluster": self.cluster_name, "ray.io/node-type": kind, "ray.io/group": group},
            env={
                **self._token,
                "RAY_CLUSTER_NAME": self.cluster_name,
                "RAY_PORT": str(RAY_PORT),
                "RAY_ADDRESS": f"{ray_host}:{RAY_PORT}",
                "FQ_RAY_IP": self._address,
                "KUBERAY_GEN_RAY_START_CMD": f"ray start {start} --block",
            },
        )

    def _on_failure(self, why: str) -> None:
        self.num_failures += 1
        if self.num_failures > self.spec.get("backoffLimit", 0):
            self.end("Failed", "AppFailed", why)
            return
        self.machine.note("Retrying", f"RayJob {self.name}: retry {self.num_failures}: {why}")
        self.end_pods()
        self.old, self.workers, self.head, self.entrypoint = self.all_pods, [], None, None
        self._start_at.clear()

    def status(self) -> Object:
        status: Object = {"failed": self.num_failures, "jobDeploymentStatus": "Running"}
        if self.ending is not None:
            status |= {"jobDeploymentStatus": self.ending.kind, "reason": self.ending.reason}
            status |= {"message": self.ending.message}
        return status


def _options(group: Object) -> str:
    given = {key: value for key, value in group.get("rayStartParams", {}).items() if key != "block"}
    cpu = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("cpu")
    if cpu is not None:
        given.setdefault("num-cpus", str(cpu))
    return " ".join(f"--{key}={value}" for key, value in given.items())
