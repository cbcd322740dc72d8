"""Ranks as Ray actors, one per GPU, or per CPU slot where there is no GPU.

Ray carries calls and results; gradients travel between the ranks through torch.distributed (NCCL on GPUs, gloo on CPUs).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.utils import logging

from posttrain.errors import InputError
from posttrain.orchestration import ray_cluster
from posttrain.orchestration.failures import NCCL_TIMEOUT_VARIABLE, WorkerDiedError
from posttrain.orchestration.launch import RankLayout
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.ray_cluster import Places
from posttrain.orchestration.workers import gather

P = ParamSpec("P")
T = TypeVar("T")


class RankActor:
    """The process of a rank. It joins the process group first, then builds the rank, which shards over that group."""

    def __init__(self, index: int, layout: RankLayout) -> None:
        self.index, self.layout = index, layout
        torch.set_num_threads(layout.num_threads or max(1, (os.cpu_count() or 1) // layout.ranks_per_node))
        logging.set_verbosity_error()  # progress bars and advice would break up the driver's console
        logging.disable_progress_bar()
        self.rank: Any = None

    def node(self) -> tuple[str, str]:
        """The IP and the id of the node that the rank is on."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def address(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def build(self, build: Callable[[], object], address: tuple[str, int]) -> None:
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor only its own GPU
        if self.layout.is_process_group and self.layout.num_ranks > 1:
            cuda = torch.cuda.is_available() and self.layout.device != "cpu"
            torch.distributed.init_process_group(
                "cuda:nccl,cpu:gloo" if cuda else "gloo",
                init_method=f"tcp://{address[0]}:{address[1]}",
                rank=self.index,
                world_size=self.layout.num_ranks,
                timeout=_collective_timeout(),
            )
        self.rank = build()

    def run(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return getattr(self.rank, operation)(*args, **kwargs)


class RayWorker:
    """One rank behind an actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _future(self.actor.run.remote(operation.__name__, args, kwargs))


class RayWorkers:
    """`WorkerGroup` over actors, one for each rank."""

    in_process = False

    def __init__(self, build: Callable[[], object], layout: RankLayout, say: Callable[[str], None]) -> None:
        self.mesh = layout.arrangement
        self.workers: list[RayWorker] = []
        self._places: Places | None = None
        self._leaves_ray = not ray.is_initialized()
        address = ray_cluster.connect(layout, say) if self._leaves_ray else ray.get_runtime_context().gcs_address
        try:
            self._places = ray_cluster.reserve(layout, address, say)
            self.workers = [RayWorker(self._actor(rank, layout)) for rank in range(layout.num_ranks)]
            actors = [worker.actor for worker in self.workers]
            self.nodes: list[tuple[str, str]] = gather("build", [_future(actor.node.remote()) for actor in actors])
            rendezvous: tuple[str, int] = gather("build", [_future(actors[0].address.remote())])[0]
            gather("build", [_future(actor.build.remote(build, rendezvous)) for actor in actors])
        except BaseException:
            self.close()
            raise
        self._cluster = f"Ray cluster at {address}" if address else "private Ray on this machine"

    def _actor(self, rank: int, layout: RankLayout) -> ActorHandle:
        assert self._places is not None
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=1,
                num_gpus=layout.gpus_per_rank if self._places.use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._places.group, placement_group_bundle_index=rank // layout.ranks_per_node
                ),
            )
            .remote(rank, layout)
        )

    @property
    def summary(self) -> str:
        assert self._places is not None
        device = "GPU" if self._places.use_gpu else "CPU"
        by_node = Counter(self.nodes)
        listed = ", ".join(f"{count} on {ip}" for (ip, _), count in by_node.items())
        nodes = "1 node" if len(by_node) == 1 else f"{len(by_node)} nodes"
        return f"{self._cluster}: {len(self.nodes)} {device} ranks on {nodes} ({listed})"

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)
        if self._places is not None:
            remove_placement_group(self._places.group)
        if self._leaves_ray:
            ray.shutdown()


def _collective_timeout() -> timedelta | None:
    """None: that of torch, 10 minutes with NCCL and 30 with gloo."""
    chosen = os.environ.get(NCCL_TIMEOUT_VARIABLE)
    if not chosen:
        return None
    if not chosen.isdigit() or int(chosen) == 0:
        raise InputError(f"{NCCL_TIMEOUT_VARIABLE} is {chosen!r}; accepted: a number of seconds above 0")
    return timedelta(seconds=int(chosen))


def _future(reference: ray.ObjectRef[T]) -> Future[T]:
    """The result of a remote call. The error of a rank is raised as it was there."""
    outcome: Future[T] = Future()

    def settle(done: Future[T]) -> None:
        error = done.exception()
        cause = getattr(error, "cause", None)
        if error is None:
            outcome.set_result(done.result())
        elif isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
            outcome.set_exception(WorkerDiedError(str(error)))
        elif isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, Exception):
            if not isinstance(cause, InputError):
                cause.__cause__ = error  # whose text is the traceback of the rank
            outcome.set_exception(cause)
        else:
            outcome.set_exception(error)

    reference.future().add_done_callback(settle)
    return outcome
