"""The pod that controllers work with, and the interface of the machine that runs it; without namespaces and
processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, Protocol

from posttrain.apps.launch.pod_template import CONTAINER, Object

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass
class Pod:
    """One pod, from the request to its end. The machine that runs it fills in what happens."""

    name: str
    template: Object
    hostname: str
    aliases: tuple[str, ...] = ()  # names of Services that lead to it
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)  # from the controller, beside those of the template
    phase: Phase = "Pending"
    exit_code: int | None = None
    is_deleted: bool = False  # asked to end
    is_disrupted: bool = False  # by its machine, not by a controller
    uid: str = ""
    ip: str = ""
    created: float = 0.0
    finished: float | None = None

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None

    @property
    def grace_s(self) -> float:
        return float(self.template["spec"].get("terminationGracePeriodSeconds", 30))

    def as_object(self, namespace: str) -> Object:
        """As the API server shows it."""
        state: Object = {"running": {}} if self.phase == "Running" else {"waiting": {"reason": "ContainerCreating"}}
        if self.exit_code is not None:
            assert self.finished is not None
            reason = "Completed" if self.exit_code == 0 else "Error"
            state = {"terminated": {"exitCode": self.exit_code, "reason": reason, "finishedAt": as_time(self.finished)}}
        metadata: Object = {
            "name": self.name,
            "namespace": namespace,
            "uid": self.uid,
            "labels": {**self.template["metadata"].get("labels", {}), **self.labels},
            "annotations": self.annotations,
            "creationTimestamp": as_time(self.created),
        }
        if self.is_deleted and not self.is_over:
            metadata["deletionTimestamp"] = as_time(self.created)
        conditions = [{"type": "DisruptionTarget", "status": "True"}] if self.is_disrupted else []
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"nodeName": f"local-{self.ip}"},
            "status": {
                "phase": self.phase,
                "podIP": self.ip,
                "conditions": conditions,
                "containerStatuses": [{"name": CONTAINER, "state": state}],
            },
        }


class Machine(Protocol):
    """The operations of a controller. `Pod` objects are updated asynchronously; no call blocks."""

    def start(self, pod: Pod) -> None: ...

    def end(self, pod: Pod) -> None:
        """SIGTERM; SIGKILL when the grace period is over. Idempotent."""

    def begin_command(self, pod: Pod, command: str) -> Command:
        """A further process in a pod."""

    def note(self, reason: str, message: str) -> None:
        """An event of the run."""


class Command(Protocol):
    def poll(self) -> int | None: ...


def as_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
