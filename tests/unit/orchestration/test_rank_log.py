"""The log of a rank: what it did, for how long, what failed, and what it was doing when it ended."""

from __future__ import annotations

import faulthandler
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.orchestration.deadlines import DEADLINE_VARIABLE
from posttrain.orchestration.rank_log import RankLog


@pytest.fixture(autouse=True)
def _own_faulthandler() -> Iterator[None]:
    yield
    faulthandler.enable(sys.__stderr__)


def text_of(folder: Path) -> str:
    return (folder / "logs" / "rank_3.log").read_text()


def test_each_operation_has_a_line_with_its_seconds(tmp_path: Path) -> None:
    log = RankLog(tmp_path, "rank_3")
    with log.operation("update"):
        assert text_of(tmp_path).endswith(" update …"), "known before it ends"
    with log.operation("save"):
        pass
    lines = text_of(tmp_path).splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d update … \d+\.\d{3} s", lines[0])


def test_an_error_is_there_with_its_traceback(tmp_path: Path) -> None:
    log = RankLog(tmp_path, "rank_3")
    with pytest.raises(KeyError), log.operation("load"):
        {}["weights"]
    assert re.search(r"load … failed after 0.0 s\nTraceback .*KeyError: 'weights'", text_of(tmp_path), re.DOTALL)


def test_of_one_that_hangs_the_stacks_are_there_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLINE_VARIABLE, "0.02")
    log = RankLog(tmp_path, "rank_3")
    with log.operation("update"):
        while "test_of_one_that_hangs" not in text_of(tmp_path):
            pass


def test_a_machine_without_the_run_folder_writes_no_log(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "run"):
        with RankLog(folder, "rank_3").operation("update"):
            pass
