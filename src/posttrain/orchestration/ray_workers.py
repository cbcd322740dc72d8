"""The policy's ranks as Ray actors, one per GPU, or per CPU slot where there is no GPU.

Ray carries calls and results; gradients travel between the ranks through torch.distributed (NCCL on GPUs, gloo on CPUs).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from logging import WARNING
from typing import Concatenate, ParamSpec, TypeVar

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.utils import logging

from posttrain.errors import InputError
from posttrain.orchestration.rank import Rank, build_rank
from posttrain.orchestration.workers import WorkerDiedError, gather
from posttrain.policy.parallel import Mesh
from posttrain.policy.trainer import RankSetup

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT_S = 180.0


class RankActor:
    """The process of a rank. It joins the process group first, then builds the rank, which shards over that group."""

    def __init__(self, rank: int, world_size: int, num_threads: int) -> None:
        self.index, self.world_size = rank, world_size
        torch.set_num_threads(num_threads)
        logging.set_verbosity_error()  # progress bars and advice would break up the driver's console
        logging.disable_progress_bar()
        self.rank: Rank | None = None

    def address(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def build(self, setup: RankSetup, address: tuple[str, int]) -> None:
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor only its own GPU
        if self.world_size > 1:
            cuda = torch.cuda.is_available() and setup.policy.device != "cpu"
            torch.distributed.init_process_group(
                "cuda:nccl,cpu:gloo" if cuda else "gloo",
                init_method=f"tcp://{address[0]}:{address[1]}",
                rank=self.index,
                world_size=self.world_size,
            )
        self.rank = build_rank(setup)

    def run(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        assert self.rank is not None
        return getattr(self.rank, operation)(*args, **kwargs)


class RayWorker:
    """One rank behind an actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _future(self.actor.run.remote(operation.__name__, args, kwargs))


class RayWorkers:
    """`WorkerGroup` over actors. Joins the cluster of RAY_ADDRESS if there is one, else starts Ray on this machine."""

    in_process = False

    def __init__(self, setup: RankSetup, num_nodes: int, ranks_per_node: int) -> None:
        self.mesh = Mesh(dp=num_nodes * ranks_per_node)
        wants_gpu = setup.policy.device != "cpu"
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            _start_ray(self.mesh.size, wants_gpu and torch.cuda.is_available())
        # The cluster's GPUs count, not those of the driver: a head node often has none.
        use_gpu = wants_gpu and ray.cluster_resources().get("GPU", 0) > 0
        self._placement = self._reserve(num_nodes, ranks_per_node, use_gpu)
        num_threads = setup.policy.num_threads or max(1, (os.cpu_count() or 1) // ranks_per_node)
        actor = ray.remote(RankActor)
        actors = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank // ranks_per_node
                ),
            ).remote(rank, self.mesh.size, num_threads)
            for rank in range(self.mesh.size)
        ]
        self.workers = [RayWorker(actor) for actor in actors]
        try:
            address: tuple[str, int] = gather("build", [_future(actors[0].address.remote())])[0]
            gather("build", [_future(actor.build.remote(setup, address)) for actor in actors])
        except BaseException:
            self.close()
            raise

    def _reserve(self, num_nodes: int, ranks_per_node: int, use_gpu: bool) -> PlacementGroup:
        bundle = {"CPU": float(ranks_per_node)}
        if use_gpu:
            bundle["GPU"] = float(ranks_per_node)
        group = placement_group([bundle] * num_nodes, strategy="PACK" if num_nodes == 1 else "SPREAD")
        if not group.wait(START_TIMEOUT_S):
            have = ray.cluster_resources()
            remove_placement_group(group)
            raise InputError(
                f"cluster.num_nodes={num_nodes} with cluster.gpus_per_node={ranks_per_node} needs {num_nodes} x {bundle}, "
                f"but the Ray cluster offers {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs"
            )
        return group

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)
        remove_placement_group(self._placement)
        if self._started_ray:
            ray.shutdown()


def _future(reference: ray.ObjectRef[T]) -> Future[T]:
    """The result of a remote call. What the user can correct is raised as it was, not wrapped into Ray's frames."""
    outcome: Future[T] = Future()

    def settle(done: Future[T]) -> None:
        error = done.exception()
        if error is None:
            outcome.set_result(done.result())
        elif isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, InputError):
            outcome.set_exception(error.cause)
        elif isinstance(error, ray.exceptions.RayActorError):
            outcome.set_exception(WorkerDiedError(str(error)))
        else:
            outcome.set_exception(error)

    reference.future().add_done_callback(settle)
    return outcome


def _start_ray(num_ranks: int, use_gpu: bool) -> None:
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=WARNING)
        return
    # A private cluster on this machine: ranks share its cores even when there are fewer cores than ranks.
    ray.init(
        num_cpus=max(num_ranks, os.cpu_count() or 1),
        num_gpus=None if use_gpu else 0,
        include_dashboard=False,
        logging_level=WARNING,
    )
