"""The policy's ranks as Ray actors, one per GPU, or per CPU slot where there is no GPU.

Ray carries calls and results; gradients travel between the ranks through torch.distributed (NCCL on GPUs, gloo on CPUs).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from logging import WARNING
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.utils import logging

from posttrain.errors import InputError
from posttrain.policy.worker import PolicyWorker, WorkerSetup

START_TIMEOUT_S = 180.0


class RankActor:
    """One rank. It joins the process group first, then builds its worker: the worker shards over that group."""

    def __init__(self, rank: int, world_size: int, num_threads: int) -> None:
        self.rank, self.world_size = rank, world_size
        torch.set_num_threads(num_threads)
        logging.set_verbosity_error()  # their bars and advice would break up the driver's console
        logging.disable_progress_bar()
        self.worker: PolicyWorker | None = None

    def address(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def build(self, setup: WorkerSetup, address: tuple[str, int]) -> None:
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor only its own GPU
        if self.world_size > 1:
            cuda = torch.cuda.is_available() and setup.policy.device != "cpu"
            torch.distributed.init_process_group(
                "cuda:nccl,cpu:gloo" if cuda else "gloo",
                init_method=f"tcp://{address[0]}:{address[1]}",
                rank=self.rank,
                world_size=self.world_size,
            )
        self.worker = PolicyWorker(setup)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        assert self.worker is not None
        return getattr(self.worker, method)(*arguments)


class RayWorkers:
    """`WorkerGroup` over actors. Joins the cluster of RAY_ADDRESS if there is one, else starts Ray on this machine."""

    in_process = False

    def __init__(self, setup: WorkerSetup, num_nodes: int, ranks_per_node: int) -> None:
        self.size = num_nodes * ranks_per_node
        wants_gpu = setup.policy.device != "cpu"
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            _start_ray(self.size, wants_gpu and torch.cuda.is_available())
        # The cluster's GPUs count, not those of the driver: a head node often has none.
        use_gpu = wants_gpu and ray.cluster_resources().get("GPU", 0) > 0
        self._placement = self._reserve(num_nodes, ranks_per_node, use_gpu)
        num_threads = setup.policy.num_threads or max(1, (os.cpu_count() or 1) // ranks_per_node)
        actor = ray.remote(RankActor)
        self._actors = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank // ranks_per_node
                ),
            ).remote(rank, self.size, num_threads)
            for rank in range(self.size)
        ]
        address = _get([self._actors[0].address.remote()])[0]
        _get([a.build.remote(setup, address) for a in self._actors])

    def _reserve(self, num_nodes: int, ranks_per_node: int, use_gpu: bool) -> Any:
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

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        # Shared arguments (an objective, a folder) are small; shards differ by rank, so nothing is sent twice.
        return _get([a.call.remote(method, args) for a, args in zip(self._actors, arguments, strict=True)])

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._placement)
        if self._started_ray:
            ray.shutdown()


def _get(references: list[Any]) -> list[Any]:
    """Results by rank. What the user can mend is raised as it was, not wrapped into Ray's frames."""
    try:
        results: list[Any] = ray.get(references)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise
    return results


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
