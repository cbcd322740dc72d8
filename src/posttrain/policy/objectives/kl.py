"""Estimates of the KL divergence from log-probabilities of sampled tokens: k1, k2 and k3."""

from __future__ import annotations

from torch import Tensor


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """KL(p || q) from log q - log p at samples of p (Schulman, "Approximating KL divergence")."""
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def clamped_kl(log_ratio: Tensor, kind: str, input_clamp: float | None, output_clamp: float | None) -> Tensor:
    """The same with bounds on inputs and outputs; None: no bound."""
    if input_clamp is not None:
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
    kl = kl_estimate(log_ratio, kind)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
