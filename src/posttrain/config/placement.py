"""Which machine of the cluster has which workers: the ranks that train, and worker groups on GPUs of their own.

Groups are placed largest first, on the last machines with room; ranks that train get what is left, from the first
machine on. So two machines of two GPUs with an engine, a reference and a reward model of one GPU each have the policy
and the engine on the first, and the other two on the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.config.base import PositiveInt, Section, setting

ENGINE, REFERENCE = "engine", "reference"


class ResourcesConfig(Section):
    gpus_per_node: PositiveInt | None = setting(
        None, "GPUs of its own on a machine, of cluster.gpus_per_node; on several machines null is all."
    )
    num_nodes: PositiveInt | None = setting(
        None, "Machines that these GPUs are on, of cluster.num_nodes; null where there is one machine."
    )


def group_of_reward(field: str) -> str:
    """Name of the worker group of a reward model: `reward_NAME` for env.NAME, `reward_NAME_PART` for one of several."""
    return "_".join(["reward", *(part for part in field.removeprefix("env.").split(".") if part != "rewards")])


@dataclass(frozen=True)
class GroupRequest:
    """What a config asks for: GPUs that do nothing else."""

    name: str  # in messages, logs and the dashboard
    field: str  # with `resources` under it
    resources: ResourcesConfig
    switch: str = ""  # what turned it on, for messages; empty: its resources
    size: int = 1  # GPUs of one machine that share the layers of one member
    size_field: str = ""
    per_actor: int = 1  # GPUs of one process

    def shape(self, num_nodes: int, gpus_per_node: int) -> tuple[int, int]:
        """Machines, and GPUs on each; 0 machines if that is not said."""
        wanted = self.resources
        if num_nodes == 1:
            return (1, wanted.gpus_per_node) if wanted.gpus_per_node else (0, 0)
        return wanted.num_nodes or 0, wanted.gpus_per_node or gpus_per_node

    def problems(self, num_nodes: int, gpus_per_node: int) -> Iterator[str]:
        wanted, key = self.resources, f"{self.field}.resources"
        name, number, limit = "num_nodes", wanted.num_nodes, num_nodes
        if num_nodes == 1:
            name, number, limit = "gpus_per_node", wanted.gpus_per_node, gpus_per_node
            if wanted.num_nodes not in (None, 1):
                yield f"{key}.num_nodes = {wanted.num_nodes}, but cluster.num_nodes = 1; set it to null"
        elif wanted.gpus_per_node is not None and wanted.gpus_per_node > gpus_per_node:
            yield f"{key}.gpus_per_node = {wanted.gpus_per_node}, but cluster.gpus_per_node = {gpus_per_node}; lower it"
            return
        machines, per_machine = self.shape(num_nodes, gpus_per_node)
        if number is None or machines * per_machine >= num_nodes * gpus_per_node:
            yield (
                f"{self.switch or key} needs {key}.{name}, its own share of cluster.{name} = {limit}; it is "
                f"{'null' if number is None else number}, and at least one GPU must be left to train"
            )
        elif per_machine % self.size:
            yield (
                f"{self.size_field} = {self.size} must divide the {per_machine} GPUs of a machine of {key}: those that "
                "share layers are on one machine"
            )


@dataclass(frozen=True)
class PlacedGroup:
    name: str
    machines: tuple[int, ...]  # of each of its GPUs
    size: int = 1  # GPUs of a member
    per_actor: int = 1  # GPUs of one process: all of a member that splits its layers itself

    @property
    def num_members(self) -> int:
        return len(self.machines) // self.size


@dataclass(frozen=True)
class Placement:
    ranks: tuple[int, ...]  # the machine of each rank that trains
    groups: tuple[PlacedGroup, ...] = ()
    left_over: tuple[GroupRequest, ...] = ()  # no machines have room for these

    def group(self, name: str) -> PlacedGroup | None:
        return next((group for group in self.groups if group.name == name), None)


def place(requests: Sequence[GroupRequest], num_nodes: int, gpus_per_node: int) -> Placement:
    """`requests` in the order in which their groups follow the policy on the machines, as far as there is room."""
    free = [gpus_per_node] * num_nodes
    placed: dict[str, PlacedGroup] = {}
    left_over: list[GroupRequest] = []
    shapes = {request.name: request.shape(num_nodes, gpus_per_node) for request in requests}
    for request in sorted(requests, key=lambda request: shapes[request.name][1])[::-1]:
        count, each = shapes[request.name]
        machines = sorted([machine for machine in range(num_nodes) if free[machine] >= each][-count:] if count else [])
        if len(machines) < count:
            left_over.append(request)
            continue
        for machine in machines:
            free[machine] -= each
        of_gpus = tuple(machine for machine in machines for _ in range(each))
        placed[request.name] = PlacedGroup(request.name, of_gpus, request.size, request.per_actor)
    ranks = tuple(machine for machine, count in enumerate(free) for _ in range(count))
    groups = [placed[request.name] for request in requests if request.name in placed]
    return Placement(ranks, tuple(group for group in groups if group.machines), tuple(left_over))


def placement_problems(requests: Sequence[GroupRequest], num_nodes: int, gpus_per_node: int) -> Iterator[str]:
    found = [problem for request in requests for problem in request.problems(num_nodes, gpus_per_node)]
    if found or not requests:
        yield from found
        return
    placement = place(requests, num_nodes, gpus_per_node)
    listed = ", ".join(
        "{} {} x {}".format(request.name, *request.shape(num_nodes, gpus_per_node)) for request in requests
    )
    for request in placement.left_over:
        yield (
            f"{request.field}.resources: {request.name} does not fit: cluster.num_nodes x cluster.gpus_per_node = "
            f"{num_nodes} x {gpus_per_node}, but {listed} are requested; lower one of them, or raise cluster.num_nodes"
        )
    if not placement.left_over and not placement.ranks:
        yield (
            f"cluster.num_nodes x cluster.gpus_per_node = {num_nodes} x {gpus_per_node} are all given away ({listed}): "
            "at least one GPU must be left to train; raise cluster.num_nodes, or lower resources"
        )
