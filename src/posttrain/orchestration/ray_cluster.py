"""Finds the Ray cluster of a run and joins it, or starts a private Ray, and reserves places for ranks on its nodes.

A private Ray is one node, so it is started for runs on one node only. Places form one placement group: all or nothing.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import ray
import torch
from ray._private import services
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from posttrain.checkpointing.stopping import StopAtOnce
from posttrain.errors import HardwareError, InputError, Terminated, reason_of
from posttrain.orchestration.deadlines import DEADLINE_VARIABLE, RESERVE, deadline_s
from posttrain.orchestration.workers import RankLayout

Say = Callable[[str], None]

CLUSTER_SIZE_VARIABLE = "POSTTRAIN_NUM_NODES"  # of pods of `posttrain launch`: the nodes that the cluster ever has
PROGRESS_PERIOD_S = 30.0
_ANSWER_TIMEOUT_S = 5.0
_TOKEN_FILE = Path("~/.ray/auth_token")
_START = (
    "On the first machine run `ray start --head --port=6379`, on each of the others `ray start "
    "--address=HEAD_IP:6379`, then start this command on the first"
)


def connect(layout: RankLayout, say: Say) -> str | None:
    """Joins the cluster of RAY_ADDRESS or the one that `ray start` recorded on this machine; else starts a private Ray.

    Returns the cluster's address; None: a private Ray.
    """
    address = find_cluster(say, needs_one=layout.num_nodes > 1)
    if address is None:
        _start_private(layout, say)
    else:
        _join(address)
    return address


def find_cluster(say: Say, *, needs_one: bool) -> str | None:
    """The address of a running cluster; None: there is none, and none is needed."""
    named = os.environ.get("RAY_ADDRESS", "")
    if named not in ("", "auto", "local"):
        if why := _why_unreachable(named):
            raise InputError(
                f"RAY_ADDRESS={named}: no Ray head answers there ({why}). The address may be stale: from a file or a "
                "variable that an earlier run left behind. Remove it, see that the head runs (`ray start --head "
                "--port=6379` prints its address), and set RAY_ADDRESS to that; on the head's own machine RAY_ADDRESS "
                "may be left out"
            )
        return named
    stale = ""
    recorded = None if named == "local" else services.find_bootstrap_address(None)
    if recorded is not None:
        why = _why_unreachable(recorded)
        if not why:
            return str(recorded)
        stale = f"the address that `ray start` recorded on this machine, {recorded}, is stale ({why})"
    if named == "auto":
        services.find_gcs_addresses.cache_clear()
        heads = sorted(services.find_gcs_addresses())
        if len(heads) == 1:
            return str(heads[0])
        found = f"{len(heads)} heads run here: {', '.join(heads)}; set RAY_ADDRESS to one of them" if heads else _START
        raise InputError(f"RAY_ADDRESS=auto: no cluster to choose{stale and ': ' + stale}. {found}")
    if needs_one:
        raise InputError(_no_cluster(named, stale))
    if stale:
        say(f"{stale}; a private Ray is started. `ray stop` removes the record")
    return None


def _no_cluster(named: str, stale: str) -> str:
    why = "RAY_ADDRESS=local is a private Ray" if named == "local" else stale or "no Ray cluster was found"
    heads = sorted(services.find_gcs_addresses())
    others = (
        f". Ray heads that run on this machine, perhaps with another --temp-dir: {', '.join(heads)}; to use one, set "
        "RAY_ADDRESS"
        if heads
        else ""
    )
    return f"cluster.num_nodes is above 1, and a private Ray has one node: {why}. {_START}, or set RAY_ADDRESS{others}"


def _why_unreachable(address: str) -> str:
    """Why no connection can be made to `address`; empty: one can."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return "accepted: auto, local, HOST:PORT or ray://HOST:PORT"
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_TIMEOUT_S).close()
    except OSError as error:
        return reason_of(error)
    return ""


# -- tokens ------------------------------------------------------------------------------------------------------------


