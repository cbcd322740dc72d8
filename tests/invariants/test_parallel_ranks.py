"""However ranks share a model and its rows, they compute what one process computes: losses, norms, every gradient, the
state after two updates, log-probabilities and sampled tokens. And a checkpoint of one arrangement continues on another.

`parallel_ranks.py` trains in processes of its own (gloo). In float64 the arrangements differ by rounding alone, 1e-12;
a sum that is missing, or made twice, in some gradient would not change the loss.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_ranks import source_of
from torch import Tensor

PROGRAM = Path(__file__).parents[1] / "parallel_ranks.py"
EXACT = 1e-12
FLOAT32 = 2e-5  # of numbers of order 1 to 10, which each CPU adds up in an order of its own; float64 holds the algebra

# What is compared with the first of each list.
QUICK = ["llama/grpo/float64/dp1", "llama/grpo/float64/tp2", "llama/grpo/float64/cp2"]
SLOW = [
    [
        "llama/grpo/float64/dp1",
        "llama/grpo/float64/dp2-tp2",
        "llama/grpo/float64/tp2-cp2",
        "llama/grpo/float64/dp3-tp2",
    ],
    [
        "qwen3/dpo/float64/dp1",
        "qwen3/dpo/float64/dp2-tp2",
        "qwen3/dpo/float64/dp4-re2",
        "qwen3/dpo/float64/cp2",
        "qwen3/dpo/float64/dp4",
        "qwen3/dpo/float64/dp1+dp2-tp2",
        "qwen3/dpo/float64/dp4+dp2-tp2",
        "qwen3/dpo/float64/dp2-tp2+dp4",
        "qwen3/dpo/float64/dp2-tp2+dp1",
    ],
    ["llama-lora/grpo/float64/dp1", "llama-lora/grpo/float64/dp2-tp2", "llama-lora/grpo/float64/cp2"],
    ["llama-lora/dpo/float64/dp1", "llama-lora/dpo/float64/tp2", "llama-lora/dpo/float64/dp1+tp2"],
    ["gemma2-recompute/grpo/float64/dp1", "gemma2-recompute/grpo/float64/tp2", "gemma2-recompute/grpo/float64/cp2"],
    ["qwen3/grpo/float64/dp1", "qwen3-fused/grpo/float64/tp2", "qwen3-fused/grpo/float64/cp2"],
    ["llama-offload/dpo/float64/dp1", "llama-offload/dpo/float64/dp2-tp2", "llama-offload/dpo/float64/dp1+dp2-tp2"],
    ["llama/rm/float64/dp1", "llama/rm/float64/tp2", "llama/rm/float64/cp2"],
    ["llama/grpo/float32/dp1", "llama/grpo/float32/tp2", "llama/grpo/float32/dp2-tp2", "llama/grpo/float32/tp2-cp2"],
]
# Ranks that share layers split the rows in between.
SPLIT_ROWS = [
    "llama/grpo/float64/dp1",
    "llama-rows/grpo/float64/tp2",
    "llama-rows/grpo/float64/dp2-tp2",
    "llama-rows/grpo/float64/tp2-cp2",
]
SPLIT_ROWS_MORE = [
    ["qwen3/dpo/float64/dp1", "qwen3-rows/dpo/float64/tp2", "qwen3-rows/dpo/float64/dp1+qwen3:dp1"],
    ["qwen3/grpo/float64/dp1", "qwen3-fused-rows/grpo/float64/tp2", "qwen3-rows-recompute/grpo/float64/tp2"],
    ["llama-lora/grpo/float64/dp1", "llama-lora-rows/grpo/float64/tp2"],
    ["llama-offload/dpo/float64/dp1", "llama-host-rows/dpo/float64/tp2"],
    ["llama/rm/float64/dp1", "llama-rows/rm/float64/tp2"],
    *[
        [f"{name}/dpo/float64/dp1", f"{name}-rows/dpo/float64/tp2"]
        for name in ("gemma2", "gemma3", "granite", "phi", "cohere")
    ],
]
# Parameters in host memory: the first has the same optimizer and parameters on the device.
HOSTED = [
    "llama-offload/grpo/float64/dp1",
    "llama-host/grpo/float64/dp1",
    "llama-host/grpo/float64/dp2",
    "llama-host/grpo/float64/tp2",
    "llama-host-recompute/grpo/float64/dp1",
    "llama-host/grpo/float64/dp1+llama-offload:dp1",
    "llama-offload/grpo/float64/dp1+llama-host:dp2",
]
HOSTED_LORA = ["llama-lora-offload/grpo/float64/dp1", "llama-lora-host/grpo/float64/dp1"]
FAMILIES = [
    [f"{name}/dpo/float64/dp1", f"{name}/dpo/float64/tp2"]
    for name in ("mistral", "qwen2", "gemma3", "granite", "smollm3", "phi", "cohere")
]


EXPERTS = [
    [
        "moe/grpo/float64/dp1",
        "moe/grpo/float64/dp2-ep2",
        "moe/grpo/float64/dp4-ep2",
        "moe/grpo/float64/dp4-ep4",
        "moe/grpo/float64/dp4-ep2-re2",
        "moe/grpo/float64/cp2-ep2",
        "moe/grpo/float64/dp2-ep2-tp2",
        "moe-recompute/grpo/float64/dp2-ep2",
    ],
    [
        "moe/dpo/float64/dp1",
        "moe/dpo/float64/dp2-ep2",
        "moe/dpo/float64/dp4-ep4",
        "moe/dpo/float64/dp2-ep2-tp2",
        "moe/dpo/float64/dp2-ep2+dp1",
        "moe/dpo/float64/dp4-ep4+dp2-ep2",
        "moe/dpo/float64/dp4-ep2+dp2-ep2-tp2",
        "moe/dpo/float64/dp2-ep2-tp2+dp4-ep4",
        "moe/dpo/float64/dp1+dp4-ep4",
    ],
    ["moe-offload/dpo/float64/dp1", "moe-offload/dpo/float64/dp4-ep2", "moe-offload/dpo/float64/dp1+dp4-ep2"],
    ["moe/rm/float64/dp1", "moe/rm/float64/dp2-ep2"],
    [
        "moe-lora/grpo/float64/dp1",
        "moe-lora/grpo/float64/dp2-ep2",
        "moe-lora/grpo/float64/dp4-ep2",
        "moe-lora/grpo/float64/dp1+dp4-ep2",
    ],
    ["moe/grpo/float32/dp1", "moe/grpo/float32/dp2-ep2", "moe/grpo/float32/dp4-ep4"],
    *[
        [f"{name}/grpo/float64/dp1", f"{name}/grpo/float64/dp2-ep2"]
        for name in ("gptoss", "deepseek", "mixtral", "qwen3next")
    ],
]


def run(folder: Path, cases: list[str]) -> Path:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parent), *sys.path])
    command = [sys.executable, str(PROGRAM), str(folder), *dict.fromkeys(cases)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("quick"), [*QUICK, *HOSTED[:2], SPLIT_ROWS[1]])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(
        tmp_path_factory.mktemp("slow"),
        [case for cases in [*SLOW, HOSTED, HOSTED_LORA, SPLIT_ROWS, *SPLIT_ROWS_MORE] for case in cases],
    )


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("families"), [case for cases in FAMILIES for case in cases])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("experts"), [case for cases in EXPERTS for case in cases])


def outcome(folder: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{case.replace('/', '_')}.pt", weights_only=False)
    return found


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name].double() - tensor.double()).abs().max()) <= tolerance, name


def assert_same(folder: Path, case: str, expected: str, exact: float = EXACT) -> None:
    ours, theirs = outcome(folder, case), outcome(folder, expected)
    tolerance = exact if "/float64/" in case else FLOAT32
    assert all(float(gradient.abs().max()) > 1e-4 for gradient in theirs["gradients"][1].values() if gradient.ndim > 1)
    if "loaded" in ours:  # bit for bit what the other mesh saved
        saved = outcome(folder, source_of(case))["saved"]
        assert saved.keys() == ours["loaded"].keys()
        assert [name for name, tensor in saved.items() if not torch.equal(tensor, ours["loaded"][name])] == []
    updates = len(ours["metrics"])  # a resumed run makes the second alone
    for number in range(-updates, 0):
        for name in ("loss", "grad_norm"):
            assert ours["metrics"][number][name] == pytest.approx(theirs["metrics"][number][name], abs=tolerance)
        assert_close(ours["gradients"][number], theirs["gradients"][number], tolerance)
    assert_close(ours["state"], theirs["state"], tolerance)
    for name in ("reference", "logprobs"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2 * tolerance)
    if "tokens" in ours:
        assert ours["tokens"] == theirs["tokens"]


@pytest.mark.invariant
@pytest.mark.parametrize("case", QUICK[1:])
def test_ranks_that_share_layers_or_rows_compute_what_one_process_does(quick: Path, case: str) -> None:
    assert_same(quick, case, QUICK[0])


@pytest.mark.invariant
def test_rows_split_between_layers_change_nothing(quick: Path) -> None:
    assert_same(quick, SPLIT_ROWS[1], SPLIT_ROWS[0])


@pytest.mark.parametrize(
    ("case", "expected"),
    [(case, cases[0]) for cases in [[SPLIT_ROWS[0], *SPLIT_ROWS[2:]], *SPLIT_ROWS_MORE] for case in cases[1:]],
)
def test_rows_split_between_layers_of_any_model_change_nothing(slow: Path, case: str, expected: str) -> None:
    assert_same(slow, case, expected)


@pytest.mark.invariant
def test_parameters_in_host_memory_change_nothing(quick: Path) -> None:
    assert_same(quick, HOSTED[1], HOSTED[0])
    assert outcome(quick, HOSTED[1])["offloaded"] == {True}


@pytest.mark.parametrize(
    ("case", "expected"), [*((case, HOSTED[0]) for case in HOSTED[2:]), (HOSTED_LORA[1], HOSTED_LORA[0])]
)
def test_parameters_in_host_memory_change_nothing_on_any_ranks(slow: Path, case: str, expected: str) -> None:
    """And checkpoints are interchangeable with those of runs without it."""
    assert_same(slow, case, expected)
    assert outcome(slow, case)["offloaded"] == ({True} if "-host" in case.partition("+")[0] else set())


def test_ranks_that_share_layers_never_hold_the_whole_model(quick: Path) -> None:
    alone, shared = (outcome(quick, case) for case in QUICK[:2])
    assert alone["held while sampling"] == alone["parameters"] == shared["parameters"]
    assert shared["held while sampling"] < 0.51 * shared["parameters"]  # the norms are on both


@pytest.mark.parametrize(("case", "expected"), [(case, cases[0]) for cases in SLOW for case in cases[1:]])
def test_any_arrangement_of_ranks_computes_what_one_process_does(slow: Path, case: str, expected: str) -> None:
    assert_same(slow, case, expected)


@pytest.mark.parametrize(("expected", "case"), FAMILIES)
def test_ranks_that_share_layers_of_any_family_compute_what_one_process_does(
    families: Path, case: str, expected: str
) -> None:
    assert_same(families, case, expected)


@pytest.mark.full
@pytest.mark.parametrize(("case", "expected"), [(case, cases[0]) for cases in EXPERTS for case in cases[1:]])
def test_ranks_that_share_experts_compute_what_one_process_does(experts: Path, case: str, expected: str) -> None:
    assert_same(experts, case, expected, exact=1e-10)


@pytest.mark.full
def test_ranks_that_share_experts_hold_their_share_of_them_while_sampling(experts: Path) -> None:
    alone, two, four = (outcome(experts, EXPERTS[0][at])["held while sampling"] for at in (0, 1, 3))
    of_experts = (alone - two) * 2
    assert four == alone - of_experts * 3 // 4
