"""Tokens that the environment wrote change neither the loss nor any metric, however unlikely they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from float64 import TOLERANCE, approx

from posttrain.config import LossFnConfig
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.types import TokenBatch

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl": {"reference_policy_kl_penalty": 0.1},
    "kl without clamps": {
        "reference_policy_kl_penalty": 0.1,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        "use_on_policy_kl_approximation": True,
    },
    "importance sampling": {"use_importance_sampling_correction": True},
    "gspo": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
    },
    "cispo": {"use_cispo": True},
}


def batch(own: list[list[float]], between: int) -> tuple[torch.Tensor, TokenBatch]:
    """Two answers with these logprobs of the model's tokens; `between` foreign ones after the second of each."""
    columns: dict[str, list[float]] = {"mask": [], "advantages": [], "generation_logprobs": []}
    columns |= {"prev_logprobs": [], "reference_logprobs": []}
    current: list[float] = []
    for answer, logprobs in enumerate(own):
        for place, logprob in enumerate(logprobs):
            current.append(logprob)
            columns["mask"].append(1.0)
            columns["advantages"].append(1.0 if answer else -0.7)
            columns["generation_logprobs"].append(logprob - 0.1)
            columns["prev_logprobs"].append(logprob + 0.05)
            columns["reference_logprobs"].append(logprob - 0.3)
            if place == 1:
                current += [-200.0] * between
                columns["mask"] += [0.0] * between
                columns["advantages"] += [1.0 if answer else -0.7] * between
                columns["generation_logprobs"] += [0.0] * between
                columns["prev_logprobs"] += [-200.0] * between
                columns["reference_logprobs"] += [-200.0] * between
    lengths = [len(logprobs) + between for logprobs in own]
    tokens = TokenBatch.build(
        prompts=[[1, 2]],
        responses=[[3] * length for length in lengths],
        prompt_of=[0] * len(own),
        columns={name: torch.tensor(values) for name, values in columns.items()},
    )
    return torch.tensor(current, requires_grad=True), tokens


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_gradient_and_metrics_are_those_of_the_models_tokens_alone(name: str) -> None:
    objective = ClippedPolicyGradient(LossFnConfig(**{"reference_policy_kl_penalty": 0.0, **VARIANTS[name]}))
    own = [[-0.5, -1.0, -0.2], [-2.0, -0.1, -0.7, -0.4]]
    results = []
    for between in (0, 3):
        logprobs, tokens = batch(own, between)
        loss, metrics = objective(logprobs, tokens)
        loss.backward()
        assert logprobs.grad is not None
        is_own = tokens.columns["mask"] > 0
        assert torch.equal(logprobs.grad[~is_own], torch.zeros(int((~is_own).sum())))
        results.append((loss.item(), logprobs.grad[is_own], {key: float(value) for key, value in metrics.items()}))
    (loss, gradient, metrics), (other_loss, other_gradient, other_metrics) = results
    assert math.isfinite(loss)
    assert other_loss == approx(loss)
    torch.testing.assert_close(other_gradient, gradient, rtol=TOLERANCE, atol=TOLERANCE)
    assert other_metrics == approx(metrics)
