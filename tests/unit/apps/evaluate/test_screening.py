"""Which prompts a screening keeps, what it saves when, and what it refuses."""

from __future__ import annotations

import datetime
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import ScriptedRollouts, completion

from posttrain.apps.evaluate.screening import (
    NothingScored,
    RewardRange,
    Rewards,
    ScreenFiles,
    Screening,
    histogram,
    measure,
)
from posttrain.checkpointing import Interruption, SaveDeadline
from posttrain.cli.data_screen import table, training_settings
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.data.sources import Row
from posttrain.errors import FolderHeld, InputError, StopRequested
from posttrain.types import Group, Rollout, Score, TakenGroups, Task

IDENTITY = {"model_fingerprint": "abc", "num_samples": 2, "sampling": {"temperature": 1.0}}


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0, 0, 0, 0], "too hard"),
        ([1, 1, 1, 1], "too easy"),
        ([0, 1, 0, 0], "kept"),
        ([0.2, 0.2, 0.2, 0.2], "no difference"),
        ([0, 1, None, None], "kept"),
        ([1, None, None, 1], "too easy"),
        ([1, None, None, None], "unscored"),
        ([None, None, None, None], "unscored"),
    ],
)
def test_prompt_is_kept_if_its_mean_is_in_range_and_its_scored_answers_differ(rewards: Rewards, verdict: str) -> None:
    assert RewardRange(0.1, 0.9).verdict(rewards) == verdict


def test_both_ends_of_the_range_are_kept() -> None:
    assert [RewardRange(0.25, 0.5).verdict(rewards) for rewards in ([0, 0.5], [0, 1], [0, 1.01])] == [
        "kept",
        "kept",
        "too easy",
    ]


def test_histogram_has_a_line_for_each_of_few_values_and_ten_parts_of_many() -> None:
    assert histogram([0.0, 0.5, 0.0, 1.0]) == [(0.0, 0.0, 2), (0.5, 0.5, 1), (1.0, 1.0, 1)]
    many = histogram([number / 100 for number in range(101)])
    assert len(many) == 10
    assert sum(count for _, _, count in many) == 101
    assert histogram([]) == []


# -- files -------------------------------------------------------------------------------------------------------------


def reopened(out: Path, identity: dict[str, object] = IDENTITY) -> ScreenFiles:
    files = ScreenFiles.open(out, identity)
    files.close()
    return files


def test_rewards_are_read_back_and_a_torn_line_is_measured_again(tmp_path: Path) -> None:
    files = reopened(tmp_path / "s.jsonl")
    files.append({3: [0.0, 1.0], 1: [1.0, 1.0]}, {})
    with files.journal.open("a") as journal:
        journal.write('{"row": 2, "rewa')
    again = reopened(tmp_path / "s.jsonl")
    assert again.rewards == {3: [0.0, 1.0], 1: [1.0, 1.0]}
    again.append({2: [0.0, 0.0]}, {})
    assert reopened(tmp_path / "s.jsonl").rewards == {3: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}


def test_prompt_with_an_unscored_answer_is_measured_again_by_the_next_command(tmp_path: Path) -> None:
    files = reopened(tmp_path / "s.jsonl")
    files.append({0: [0.0, 1.0], 1: [None, 1.0]}, {1: "timeout after 5 s"})
    assert json.loads(files.journal.read_text().splitlines()[-1])["error"] == "timeout after 5 s"
    assert reopened(tmp_path / "s.jsonl").rewards == {0: [0.0, 1.0]}


def test_rewards_of_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    reopened(tmp_path / "s.jsonl").append({0: [0.0, 1.0]}, {})
    with pytest.raises(InputError, match=r"s\.jsonl: .*sampling\.temperature was 1\.0 and is 0\.5"):
        reopened(tmp_path / "s.jsonl", {**IDENTITY, "sampling": {"temperature": 0.5}})
    assert reopened(tmp_path / "s.jsonl").rewards == {0: [0.0, 1.0]}, "nothing was lost"


def test_attempt_that_measured_nothing_does_not_stand_in_the_way(tmp_path: Path) -> None:
    reopened(tmp_path / "s.jsonl")
    other = {**IDENTITY, "num_samples": 4}
    reopened(tmp_path / "s.jsonl", other).append({0: [0.0, 1.0]}, {})
    assert reopened(tmp_path / "s.jsonl", other).rewards == {0: [0.0, 1.0]}


