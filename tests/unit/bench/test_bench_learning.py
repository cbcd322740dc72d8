"""bench/learn.py and bench/speculation.py: what they count, when they keep weights, and that they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import learn
import learn_sides
import problems
import pytest
import speculation
from side_by_side.models import TINY_SHAPE, random_model


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("48 + 24 = 72.\n#### 72", "72", 1.0),
        ("#### 1,234.50", "1234.5", 1.0),
        ("#### -3 apples", "-3", 1.0),
        ("#### 72\n#### 71", "72", 0.0),
        ("the answer is 72", "72", 0.0),
        ("#### none", "72", 0.0),
    ],
)
def test_the_number_after_the_last_mark_counts(answer: str, reference: str, reward: float) -> None:
    assert problems.right_answer("", answer, reference) == reward


def test_weights_are_kept_at_equally_distant_times_that_do_not_count_their_writing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, kept = [100.0], list[str]()
    monkeypatch.setattr(learn_sides.time, "perf_counter", lambda: now[0])

    def save(folder: Path) -> None:
        kept.append(folder.name)
        now[0] += 1000.0

    watch = learn_sides.Stopwatch(minutes=1.0, marks=3, save=save, out=tmp_path)
    now[0] += 50.0  # loading
    for _ in range(7):
        watch.begin()
        assert not watch.is_over
        now[0] += 9.0
        watch.stepped(num_tokens=10, reward=0.5)
    assert watch.is_over
    assert kept == ["step_3", "step_5", "step_7"], "after 20, 40 and 60 seconds of steps of 9"
    assert [(point["seconds"], point["tokens"]) for point in watch.curve] == [(27.0, 30), (45.0, 50), (63.0, 70)]


def test_a_run_of_seconds_is_evaluated_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(tmp_path / "model", TINY_SHAPE)
    rows = [{"question": f"What is {n} + 1?", "final_answer": str(n + 1)} for n in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "posttrain"
    sizes = ["--prompts", "2", "--samples", "2", "--new-tokens", "4", "--micro-batch", "4", "--device", "cpu"]
    words = ["--model", str(model), "--train", str(data), "--out", str(run), "--minutes", "0.001", "--marks", "1"]
    assert learn.main(["train", "posttrain", *words, *sizes, "--recipe", "hot"]) == 0
    held_out = ["--test", str(data), "--start", str(model), "--samples", "2", "--new-tokens", "4", "--device", "cpu"]
    assert learn.main(["evaluate", str(run), *held_out]) == 0
    drawn = tmp_path / "curve.svg"
    assert learn.main(["report", str(run), "--json", str(tmp_path / "all.json"), "--svg", str(drawn)]) == 0
    assert drawn.read_text().count('<circle class="dot a"') == 2, "the start and one mark"
    found = json.loads((tmp_path / "all.json").read_text())["runs"]["posttrain"]
    assert found["recipe"] == ["hot"]
    assert found["curve"][-1]["problems"] == found["start"]["problems"] == 8
    assert "points a minute" in capsys.readouterr().out


def finished_run(side: str, lr: float, accuracy: float, vllm: bool = False) -> dict[str, Any]:
    last = {"accuracy": accuracy, "pass@16": 2 * accuracy}
    return {"side": side, "lr": lr, "recipe": ["plain"], "vllm": vllm, "curve": [{"accuracy": 0.0}, last]}


def test_seeds_are_averaged_and_each_side_has_its_best_rate() -> None:
    runs = [finished_run("posttrain", 1e-5, value) for value in (0.09, 0.10, 0.11)]
    runs += [finished_run("posttrain", 3e-5, value) for value in (0.05, 0.06, 0.07)]
    runs += [finished_run("trl", 1e-5, 0.08, vllm=True), {**finished_run("trl", 1e-5, 0.5), "curve": [{}]}]
    rows = learn.over_seeds(runs)
    assert [row[:3] for row in rows] == [
        ["posttrain", "1e-05", 3],
        ["posttrain", "3e-05", 3],
        ["trl, vLLM", "1e-05", 1],
    ]
    assert [bool(row[-1]) for row in rows] == [True, False, True]
    # The deviation of three seeds is 1 point, Student's factor with two degrees of freedom 4.303.
    assert rows[0][3] == "10.00% [7.52%, 12.48%]"
    assert rows[0][4] == "pass@16 20.00% [15.03%, 24.97%]"
    assert rows[2][3] == "8.00%"


def test_all_runs_of_a_comparison_are_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def train(words: list[str], check: bool) -> None:
        started.append(words)
        args = learn.arguments(words[2:])
        args.out.mkdir(parents=True)
        (args.out / learn.CURVE).write_text("{}")

    monkeypatch.setattr(learn.subprocess, "run", train)
    called: list[list[str]] = []
    monkeypatch.setattr(learn, "main", lambda words: called.append(words) or 0)
    words = ["--out", str(tmp_path), "--test", "t", "--seeds", "0", "1", "--lr", "1e-5", "--vllm", "--trl-python", "PY"]
    args = learn.arguments(["compare", *words, "--", "--model", "M", "--train", "T"])
    for _ in range(2):  # the second time there is nothing to train
        assert learn.compare(args) == 0
    assert [(words[0] == "PY", words[3], "--vllm" in words) for words in started] == [
        (False, "posttrain", False), (True, "trl", True)
    ] * 2  # fmt: skip
    assert [called[0][0], called[1][0]] == ["evaluate", "report"]
    assert len([word for word in called[0] if "seed" in word and "1e-05" in word]) == 4


def test_trl_takes_the_settings_of_colocated_vllm(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    needed = ["train", "trl", "--model", "M", "--train", "T", "--out", str(tmp_path), "--device", "cpu", "--vllm"]
    args = learn.arguments([*needed, "--new-tokens", "100", "--longest-prompt", "50"])
    config = trl.GRPOConfig(**learn_sides.trl_settings(args))
    assert (config.use_vllm, config.vllm_mode, config.vllm_max_model_length) == (True, "colocate", 150)
    assert config.vllm_gpu_memory_utilization == pytest.approx(0.3)


def test_speculation_is_compared_token_by_token(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    sizes = ["--prompts", "6", "--per-call", "3", "--samples", "2", "--new-tokens", "12", "--repeats", "1"]
    assert speculation.main(["--shape", "tiny", "--device", "cpu", "--drafts", "3", *sizes, "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert results["drafts: 3"]["equal"] == 12
    assert results["drafts: 3"]["drafted_steps"] > 0


def test_equal_learning_counts_only_runs_that_came_to_their_last_step(tmp_path: Path) -> None:
    import equal_learning

    rows = [{"step": step, "train/reward": 0.1 * step, "validation/accuracy": 0.5} for step in (1, 2, 3)]
    run = tmp_path / "seed-1/plain"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert equal_learning.result_of(tmp_path, 1, "plain", 4) is None
    assert equal_learning.result_of(tmp_path, 2, "plain", 3) is None
    found = equal_learning.result_of(tmp_path, 1, "plain", 3)
    assert found is not None
    assert (found.accuracy, found.reward) == (0.5, pytest.approx(0.3))
