"""Stages as a function of the log: one production version at any moment, and a rollback that goes where it should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.apps.ship.registry.stages import NO_VERSION, NOTHING_EXPECTED, Action, Change, Stage, Stages, replay


def change(action: Action, version: int, to: Stage, *, expected: int = NOTHING_EXPECTED) -> Change:
    return Change(action, version, to, by="me", at="2025-01-01T00:00:00+00:00", why="because", expected=expected)


def promote(version: int, to: Stage = "production", *, expected: int = NOTHING_EXPECTED) -> Change:
    return change("promote", version, to, expected=expected)


def rollback(version: int, to: Stage = "production", *, expected: int = NOTHING_EXPECTED) -> Change:
    return change("rollback", version, to, expected=expected)


def test_promoting_archives_what_was_in_production() -> None:
    stages, entries = replay([promote(1, "canary"), promote(1), promote(2)])
    assert (stages.of(1), stages.of(2), stages.production, stages.canary) == ("archived", "production", 2, NO_VERSION)
    assert [(move.version, move.before, move.after) for move in entries[-1].moves] == [
        (1, "production", "archived"),
        (2, "candidate", "production"),
    ]


def test_rollback_twice_goes_back_two_versions() -> None:
    stages, _ = replay([promote(1), promote(2), promote(3)])
    for expected in (2, 1):
        assert stages.previous_production() == expected
        stages.apply(change("rollback", expected, "production", expected=stages.production))
        assert stages.production == expected
    assert stages.previous_production() == NO_VERSION
    assert (stages.of(2), stages.of(3)) == ("archived", "archived")


@pytest.mark.parametrize(
    ("log", "stages", "previous"),
    [
        ([], ["candidate"] * 3, NO_VERSION),
        ([promote(1, "canary"), promote(2, "canary")], ["archived", "canary", "candidate"], NO_VERSION),
        # 2 was rolled back, so it is not what a rollback of 3 returns to.
        ([promote(1), promote(2), rollback(1), promote(3)], ["archived", "archived", "production"], 1),
        # A canary that is rolled back leaves production alone.
        (
            [promote(1), promote(2, "canary"), rollback(2, "archived", expected=2)],
            ["production", "archived"],
            NO_VERSION,
        ),
        ([promote(1), promote(2), promote(2, "archived")], ["archived", "archived"], 1),
        ([promote(1), promote(1, "canary")], ["production"], NO_VERSION),
    ],
)
def test_stages_after_a_log(log: list[Change], stages: list[Stage], previous: int) -> None:
    found, _ = replay(log)
    assert [found.of(version) for version in range(1, len(stages) + 1)] == stages
    assert found.production == (stages.index("production") + 1 if "production" in stages else NO_VERSION)
    assert found.canary == (stages.index("canary") + 1 if "canary" in stages else NO_VERSION)
    assert found.previous_production() == previous


def test_change_with_unmet_expectation_is_refused() -> None:
    stages, entries = replay(
        [promote(1), promote(2, expected=1), promote(3, expected=1), promote(4, expected=NO_VERSION)]
    )
    assert stages.production == 2
    assert [bool(entry.refused) for entry in entries] == [False, False, True, True]
    assert entries[2].refused == "production was version 2, not version 1"
    assert entries[3].refused == "production was version 2, not empty"
    assert not entries[2].moves
    assert stages.apply(promote(2, "canary")).refused == "version 2 is in production"


changes = st.builds(
    change,
    st.sampled_from(["promote", "rollback"]),
    st.integers(1, 4),
    st.sampled_from(["canary", "production", "archived"]),
    expected=st.sampled_from([NOTHING_EXPECTED, NO_VERSION, 1, 2]),
).filter(lambda one: one.action == "promote" or one.to == "production")


@given(st.lists(changes, max_size=25))
@settings(max_examples=100, deadline=None)
def test_any_log_gives_one_stage_per_version(log: list[Change]) -> None:
    known = dict.fromkeys(range(1, 5), "candidate")
    stages = Stages()
    for one in log:
        entry = stages.apply(one)
        for move in entry.moves:
            assert known[move.version] == move.before, "a move starts where the last one ended"
            known[move.version] = move.after
        assert known == {version: stages.of(version) for version in known}
        assert sum(stage == "production" for stage in known.values()) <= 1
        assert sum(stage == "canary" for stage in known.values()) <= 1
        assert stages.production in (NO_VERSION, *stages.line[-1:]), "the line ends with what is in production"
