"""Starts the ranks of a run: one in this process, or several as Ray actors. The only place that makes this choice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import InputError
from posttrain.orchestration.workers import LocalWorker, WorkerGroup
from posttrain.policy.parallel.mesh import Mesh


@dataclass(frozen=True)
class RankLayout:
    """Number of ranks and nodes, and resources per rank. Dedicated engines take the last places."""

    num_nodes: int = 1
    ranks_per_node: int = 1  # engines included
    gpus_per_rank: int = 1  # if there are GPUs
    device: str = "auto"  # of the config: auto, cpu or cuda
    num_threads: int | None = None  # CPUs per rank; None: its share of the node's cores
    is_process_group: bool = True  # False: independent ranks without a process group
    mesh: Mesh | None = None  # how the ranks are arranged; None: data parallel
    num_engines: int = 0
    places_per_engine: int = 1  # that share the layers of one engine
    places_per_engine_actor: int = 1  # all of an engine: vLLM, which starts its own processes
    log_folder: Path | None = None  # the run folder, for the logs of ranks; None: they write none

    @property
    def arrangement(self) -> Mesh:
        return self.mesh or Mesh(dp=self.num_ranks)

    @property
    def num_places(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        return self.num_places - self.num_engines * self.places_per_engine

    @property
    def gpus_per_node(self) -> int:
        return self.ranks_per_node * self.gpus_per_rank

    def engine_places(self, engine: int) -> range:
        """The first place of each of its actors."""
        first = self.num_ranks + engine * self.places_per_engine
        return range(first, first + self.places_per_engine, self.places_per_engine_actor)

    def num_places_of(self, place: int) -> int:
        """Of the actor that begins at this place."""
        return self.places_per_engine_actor if place >= self.num_ranks else 1

    def place_in_group(self, place: int) -> tuple[int, int]:
        """Rank and size in its process group, which spans all ranks or one engine."""
        if place >= self.num_ranks:
            part = (place - self.num_ranks) % self.places_per_engine
            return part // self.places_per_engine_actor, self.places_per_engine // self.places_per_engine_actor
        return (place, self.num_ranks) if self.is_process_group else (0, 1)

    def name_of(self, place: int) -> str:
        if place < self.num_ranks:
            return f"rank_{place}"
        engine = (place - self.num_ranks) // self.places_per_engine
        part, num_parts = self.place_in_group(place)
        return f"engine_{engine}" if num_parts == 1 else f"engine_{engine}_part_{part}"


def start_workers(
    build: Callable[[], object],
    layout: RankLayout,
    launcher: str,
    *,
    build_engine: Callable[[], object] | None = None,
    quiet: bool = False,
) -> WorkerGroup:
    """`build` creates a rank and `build_engine` a sampling-only rank, both in the process it runs in. Both are
    picklable.
    """
    size = layout.num_places
    if launcher == "local" and size > 1:
        raise InputError(
            f"cluster.launcher: local is one process, but num_nodes x gpus_per_node is {size}; use ray or auto"
        )
    if size == 1 and launcher != "ray":
        return LocalWorker.start(build)
    try:
        from posttrain.orchestration.ray_workers import RayWorkers
    except ImportError as error:
        raise InputError(
            f"cluster: {size} processes need Ray, which is not installed: pip install 'posttrain[ray]'; "
            "or set cluster.num_nodes=1 cluster.gpus_per_node=1"
        ) from error
    workers = RayWorkers(build, layout, _warn, build_engine)
    if not quiet:
        _warn(workers.summary)
    return workers


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
