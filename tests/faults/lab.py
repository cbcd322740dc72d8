"""What cases share: a tiny model, its data, and uninterrupted runs to compare with. Made once, when first asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tiny_runs

from faults import processes

STEPS, SAVE_PERIOD = 6, 2
BACKGROUND = "checkpointing.async_save=true"


class Lab:
    """A folder for a campaign, and for what it leaves open: processes that live as long as it does."""

    def __init__(self, folder: Path, keep: bool = False) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.open = ExitStack()
        self._keep = keep
        self._wholes: dict[str, Path] = {}
        self._shared: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.close()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def shared(self, name: str, make: Callable[[Path], Any]) -> Any:
        """Something that one part needs in several cases; `make` gets an empty folder."""
        if name not in self._shared:
            folder = self.folder / "shared" / name
            folder.mkdir(parents=True)
            self._shared[name] = make(folder)
        return self._shared[name]

    @cached_property
    def model(self) -> Path:
        return tiny_runs.save_model(self.folder / "model")

    @cached_property
    def data(self) -> Path:
        return tiny_runs.save_data(self.folder / "data")

    def arguments(self, kind: str, folder: Path) -> list[str]:
        """`grpo`, `dpo`, `rm`, `sft`; `-lora` behind it trains adapters, `-rounds` samples across steps, `-dedicated`
        on an engine of its own, `-background` saves beside the training, `-kept` keeps the last and the best.
        """
        name, *variants = kind.split("-")
        words = getattr(tiny_runs, name)(self.model, self.data, folder, steps=STEPS)
        if name == "sft":
            words += [f"checkpointing.save_period={SAVE_PERIOD}", "checkpointing.keep_top_k=null"]
        if "lora" in variants:
            words += [*tiny_runs.LORA, "policy.dtensor_cfg.lora_cfg.dropout=0.2"]
        if "rounds" in variants:
            words += ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]
        if "dedicated" in variants:
            engine = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"
            words += ["cluster.gpus_per_node=2", engine]
        if "background" in variants:
            words.append(BACKGROUND)
        if "kept" in variants:
            words.append("checkpointing.keep_top_k=1")
        if "ray" in variants:
            words += ["cluster.launcher=ray", "cluster.gpus_per_node=2"]
        return words

    def whole(self, kind: str) -> Path:
        """The folder of a run of that kind that nothing happened to. Saving in the background must not matter."""
        kind = kind.replace("-background", "")
        if kind not in self._wholes:
            folder = self.folder / "whole" / kind
            folder.parent.mkdir(exist_ok=True)
            finished = processes.run(self.arguments(kind, folder), self.folder / f"whole-{kind}.log")
            assert finished.code == 0, f"the run without a fault failed: {finished}"
            self._wholes[kind] = folder
        return self._wholes[kind]

    def assert_same_end(self, kind: str, folder: Path, finished: processes.Finished) -> None:
        """Every number of every row, every sample, the bytes of the last weights."""
        whole = self.whole(kind)
        assert finished.code == 0, f"the same command, given again, did not finish: {finished}"
        ours, expected = tiny_runs.results_of(folder), tiny_runs.results_of(whole)
        assert [row["step"] for row in ours] == [row["step"] for row in expected], (
            f"rows are missing or twice: {finished}"
        )
        for row, other in zip(ours, expected, strict=True):
            assert row == other, f"step {row['step']} differs: {row} instead of {other}\n{finished}"
        self.assert_same_weights(kind, folder, finished)
        samples = {path.name: path.read_bytes() for path in (whole / "rollouts").glob("*")}
        assert {path.name: path.read_bytes() for path in (folder / "rollouts").glob("*")} == samples, "other samples"

    def assert_same_weights(self, kind: str, folder: Path, finished: processes.Finished) -> None:
        assert finished.code == 0, f"the same command, given again, did not finish: {finished}"
        ours = tiny_runs.weights_of(folder / f"step_{STEPS}")
        assert ours == tiny_runs.weights_of(self.whole(kind) / f"step_{STEPS}"), f"other weights: {finished}"


def assert_no_traceback(finished: processes.Finished) -> None:
    assert "Traceback (most recent call last)" not in finished.output, f"a traceback: {finished}"


def assert_refused(finished: processes.Finished) -> None:
    assert finished.code == 64, f"not refused: {finished}"
    assert_no_traceback(finished)