def token_source() -> str | None:
    """Where Ray reads the cluster token from."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return f"RAY_AUTH_TOKEN_PATH={path}"
    return str(_TOKEN_FILE) if _TOKEN_FILE.expanduser().is_file() else None


def _init(**options: object) -> None:
    """Calls `ray.init` and restores the SIGTERM handler, which Ray replaces by one that exits with code 15."""
    try:
        ray.init(logging_level=WARNING, **options)
    except SystemExit as stopped:
        raise Terminated(signal.SIGTERM) from stopped
    finally:
        StopAtOnce.install_again()


def _join(address: str) -> None:
    if token_source() is not None:
        _use_token()
    try:
        if not address.startswith("ray://"):
            GcsClient(address=address)  # `ray.init` would repeat a refused call for 20 seconds
        _init(address=address)
    except Exception as error:  # Ray raises a dozen different classes
        text = str(error)
        if "AuthToken" in text or "authentication" in text.lower():
            raise InputError(_about_token(address)) from error
        raise InputError(
            f"the Ray cluster at {address} cannot be joined: {reason_of(error)}. Ray and Python must have the same "
            f"versions here (Ray {ray.__version__}) and there"
        ) from error


def _use_token() -> None:
    """Ray sends no token to a given address unless told to. A cluster without authentication ignores it."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # the mode was read when ray was imported


def _about_token(address: str) -> str:
    source, mode = token_source(), os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() == "disabled":
        found = "RAY_AUTH_MODE=disabled is set here: unset it"
    elif source is None:
        found = f"none was found here (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, {_TOKEN_FILE})"
    else:
        found = f"the one from {source} is another one"
    return (
        f"the Ray cluster at {address} asks for a token, and {found}. `ray get-auth-token` prints it on the head; here "
        f"set RAY_AUTH_TOKEN to it, or write it to {_TOKEN_FILE}. Machines that join need it too, with "
        "RAY_AUTH_MODE=token for `ray start`"
    )


# -- a private Ray -----------------------------------------------------------------------------------------------------


def _start_private(layout: RankLayout, say: Say) -> None:
    num_places = layout.num_places
    num_gpus = torch.cuda.device_count() if layout.device != "cpu" else 0
    needed = num_places * layout.gpus_per_rank
    if 0 < num_gpus < needed:
        raise InputError(
            f"cluster.gpus_per_node={needed}, but this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''} and no "
            f"Ray cluster was found. Set cluster.gpus_per_node={num_gpus}, or RAY_ADDRESS to the address of a cluster"
        )
    if token_source() is None and "RAY_AUTH_MODE" not in os.environ:
        # Without one, Ray would write a token into ~/.ray, and later `ray start --head` would ask every node for it.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _use_token()
    if num_gpus == 0:
        say(f"{'' if layout.device == 'cpu' else 'no GPU here: '}{num_places} CPU processes on {os.cpu_count()} cores")
    # Ranks share the cores even if there are fewer cores than ranks.
    num_cpus = max(num_places, os.cpu_count() or 1)
    try:
        _init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False)
    except Exception as error:  # Ray raises plain ones
        raise HardwareError(
            f"no private Ray could be started: {reason_of(error)} Its logs are below /tmp/ray/session_latest/logs; if "
            "the machine was only busy, the same command may succeed"
        ) from None


# -- places on nodes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Reserved resources: bundle i of the placement group is on the i-th node of the run."""

    group: PlacementGroup
    use_gpu: bool


