"""`checkpoint_must_save_by`: when it is time to save and stop."""

from __future__ import annotations

from posttrain.checkpointing import SaveDeadline


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_there_is_no_deadline() -> None:
    deadline = SaveDeadline(None)
    assert not deadline.must_save_now()
    deadline.start()
    deadline.mark_step()
    assert not deadline.must_save_now()


def test_the_deadline_is_reached_when_one_more_mean_step_would_not_fit() -> None:
    clock = Clock()
    deadline = SaveDeadline(100, clock)
    clock.now += 500  # loading a model before the loop does not count
    deadline.start()
    # (duration of the step, is it time?): 20+20, 60+30, 70+23.3, 75+18.75, then 84+16.8 >= 100
    for duration, expected in ((20, False), (40, False), (10, False), (5, False), (9, True)):
        clock.now += duration
        deadline.mark_step()
        assert deadline.must_save_now() is expected


def test_reaching_the_limit_exactly_is_reaching_it() -> None:
    clock = Clock()
    deadline = SaveDeadline(100, clock)
    deadline.start()
    for expected in (False, False, False, True):
        clock.now += 20
        deadline.mark_step()
        assert deadline.must_save_now() is expected


def test_time_since_the_last_step_counts() -> None:
    clock = Clock()
    deadline = SaveDeadline(100, clock)
    deadline.start()
    clock.now += 20
    deadline.mark_step()
    clock.now += 59
    assert not deadline.must_save_now()
    clock.now += 1
    assert deadline.must_save_now()


def test_the_limit_itself_is_enough_before_any_step_has_ended() -> None:
    clock = Clock()
    deadline = SaveDeadline(10, clock)
    deadline.start()
    clock.now += 9.9
    assert not deadline.must_save_now()
    clock.now += 0.1
    assert deadline.must_save_now()
