"""States that live in other processes: what stays open, what is repeated, and what a difference means."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from posttrain.environments.item import Unscored
from posttrain.environments.turns.replay import History, LiveStates


class Counter:
    """Adds up; all instances are listed. `drift` is added to the result of later instances."""

    made: ClassVar[list[Counter]] = []
    drift = 0

    def __init__(self, start: Any) -> None:
        self.total, self.is_open = start["total"] + self.drift * len(self.made), True
        self.made.append(self)

    def act(self, action: Any) -> dict[str, Any]:
        assert self.is_open
        if action["add"] is None:
            raise Unscored("broken")
        self.total += action["add"]
        return {"total": self.total}

    def close(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    monkeypatch.setattr(Counter, "made", [])
    return Counter.made


@pytest.mark.invariant
def test_a_state_is_continued_where_it_is_open_and_repeated_where_it_is_not(counters: list[Counter]) -> None:
    history = History({"total": 10})
    here, elsewhere = LiveStates(Counter, max_open=2), LiveStates(Counter, max_open=2)
    assert here.act(history, {"add": 1}) == {"total": 11}
    assert here.act(history, {"add": 2}) == {"total": 13}
    assert len(counters) == 1
    assert elsewhere.act(history, {"add": 3}) == {"total": 16}  # a fresh instance with all three actions
    assert [one.total for one in counters] == [13, 16]
    assert len(history.actions) == 3


def test_an_earlier_state_is_not_confused_with_a_later_one(counters: list[Counter]) -> None:
    first = History({"total": 0})
    states = LiveStates(Counter, max_open=4)
    states.act(first, {"add": 1})
    second = History(first.start, list(first.actions))  # two samples that have done the same so far
    assert states.act(first, {"add": 5}) == {"total": 6}
    assert states.act(second, {"add": 7}) == {"total": 8}
    assert [one.total for one in counters] == [6, 8]


@pytest.mark.invariant
def test_an_environment_that_does_not_repeat_itself_is_noticed(
    counters: list[Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counter, "drift", 1)
    history = History({"total": 0})
    LiveStates(Counter, max_open=1).act(history, {"add": 1})
    with pytest.raises(Unscored, match="does not repeat itself: action 1 of 1"):
        LiveStates(Counter, max_open=1).act(history, {"add": 1})
    assert [one.is_open for one in counters] == [True, False]


def test_errors_ends_and_the_limit_close_states(counters: list[Counter]) -> None:
    states = LiveStates(Counter, max_open=1)
    one, other = History({"total": 0}), History({"total": 100})
    states.act(one, {"add": 1})
    states.act(other, {"add": 1})
    assert [each.is_open for each in counters] == [False, True]  # only one may be open
    assert states.act(one, {"add": 1}) == {"total": 2}
    with pytest.raises(Unscored, match="broken"):
        states.act(one, {"add": None})
    assert not any(each.is_open for each in counters)
    states.act(other, {"add": 1})
    states.release(other)
    assert not any(each.is_open for each in counters)


def test_a_state_that_does_not_close_leaves_results_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Counter) -> None:
        raise Unscored("it did not answer")

    monkeypatch.setattr(Counter, "close", fail)
    states, one, other = LiveStates(Counter, max_open=1), History({"total": 0}), History({"total": 100})
    states.act(one, {"add": 1})
    assert states.act(other, {"add": 1}) == {"total": 101}  # closes the first one
    states.release(other)
