"""The losses of preference pairs: value, gradient and metrics, against slow float64 references written here, the
numbers published for NeMo-Aligner's variants, and what they must be at equality.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from float64 import TOLERANCE, approx, float64
from torch import Tensor

from posttrain.algorithms.step_reports import with_accuracy
from posttrain.config import DpoConfig
from posttrain.config.dpo import LOSSES
from posttrain.policy.objectives import NegativeLogLikelihood, PreferenceLoss
from posttrain.policy.objectives.preference_forms import log_odds, pair_losses
from posttrain.types import TokenBatch

PAIRED = [name for name, traits in LOSSES.items() if traits.is_paired]
Pair = tuple[Tensor, Tensor]


@dataclass
class Pairs:
    """Answers chosen, rejected, chosen, rejected, …: one list of token values each."""

    current: list[list[float]]
    reference: list[list[float]]
    mask: list[list[float]]
    rewards: list[float] = field(default_factory=list)  # as the data gives them

    @property
    def batch(self) -> TokenBatch:
        lengths = [len(row) for row in self.mask]
        counted = [sum(row) for row in self.mask]
        num_tokens = [sum(counted[0::2]), sum(counted[1::2])] * (len(lengths) // 2)
        given = self.rewards or [0.0] * len(lengths)
        columns = {
            "mask": flat(self.mask),
            "reference_logprobs": flat(self.reference),
            "given_rewards": flat([[r] * n for r, n in zip(given, lengths, strict=True)]),
            "num_class_tokens": flat([[t] * n for t, n in zip(num_tokens, lengths, strict=True)]),
        }
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
    rewards = torch.randn(len(lengths), generator=generator).tolist()
    return Pairs(current, reference, mask, rewards)


# -- the formulas, slowly ----------------------------------------------------------------------------------------------


def s(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def coin_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def odds(mean_logprob: Tensor) -> Tensor:
    return torch.exp(mean_logprob) / (1 - torch.exp(mean_logprob))


BETA, SMOOTHING, GAMMA, SCALE = 0.4, 0.15, 0.7, 1.3
# name -> loss of one pair from (chosen reward, rejected reward, given margin)
SLOW: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "dpo": lambda c, r, g: -torch.log(s(BETA * (c - r))),
    "cdpo": lambda c, r, g: -(1 - SMOOTHING) * torch.log(s(BETA * (c - r))) - SMOOTHING * torch.log(s(BETA * (r - c))),
    "robust": lambda c, r, g: (
        (-(1 - SMOOTHING) * torch.log(s(BETA * (c - r))) + SMOOTHING * torch.log(s(BETA * (r - c))))
        / (1 - 2 * SMOOTHING)
    ),
    "hinge": lambda c, r, g: torch.clamp(1 - BETA * (c - r), min=0),
    "ipo": lambda c, r, g: (c - r - 1 / (2 * BETA)) ** 2,
    "rpo_sq": lambda c, r, g: (BETA * (c - r) - g) ** 2,
    "rpo_bwd_kl": lambda c, r, g: coin_kl(s(torch.tensor(g, dtype=torch.float64)), s(BETA * (c - r))),
    "rpo_fwd_kl": lambda c, r, g: coin_kl(s(BETA * (c - r)), s(torch.tensor(g, dtype=torch.float64))),
    "simpo": lambda c, r, g: (
        -(1 - SMOOTHING) * torch.log(s(BETA * (c - r) - GAMMA)) - SMOOTHING * torch.log(s(GAMMA - BETA * (c - r)))
    ),
    "orpo": lambda c, r, g: -torch.log(s(torch.log(odds(c) / odds(r)))),
}


def slow_loss(pairs: Pairs, objective: PreferenceLoss) -> tuple[float, Tensor, dict[str, float]]:
    name = objective.config.preference_loss
    tokens = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in row] for row in pairs.current]
    rewards, likelihoods = [], []
    for row, reference, mask in zip(tokens, pairs.reference, pairs.mask, strict=True):
        count = sum(mask)
        with_reference = name not in ("simpo", "orpo")
        reward = sum((lc - lr * with_reference) * m for lc, lr, m in zip(row, reference, mask, strict=True))
        nll = -sum(lc * m for lc, m in zip(row, mask, strict=True))
        average = objective.config.preference_average_log_probs or not with_reference
        rewards.append(reward / count if average else reward)
        likelihoods.append(nll / count if objective.config.sft_average_log_probs else nll)
    num_pairs = len(tokens) // 2
    chosen, rejected = rewards[0::2], rewards[1::2]
    given = [SCALE * (c - r) for c, r in zip(pairs.rewards[0::2], pairs.rewards[1::2], strict=True)]
    preference = sum(SLOW[name](c, r, g) for c, r, g in zip(chosen, rejected, given, strict=True)) / num_pairs
    num_chosen_tokens = sum(sum(mask) for mask in pairs.mask[0::2])
    sft = sum(likelihoods[0::2]) / (num_chosen_tokens if objective.config.sft_token_level_loss else num_pairs)
    loss = objective.config.preference_loss_weight * preference + objective.config.sft_loss_weight * sft
    flat_tokens = [t for row in tokens for t in row]
    gradients = torch.autograd.grad(loss, flat_tokens, allow_unused=True)
    gradient = torch.stack([torch.zeros((), dtype=torch.float64) if g is None else g for g in gradients])
    numbers = [(float(c.detach()), float(r.detach())) for c, r in zip(chosen, rejected, strict=True)]
    metrics = {
        "loss": float(loss.detach()),
        "preference_loss": float(preference.detach()),
        "sft_loss": float(sft.detach()) if objective.config.sft_loss_weight > 0 else 0.0,
        "num_ranked_right": sum(c > r for c, r in numbers),
        "num_ties": 0.0,
        "rewards_chosen_mean": sum(c for c, _ in numbers) / num_pairs,
        "rewards_rejected_mean": sum(r for _, r in numbers) / num_pairs,
        "rewards_margin_mean": sum(c - r for c, r in numbers) / num_pairs,
    }
    return metrics["loss"], gradient, metrics


def computed(objective: Any, pairs: Pairs) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """Loss, gradient by the log-probabilities, metrics."""
    logprobs = flat(pairs.current).requires_grad_()
    loss, metrics = objective(logprobs, pairs.batch)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def assert_equals_the_slow_reference(objective: PreferenceLoss, pairs: Pairs) -> None:
    with float64():
        loss, gradient, metrics = computed(objective, pairs)
    expected_loss, expected_gradient, expected_metrics = slow_loss(pairs, objective)
    assert float(loss) == approx(expected_loss)
    torch.testing.assert_close(gradient, expected_gradient, rtol=TOLERANCE, atol=TOLERANCE)
    assert {name: float(value) for name, value in metrics.items()} == approx(expected_metrics)


def objective_of(name: str, **options: Any) -> PreferenceLoss:
    constants = {"reference_policy_kl_penalty": BETA, "gt_reward_scale": SCALE}
    constants |= {"label_smoothing": SMOOTHING, "simpo_gamma": GAMMA}
    return PreferenceLoss(DpoConfig(preference_loss=name, **{**constants, **options}))  # type: ignore[arg-type]


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("name", PAIRED)
def test_every_loss_equals_its_slow_reference(name: str, average: bool) -> None:
    objective = objective_of(name, preference_average_log_probs=average, sft_loss_weight=0.3)
    for seed in range(3):
        assert_equals_the_slow_reference(objective, random_pairs(seed))


@pytest.mark.parametrize("sft", ["sum", "mean", "tokens"])
@pytest.mark.parametrize(("preference_weight", "sft_weight"), [(1.0, 0.0), (1.0, 0.3), (0.5, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_the_supervised_term(name: str, sft: str, preference_weight: float, sft_weight: float) -> None:
    objective = objective_of(
        name,
        sft_average_log_probs=sft == "mean",
        sft_token_level_loss=sft == "tokens",
        preference_loss_weight=preference_weight,
        sft_loss_weight=sft_weight,
    )
    assert_equals_the_slow_reference(objective, random_pairs(0))


# -- published numbers -------------------------------------------------------------------------------------------------

# (margin, given margin) -> losses of NeMo-Aligner at beta 0.2
GOLDEN = {
    (0.0, 0.0): {"dpo": 0.693147, "ipo": 6.25, "rpo_sq": 0.0, "rpo_bwd_kl": 0.0, "rpo_fwd_kl": 0.0},
    (1.5, 1.0): {"dpo": 0.554355, "ipo": 1.0, "rpo_sq": 0.49, "rpo_bwd_kl": 0.052835, "rpo_fwd_kl": 0.056797},
    (-2.0, 1.0): {"dpo": 0.913015, "ipo": 20.25, "rpo_sq": 1.96, "rpo_bwd_kl": 0.223236, "rpo_fwd_kl": 0.238409},
}


@pytest.mark.parametrize("point", GOLDEN, ids=str)
def test_golden_numbers_of_nemo_aligner(point: tuple[float, float]) -> None:
    margin, given = point
    pairs = Pairs([[-1.0, -2.0], [-3.0]], [[-1.0, -2.0 - margin], [-3.0]], [[1.0, 1.0], [1.0]], [given, 0.0])
    for name, value in GOLDEN[point].items():
        with float64():
            settings = DpoConfig(preference_loss=name, reference_policy_kl_penalty=0.2)  # type: ignore[arg-type]
            loss, _ = PreferenceLoss(settings)(flat(pairs.current), pairs.batch)
        assert float(loss) == pytest.approx(value, abs=5.1e-7), name  # six digits are given


# -- what the definitions imply ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_loss_is_ln_2_when_the_policy_is_the_reference(average: bool) -> None:
    pairs = random_pairs(1, distance=0.0)
    loss, metrics = PreferenceLoss(DpoConfig(preference_average_log_probs=average))(flat(pairs.current), pairs.batch)
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-7)
    assert float(metrics["rewards_chosen_mean"]) == float(metrics["rewards_rejected_mean"]) == 0.0
    shares = with_accuracy({name: float(value) for name, value in metrics.items()}, 4)
    assert (shares["accuracy"], shares["tie_rate"]) == (0.5, 1.0)  # nothing is known yet: as good as guessing


def test_without_smoothing_cdpo_and_robust_are_dpo() -> None:
    chosen, rejected = torch.randn(5), torch.randn(5)
    expected = pair_losses("dpo", chosen, rejected, beta=0.3)
    for name in ("cdpo", "robust"):
        torch.testing.assert_close(pair_losses(name, chosen, rejected, beta=0.3), expected)  # type: ignore[arg-type]


def test_robust_is_unbiased_under_flipped_labels_and_cdpo_is_not() -> None:
    """If a share e of the pairs is flipped, the expected robust loss is the loss on clean labels."""
    chosen, rejected, e = torch.tensor([1.2]), torch.tensor([-0.4]), 0.2
    clean = pair_losses("dpo", chosen, rejected, beta=1.0)
    for name, unbiased in (("robust", True), ("cdpo", False)):
        right = pair_losses(name, chosen, rejected, beta=1.0, label_smoothing=e)  # type: ignore[arg-type]
        flipped = pair_losses(name, rejected, chosen, beta=1.0, label_smoothing=e)  # type: ignore[arg-type]
        assert torch.allclose((1 - e) * right + e * flipped, clean, atol=1e-6) == unbiased


def test_rpo_with_a_certain_reward_is_dpo() -> None:
    chosen, rejected = torch.randn(5), torch.randn(5)
    certain = torch.full((5,), 60.0)
    torch.testing.assert_close(
        pair_losses("rpo_bwd_kl", chosen, rejected, beta=0.3, given_margin=certain),
        pair_losses("dpo", chosen, rejected, beta=0.3),
    )


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_do_not_read_one(name: str) -> None:
    pairs = random_pairs(6)
    batch = pairs.batch
    columns: Any = {"mask": batch.columns["mask"]}
    without = TokenBatch.build(batch.prompts, batch.responses, batch.prompt_of, columns)
    objective = objective_of(name)
    assert not objective.needs_reference
    assert float(objective(flat(pairs.current), without)[0]) == float(objective(flat(pairs.current), batch)[0])


def test_reported_rewards_do_not_depend_on_beta() -> None:
    pairs = random_pairs(2)
    small, large = (
        PreferenceLoss(DpoConfig(reference_policy_kl_penalty=beta))(flat(pairs.current), pairs.batch)[1]
        for beta in (0.01, 10.0)
    )
    for name in ("rewards_chosen_mean", "rewards_rejected_mean", "num_ranked_right"):
        assert float(small[name]) == float(large[name])
    assert float(small["preference_loss"]) != float(large["preference_loss"])


@pytest.mark.parametrize("name", PAIRED)
def test_hopeless_pairs_have_a_finite_loss_and_gradient(name: str) -> None:
    pairs = random_pairs(3)
    far = (400.0, -400.0)
    pairs.reference = [[v + far[index % 2] for v in row] for index, row in enumerate(pairs.current)]
    loss, gradient, _ = computed(objective_of(name, reference_policy_kl_penalty=1.0), pairs)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("certain", [0.0, -1e-9, -1e-7, -80.0])
def test_answers_that_are_certain_have_finite_odds(certain: float) -> None:
    logprob = torch.tensor([certain, -0.5], requires_grad=True)
    value = log_odds(logprob)
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert float(value[1]) == pytest.approx(math.log(math.exp(-0.5) / (1 - math.exp(-0.5))), rel=1e-6)


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("name", PAIRED)
def test_a_pair_that_is_masked_altogether_takes_no_part(name: str, average: bool) -> None:
    """`num_sequences` leaves it out of the denominator, so the sum must leave it out as well."""
    pairs = random_pairs(4)
    without = Pairs(pairs.current[2:], pairs.reference[2:], pairs.mask[2:], pairs.rewards[2:])
    pairs.mask[0], pairs.mask[1] = [0.0] * 3, [0.0] * 5
    objective = objective_of(
        name, preference_average_log_probs=average, sft_average_log_probs=average, sft_loss_weight=0.5
    )
    loss, gradient, metrics = computed(objective, pairs)
    expected_loss, expected_metrics = objective(flat(without.current), without.batch)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(metrics, expected_metrics)
    assert gradient[:8].abs().max() == 0.0


def test_accuracy_is_a_share_of_whole_numbers() -> None:
    """Adding up 1/3 of three micro-batches in fp32 gives more than 1; counts do not."""
    third = float(torch.tensor(1.0) / 3)
    assert third + third + third > 1
    counts = {"num_ranked_right": 1.0 + 1.0 + 1.0, "num_ties": 0.0}
    assert with_accuracy(counts, 3)["accuracy"] == 1.0
    assert with_accuracy({"num_ranked_right": 5.0, "num_ties": 3.0}, 10)["accuracy"] == 0.65


def test_supervised_loss_is_the_mean_over_all_trained_tokens_not_over_sequences() -> None:
    pairs = random_pairs(5)
    loss, gradient, metrics = computed(NegativeLogLikelihood(), pairs)
    counted = flat(pairs.current)[flat(pairs.mask) > 0]
    assert float(loss) == pytest.approx(-float(counted.mean()), rel=1e-6)
    assert float(metrics["loss"]) == float(loss)
    torch.testing.assert_close(gradient, -flat(pairs.mask) / len(counted))