def reserve(layout: RankLayout, address: str | None, say: Say) -> Places:
    """Reserves resources for all ranks, each bundle on its own node. Waits for joining nodes, up to the deadline; not
    where the cluster has a fixed size that is too small."""
    limit_s = deadline_s(RESERVE)
    size = os.environ.get(CLUSTER_SIZE_VARIABLE, "")
    if address is not None and size.isdecimal() and int(size) < layout.num_nodes:
        raise InputError(
            f"cluster.num_nodes={layout.num_nodes}: this cluster was launched with {size} "
            f"node{'s' if size != '1' else ''}, and no other joins it; {_offered()}. Lower cluster.num_nodes, or "
            "launch a larger cluster"
        )
    end = time.monotonic() + limit_s
    use_gpu = _uses_gpu(layout, end, say)
    bundle = {"CPU": float(layout.ranks_per_node)}
    if use_gpu:
        bundle["GPU"] = float(layout.ranks_per_node * layout.gpus_per_rank)
    group = placement_group([bundle] * layout.num_nodes, strategy="STRICT_SPREAD" if layout.num_nodes > 1 else "PACK")
    patience_s = min(2.0, limit_s)
    if not group.wait(patience_s):
        if time.monotonic() < end:
            say(f"waiting up to {limit_s:.0f} s for {_wanted(layout, use_gpu)}; {_offered()}")
        while not group.wait(max(min(end - time.monotonic(), PROGRESS_PERIOD_S), 0.01)):
            if time.monotonic() < end:
                _say_waiting(layout, end, say)
                continue
            offered = _offered()
            remove_placement_group(group)
            raise InputError(_too_few(layout, use_gpu, address, limit_s, offered))
    return Places(group, use_gpu)


def _uses_gpu(layout: RankLayout, end: float, say: Say) -> bool:
    """Looks at the cluster's GPUs: a head node often has none. Ranks use CPUs only if no node has a GPU."""
    announced: float | None = None
    while True:
        nodes = alive_nodes()
        if layout.device == "cpu":
            return False
        if layout.device == "cuda" or any(node["Resources"].get("GPU", 0) for node in nodes):
            return True
        if len(nodes) >= layout.num_nodes or time.monotonic() > end:
            return False
        if announced is None:
            say(f"waiting for {layout.num_nodes} nodes; {_offered()}")
            announced = time.monotonic()
        elif time.monotonic() - announced >= PROGRESS_PERIOD_S:
            _say_waiting(layout, end, say)
            announced = time.monotonic()
        time.sleep(0.5)


def _say_waiting(layout: RankLayout, end: float, say: Say) -> None:
    left_s, count = max(end - time.monotonic(), 0.0), len(alive_nodes())
    left = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
    busy = ", not all of them free" if count >= layout.num_nodes else ""
    say(f"{count} of {layout.num_nodes} nodes{busy}, waiting, {left} left")


def alive_nodes() -> list[dict[str, dict[str, float]]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _wanted(layout: RankLayout, use_gpu: bool) -> str:
    gpus = f"{layout.ranks_per_node * layout.gpus_per_rank} GPUs and " if use_gpu else ""
    nodes = f"{layout.num_nodes} node{'s' if layout.num_nodes > 1 else ''}"
    return f"{nodes} with {gpus}{layout.ranks_per_node} CPUs free on each"


def _offered() -> str:
    nodes, free = alive_nodes(), ray.available_resources()
    listed = "; ".join(
        f"{node['NodeManagerAddress']} with {node['Resources'].get('GPU', 0):g} GPUs, "
        f"{node['Resources'].get('CPU', 0):g} CPUs"
        for node in nodes
    )
    return (
        f"the cluster has {len(nodes)} ({listed}), of which {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} "
        "CPUs are free"
    )


def _too_few(layout: RankLayout, use_gpu: bool, address: str | None, limit_s: float, offered: str) -> str:
    gpus = f" --num-gpus={layout.ranks_per_node * layout.gpus_per_rank}" if use_gpu else ""
    join = f"ray start --address={address or 'HEAD_IP:6379'}{gpus}"
    return (
        f"cluster.num_nodes={layout.num_nodes} with cluster.gpus_per_node={layout.gpus_per_node} needs "
        f"{_wanted(layout, use_gpu)}; after {limit_s:.0f} s {offered}. On each missing machine run `{join}`, or lower "
        f"cluster.num_nodes or cluster.gpus_per_node. What other jobs hold, `ray status` shows; {DEADLINE_VARIABLE} "
        "sets how long to wait"
    )
