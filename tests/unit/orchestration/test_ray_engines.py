"""Engines that die: replaced a few times, with the newest weights, then the run ends. Without Ray processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

ray_engines = pytest.importorskip("posttrain.orchestration.ray_engines", reason="Ray is not installed (posttrain[ray])")

from posttrain.config.placement import PlacedGroup, Placement  # noqa: E402
from posttrain.engines.vllm.process import VllmLostError  # noqa: E402
from posttrain.errors import StopRequested  # noqa: E402
from posttrain.orchestration.deadlines import DEADLINE_VARIABLE  # noqa: E402
from posttrain.orchestration.failures import WorkerDiedError, WorkerTimeoutError  # noqa: E402
from posttrain.orchestration.rank import Rank  # noqa: E402
from posttrain.orchestration.workers import RankLayout  # noqa: E402


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def remote(self, *args: Any) -> Future[Any]:
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(self.call(*args))
        except RuntimeError as error:
            outcome.set_exception(error)
        return outcome


class FakeActor:
    def __init__(self, number: int, dies_at: set[str], log: list[tuple[int, str]]) -> None:
        self.number, self.dies_at, self.log = number, dies_at, log
        self.build, self.run = Method(lambda *args: self._note("build")), Method(self._run)
        self.address, self.close = Method(lambda: ("host", 1)), Method(lambda: None)
        self.node = Method(lambda: ("10.0.0.1", "1"))
        self.request_stop = Method(lambda: self._note("request_stop"))

    def _run(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return self._note(" ".join([operation, *map(str, args[1:])]))  # the first are weights, or tasks

    def _note(self, operation: str) -> int:
        self.log.append((self.number, operation))
        if operation in self.dies_at:
            raise WorkerDiedError("gone")
        if f"loses its vLLM in {operation}" in self.dies_at:
            raise VllmLostError("vLLM (process 7) ended")
        if f"loses another in {operation}" in self.dies_at:
            raise RuntimeError("connection closed by peer")
        return self.number


def layout_of(num_ranks: int, num_engines: int, size: int, per_actor: int = 1) -> RankLayout:
    engines = PlacedGroup("engine", (0,) * num_engines * size, size, per_actor)
    return RankLayout(1, num_ranks + num_engines * size, placement=Placement((0,) * num_ranks, (engines,)))


class Actors:
    """Each start is the next of these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *dies_at: set[str], size: int = 1) -> None:
        self.log: list[tuple[int, str]] = []
        self.said: list[str] = []
        actors = iter(FakeActor(number, operations, self.log) for number, operations in enumerate(dies_at))
        monkeypatch.setattr(ray_engines, "start_actor", lambda place, layout, places: next(actors))
        monkeypatch.setattr(ray_engines, "future_of", lambda outcome: outcome)
        monkeypatch.setattr("posttrain.orchestration.ray_actor.future_of", lambda outcome: outcome)
        monkeypatch.setattr(
            "posttrain.orchestration.ray_actor.ray.kill", lambda actor: self.log.append((actor.number, "kill"))
        )
        layout = layout_of(num_ranks=1, num_engines=1, size=size)
        [group] = layout.groups
        self.engine = ray_engines.RayMember(group, 0, object, layout, cast(Any, None), self.said.append)
        self.engine.built.result(timeout=10)

    def call(self, operation: Any, *args: Any) -> Any:
        return self.engine.submit(operation, *args).result(timeout=10)


@pytest.mark.parametrize("fault", ["sample_round", "loses its vLLM in sample_round"])
def test_a_replacement_gets_the_newest_weights_and_repeats_the_call(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = Actors(monkeypatch, {fault}, set())
    actors.call(Rank.receive_weights, "weights")
    assert actors.call(Rank.sample_round) == 1
    calls = ["build", "receive_weights", "sample_round"]
    assert actors.log == [*((0, call) for call in calls), (0, "kill"), *((1, call) for call in calls)]
    *cause, replaced = actors.said
    assert cause == (["vLLM (process 7) ended"] if "vLLM" in fault else [])
    assert replaced.startswith("engine 0 died during sample_round")


def test_a_replacement_fills_its_cache_as_the_lost_engine_had(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, {"generate 3"}, set())
    actors.call(Rank.receive_weights, "weights")
    actors.call(Rank.generate, "tasks", 0)
    actors.call(Rank.keep_prefixes, True)
    for turn in range(1, 4):
        actors.call(Rank.generate, "tasks", turn)
    calls = ["build", "receive_weights", "keep_prefixes", "generate 1", "generate 2", "generate 3"]
    assert [operation for number, operation in actors.log if number == 1] == calls
    actors.call(Rank.keep_prefixes, False)
    actors.call(Rank.generate, "tasks", 4)
    assert actors.engine._to_repeat == []


def test_an_engine_that_dies_between_two_lots_gets_all_of_that_version_from_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = Actors(monkeypatch, {"receive_weights 1"}, set())
    for lot in range(3):
        actors.call(Rank.receive_weights, "weights", lot)
    assert [operation for _, operation in actors.log] == [
        *("build", "receive_weights 0", "receive_weights 1", "kill"),
        *("build", "receive_weights", "receive_weights 1", "receive_weights 2"),
    ]


def test_an_engine_that_dies_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, {"sample_round"}, {"sample_round"}, {"sample_round"})
    with pytest.raises(WorkerDiedError):
        actors.call(Rank.sample_round)
    assert len(actors.said) == ray_engines.MAX_REPLACEMENTS


