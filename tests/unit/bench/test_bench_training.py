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
from train_job import TrainJob

from posttrain.algorithms.batches import pair_batch
from posttrain.errors import InputError
from posttrain.types import Pair

TRAIN = TrainJob("posttrain", "tiny", "cpu", "float32", 5, 14, 6, micro_batch_tokens=40, logprob_tokens=60, steps=1)
GRPO = GrpoJob("tiny", "cpu", "float32", 3, 4, 10, 6, 64, 64, 8, warm_up_prompts=1, steps=1, kl_penalty=0.1)


# -- training
# ------------------------------------------------------------------------------------------------------------


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


def test_settings_of_the_run_reach_the_worker() -> None:
    with pytest.raises(InputError, match="learning"):
        train.do_job(replace(TRAIN, overrides=("policy.optimizer.kwargs.learning=1",)).as_json())


def test_the_training_report_has_the_share_of_the_roof_and_the_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "run_side", lambda _, job: dict(trained[job["side"]]))
    assert train.main(["--shape", "tiny", "--against", "stock", "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    rates = [trained[side]["train_tokens_per_s"] for side in ("posttrain", "stock")]
    assert report["ratios"] == {"stock": pytest.approx(rates[0] / rates[1])}
    shown = capsys.readouterr().out
    share = trained["posttrain"]["train_flops"] / trained["posttrain"]["matrix_roof_flops"]
    assert f"{share:.0%}" in shown
    assert f"{rates[0] / rates[1]:.2f}x" in shown


def test_fp8_runs_beside_bf16_with_its_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def run_side(_: str, job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        faster = 1.5 if "policy.fp8=true" in job["overrides"] else 1.0
        return {**trained["posttrain"], "train_tokens_per_s": faster * 100, "logprobs_tokens_per_s": faster**2 * 100}

    monkeypatch.setattr(train, "run_side", run_side)
    assert train.main(["--shape", "tiny", "--fp8", "--set", "policy.num_threads=1", "--out", str(tmp_path / "r")]) == 0
    assert [job["overrides"] for job in jobs] == [
        ("policy.num_threads=1",),
        ("policy.num_threads=1", "policy.fp8=true"),
    ]
    gain = {"training": pytest.approx(1.5), "log-probabilities": pytest.approx(2.25)}
    assert json.loads((tmp_path / "r").read_text())["fp8_over_bf16"] == gain
    assert "FP8 is 1.50x bf16 in training, 2.25x bf16 in log-probabilities" in capsys.readouterr().out


def test_fp8_that_cannot_be_had_is_a_failure_with_its_reason() -> None:
    with pytest.raises(InputError, match=r"policy\.fp8"):
        train.do_job(replace(TRAIN, side="posttrain-fp8", overrides=("policy.fp8=true",)).as_json())


# -- GRPO
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> dict[bool, Any]:
    return {shared: measure(replace(GRPO, share_prompts=shared)) for shared in (True, False)}


def test_prompt_sharing_does_not_change_answers_or_loss(steps: dict[bool, Any]) -> None:
    shared, alone = (steps[which]["metrics"] for which in (True, False))
    assert shared["reward"] == alone["reward"]
    # The loss is a sum of advantages of both signs, of order 1: it errs by eps times the number of tokens.
    assert shared["loss"] == pytest.approx(alone["loss"], abs=2e-5)
    assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_tokens_are_those_of_full_sequences(steps: dict[bool, Any]) -> None:
    for result in steps.values():
        assert result["num_tokens"] == 3 * 4 * (10 + 6)
        total = result["timings_s"]["total_step_time"]
        assert result["performance"]["tokens_per_sec_per_gpu"] == pytest.approx(result["num_tokens"] / total)
        assert {"generate", "update", "reference_logprobs"} <= result["peak_gib"].keys()


def test_the_sampler_agrees_with_the_trainer(steps: dict[bool, Any]) -> None:
    assert steps[True]["metrics"]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


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


def test_long_prompts_are_run_with_and_without_sharing(
    tmp_path: Path, in_process: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    in_process(grpo_step)
    words = ["--workload", "long-prompt", "--shape", "tiny", "--prompts", "2", "--lora", "--kl", "0"]
    assert grpo_step.main([*words, "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    times = [run["timings_s"]["total_step_time"] for run in report["runs"].values()]
    assert report["ratios"]["sharing"] == pytest.approx(times[1] / times[0])
    assert f"{times[1] / times[0]:.2f} times as fast" in capsys.readouterr().out


# -- DPO
# -----------------------------------------------------------------------------------------------------------------


def test_dpo_is_the_same_job_on_both_sides(
    tmp_path: Path, in_process: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="the bench extra is not installed")
    in_process(dpo_step)
    assert dpo_step.main(["--shape", "tiny", "--steps", "2", "--out", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    trl, ours = (report["sides"][side] for side in ("trl", "posttrain"))
    assert ours["losses"][0] == pytest.approx(0.693147, abs=1e-5)
    assert ours["grad_norms"] == pytest.approx(trl["grad_norms"], rel=1e-2)
    assert report["ratios"]["pairs_per_s"] == pytest.approx(ours["pairs_per_s"] / trl["pairs_per_s"])
    assert f"{report['ratios']['pairs_per_s']:.2f}x" in capsys.readouterr().out


def test_other_pairs_on_one_side_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side = {"pairs_per_s": 1.0, "peak_gib": 1.0, "losses": [0.69, 0.69], "grad_norms": [2.0]}
    norms = {"trl": [2.0], "posttrain": [2.4]}
    monkeypatch.setattr(dpo_step, "run_side", lambda _, job: {**side, "grad_norms": norms[job["side"]]})
    assert dpo_step.main(["--shape", "tiny"]) == 1
    assert "not the same job" in capsys.readouterr().out


def test_random_lengths_are_distributed_like_ultrafeedbacks() -> None:
    pairs = pair_lengths.like_ultrafeedback(4000, max_tokens=10**6, seed=0)
    assert pairs == pair_lengths.like_ultrafeedback(4000, max_tokens=10**6, seed=0)
    for name, quantiles in (
        ("prompt", pair_lengths.PROMPT),
        ("chosen", pair_lengths.CHOSEN),
        ("rejected", pair_lengths.REJECTED),
    ):
        lengths = sorted(getattr(pair, name) for pair in pairs)
        for share, known in list(zip(pair_lengths.SHARES, quantiles, strict=True))[3:8]:
            assert lengths[int(share * 3999)] == pytest.approx(known, rel=0.15)
    assert max(pair.longest for pair in pair_lengths.like_ultrafeedback(50, max_tokens=300, seed=0)) <= 300


def test_lengths_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "t5 t6", "chosen": "t7", "rejected": "t8 t9 t9"},
        {"prompt": "t5", "chosen": "t7", "rejected": "t9"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = pair_lengths_tokenizer()
    found = pair_lengths.from_file(file, tokenizer, 2, max_tokens=20)
    assert found == [pair_lengths.PairLengths(3, 2, 4), pair_lengths.PairLengths(2, 2, 2)]
    with pytest.raises(InputError, match="1 pairs of at most 4 tokens, and 2 are needed"):
        pair_lengths.from_file(file, tokenizer, 2, max_tokens=4)


def pair_lengths_tokenizer() -> Any:
    from shapes import make_tokenizer

    return make_tokenizer(16)