def test_file_of_another_origin_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"input": "mine"}\n')
    with pytest.raises(InputError, match=r"s\.jsonl: exists, without the s\.screen\.jsonl"):
        reopened(tmp_path / "s.jsonl")
    for content in ("3\n", "[]\n", '{"a": 1}\n3\n', "{\n"):
        (tmp_path / "s.screen.jsonl").write_text(content)
        with pytest.raises(InputError, match=r"s\.screen\.jsonl: not the rewards of a screening"):
            reopened(tmp_path / "s.jsonl")
    assert (tmp_path / "s.jsonl").read_text() == '{"input": "mine"}\n'


def test_second_process_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    first = ScreenFiles.open(tmp_path / "s.jsonl", IDENTITY)
    with pytest.raises(FolderHeld, match="is screening into this file"):
        ScreenFiles.open(tmp_path / "s.jsonl", IDENTITY)
    first.close()
    reopened(tmp_path / "s.jsonl")


def test_column_that_json_cannot_hold_is_named_with_its_row(tmp_path: Path) -> None:
    row = Row({"input": "q", "day": datetime.date(2026, 1, 1)}, "rows.parquet", 7)
    with pytest.raises(InputError, match=r"rows\.parquet, row 7: .*date is not JSON serializable"):
        reopened(tmp_path / "s.jsonl").write([(row, 0.5, 2)], {})
    assert not (tmp_path / "s.jsonl").exists()


# -- measuring ---------------------------------------------------------------------------------------------------------


def groups(*rewards: Rewards) -> list[Group]:
    return [
        Group(
            Task(draw, f"d:{draw}", "", ()),
            tuple(Rollout(completion("x"), Score(r, error=None if r is not None else "no judge")) for r in row),
        )
        for draw, row in enumerate(rewards)
    ]


def measured(tmp_path: Path, source: ScriptedRollouts, sizes: Sequence[int], **parts: object) -> ScreenFiles:
    files = reopened(tmp_path / "s.jsonl")
    usual = {"keep": RewardRange(), "deadline": SaveDeadline(None), "interruption": Interruption()}
    measure(source, sizes, files, **{**usual, **parts})  # type: ignore[arg-type]
    return files


def test_every_batch_is_saved_before_the_next_begins(tmp_path: Path) -> None:
    class Watched(ScriptedRollouts):
        def take(self, num_groups: int, step: int) -> TakenGroups:
            assert step == 0, "other noise than that of training"
            assert len((tmp_path / "s.screen.jsonl").read_text().splitlines()) == 1 + self.position
            return super().take(num_groups, step)

    files = measured(tmp_path, Watched(groups([0, 1], [1, 1], [0, 0])), [2, 1])
    assert files.rewards == {0: [0, 1], 1: [1, 1], 2: [0, 0]} == reopened(tmp_path / "s.jsonl").rewards


def test_batch_that_a_signal_interrupts_is_left_out(tmp_path: Path) -> None:
    interruption = Interruption()

    class Stopped(ScriptedRollouts):
        def take(self, num_groups: int, step: int) -> TakenGroups:
            if self.position:
                interruption.signal = signal.SIGTERM
                raise StopRequested
            return super().take(num_groups, step)

    files = measured(tmp_path, Stopped(groups([0, 1], [1, 1])), [1, 1], interruption=interruption)
    assert files.rewards == {0: [0, 1]}
    assert interruption.exit_code == 85


def test_measuring_ends_when_one_more_batch_would_not_fit_into_the_minutes(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 40.0, 40.0, 80.0, 80.0])  # start; then before and after each batch
    deadline = SaveDeadline(100.0, clock=lambda: next(times))
    files = measured(tmp_path, ScriptedRollouts(groups([0, 1], [1, 1], [0, 0])), [1, 1, 1], deadline=deadline)
    assert sorted(files.rewards) == [0, 1]


