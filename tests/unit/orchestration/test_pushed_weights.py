"""Weights for engines of their own: published once before the first sample, and removed with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from test_sharded_roles import Ranks

from posttrain.orchestration.weights import PushedWeights
from posttrain.policy.weight_files import Handover, SentWeights


class SendingRank:
    def __init__(self, file: Path, *, dies: bool) -> None:
        self.file, self.dies = file, dies

    def send_weights(self, to: Handover) -> SentWeights:
        self.file.touch()
        return SentWeights(self.file, 0, {}, on_one_machine=True)

    def receive_weights(self, sent: SentWeights) -> None:
        assert sent.file.exists()

    def remove_weights(self) -> None:
        if self.dies:
            raise RuntimeError("gone")


@pytest.mark.parametrize("dies", [False, True])
def test_weights_are_published_before_the_first_sample_and_their_file_goes_with_the_run(
    tmp_path: Path, dies: bool
) -> None:
    ranks: Any = Ranks([SendingRank(tmp_path / "weights", dies=dies)])
    ranks.engines = ranks
    weights = PushedWeights(ranks, cast(Any, None))
    weights.close()
    assert ranks.log == [], "nothing was published"
    weights.ensure_published()
    weights.ensure_published()
    weights.publish(1)
    assert [name for name, _ in ranks.calls] == ["send_weights", "receive_weights"] * 2
    weights.close()
    assert not (tmp_path / "weights").exists()
