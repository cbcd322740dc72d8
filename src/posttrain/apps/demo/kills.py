"""`posttrain faults`: kill a GRPO run at random moments, resume it, and compare it with one that was never killed.

With `--against trl` the same is done to TRL's GRPO trainer: same model, data, reward and number of steps; both resume
from their newest checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from posttrain.apps.demo.arithmetic import build_model, sft_settings, write_data
from posttrain.apps.demo.show import grpo_overrides
from posttrain.errors import InputError
from posttrain.files.digests import sha256_of_file
from posttrain.files.json_files import JsonMapping
from posttrain.processes import ending_of
from posttrain.reporting.charts import Frame, picture, value_range
from posttrain.reporting.rows import read_rollouts
from posttrain.reporting.run_files import METRICS_FILE, read_rows

SFT_STEPS = 200
SAVE_PERIOD = 5
SHORTEST_S = 2.0  # before a kill: the start of Python is not interesting


@dataclass(frozen=True)
class TrainerRuns:
    """One trainer's run that was not killed, and its run that was; rewards by step."""

    name: str
    whole: Mapping[int, float]
    killed: Mapping[int, float]
    num_kills: int
    differences: Sequence[str]  # what is not equal

    @property
    def largest_difference(self) -> float:
        return max((abs(self.whole[step] - self.killed.get(step, 0.0)) for step in self.whole), default=0.0)


def run(folder: Path, seed: int, num_kills: int, steps: int, against: str | None) -> int:
    if against is not None and find_spec("trl") is None:
        raise InputError("--against trl: TRL is not installed; pip install 'posttrain[bench]'")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--folder {folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    build_model(folder / "model", seed)
    write_data(folder / "data", seed)
    print(f"Teaching a small model the format of an answer ({SFT_STEPS} steps of SFT)", flush=True)
    taught = [*sft_settings(folder / "model", folder / "data", folder / "taught", seed, SFT_STEPS)]
    taught += ["policy.scheduler=null", "sft.max_num_epochs=100", f"checkpointing.save_period={SFT_STEPS}"]
    _finish([sys.executable, "-m", "posttrain", "sft", "--quiet", *taught], folder / "taught.log")

    chance = random.Random(seed)
    sides = [_posttrain(folder, seed, num_kills, steps, chance)]
    if against:
        sides.append(_trl(folder, num_kills, steps, chance))
    for side in sides:
        verdict = "equal, bit for bit" if not side.differences else f"differs: {'; '.join(side.differences)}"
        print(f"\n{side.name}: {steps} steps, killed {side.num_kills} times and resumed: {verdict}")
        print(f"  largest difference of a step's mean reward: {side.largest_difference:.4g}")
    chart = folder / "kills.svg"
    chart.write_text(_drawn(sides), encoding="utf-8")
    print(f"\nRewards of the runs: {chart}")
    return 1 if sides[0].differences else 0


def _posttrain(folder: Path, seed: int, num_kills: int, steps: int, chance: random.Random) -> TrainerRuns:
    def command(name: str) -> list[str]:
        changed = (
            f"checkpointing.checkpoint_dir={folder / name}",
            f"policy.model_name={folder}/taught/step_{SFT_STEPS}/policy/weights/model",
            f"policy.tokenizer.name={folder}/taught/step_{SFT_STEPS}/policy/tokenizer",
            f"checkpointing.save_period={SAVE_PERIOD}",
            "checkpointing.metric_name=null",
            "data.validation=null",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
        )
        usual = grpo_overrides(folder, seed, steps)
        names = {setting.partition("=")[0] for setting in changed}
        kept = [setting for setting in usual if setting.partition("=")[0] not in names]
        return [sys.executable, "-m", "posttrain", "grpo", "--quiet", *kept, *changed]

    num_kills = _both("posttrain", command("whole"), command("killed"), folder, num_kills, chance)
    whole, killed = folder / "whole", folder / "killed"
    first, second = _rows(whole), _rows(killed)
    differences = _differences(whole, killed, first, second, steps)
    return TrainerRuns("posttrain", _rewards(first), _rewards(second), num_kills, differences)


def _differences(
    whole: Path, killed: Path, first: list[JsonMapping], second: list[JsonMapping], steps: int
) -> list[str]:
    found = ["rows of metrics.jsonl"] if first != second else []
    for step in range(1, steps + 1):
        one, other = (read_rollouts(run / f"rollouts/step_{step}.jsonl.gz") for run in (whole, killed))
        if one != other:
            found.append(f"answers of step {step}")
            break
    weights = [sorted((run / f"step_{steps}/policy/weights").rglob("*.safetensors")) for run in (whole, killed)]
    if not weights[0] or [sha256_of_file(file) for file in weights[0]] != [sha256_of_file(file) for file in weights[1]]:
        found.append("final weights")
    return found


def _trl(folder: Path, num_kills: int, steps: int, chance: random.Random) -> TrainerRuns:
    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "posttrain.apps.demo.trl_side", str(folder), name, str(steps), str(SAVE_PERIOD)]

    num_kills = _both("TRL", command("trl-whole"), command("trl-killed"), folder, num_kills, chance)
    whole, killed = folder / "trl-whole", folder / "trl-killed"
    first, second = _rewards(_rows(whole)), _rewards(_rows(killed))
    different = sum(first[step] != second.get(step) for step in first)
    differences = [f"{different} of {steps} rewards"] if different else []
    if (whole / "weights.sha256").read_text() != (killed / "weights.sha256").read_text():
        differences.append("final weights")
    return TrainerRuns("TRL", first, second, num_kills, differences)


