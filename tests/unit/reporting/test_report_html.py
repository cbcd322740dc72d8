"""report.html: complete for any state of a run, needs nothing from outside, and lets no model write into it."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from posttrain.reporting.report import write_report
from posttrain.types import Score, StepReport

VOID_TAGS = {"meta", "input", "line", "path", "circle", "rect", "br"}
ATTACK = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\" ' & \x00"


class Page(HTMLParser):
    """Checks that tags nest, and collects what tests compare."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.chart_data: list[dict[str, Any]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and self.tags[-1][1].get("type") == "application/json":
            self.chart_data.append(json.loads(data))
        elif self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    @property
    def headings(self) -> list[str]:
        return re.findall(r"[^\n]+", self.text)


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text("utf-8"))


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_text_of_models_data_and_configs_is_escaped(bench: Any, group: Any, report: Any) -> None:
    recorder = bench.recorder(title=ATTACK, config_yaml=ATTACK)
    scores = (Score(1.0, {ATTACK: 1.0}), Score(None, error=ATTACK, traceback=ATTACK))
    groups = (group(0, (ATTACK, "x"), scores),)
    validation = StepReport({ATTACK: 0.5}, {}, groups)
    recorder.record_step(1, report(groups=groups, unscored=1, **{ATTACK: 1.0}), validation)
    recorder.warn(ATTACK)
    recorder.finish(ATTACK)
    page = page_of(bench.folder)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    own = [attributes for attributes in scripts if attributes.get("type") != "application/json"]
    assert own == [{"type": "module"}]  # the page's own and no other
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("<script>alert(1)</script>") >= 6  # shown, not run


