"""Worker groups on devices of their own: engines, the reference, reward models. A member is replaced as a whole when
one of its actors dies, or its vLLM.

Members are independent. A replacement repeats the lost call with the same arguments, so with the same bits; an engine
gets the newest weights before that. While prefixes are kept it repeats all calls since then: a prompt that continues
cached pages has other bits than one computed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Concatenate, ParamSpec, TypeVar

from posttrain.config.placement import PlacedGroup
from posttrain.engines.weights import SentWeights
from posttrain.errors import EngineLostError, StopRequested
from posttrain.orchestration.deadlines import DEADLINE_VARIABLE, RESERVE, deadline_s
from posttrain.orchestration.failures import WorkerDiedError, WorkerTimeoutError
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.ray_actor import RayWorker, end_actors, future_of, settle, start_actor, statuses
from posttrain.orchestration.ray_cluster import Places
from posttrain.orchestration.workers import RankLayout, WorkerGroup, gather
from posttrain.policy.parallel.mesh import Mesh
from posttrain.types import OpenGroup

P = ParamSpec("P")
T = TypeVar("T")

MAX_REPLACEMENTS = 2  # per call: if every new process dies too, more restarts do not help
_RUN_HAS_ENDED = "the run has ended"
_GRACE_S = 10.0  # the wait for all engines times out before that for one, with a message that names the late ones


class RayMember:
    """One member: an actor, or several that share its layers and run every call together, in order of `submit`."""

    def __init__(
        self,
        group: PlacedGroup,
        index: int,
        build: Callable[[], object],
        layout: RankLayout,
        places: Places,
        say: Callable[[str], None],
    ) -> None:
        self.name, self._where = f"{group.name} {index}", layout.places_of(group, index)
        self._build, self._layout, self._places, self._say = build, layout, places, say
        self._newest: Sequence[SentWeights] | None = None
        self._to_repeat: list[
            tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
        ] = []  # calls whose cached pages are in use
        self._is_closing = self._is_asked_to_stop = False
        self._waits_for: Sequence[Future[Any]] = ()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"{group.name}-{index}")
        self._start()
        self.built = self._calls.submit(self._build_all)

    def _start(self) -> None:
        self.workers = [RayWorker(start_actor(place, self._layout, self._places)) for place in self._where]

    def _build_all(self) -> None:
        actors, address = [worker.actor for worker in self.workers], ("", 0)
        if len(actors) > 1:
            [address] = self._wait([future_of(actors[0].address.remote())], "build")
        self._wait([future_of(actor.build.remote(self._build, address)) for actor in actors], "build")

    def submit(self, operation: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._calls.submit(self._call, operation, args, kwargs)

    def take_whole_groups(self) -> Future[list[OpenGroup]]:
        return self.workers[0].take_whole_groups()  # all sample the same

    def _call(self, operation: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        name = operation.__name__
        if name == Rank.receive_weights.__name__:
            self._newest = args[0]
        elif name == Rank.keep_prefixes.__name__:
            self._to_repeat = []
        for num_replaced in range(MAX_REPLACEMENTS + 1):
            try:
                if num_replaced:
                    self._replace(name)
                if num_replaced and self._is_asked_to_stop:  # meanwhile; the time that is left is for saving
                    raise StopRequested
                result = self._call_all(operation, *args, **kwargs)
                if self._to_repeat or (name == Rank.keep_prefixes.__name__ and args[0]):
                    self._to_repeat.append((operation, args, kwargs))
                return result
            except (WorkerDiedError, EngineLostError) as error:
                if self._is_closing or num_replaced == MAX_REPLACEMENTS:
                    raise
                if self._is_asked_to_stop:
                    raise StopRequested from error
                if isinstance(error, EngineLostError):
                    self._say(str(error))  # with the end of its log
        raise AssertionError("the last attempt returns or raises")

    def _call_all(self, operation: Callable[..., T], *args: object, **kwargs: object) -> T:
        pending = [worker.submit(operation, *args, **kwargs) for worker in self.workers]
        results = self._wait(pending, operation.__name__)
        # All actors sample the same. Only some may report why weights were not received.
        return next(filter(None, results), results[0])

    def _replace(self, operation: str) -> None:
        self._say(f"{self.name} died during {operation}: another one is started, and repeats it")
        end_actors(self.workers)  # the remaining ones would hold their place or wait for the dead one
        self._start()
        try:
            self._wait([future_of(worker.actor.node.remote()) for worker in self.workers], RESERVE)
        except WorkerTimeoutError as error:
            raise WorkerTimeoutError(
                f"{self.name} died during {operation}, and within {deadline_s(RESERVE):.0f} s no machine had room for "
                f"another one. `ray status` lists the nodes; {DEADLINE_VARIABLE} sets how long to wait. The same "
                "command continues from what was saved"
            ) from error
        self._build_all()
        if self._newest is not None:
            self._call_all(Rank.receive_weights, self._newest)
        for earlier, args, kwargs in self._to_repeat:
            self._call_all(earlier, *args, **kwargs)

    def _wait(self, pending: Sequence[Future[T]], operation: str) -> list[T]:
        limit_s = deadline_s(operation) + _GRACE_S
        self._waits_for = pending
        if self._is_closing:  # of a replacement that was started meanwhile
            raise WorkerDiedError(_RUN_HAS_ENDED)
        wait(pending, timeout=limit_s, return_when=FIRST_EXCEPTION)
        if (errors := _errors(pending)) and not isinstance(errors[0], WorkerDiedError):
            wait(pending, timeout=_GRACE_S)  # other actors may fail before the death of the first one is detected
        for error in _errors(pending):
            raise error
        if not all(future.done() for future in pending):
            raise WorkerTimeoutError(f"{self.name} has not finished {operation} within {limit_s:.0f} s")
        return [future.result(timeout=0) for future in pending]

    def request_stop(self) -> None:
        self._is_asked_to_stop = True
        for worker in self.workers:
            worker.actor.request_stop.remote()

    def close(self) -> None:
        self._is_closing = True
        end_actors(self.workers)
        self._calls.shutdown(wait=False, cancel_futures=True)
        for pending in self._waits_for:  # its thread would keep this process alive until the deadline
            settle(pending, WorkerDiedError(_RUN_HAS_ENDED))


def _errors(pending: Sequence[Future[Any]]) -> list[BaseException]:
    """Those of dead processes first."""
    errors = [error for future in pending if future.done() and (error := future.exception(timeout=0)) is not None]
    return sorted(errors, key=lambda error: not isinstance(error, WorkerDiedError))


class RayGroup:
    """`WorkerGroup` of such members. They start in the background after the constructor, in parallel with the ranks."""

    in_process = False

    def __init__(
        self,
        group: PlacedGroup,
        build: Callable[[], object],
        layout: RankLayout,
        places: Places,
        say: Callable[[str], None],
    ) -> None:
        self.unit = group.name
        self.mesh, self.num_nodes = Mesh(dp=group.num_members), layout.num_nodes
        self._members = [RayMember(group, index, build, layout, places, say) for index in range(group.num_members)]

    @property
    def workers(self) -> Sequence[RayMember]:
        return self._members

    @property
    def engines(self) -> WorkerGroup:
        return self

    def beside(self, name: str) -> WorkerGroup | None:
        return None

    def status(self) -> list[dict[str, object]]:
        return statuses(self.unit, [worker for member in self._members for worker in member.workers])

    @property
    def summary(self) -> str:
        count, size = len(self._members), len(self._members[0].workers)
        return f"{count} {self.unit}{'s' if count > 1 else ''}{f' of {size} processes' if size > 1 else ''}"

    def wait_until_built(self) -> list[tuple[str, str]]:
        """Returns their nodes: IP and id."""
        gather("build", [member.built for member in self._members], self.unit)
        workers = [worker for member in self._members for worker in member.workers]
        return gather("build", [future_of(worker.actor.node.remote()) for worker in workers], self.unit)

    def request_stop(self) -> None:
        for member in self._members:
            member.request_stop()

    def close(self) -> None:
        for member in self._members:
            member.close()
