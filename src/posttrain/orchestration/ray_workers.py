"""Ranks as Ray actors, one per GPU, or per CPU slot where there is no GPU; and dedicated engines.

Ray carries calls and results; ranks exchange gradients through torch.distributed (NCCL on GPUs, gloo on CPUs).
Ranks and engines are places of one placement group: all of them start, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import ray
from ray.util.placement_group import remove_placement_group

from posttrain.orchestration import ray_cluster
from posttrain.orchestration.ray_actor import PrivateRayWatch, RayWorker, end_actors, future_of, start_actor
from posttrain.orchestration.ray_cluster import Places
from posttrain.orchestration.ray_engines import RayEngines
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
        build_engine: Callable[[], object] | None = None,
    ) -> None:
        self.mesh = layout.arrangement
        self.workers: list[RayWorker] = []
        self._engines: RayEngines | None = None
        self._places: Places | None = None
        self._leaves_ray = not ray.is_initialized()
        address = ray_cluster.connect(layout, say) if self._leaves_ray else ray.get_runtime_context().gcs_address
        self._watch = PrivateRayWatch() if self._leaves_ray and address is None else None
        try:
            places = self._places = ray_cluster.reserve(layout, address, say)
            if build_engine is not None:
                self._engines = RayEngines(build_engine, layout, places, say)
            self.workers = [RayWorker(start_actor(rank, layout, places)) for rank in range(layout.num_ranks)]
            actors = [worker.actor for worker in self.workers]
            self.nodes: list[tuple[str, str]] = gather("build", [future_of(actor.node.remote()) for actor in actors])
            rendezvous: tuple[str, int] = gather("build", [future_of(actors[0].address.remote())])[0]
            gather("build", [future_of(actor.build.remote(build, rendezvous)) for actor in actors])
            if self._engines is not None:
                self.nodes += self._engines.wait_until_built()
        except BaseException:
            self.close()
            raise
        self._cluster = f"Ray cluster at {address}" if address else "private Ray on this machine"

    @property
    def engines(self) -> WorkerGroup:
        return self._engines or self

    @property
    def num_nodes(self) -> int:
        """Includes the engines."""
        return len(set(self.nodes))

    @property
    def summary(self) -> str:
        assert self._places is not None
        device = "GPU" if self._places.use_gpu else "CPU"
        by_node = Counter(self.nodes)
        listed = ", ".join(f"{count} on {ip}" for (ip, _), count in by_node.items())
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        engines = f" and {self._engines.summary}" if self._engines is not None else ""
        return f"{self._cluster}: {len(self.workers)} {device} ranks{engines} on {nodes} ({listed})"

    def request_stop(self) -> None:
        for worker in self.workers:
            worker.actor.request_stop.remote()

    def close(self) -> None:
        if self._engines is not None:
            self._engines.close()
        end_actors(self.workers)
        if self._places is not None and (self._watch is None or self._watch.loss is None):
            remove_placement_group(self._places.group)
        if self._leaves_ray:
            ray.shutdown()
        if self._watch is not None:
            self._watch.close()
