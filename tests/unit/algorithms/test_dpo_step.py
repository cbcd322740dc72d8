"""The steps of DPO and KTO: which calls they make in which order, what they hand to the policy, what they report."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.dpo import Dpo
from posttrain.algorithms.kto import Kto
from posttrain.config import DpoConfig
from posttrain.policy.objectives import KtoLoss, PreferenceLoss
from posttrain.roles import Objective
from posttrain.types import Judged, Pair, TokenBatch, UpdateReport


class FakePolicy:
    """Its log-probabilities are -1 everywhere; it reports what it is told to."""

    def __init__(self, **metrics: float) -> None:
        self.calls: list[str] = []
        self.batches: list[TokenBatch] = []
        rewards = {"rewards_chosen_mean": 0.0, "rewards_rejected_mean": 0.0}
        self.metrics = {"loss": 1.0, "num_ranked_right": 1.0, "num_ties": 1.0, **rewards, **metrics}

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.calls.append("update")
        self.batches.append(batch)
        return UpdateReport(self.metrics)

    def evaluate(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.calls.append("evaluate")
        self.batches.append(batch)
        return UpdateReport(self.metrics)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self.calls.append("logprobs")
        return torch.full((sum(batch.response_lengths),), -1.0)

    def end_step(self) -> None:
        self.calls.append("end_step")


class FakeReference:
    """-3 for the first batch it sees of a step, -1.5 for the second."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, list[list[int]]]] = []

    def logprobs(self, batch: TokenBatch, step: int, *, keep: bool = True) -> tuple[Tensor, float]:
        self.asked.append((step, keep, [response.tolist() for response in batch.responses]))
        value = -3.0 if len(self.asked) % 2 else -1.5
        return torch.full((sum(batch.response_lengths),), value), 0.25


class Rows:
    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)

    def take(self, count: int) -> Sequence[Any]:
        taken, self.rows = self.rows[:count], self.rows[count:]
        return taken


PAIRS = [
    Pair(0, "a", (1, 2), (3,), (4, 5), chosen_reward=0.9, rejected_reward=0.4),
    Pair(1, "b", (6,), (7, 8), (9,)),
]
ANSWERS = [Judged(0, "a", (1, 2), (3,), True), Judged(1, "b", (6,), (7, 8), False), Judged(2, "c", (4,), (9,), True)]


def dpo(policy: Any, reference: Any, **objective: Any) -> Dpo:
    return Dpo(2, PreferenceLoss(DpoConfig(**objective)), policy, Rows(PAIRS), PAIRS, reference)


def kto(policy: Any, reference: Any, answers: Sequence[Judged] = ANSWERS) -> Kto:
    loss = KtoLoss(DpoConfig())
    return Kto(len(answers), loss, policy, Rows(answers), answers, reference=reference, max_total_tokens=64)


def test_dpo_scores_the_reference_then_updates_then_moves_the_schedule() -> None:
    policy, reference = FakePolicy(), FakeReference()
    report = dpo(policy, reference).step(7)
    assert policy.calls == ["update", "end_step"]
    assert reference.asked == [(7, True, [[3], [4, 5], [7, 8], [9]])]
    assert (policy.batches[0].columns["reference_logprobs"] == -3.0).all()
    assert report.metrics["reference_cached"] == 0.25
    assert report.timings_s.keys() == {
        "data_processing", "policy_and_reference_logprobs", "policy_training", "total_step_time"
    }  # fmt: skip


def test_a_loss_without_a_reference_asks_for_none() -> None:
    policy = FakePolicy()
    report = dpo(policy, None, preference_loss="simpo").step(1)
    assert "reference_logprobs" not in policy.batches[0].columns
    assert "reference_cached" not in report.metrics
    assert "policy_and_reference_logprobs" not in report.timings_s


@pytest.mark.parametrize("what", ["step", "validate"])
def test_counts_become_an_accuracy_in_which_a_tie_is_half_right(what: str) -> None:
    report = getattr(dpo(FakePolicy(), FakeReference()), what)(3)
    assert (report.metrics["accuracy"], report.metrics["tie_rate"]) == (0.75, 0.5)
    assert not report.metrics.keys() & {"num_ranked_right", "num_ties"}


def test_the_rewards_of_the_data_travel_with_the_tokens() -> None:
    policy = FakePolicy()
    dpo(policy, FakeReference()).step(1)
    columns = policy.batches[0].columns
    assert columns["given_rewards"].tolist() == pytest.approx([0.9, 0.4, 0.4, 1.0, 1.0, 0.0])
    assert columns["num_class_tokens"].tolist() == [3.0] * 6


def test_validation_counts_pairs_and_throughput_counts_responses() -> None:
    algorithm = dpo(FakePolicy(), FakeReference())
    validation = algorithm.validate(1)
    assert validation is not None
    assert validation.num_samples == len(algorithm.validation)
    assert algorithm.step(1).num_samples == 2 * algorithm.num_rows_per_step


def test_validation_looks_up_its_own_step_and_is_timed() -> None:
    policy, reference = FakePolicy(), FakeReference()
    report = dpo(policy, reference).validate(4)
    assert report is not None
    assert policy.calls == ["evaluate"]
    assert reference.asked[0][0] == 4
    assert "policy_and_reference_logprobs" in report.timings_s
    assert Dpo(2, PreferenceLoss(DpoConfig()), policy, Rows([]), (), reference).validate(4) is None


def test_kto_measures_its_baseline_before_the_update_on_answers_to_other_prompts() -> None:
    policy, reference = FakePolicy(), FakeReference()
    report = kto(policy, reference).step(5)
    assert policy.calls == ["logprobs", "update", "end_step"]
    matched, mismatched = reference.asked
    assert matched == (5, True, [[3], [7, 8], [9]])
    assert mismatched == (5, False, [[9], [3], [7, 8]])  # not kept: next time they stand beside other prompts
    # (-1 - -1.5) for each of the 4 tokens, over 3 answers
    assert report.metrics["kl"] == pytest.approx(0.5 * 4 / 3)
    assert policy.batches[0].columns["kl_baseline"].tolist() == pytest.approx([0.5 * 4 / 3] * 4)
    assert report.metrics["num_valid_samples"] == 3


def test_a_negative_baseline_is_zero() -> None:
    class Lower(FakeReference):
        def logprobs(self, batch: TokenBatch, step: int, *, keep: bool = True) -> tuple[Tensor, float]:
            return torch.full((sum(batch.response_lengths),), -0.5), 0.0

    assert kto(FakePolicy(), Lower()).step(1).metrics["kl"] == 0.0


def test_the_mismatches_of_a_validation_come_again_and_are_kept() -> None:
    reference = FakeReference()
    kto(FakePolicy(), reference).validate(2)
    assert [keep for _, keep, _ in reference.asked] == [True, True]


def test_kto_reports_a_margin_only_if_it_saw_both_verdicts() -> None:
    rewards = {"rewards_chosen_mean": 0.7, "rewards_rejected_mean": 0.2}
    both = kto(FakePolicy(**rewards), FakeReference()).step(1).metrics
    assert both["rewards_margin_mean"] == pytest.approx(0.5)
    good = kto(FakePolicy(**rewards), FakeReference(), [ANSWERS[0], ANSWERS[2]]).step(1).metrics
    assert good["rewards_chosen_mean"] == 0.7
    assert not good.keys() & {"rewards_rejected_mean", "rewards_margin_mean"}
