"""bench/train.py, grpo_step.py and dpo_step.py on a tiny model: the sides do the same job, and the numbers add up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dpo_step
import grpo_step
import pair_lengths
import pytest
import train
from grpo_job import GrpoJob, measure, unshared
from shapes import make_tokenizer
from train_job import TrainJob

from posttrain.algorithms.batches import pair_batch
from posttrain.errors import InputError
from posttrain.types import Pair

TRAIN = TrainJob("posttrain", "tiny", "cpu", "float32", 5, 14, 6, micro_batch_tokens=40, logprob_tokens=60, steps=1)
GRPO = GrpoJob("tiny", "cpu", "float32", 3, 4, 10, 6, 64, 64, 8, warm_up_prompts=1, steps=1, kl_penalty=0.1)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return {side: train.do_job(replace(TRAIN, side=side).as_json()) for side in ("posttrain", "stock")}


def test_posttrain_and_the_plain_loop_have_the_same_loss(trained: dict[str, Any]) -> None:
    assert trained["posttrain"]["loss"] == pytest.approx(trained["stock"]["loss"], rel=1e-5)
    assert train.same_losses(trained) == []
    other = {**trained, "stock": {**trained["stock"], "loss": 2 * trained["stock"]["loss"]}}
    assert train.same_losses(other) == ["stock"]


def test_trl_has_the_same_loss_too(trained: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="the bench extra is not installed")
    # One micro-batch: TRL's mean over several weighs short ones as much as long ones.
    result = train.do_job(replace(TRAIN, side="trl", micro_batch_tokens=5 * 14).as_json())
    assert result["loss"] == pytest.approx(trained["posttrain"]["loss"], rel=1e-4)


def test_rates_count_every_token_and_logprobs_a_third_of_the_work(trained: dict[str, Any]) -> None:
    result = trained["posttrain"]
    num_tokens = sum(map(len, TRAIN.sequences()))
    assert result["train_tokens_per_s"] == pytest.approx(num_tokens / min(result["step_s"]))
    assert result["train_flops"] == pytest.approx(result["flops_per_token"] * result["train_tokens_per_s"])
    assert result["logprobs_flops"] == pytest.approx(result["flops_per_token"] / 3 * result["logprobs_tokens_per_s"])
    assert result["matrix_roof_flops"] > 1e8


@pytest.mark.parametrize("setting", ["policy.optimizer.kwargs.learning=1", "policy.fp8=true"])
def test_settings_of_the_run_reach_the_worker(setting: str) -> None:
    """Neither can be had on a CPU."""
    with pytest.raises(InputError, match=setting.partition("=")[0].rpartition(".")[2]):
        train.do_job(replace(TRAIN, overrides=(setting,)).as_json())


def test_ratios_are_those_of_the_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: dict[str, Any]
) -> None:
    jobs = []

    def run_side(_: str, job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        faster = 1.5 if "policy.fp8=true" in job["overrides"] else 0.5 if job["side"] == "stock" else 1.0
        return {**trained["posttrain"], "train_tokens_per_s": faster * 100, "logprobs_tokens_per_s": faster**2 * 100}

    monkeypatch.setattr(train, "run_side", run_side)
    words = ["--shape", "tiny", "--against", "stock", "--fp8", "--set", "policy.num_threads=1"]
    assert train.main([*words, "--out", str(tmp_path / "r")]) == 0
    report = json.loads((tmp_path / "r").read_text())
    assert report["ratios"]["stock"] == pytest.approx(2.0)
    assert report["fp8_over_bf16"] == pytest.approx({"training": 1.5, "log-probabilities": 2.25})
    ours = [job["overrides"] for job in jobs if job["side"] != "stock"]
    assert ours == [("policy.num_threads=1",), ("policy.num_threads=1", "policy.fp8=true")]


# -- GRPO --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> dict[bool, Any]:
    return {shared: measure(replace(GRPO, share_prompts=shared)) for shared in (True, False)}


def test_prompt_sharing_does_not_change_answers_or_loss(steps: dict[bool, Any]) -> None:
    shared, alone = (steps[which]["metrics"] for which in (True, False))
    assert shared["reward"] == alone["reward"]
    # The loss is a sum of advantages of both signs, of order 1: it errs by eps times the number of tokens.
    assert shared["loss"] == pytest.approx(alone["loss"], abs=2e-5)
    assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_tokens_are_those_of_full_sequences_and_the_sampler_agrees_with_the_trainer(steps: dict[bool, Any]) -> None:
    for result in steps.values():
        assert result["num_tokens"] == 3 * 4 * (10 + 6)
        total = result["timings_s"]["total_step_time"]
        assert result["performance"]["tokens_per_sec_per_gpu"] == pytest.approx(result["num_tokens"] / total)
        assert {"generate", "update", "reference_logprobs"} <= result["peak_gib"].keys()
        assert result["metrics"]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


def test_the_stages_of_the_table_add_up_to_the_step(steps: dict[bool, Any]) -> None:
    rows = grpo_step.stage_table(steps[True]).splitlines()[2:]
    shares = [float(cell.rstrip("%")) for row in rows for cell in row.split() if cell.endswith("%")]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.5)
    assert {"generation", "policy_training", "policy_and_reference_logprobs"} <= {row.split()[0] for row in rows}


def test_an_unshared_batch_has_a_prompt_for_every_answer() -> None:
    pairs = [Pair(0, "a", (5, 6), (7,), (8, 9)), Pair(1, "b", (6,), (3, 4), (5,))]
    batch = unshared(pair_batch(pairs))
    assert [prompt.tolist() for prompt in batch.prompts] == [[5, 6], [5, 6], [6], [6]]
    assert batch.prompt_of == (0, 1, 2, 3)
    assert (batch.num_tokens, batch.num_sequences) == (6, 4)


def test_long_prompts_are_run_with_and_without_sharing(tmp_path: Path, in_process: Callable[[Any], None]) -> None:
    in_process(grpo_step)
    words = ["--workload", "long-prompt", "--shape", "tiny", "--prompts", "2", "--lora", "--kl", "0"]
    assert grpo_step.main([*words, "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    times = [run["timings_s"]["total_step_time"] for run in report["runs"].values()]
    assert report["ratios"]["sharing"] == pytest.approx(times[1] / times[0])


# -- DPO ---------------------------------------------------------------------------------------------------------------


def test_dpo_is_the_same_job_on_both_sides(tmp_path: Path, in_process: Callable[[Any], None]) -> None:
    pytest.importorskip("trl", reason="the bench extra is not installed")
    in_process(dpo_step)
    assert dpo_step.main(["--shape", "tiny", "--steps", "2", "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    trl, ours = (report["sides"][side] for side in ("trl", "posttrain"))
    assert ours["losses"][0] == pytest.approx(0.693147, abs=1e-5)
    assert ours["grad_norms"] == pytest.approx(trl["grad_norms"], rel=1e-2)
    assert report["ratios"]["pairs_per_s"] == pytest.approx(ours["pairs_per_s"] / trl["pairs_per_s"])


def test_other_pairs_on_one_side_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    side = {"pairs_per_s": 1.0, "peak_gib": 1.0, "losses": [0.69, 0.69], "grad_norms": [2.0]}
    norms = {"trl": [2.0], "posttrain": [2.4]}
    monkeypatch.setattr(dpo_step, "run_side", lambda _, job: {**side, "grad_norms": norms[job["side"]]})
    assert dpo_step.main(["--shape", "tiny"]) == 1


def test_random_lengths_are_seeded_and_limited() -> None:
    pairs = pair_lengths.like_ultrafeedback(50, max_tokens=300, seed=0)
    assert pairs == pair_lengths.like_ultrafeedback(50, max_tokens=300, seed=0)
    assert max(pair.longest for pair in pairs) <= 300


def test_lengths_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "t5 t6", "chosen": "t7", "rejected": "t8 t9 t9"},
        {"prompt": "t5", "chosen": "t7", "rejected": "t9"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(16)
    found = pair_lengths.from_file(file, tokenizer, 2, max_tokens=20)
    assert found == [pair_lengths.PairLengths(3, 2, 4), pair_lengths.PairLengths(2, 2, 2)]
    with pytest.raises(InputError, match="at most 4 tokens"):
        pair_lengths.from_file(file, tokenizer, 2, max_tokens=4)