def test_nothing_scored_ends_the_screening_with_the_reason_and_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(NothingScored, match="no answer could be scored: no judge") as raised:
        measured(tmp_path, ScriptedRollouts(groups([None, None], [0, 1])), [1, 1])
    assert raised.value.exit_code == 65
    assert reopened(tmp_path / "s.jsonl").rewards == {}


def test_rewards_of_another_scale_are_saved_and_ask_for_a_range(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rewards from -1 to 5 were measured.*--keep LOW:HIGH in units of the reward"):
        measured(tmp_path, ScriptedRollouts(groups([-1, 5])), [1])
    assert reopened(tmp_path / "s.jsonl").rewards == {0: [-1, 5]}
    measured(tmp_path, ScriptedRollouts(groups([-1, 5])), [1], keep=RewardRange(0, 4, is_default=False))


# -- settings ----------------------------------------------------------------------------------------------------------


def screening(tmp_path: Path, *words: str, num_samples: int = 4, **options: float) -> Screening:
    config = load_config("grpo", None, ["data.train.data_path=rows.jsonl", *words]).config
    return Screening(config, tmp_path / "s.jsonl", num_samples, RewardRange(), say=print, **options)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.train=[{data_path: a.jsonl}, {data_path: b.jsonl}]"], "data.train lists 2 datasets"),
        (["data.train.dataset_name=TraceGroups"], "data.train.dataset_name = TraceGroups"),
    ],
)
def test_datasets_that_cannot_be_screened_are_refused_by_name(tmp_path: Path, words: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        _ = screening(tmp_path, *words).entry


def test_fewer_than_two_answers_and_no_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--samples 1"):
        screening(tmp_path, num_samples=1)
    with pytest.raises(InputError, match="--minutes 0"):
        screening(tmp_path, minutes=0)


@pytest.mark.parametrize("name", ["s.parquet", "s.screen.jsonl", "none/s.jsonl", "."])
def test_names_that_cannot_be_written_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="--out"):
        ScreenFiles.check_name(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["data.train.data_path={out}"]),
        (["data.train.dataset_name=gsm8k"], ["data.train.data_path={out}"]),
        (
            ["data.train={dataset_name: org/sums, subset: main, split: 'train[:9]'}"],
            ["data.train.data_path={out}", "data.train.subset=null", "data.train.split=null"],
        ),
        (
            ["data.train={dataset_name: rows.jsonl}"],
            ["data.train.data_path={out}", "data.train.dataset_name=null"],
        ),
        (
            ["data.train=[{dataset_name: gsm8k, env_name: math}]"],
            ['data.train=[{{"dataset_name": "gsm8k", "env_name": "math", "data_path": "{out}"}}]'],
        ),
    ],
)
def test_settings_for_training_make_the_run_read_the_kept_rows(
    tmp_path: Path, words: list[str], expected: list[str]
) -> None:
    made = screening(tmp_path, *words)
    out = tmp_path / "s.jsonl"
    settings = training_settings(made)
    assert settings == [word.format(out=out) for word in expected]
    out.write_text('{"input": "1 + 1", "output": "2"}\n')
    entry = screening(tmp_path, *words, *settings).entry
    assert [row.values["output"] for row in entry.rows(None)] == ["2"]


@pytest.mark.parametrize("keep", ["0.5", "0.9:0.1", "a:b", "nan:1", "0:inf"])
def test_range_that_is_none_is_refused(keep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "screen", "--out", str(tmp_path / "s.jsonl"), "--keep", keep])
    assert ended.value.code == 64
    assert f"--keep: '{keep}'" in capsys.readouterr().err


def test_table_shows_rewards_and_what_became_of_the_prompts() -> None:
    counts = {"kept": 1, "too hard": 1200, "too easy": 0, "no difference": 0, "unscored": 2, "not measured": 5}
    summary = {"histogram": [(0.0, 0.0, 1200), (0.5, 0.5, 1)], "keep": [0.1, 0.9], "prompts": counts}
    lines = table({**summary, "num_unscored_answers": 9})
    assert lines[1:3] == [f"  0.000             1,200  {'#' * 40}", "  0.500                 1  #"]
    assert [line.split("  ")[1] for line in lines[3:-1]] == ["kept", "too hard", "unscored", "not measured"]
    assert lines[-1] == "  9 answers could not be scored and are ignored"
