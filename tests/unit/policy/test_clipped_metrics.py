"""What the clipped loss reports about the distance between sampler and trainer, token by token, in plain Python."""

import math
from collections.abc import Callable

import pytest
from float64 import float64
from slow_reference import Case, random_case

from posttrain.config import LossFnConfig
from posttrain.policy.objectives import ClippedPolicyGradient

EPSILON = 1e-8  # on the denominators of the loss; the definitions below have none


def token_mean(case: Case, value: Callable[[float, float, float], float]) -> float:
    """Mean over counted tokens of value(current, previous, sampler)."""
    assert case.previous is not None
    total = 0.0
    for i, mask in enumerate(case.mask):
        for t, counted in enumerate(mask):
            if counted:
                total += value(case.current[i][t], case.previous[i][t], case.sampler[i][t])
    return total / case.num_tokens


def estimate(log_ratio: float, kind: str) -> float:
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}[kind]


def half_way(lp: float, lg: float) -> float:
    return math.log(0.5 * math.exp(lp) + 0.5 * math.exp(lg))


def measured(case: Case, **options: object) -> dict[str, float]:
    with float64():
        settings = LossFnConfig(**{"reference_policy_kl_penalty": 0.0, **options})
        _, metrics = ClippedPolicyGradient(settings)(case.logprobs, case.batch)
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("level", [True, False], ids=["token level", "sequence level"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_sampler_mismatch_metrics_follow_their_definitions(kind: str, level: bool) -> None:
    case = random_case(20)
    metrics = measured(case, reference_policy_kl_type=kind, token_level_loss=level)
    expected = {
        "token_mult_prob_error": token_mean(case, lambda lc, lp, lg: math.exp(abs(lg - lp))),
        "gen_kl_error": token_mean(case, lambda lc, lp, lg: estimate(lp - lg, kind)),
        "policy_kl_error": token_mean(case, lambda lc, lp, lg: estimate(lg - lp, kind)),
        "js_divergence_error": token_mean(
            case,
            lambda lc, lp, lg: 0.5 * (estimate(half_way(lp, lg) - lp, kind) + estimate(half_way(lp, lg) - lg, kind)),
        ),
        "sampling_importance_ratio": token_mean(case, lambda lc, lp, lg: math.exp(lp - lg)),
        "sampling_importance_square": token_mean(case, lambda lc, lp, lg: math.exp(lp - lg) ** 2),
        "approx_entropy": token_mean(case, lambda lc, lp, lg: -math.exp(lc - lg) * lc),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=EPSILON, abs=EPSILON), name


def test_a_sampler_that_agrees_shows_no_error() -> None:
    case = random_case(21, previous=False)
    case.sampler = [list(row) for row in case.current]
    metrics = measured(case)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0)
    for name in ("gen_kl_error", "policy_kl_error", "js_divergence_error"):
        assert metrics[name] == pytest.approx(0.0, abs=EPSILON)


def test_the_kl_metric_is_not_multiplied_by_its_price() -> None:
    case = random_case(22)
    cheap, dear = (measured(case, reference_policy_kl_penalty=price)["kl_penalty"] for price in (0.001, 5.0))
    assert cheap == pytest.approx(dear)
    assert cheap > 0.01


def test_metrics_carry_no_graph() -> None:
    _, metrics = ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.1))(
        random_case(23).logprobs, random_case(23).batch
    )
    assert not any(value.requires_grad for value in metrics.values())
