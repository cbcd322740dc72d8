"""Which Ray cluster a run joins, and what it says without one. No Ray is started: addresses are sockets."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

from posttrain.checkpointing import StopAtOnce
from posttrain.errors import HardwareError, InputError, Terminated
from posttrain.orchestration import ray_cluster
from posttrain.orchestration.deadlines import collective_timeout
from posttrain.orchestration.ray_cluster import find_cluster, token_source
from posttrain.orchestration.workers import RankLayout, start_workers

GONE = "127.0.0.1:9"  # the discard port: no process listens


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def alive() -> Iterator[str]:
    """The address of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


class Machine:
    """What Ray finds on this machine: the address that `ray start` has recorded, and the heads that run."""

    recorded: str | None = None
    heads: tuple[str, ...] = ()


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()

    def find_gcs_addresses() -> set[str]:
        return set(found.heads)

    find_gcs_addresses.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(ray_cluster.services, "find_bootstrap_address", lambda temp_dir: found.recorded)
    monkeypatch.setattr(ray_cluster.services, "find_gcs_addresses", find_gcs_addresses)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def test_the_address_in_the_environment_comes_first(
    alive: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    machine.recorded = GONE
    monkeypatch.setenv("RAY_ADDRESS", alive)
    assert find_cluster(said.append, needs_one=True) == alive


@pytest.mark.parametrize("named", ["", "auto"])
def test_the_recorded_cluster_is_found(
    alive: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, said: list[str], named: str
) -> None:
    machine.recorded, machine.heads = alive, (alive, "10.0.0.1:7")
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert find_cluster(said.append, needs_one=False) == alive
    assert said == []


def test_auto_finds_the_only_head_that_runs_here(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    machine.heads = ("10.0.0.1:7",)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert find_cluster(said.append, needs_one=True) == "10.0.0.1:7"
    machine.heads = ("10.0.0.1:7", "10.0.0.1:8")
    with pytest.raises(InputError, match=r"2 heads run here: 10\.0\.0\.1:7, 10\.0\.0\.1:8; set RAY_ADDRESS to one"):
        find_cluster(said.append, needs_one=True)
    machine.heads = ()
    with pytest.raises(InputError, match=r"RAY_ADDRESS=auto: no cluster to choose.*ray start --head"):
        find_cluster(said.append, needs_one=True)


def test_a_stale_address_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", GONE)
    with pytest.raises(InputError, match=rf"RAY_ADDRESS={GONE}: no Ray head answers there \(.*refused\).*may be stale"):
        find_cluster(said.append, needs_one=False)
    monkeypatch.setenv("RAY_ADDRESS", "the-head")
    with pytest.raises(InputError, match=r"accepted: auto, local, HOST:PORT"):
        find_cluster(said.append, needs_one=False)


def test_without_a_cluster_a_run_on_one_node_starts_its_own(machine: Machine, said: list[str]) -> None:
    machine.heads = ("10.0.0.1:7",)
    assert find_cluster(said.append, needs_one=False) is None, "a head that another run has started is not joined"
    assert said == []


def test_a_stale_record_is_mentioned_before_a_private_ray_starts(machine: Machine, said: list[str]) -> None:
    machine.recorded = GONE
    assert find_cluster(said.append, needs_one=False) is None
    assert len(said) == 1
    assert f"recorded on this machine, {GONE}, is stale" in said[0]
    assert "a private Ray is started" in said[0]


@pytest.mark.parametrize(
    ("named", "recorded", "why"),
    [
        ("", None, "no Ray cluster was found"),
        ("", GONE, f"recorded on this machine, {GONE}, is stale"),
        ("local", None, "RAY_ADDRESS=local is a private Ray"),
    ],
)
def test_two_nodes_without_a_cluster_are_refused_with_the_commands(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, named: str, recorded: str | None, why: str
) -> None:
    machine.recorded = recorded
    monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(ray_cluster.ray, "init", Mock(side_effect=AssertionError("a private Ray is one node")))
    with pytest.raises(InputError) as caught:
        start_workers(int, RankLayout(num_nodes=2), "auto")
    for words in (why, "`ray start --head --port=6379`", "`ray start --address=HEAD_IP:6379`"):
        assert words in str(caught.value)


def test_a_head_under_another_temp_dir_is_listed(machine: Machine) -> None:
    machine.heads = ("10.0.0.1:7",)
    with pytest.raises(InputError, match=r"another --temp-dir: 10\.0\.0\.1:7; to use one, set RAY_ADDRESS"):
        start_workers(int, RankLayout(num_nodes=2), "auto")


def test_more_gpus_than_this_machine_has_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"gpus_per_node=4, .* 2 GPUs .*cluster\.gpus_per_node=2"):
        start_workers(int, RankLayout(ranks_per_node=4), "auto")


def test_a_private_ray_has_a_token_of_its_own_and_writes_none_to_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A token in ~/.ray would make every later `ray start --head` on this machine ask its workers for it."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray_cluster, "Config", SimpleNamespace(initialize=lambda settings: None))
    monkeypatch.setenv("HOME", str(tmp_path))
    started = []
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **arguments: started.append(arguments))
    assert ray_cluster.connect(RankLayout(ranks_per_node=2, device="cpu"), print) is None
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert [arguments["address"] for arguments in started] == ["local"]
    assert list(tmp_path.iterdir()) == []


def test_a_private_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**arguments: object) -> None:
        raise Exception("The current node timed out during startup.\nMore.")  # as Ray does

    monkeypatch.setenv("RAY_AUTH_TOKEN", "a")
    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with pytest.raises(HardwareError, match=r"no private Ray could be started: The current node timed out .* Its logs"):
        start_workers(int, RankLayout(ranks_per_node=2, device="cpu"), "auto")


@pytest.mark.parametrize(("value", "seconds"), [("7200", 7200), ("", None)])
def test_nccl_timeout_bounds_collectives(monkeypatch: pytest.MonkeyPatch, value: str, seconds: int | None) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", value)
    assert collective_timeout() == (None if seconds is None else timedelta(seconds=seconds))
    monkeypatch.setenv("NCCL_TIMEOUT", "two hours")
    with pytest.raises(InputError, match=r"NCCL_TIMEOUT is 'two hours'; accepted: a number of seconds above 0"):
        collective_timeout()


def test_the_token_is_looked_for_where_ray_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_source() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert token_source() == "~/.ray/auth_token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/run/token")
    assert token_source() == "RAY_AUTH_TOKEN_PATH=/run/token"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert token_source() == "RAY_AUTH_TOKEN"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "none was found here (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token)"),
        ({"RAY_AUTH_TOKEN": "secret"}, "the one from RAY_AUTH_TOKEN is another one"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled is set here: unset it"),
    ],
)
def test_a_refused_token_is_explained_by_what_is_set_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    refused = ray_cluster.ray.exceptions.RpcError("InvalidAuthToken: Authentication token is missing or incorrect")
    monkeypatch.setattr(ray_cluster, "GcsClient", Mock(side_effect=refused))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        ray_cluster._join("10.0.0.1:6379")
    assert f"the Ray cluster at 10.0.0.1:6379 asks for a token, and {said}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "`ray get-auth-token` prints it on the head" in str(caught.value)


def test_ray_does_not_keep_the_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ends the process with exit code 15 and writes nothing."""

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if options.get("is_interrupted"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with StopAtOnce():
        ray_cluster._init()
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    with StopAtOnce(), pytest.raises(Terminated):
        ray_cluster._init(is_interrupted=True)
