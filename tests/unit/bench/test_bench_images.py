from __future__ import annotations

from pathlib import Path

import images
import pytest


def test_prompts_with_an_image_are_sampled_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        images.main(["--shape", "tiny", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path / "images.json")])
        == 0
    )
    printed = capsys.readouterr().out
    assert "4 prompts with an image of 56 x 56, 2 samples of 8 tokens" in printed
    assert "native" in printed
    assert (tmp_path / "images.json").exists()
