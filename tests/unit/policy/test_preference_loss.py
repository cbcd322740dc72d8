"""The DPO loss, value, gradient and metrics, against a slow reference and against what it must be at equality."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from posttrain.policy.objectives import NegativeLogLikelihood, PreferenceLoss
from posttrain.types import TokenBatch


@dataclass
class Pairs:
    """Answers chosen, rejected, chosen, rejected, …: one list of token values each."""

    current: list[list[float]]
    reference: list[list[float]]
    mask: list[list[float]]

    @property
    def batch(self) -> TokenBatch:
        lengths = [len(row) for row in self.mask]
        columns = {"mask": flat(self.mask), "reference_logprobs": flat(self.reference)}
        prompt_of = [index // 2 for index in range(len(lengths))]
        return TokenBatch.build([[1]] * (len(lengths) // 2), [[2] * n for n in lengths], prompt_of, columns)


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32)


def random_pairs(seed: int, distance: float = 0.5) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 5, 1, 4, 6, 2, 7, 7]
    current = [(-2 + 0.7 * torch.randn(n, generator=generator)).tolist() for n in lengths]
    reference = [
        (torch.tensor(row) + distance * torch.randn(len(row), generator=generator)).tolist() for row in current
    ]
    mask = [[1.0] * n for n in lengths]
    mask[1][0] = mask[6][3] = 0.0  # a token that is not trained counts nowhere
    return Pairs(current, reference, mask)


def slow_dpo(
    pairs: Pairs,
    beta: float,
    average: bool = False,
    sft_average: bool = False,
    preference_weight: float = 1.0,
    sft_weight: float = 0.0,
) -> tuple[float, Tensor, dict[str, float]]:
    tokens = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in row] for row in pairs.current]
    rewards, likelihoods = [], []
    for row, reference, mask in zip(tokens, pairs.reference, pairs.mask, strict=True):
        count = sum(mask)
        reward = sum((lc - lr) * m for lc, lr, m in zip(row, reference, mask, strict=True))
        nll = -sum(lc * m for lc, m in zip(row, mask, strict=True))
        rewards.append(reward / count if average else reward)
        likelihoods.append(nll / count if sft_average else nll)
    num_pairs = len(tokens) // 2
    chosen, rejected = rewards[0::2], rewards[1::2]
    preference = sum(torch.log1p(torch.exp(-beta * (c - r))) for c, r in zip(chosen, rejected, strict=True)) / num_pairs
    sft = sum(likelihoods[0::2]) / num_pairs
    loss = preference_weight * preference + sft_weight * sft
    flat_tokens = [t for row in tokens for t in row]
    gradients = torch.autograd.grad(loss, flat_tokens, allow_unused=True)
    gradient = torch.stack([torch.zeros((), dtype=torch.float64) if g is None else g for g in gradients])
    numbers = [(float(c.detach()), float(r.detach())) for c, r in zip(chosen, rejected, strict=True)]
    metrics = {
        "loss": float(loss.detach()),
        "preference_loss": float(preference.detach()),
        "sft_loss": float(sft.detach()) if sft_weight > 0 else 0.0,
        "accuracy": sum(c > r for c, r in numbers) / num_pairs,
        "rewards_chosen_mean": sum(c for c, _ in numbers) / num_pairs,
        "rewards_rejected_mean": sum(r for _, r in numbers) / num_pairs,
    }
    return metrics["loss"], gradient, metrics


@pytest.mark.parametrize("beta", [0.05, 0.5])
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("sft_average", [False, True], ids=["sft sum", "sft mean"])
@pytest.mark.parametrize(("preference_weight", "sft_weight"), [(1.0, 0.0), (1.0, 0.3), (0.5, 2.0), (0.0, 1.0)])
def test_equals_the_slow_reference(
    beta: float, average: bool, sft_average: bool, preference_weight: float, sft_weight: float
) -> None:
    pairs = random_pairs(0)
    logprobs = flat(pairs.current).requires_grad_()
    objective = PreferenceLoss(
        reference_policy_kl_penalty=beta,
        preference_average_log_probs=average,
        sft_average_log_probs=sft_average,
        preference_loss_weight=preference_weight,
        sft_loss_weight=sft_weight,
    )
    loss, metrics = objective(logprobs, pairs.batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = slow_dpo(pairs, beta, average, sft_average, preference_weight, sft_weight)
    assert float(loss.detach()) == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)
    for name, value in expected[2].items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_loss_is_ln_2_when_the_policy_is_the_reference(average: bool) -> None:
    pairs = random_pairs(1, distance=0.0)
    loss, metrics = PreferenceLoss(preference_average_log_probs=average)(flat(pairs.current), pairs.batch)
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-7)
    assert float(metrics["rewards_chosen_mean"]) == float(metrics["rewards_rejected_mean"]) == 0.0
    assert float(metrics["accuracy"]) == 0.0  # a tie is not a win


def test_reported_rewards_do_not_depend_on_beta() -> None:
    pairs = random_pairs(2)
    small, large = (
        PreferenceLoss(reference_policy_kl_penalty=beta)(flat(pairs.current), pairs.batch)[1] for beta in (0.01, 10.0)
    )
    for name in ("rewards_chosen_mean", "rewards_rejected_mean", "accuracy"):
        assert float(small[name]) == float(large[name])
    assert float(small["preference_loss"]) != float(large["preference_loss"])


def test_hopeless_pairs_have_a_finite_loss_and_gradient() -> None:
    pairs = random_pairs(3)
    pairs.reference = [
        [v + (400.0 if index % 2 == 0 else -400.0) for v in row] for index, row in enumerate(pairs.current)
    ]
    logprobs = flat(pairs.current).requires_grad_()
    loss, _ = PreferenceLoss(reference_policy_kl_penalty=1.0)(logprobs, pairs.batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) > 1000
    assert gradient.isfinite().all()


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_a_pair_that_is_masked_altogether_takes_no_part(average: bool) -> None:
    """`num_sequences` leaves it out of the denominator, so the sum must leave it out as well."""
    pairs = random_pairs(4)
    without = Pairs(pairs.current[2:], pairs.reference[2:], pairs.mask[2:])
    pairs.mask[0], pairs.mask[1] = [0.0] * 3, [0.0] * 5
    objective = PreferenceLoss(preference_average_log_probs=average, sft_average_log_probs=average, sft_loss_weight=0.5)
    logprobs = flat(pairs.current).requires_grad_()
    loss, metrics = objective(logprobs, pairs.batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected_loss, expected_metrics = objective(flat(without.current), without.batch)
    torch.testing.assert_close(loss.detach(), expected_loss)
    torch.testing.assert_close(metrics, expected_metrics)
    assert gradient[:8].abs().max() == 0.0


def test_pairs_must_meet_in_one_micro_batch() -> None:
    assert PreferenceLoss().keeps_groups_whole
    assert not NegativeLogLikelihood().keeps_groups_whole


def test_supervised_loss_is_the_mean_over_all_trained_tokens_not_over_sequences() -> None:
    pairs = random_pairs(5)
    logprobs = flat(pairs.current).requires_grad_()
    loss, metrics = NegativeLogLikelihood()(logprobs, pairs.batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    counted = [
        v for row, mask in zip(pairs.current, pairs.mask, strict=True) for v, m in zip(row, mask, strict=True) if m
    ]
    assert float(loss.detach()) == pytest.approx(-sum(counted) / len(counted), rel=1e-6)
    assert float(metrics["loss"]) == float(loss.detach())
    torch.testing.assert_close(gradient, -flat(pairs.mask) / len(counted))
