"""bench/scaling.py, the shared parts of the benchmarks, and long prompts of the CPU comparison."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import scaling
import torch
from profiling import largest_costs
from side_by_side.job import GRPO, Job, long_prompt_rows, prompt_length
from side_by_side.models import small_tokenizer
from side_process import run_side


def test_linear_and_quadratic_growth_are_distinguished() -> None:
    def found(exponent: float) -> dict[int, dict[str, float]]:
        parts = ((n, 1e-6 * n, 1e-9 * n**exponent) for n in (100, 1000, 10_000))
        return {n: {"fine": fine, "suspect": suspect, "total": fine + suspect} for n, fine, suspect in parts}

    assert scaling.exponents(found(2))["suspect"] == pytest.approx(2)
    assert scaling.grows_too_fast(found(2)) == ["suspect", "total"]
    assert scaling.grows_too_fast(found(1)) == []
    assert scaling.grows_too_fast({100: {"fine": 1.0, "total": 1.0}}) == []
    small = {n: {"fine": 1e-3 * n, "suspect": 1e-12 * n**2, "total": 1e-3 * n} for n in (100, 1000)}
    assert scaling.grows_too_fast(small) == []


def test_every_part_of_the_driver_is_measured(tmp_path: Path) -> None:
    words = ["--samples", "8", "--group", "4", "--factors", "1", "3", "--new-tokens", "6", "--prompt-tokens", "5"]
    assert scaling.main([*words, "--repeats", "1", "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert list(report["seconds"]) == ["8", "24"]
    parts = report["seconds"]["24"]
    expected = {"scheduling (native engine)", "generation", "advantage_calculation", "policy_training", "recording"}
    assert expected <= parts.keys()
    assert parts["total"] == pytest.approx(sum(seconds for part, seconds in parts.items() if part != "total"))


# -- shared parts ------------------------------------------------------------------------------------------------------


def test_the_profile_finds_the_largest_cost() -> None:
    a = torch.randn(300, 300)
    costs, busy = largest_costs(lambda: [a @ a for _ in range(20)] and torch.ones(2).sin(), "cpu", count=3)
    assert costs[0].name == "aten::mm"
    assert costs[0].calls == 20
    assert 0 < busy <= 1.2
    assert len(costs) == 3


SIDE = """
import sys
sys.path.insert(0, {bench!r})
from pathlib import Path
from side_process import serve_side

def work(job):
    if job["kind"] == "fail":
        raise ValueError("too large\\nin many words")
    if job["kind"] == "die":
        print("last words", flush=True)
        import os
        os._exit(9)
    return {{"twice": 2 * job["number"]}}

sys.exit(serve_side(Path(sys.argv[2]), work))
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fine", {"twice": 6}),
        ("fail", {"error": "ValueError: too large"}),
        ("die", {"error": "ended with exit code 9", "output": "last words"}),
    ],
)
def test_a_side_hands_back_its_result_or_why_there_is_none(tmp_path: Path, kind: str, expected: dict[str, Any]) -> None:
    script = tmp_path / "side.py"
    script.write_text(SIDE.format(bench=str(Path(sys.modules["side_process"].__file__ or "").parent)))
    result = run_side(script, {"kind": kind, "number": 3})
    assert expected.items() <= result.items()
    if kind == "fail":
        assert "Traceback" in result["output"]


def test_long_prompts_have_exactly_the_length_asked_for() -> None:
    tokenizer = small_tokenizer()
    rows = long_prompt_rows(tokenizer, 3, 64)
    assert [prompt_length(tokenizer, row) for row in rows] == [64, 64, 64]
    assert len({row["input"] for row in rows}) == 3
    assert "3 prompts of 64 tokens" in Job(GRPO, "m", 1, 1, num_prompts=3, num_prompt_tokens=64).work