def _both(name: str, whole: list[str], killed: list[str], folder: Path, num_kills: int, chance: random.Random) -> int:
    """Run one to its end and the other with kills; the number of kills that met it alive."""
    print(f"{name}: a run that is left alone", flush=True)
    began = time.monotonic()
    _finish(whole, folder / f"{name}-whole.log")
    seconds = time.monotonic() - began
    print(f"{name}: it took {seconds:.0f} s. The same, killed at random moments", flush=True)
    done = 0
    while done < num_kills:
        with (folder / f"{name}-killed.log").open("ab") as log:
            child = subprocess.Popen(killed, stdout=log, stderr=log, start_new_session=True)
            wait_s = chance.uniform(SHORTEST_S, max(SHORTEST_S, seconds))
            try:
                child.wait(wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode >= 0:  # it reached its end first
            _check(child.returncode, killed, folder / f"{name}-killed.log")
            return done
        done += 1
        print(f"  kill -9 after {wait_s:.1f} s", flush=True)
    _finish(killed, folder / f"{name}-killed.log")
    return done


def _finish(command: list[str], log: Path) -> None:
    with log.open("ab") as output:
        _check(subprocess.run(command, stdout=output, stderr=output, check=False).returncode, command, log)


def _check(code: int, command: list[str], log: Path) -> None:
    if code:
        sys.exit(f"posttrain: error: `{' '.join(command[:4])} …` ended with {ending_of(code)}; see {log}")


def _rows(run: Path) -> list[JsonMapping]:
    """The rows of a run without what a clock measured."""
    clocks = ("timing/", "performance/", "memory/", "cluster/")
    rows = read_rows(run / METRICS_FILE)
    return [{k: v for k, v in row.items() if not k.startswith(clocks) and k != "time"} for row in rows]


def _rewards(rows: list[JsonMapping]) -> dict[int, float]:
    return {row["step"]: row["train/reward"] for row in rows if "train/reward" in row}


def _drawn(sides: Sequence[TrainerRuns]) -> str:
    width = 820
    body = []
    for number, side in enumerate(sides):
        values = [*side.whole.values(), *side.killed.values()]
        frame = Frame.around(list(side.whole), *value_range(values), size=(width, 260))
        both = (("a", side.whole), ("b", side.killed))
        curves = [frame.curve(style, list(rewards), list(rewards.values())) for style, rewards in both]
        label = f"{side.name}: left alone, and killed {side.num_kills} times; mean reward by step"
        body.append(
            f'<g transform="translate(0 {50 + 260 * number})">{frame.grid()}{"".join(curves)}'
            f'<text class="key" x="64" y="8">{label}</text></g>'
        )
    return str(picture("A run that is killed, and one that is not", (width, 60 + 260 * len(sides)), "".join(body)))
