"""KTO: the loss against a slow float64 reference, and what its batch statistics are made of."""

import math

import pytest
import torch
from float64 import TOLERANCE, approx

from posttrain.algorithms.batches import judged_batch, mismatched_batch
from posttrain.config import DpoConfig
from posttrain.policy.objectives import KtoLoss
from posttrain.types import Judged, TokenBatch

VERDICTS = [True, False, True, True, False]
LENGTHS = [3, 5, 1, 4, 2]


def answers() -> list[Judged]:
    return [
        Judged(i, str(i), (1, 2 + i), tuple(range(10, 10 + n)), good)
        for i, (n, good) in enumerate(zip(LENGTHS, VERDICTS, strict=True))
    ]


def random_batch(seed: int = 0, kl: float = 0.3) -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    current = -2 + 0.7 * torch.randn(sum(LENGTHS), generator=generator)
    reference = current + 0.5 * torch.randn(sum(LENGTHS), generator=generator)
    batch = judged_batch(answers())
    columns = {"reference_logprobs": reference, "kl_baseline": torch.full_like(reference, kl)}
    return batch.with_columns(**columns), current


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("sft", ["off", "sum", "mean", "tokens"])
@pytest.mark.parametrize(("good_weight", "bad_weight"), [(1.0, 1.0), (1.5, 0.25)])
def test_equals_the_slow_reference(sft: str, good_weight: float, bad_weight: float) -> None:
    batch, current = random_batch()
    beta, weight, sft_weight = 0.4, 0.8, 0.0 if sft == "off" else 0.3
    objective = KtoLoss(
        DpoConfig(
            reference_policy_kl_penalty=beta,
            desirable_weight=good_weight,
            undesirable_weight=bad_weight,
            preference_loss_weight=weight,
            sft_loss_weight=sft_weight,
            sft_average_log_probs=sft == "mean",
            sft_token_level_loss=sft == "tokens",
        )
    )
    logprobs = current.clone().requires_grad_()
    loss, metrics = objective(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    tokens = current.double().requires_grad_()
    parts = zip(tokens.split(LENGTHS), batch.columns["reference_logprobs"].double().split(LENGTHS), strict=True)
    preference = nll = torch.zeros((), dtype=torch.float64)
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for (lc, lr), good in zip(parts, VERDICTS, strict=True):
        reward = (lc - lr).sum()
        rewards[good].append(float(reward.detach()))
        value = 1 / (1 + torch.exp(-beta * (reward - 0.3 if good else 0.3 - reward)))
        preference = preference + (good_weight if good else bad_weight) * (1 - value) / 5
        if good:
            nll = nll - (lc.mean() if sft == "mean" else lc.sum())
    nll = nll / (8 if sft == "tokens" else 3)  # the good answers have 3 + 1 + 4 tokens
    expected = weight * preference + sft_weight * nll
    (slow_gradient,) = torch.autograd.grad(expected, tokens)

    assert float(loss.detach()) == approx(float(expected.detach()))
    torch.testing.assert_close(gradient, slow_gradient, rtol=TOLERANCE, atol=TOLERANCE)
    assert float(metrics["preference_loss"]) == approx(float(preference.detach()))
    assert float(metrics["sft_loss"]) == approx(0.0 if sft == "off" else float(nll.detach()))
    for name, good in (("rewards_chosen_mean", True), ("rewards_rejected_mean", False)):
        assert float(metrics[name]) == approx(sum(rewards[good]) / len(rewards[good]))
    right = sum(r > 0.3 for r in rewards[True]) + sum(r < 0.3 for r in rewards[False])
    assert float(metrics["num_ranked_right"]) == right


def test_at_equality_the_loss_is_one_half_and_every_answer_a_tie() -> None:
    batch, _ = random_batch(kl=0.0)
    loss, metrics = KtoLoss(DpoConfig())(batch.columns["reference_logprobs"], batch)
    assert float(loss) == 0.5
    assert (float(metrics["num_ties"]), float(metrics["num_ranked_right"])) == (5.0, 0.0)


def test_a_higher_baseline_raises_the_loss_of_good_answers_and_lowers_that_of_bad_ones() -> None:
    low, current = random_batch(kl=0.0)
    high = low.with_columns(kl_baseline=torch.full_like(current, 2.0))
    only_good, only_bad = KtoLoss(DpoConfig(undesirable_weight=0.0)), KtoLoss(DpoConfig(desirable_weight=0.0))
    assert float(only_good(current, high)[0]) > float(only_good(current, low)[0])
    assert float(only_bad(current, high)[0]) < float(only_bad(current, low)[0])


def test_hopeless_answers_have_a_finite_gradient() -> None:
    batch, current = random_batch()
    logprobs = (current - 400).requires_grad_()
    loss, _ = KtoLoss(DpoConfig(reference_policy_kl_penalty=1.0))(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert math.isfinite(float(loss.detach()))
    assert gradient.isfinite().all()


def test_mismatched_answers_belong_to_the_previous_prompt() -> None:
    batch = judged_batch(answers())
    mismatched = mismatched_batch(batch, max_total_tokens=6)
    assert [prompt.tolist() for prompt in mismatched.prompts] == [[1, 2 + i] for i in range(5)]
    lengths = [len(response) for response in mismatched.responses]
    assert lengths == [2, 3, 4, 1, 4]  # 5 + 2 prompt tokens would be too long: cut
    assert mismatched.responses[2].tolist() == [10, 11, 12, 13]
    assert mismatched.num_sequences == 5


def test_answers_to_one_prompt_share_it() -> None:
    same = [
        Judged(0, "a", (1, 2), (3,), True),
        Judged(1, "b", (4,), (5,), False),
        Judged(2, "c", (1, 2), (6, 7), False),
    ]
    batch = judged_batch(same)
    assert [prompt.tolist() for prompt in batch.prompts] == [[1, 2], [4]]
    assert batch.prompt_of == (0, 1, 0)
    assert batch.columns["num_class_sequences"].tolist() == [1, 2, 2, 2]
    assert batch.columns["num_class_tokens"].tolist() == [1, 3, 3, 3]


def test_an_answer_to_the_same_prompt_is_no_mismatch() -> None:
    """Both answers of each pair, side by side, as the rows of a validation set may come."""
    pairs = [Judged(i, str(i), (i // 2,), (10 + i,), i % 2 == 0) for i in range(6)]
    mismatched = mismatched_batch(judged_batch(pairs), 64)
    assert mismatched.prompt_of == (0, 0, 1, 1, 2, 2)
    assert [response.tolist() for response in mismatched.responses] == [[14], [15], [10], [11], [12], [13]]