def test_page_is_self_contained(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    recorder.record_step(1, report(), None)
    recorder.finish("done")
    text = (bench.folder / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#)|fetch\(|<link""", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "color-scheme: light dark" in text


def test_curves_have_the_logged_numbers(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    recorder.record_validation(0, StepReport({"accuracy": 0.125}, {}))
    for step in (1, 2, 3):
        recorder.record_step(step, report(step), StepReport({"accuracy": 0.5}, {}) if step == 3 else None)
    recorder.finish("done")
    reward = page_of(bench.folder).chart_data[0]
    assert [curve["data"] for curve in reward["curves"]] == [
        {"steps": [1, 2, 3], "mean": [0.1, 0.2, 0.3]},
        {"steps": [0, 3], "mean": [0.125, 0.5]},
    ]


def test_key_figures_name_first_last_best_and_validation(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=3)
    recorder.record_validation(0, StepReport({"accuracy": 0.125}, {}))
    for step, reward in enumerate((0.25, 0.875, 0.75), start=1):
        recorder.record_step(
            step, report(step, reward=reward), StepReport({"accuracy": 0.5}, {}) if step == 3 else None
        )
    recorder.finish("done")
    text = page_of(bench.folder).text
    assert "Reward0.75first 0.25 · best 0.875 at step 2" in text
    assert "Validation accuracy0.125 → 0.5" in text
    assert "3 / 3" in text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "validation/accuracy": 0.5}],
        [{"step": 1, "train/reward": 0.5, "timing/train/generation": 1.0, "timing/train/total_step_time": 2.0}],
        [{"step": 1, "train/reward": None, "timing/train/total_step_time": None}],
        [{"step": step, "train/reward": None if step % 2 else 0.0, "train/loss": -1e-30} for step in range(30)],
        [{"step": step, "train/loss": 10.0**step, "train/kl_penalty": -5.0} for step in range(-30, 30)],
        [{"step": 7}, {"step": 7, "train/loss": 1e308}, {"step": 9, "train/loss": -1e308}],
        [{"step": 1, "train/reward": "text", "train/note": "text"}],
    ],
    ids=["empty", "validation only", "one step", "nulls", "gaps", "wild", "huge", "text"],
)
def test_every_state_of_a_run_has_a_page(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_rows(tmp_path, rows)
    page = page_of(tmp_path)
    assert tmp_path.name in page.text


def test_folder_with_a_torn_row_and_broken_rollouts_has_a_page(bench: Any, group: Any, report: Any) -> None:
    bench.recorder().record_step(1, report(groups=(group(),)), None)
    with (bench.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/')
    path = bench.folder / "rollouts" / "step_1.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    (bench.folder / "run.json").write_text("{")
    assert "Reward" in page_of(bench.folder).text


def test_ten_thousand_steps_are_downsampled(tmp_path: Path) -> None:
    rows = [
        {"step": step, "train/reward": (step % 100) / 100, "timing/train/generation": 1.0} for step in range(1, 10_001)
    ]
    for row in rows:
        row["timing/train/total_step_time"] = 1.5
    write_rows(tmp_path, rows)
    page = page_of(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000
    reward = page.chart_data[0]["curves"][0]["data"]
    assert len(reward["steps"]) == 400
    assert reward["steps"][-1] == 10_000
    assert sum(reward["mean"]) / 400 == pytest.approx(0.495, abs=1e-6)  # the mean survives
    assert (min(reward["low"]), max(reward["high"])) == (0.0, 0.99)
    stacked = next(data for data in page.chart_data if data.get("stacked"))
    assert [len(curve["data"]["steps"]) for curve in stacked["curves"]] == [120, 120]


def test_stages_of_a_step_are_stacked_without_double_counting(tmp_path: Path) -> None:
    timing = {"generation": 4.0, "policy_training": 3.0, "policy_training/sharding": 1.0, "total_step_time": 10.0}
    write_rows(tmp_path, [{"step": s} | {f"timing/train/{k}": v for k, v in timing.items()} for s in (1, 2)])
    page = page_of(tmp_path)
    stacked = next(data for data in page.chart_data if data.get("stacked"))
    assert [curve["data"]["mean"] for curve in stacked["curves"]] == [[4.0, 4.0], [3.0, 3.0], [3.0, 3.0]]
    assert "generation (40%)" in page.text
    assert "other (30%)" in page.text


def test_samples_show_mixed_groups_first_with_reward_and_advantage(bench: Any, group: Any, report: Any) -> None:
    same = group(1, ("same a", "same b"), (Score(0.0), Score(0.0)))
    mixed = group(2, ("good", "bad"), advantages=(0.7, -0.7))
    recorder = bench.recorder()
    recorder.record_step(1, report(groups=(same, mixed)), None)
    recorder.record_step(2, report(2, groups=(same,)), None)
    recorder.finish("done")
    text = page_of(bench.folder).text
    latest, first = text.split("First step")
    assert "Latest step step 2" in latest
    assert "same a" in latest
    assert first.index("good") < first.index("same a")
    assert "advantage +0.700" in first
    assert "advantage -0.700" in first


def test_turns_are_shown_by_role_and_escaped(bench: Any) -> None:
    said = [{"role": "assistant", "text": "<b>x</b>"}, {"role": "tool", "text": "391"}]
    row = {"completions": [{"reward": 1.0, "text": "the whole", "turns": said, "counts": {"tool_calls": 1}}]}
    (bench.folder / "rollouts").mkdir(parents=True)
    (bench.folder / "rollouts" / "step_1.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    html = write_report(bench.folder).read_text("utf-8")
    assert '<div class="turn model"><b>assistant</b><pre>&lt;b&gt;x&lt;/b&gt;</pre></div>' in html
    assert '<div class="turn environment"><b>tool</b><pre>391</pre></div>' in html
    assert "tool_calls 1" in html
    assert "the whole" not in html


def test_unscored_reasons_are_listed_with_their_counts(bench: Any, group: Any, report: Any) -> None:
    late = Score(None, error="timeout after 5 s")
    bench_recorder = bench.recorder()
    for step in (1, 2):
        bench_recorder.record_step(step, report(step, unscored=2, groups=(group(0, ("a", "b"), (late, late)),)), None)
    bench_recorder.finish("done")
    text = page_of(bench.folder).text
    assert re.search(r"4\s*timeout after 5 s\s*1–2", text)


def test_every_other_metric_has_a_chart(tmp_path: Path) -> None:
    keys = (
        "train/probs_ratio_max",
        "validation-sums_accuracy",
        "performance/train_mfu",
        "timing/validation/generation",
    )
    write_rows(tmp_path, [{"step": step, "train/loss": 1.0} | dict.fromkeys(keys, 0.5) for step in (1, 2)])
    page = page_of(tmp_path)
    assert f"All other metrics ({len(keys)})" in page.text
    assert [key for key in keys if key in page.text] == list(keys)


def test_report_renders_without_torch() -> None:
    code = "import sys, posttrain.reporting.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
