"""Ranks as Ray actors, one per GPU, or per CPU slot where there is no GPU; and groups beside them.

Ray carries calls and results; ranks exchange gradients through torch.distributed (NCCL on GPUs, gloo on CPUs).
Ranks and groups are places of one placement group: all of them start, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import ray
from ray.util.placement_group import remove_placement_group

from posttrain.config.placement import ENGINE
from posttrain.orchestration import ray_cluster
from posttrain.orchestration.ray_actor import PrivateRayWatch, RayWorker, end_actors, future_of, start_actor, statuses
from posttrain.orchestration.ray_cluster import Places
from posttrain.orchestration.ray_engines import RayGroup
from posttrain.orchestration.workers import RankLayout, WorkerGroup, gather


class RayWorkers:
    """`WorkerGroup` over actors, one for each rank."""

    in_process = False
    unit = "rank"

    def __init__(
        self,
        build: Callable[[], object],
        layout: RankLayout,
        say: Callable[[str], None],
        beside: Mapping[str, Callable[[], object]],
    ) -> None:
        self.mesh = layout.arrangement
        self.workers: list[RayWorker] = []
        self._beside: dict[str, RayGroup] = {}
        self._places: Places | None = None
        self._leaves_ray = not ray.is_initialized()
        address = ray_cluster.connect(layout, say) if self._leaves_ray else ray.get_runtime_context().gcs_address
        self._watch = PrivateRayWatch() if self._leaves_ray and address is None else None
        try:
            places = self._places = ray_cluster.reserve(layout, address, say)
            for group in layout.groups:
                self._beside[group.name] = RayGroup(group, beside[group.name], layout, places, say)
            self.workers = [RayWorker(start_actor(rank, layout, places)) for rank in range(layout.num_ranks)]
            actors = [worker.actor for worker in self.workers]
            self.nodes: list[tuple[str, str]] = gather("build", [future_of(actor.node.remote()) for actor in actors])
            rendezvous: tuple[str, int] = gather("build", [future_of(actors[0].address.remote())])[0]
            gather("build", [future_of(actor.build.remote(build, rendezvous)) for actor in actors])
            for own in self._beside.values():
                self.nodes += own.wait_until_built()
        except BaseException:
            self.close()
            raise
        self._cluster = f"Ray cluster at {address}" if address else "private Ray on this machine"

    @property
    def engines(self) -> WorkerGroup:
        return self._beside.get(ENGINE) or self

    def beside(self, name: str) -> WorkerGroup | None:
        return self._beside.get(name)

    @property
    def num_nodes(self) -> int:
        """Includes the groups beside the ranks."""
        return len(set(self.nodes))

    @property
    def summary(self) -> str:
        assert self._places is not None
        device = "GPU" if self._places.use_gpu else "CPU"
        by_node = Counter(self.nodes)
        listed = ", ".join(f"{count} on {ip}" for (ip, _), count in by_node.items())
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        beside = "".join(f" and {group.summary}" for group in self._beside.values())
        return f"{self._cluster}: {len(self.workers)} {device} ranks{beside} on {nodes} ({listed})"

    def status(self) -> list[dict[str, object]]:
        found = statuses("policy", self.workers)
        for group in self._beside.values():
            found += group.status()
        return found

    def request_stop(self) -> None:
        for worker in self.workers:
            worker.actor.request_stop.remote()

    def close(self) -> None:
        for group in self._beside.values():
            group.close()
        end_actors(self.workers)
        if self._places is not None and (self._watch is None or self._watch.loss is None):
            remove_placement_group(self._places.group)
        if self._leaves_ray:
            ray.shutdown()
        if self._watch is not None:
            self._watch.close()
