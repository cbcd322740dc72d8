from __future__ import annotations

from pathlib import Path

import pytest
import turns


def test_with_the_cache_each_token_is_prefilled_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--turns 2 4 --samples 3 --prompts 2 --prompt 20 --new 5 --observed 9 --device cpu"
    before, after, *longer = turns.main([*words.split(), "--out", str(tmp_path / "turns.json")])
    assert after.computed == after.distinct == 2 * 20 + 6 * 10
    assert before.computed == 2 * 20 + 6 * (20 + 14)
    assert longer[1].computed == 2 * 20 + 3 * 6 * 10
    assert before.answers == after.answers
    assert "cache kept" in capsys.readouterr().out
    assert (tmp_path / "turns.json").exists()
