"""When a checkpoint gets a copy of the model by itself."""

from __future__ import annotations

from posttrain.checkpointing.save_and_resume import CopyRule

GIB = 2**30
# Written at 1 GiB/s: the copy of a model of 2 GiB is estimated at 2 s + 6 passes of 2 s.
WRITTEN = {"save_s": 8.0, "saved_bytes": 8 * GIB}
ESTIMATED_S = 14.0


def is_made(rule: CopyRule, trained_s: float, *, blocks: bool) -> bool:
    return rule.reason_against(trained_s=trained_s, blocks=blocks, **WRITTEN) is None  # type: ignore[arg-type]


def test_a_copy_may_take_2_percent_of_the_time_where_training_waits_and_half_of_it_where_not() -> None:
    rule = CopyRule(by_cost=True, model_bytes=2 * GIB)
    assert rule.cost_s(8.0, 8 * GIB) == ESTIMATED_S
    assert [is_made(rule, ESTIMATED_S * 50 * share, blocks=True) for share in (0.99, 1.01)] == [False, True]
    assert [is_made(rule, ESTIMATED_S * 2 * share, blocks=False) for share in (0.99, 1.01)] == [False, True]


def test_the_measured_time_of_a_copy_replaces_the_estimate() -> None:
    rule = CopyRule(by_cost=True, model_bytes=2 * GIB, measured_s=1.0)
    assert is_made(rule, 51.0, blocks=True)
    rule.measured_s = 100.0
    reason = rule.reason_against(trained_s=1000.0, blocks=True, save_s=8.0, saved_bytes=8 * GIB)
    assert reason is not None
    assert reason.startswith("it would take 1e+02 s after 1e+03 s of training, more than 2 %")


def test_a_copy_that_is_asked_for_is_made_at_any_cost() -> None:
    assert is_made(CopyRule(by_cost=False, model_bytes=2 * GIB, measured_s=1e6), 1.0, blocks=True)