def test_an_engine_that_hangs_does_not_hold_its_thread_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch, set())
    monkeypatch.setenv(DEADLINE_VARIABLE, "0.01")
    monkeypatch.setattr(ray_engines, "_GRACE_S", 0.01)
    actor: Any = actors.engine.workers[0].actor
    monkeypatch.setattr(actor, "run", Method(lambda *args: None))
    monkeypatch.setattr(actor.run, "remote", lambda *args: Future())
    with pytest.raises(WorkerTimeoutError, match="engine 0 has not finished sample_round"):
        actors.call(Rank.sample_round)


def test_an_engine_that_is_closed_while_it_is_replaced_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors of the replacement are not there yet when `close` ends what is waited for."""
    actors = Actors(monkeypatch, {"sample_round"}, set())
    start = ray_engines.start_actor

    def start_after_close(*args: Any) -> Any:
        actors.engine.close()
        actor = start(*args)
        monkeypatch.setattr(actor.build, "remote", lambda *args: Future())
        return actor

    monkeypatch.setattr(ray_engines, "start_actor", start_after_close)
    with pytest.raises(WorkerDiedError, match="the run has ended"):
        actors.call(Rank.sample_round)


def test_an_engine_that_dies_after_a_request_to_stop_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is left undone, and the time until the run is killed is for saving."""
    actors = Actors(monkeypatch, {"sample_round"})
    actors.engine.request_stop()
    with pytest.raises(StopRequested):
        actors.call(Rank.sample_round)
    assert [operation for _, operation in actors.log] == ["build", "request_stop", "sample_round"]


def test_an_engine_of_two_parts_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that is left fails too, with an error of its own: it is not the cause."""
    actors = Actors(monkeypatch, {"loses another in sample_round"}, {"sample_round"}, set(), set(), size=2)
    actors.call(Rank.receive_weights, "weights")
    assert actors.call(Rank.sample_round) == 2
    both = [(number, "kill") for number in (0, 1)]
    anew = [(number, operation) for operation in ("build", "receive_weights", "sample_round") for number in (2, 3)]
    assert actors.log[6:] == [*both, *anew]
    assert actors.said == ["engine 0 died during sample_round: another one is started, and repeats it"]


def test_an_error_of_a_part_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engines, "_GRACE_S", 0.01)
    actors = Actors(monkeypatch, set(), {"loses another in sample_round"}, size=2)
    with pytest.raises(RuntimeError, match="connection closed"):
        actors.call(Rank.sample_round)
    assert not actors.said


def test_places_ranks_and_logs_of_engines_of_two_parts() -> None:
    layout = layout_of(2, num_engines=2, size=2)
    assert layout.num_ranks == 2
    assert [list(layout.places_of(layout.groups[0], engine)) for engine in range(2)] == [[2, 3], [4, 5]]
    assert [layout.place_in_group(place) for place in range(6)] == [(0, 2), (1, 2), (0, 2), (1, 2), (0, 2), (1, 2)]
    names = ["rank_0", "rank_1", "engine_0_part_0", "engine_0_part_1", "engine_1_part_0", "engine_1_part_1"]
    assert [layout.name_of(place) for place in range(6)] == names
    assert {layout.num_places_of(place) for place in range(6)} == {1}


def test_an_engine_that_splits_its_layers_itself_is_one_actor_with_all_places() -> None:
    layout = layout_of(2, num_engines=2, size=2, per_actor=2)
    assert layout.num_ranks == 2
    assert [list(layout.places_of(layout.groups[0], engine)) for engine in range(2)] == [[2], [4]]
    assert [layout.place_in_group(place) for place in (0, 2, 4)] == [(0, 2), (0, 1), (0, 1)]
    assert [layout.name_of(place) for place in (1, 2, 4)] == ["rank_1", "engine_0", "engine_1"]
    assert [layout.num_places_of(place) for place in (1, 2, 4)] == [1, 2, 2]
