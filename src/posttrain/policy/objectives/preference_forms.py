"""The preference losses of one pair, as functions of its two rewards. Independent of sums, masks and batches.

A reward is a sum or a mean over the tokens of an answer of log p - log p_reference, or of log p alone for the losses
without a reference (simpo, orpo). m = chosen reward - rejected reward, b = beta, s = the logistic function:

    dpo         -log s(b m)                                         arXiv:2305.18290
    cdpo        -(1-e) log s(b m) - e log s(-b m)                   label smoothing e; OpenRLHF calls this dpo
    robust      (-(1-e) log s(b m) + e log s(-b m)) / (1-2e)        arXiv:2403.00409
    hinge       max(0, 1 - b m)                                     arXiv:2305.10425
    ipo         (m - 1/(2b))^2                                      arXiv:2310.12036
    rpo_sq      (b m - g)^2                                         NVIDIA's reward-aware preference optimisation,
    rpo_bwd_kl  KL(Bernoulli(s(g)) || Bernoulli(s(b m)))            arXiv:2406.11704; g is the margin of the rewards
    rpo_fwd_kl  KL(Bernoulli(s(b m)) || Bernoulli(s(g)))            that came with the data, scaled
    simpo       -(1-e) log s(b m - gamma) - e log s(gamma - b m)    arXiv:2405.14734; e is 0 unless set
    orpo        -log s(log odds(chosen) - log odds(rejected))       arXiv:2403.07691, without its likelihood term
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.config.dpo import PreferenceLossName

_LARGEST_MEAN_LOGPROB = -1e-7  # odds are infinite at probability 1; in fp32 this is the number next to it


def pair_losses(
    name: PreferenceLossName,
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    given_margin: Tensor | None = None,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """The loss of each pair. `given_margin` is g of the rpo losses."""
    logits = beta * (chosen - rejected)
    match name:
        case "dpo":
            return -F.logsigmoid(logits)
        case "cdpo":
            return _smoothed(logits, label_smoothing)
        case "robust":
            right, wrong = -F.logsigmoid(logits), -F.logsigmoid(-logits)
            return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
        case "hinge":
            return F.relu(1 - logits)
        case "ipo":
            return (chosen - rejected - 1 / (2 * beta)).square()
        case "simpo":
            return _smoothed(logits - gamma, label_smoothing)
        case "orpo":
            return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))
    assert given_margin is not None, f"{name} learns the margin of the rewards that came with the data"
    match name:
        case "rpo_sq":
            return (logits - given_margin).square()
        case "rpo_bwd_kl":
            return bernoulli_kl(given_margin, logits)
        case "rpo_fwd_kl":
            return bernoulli_kl(logits, given_margin)
    raise AssertionError(f"{name} is not a loss of pairs")


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    if label_smoothing == 0:
        return -F.logsigmoid(logits)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def bernoulli_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of two coins, each given by the logit of heads."""
    heads = p_logits.sigmoid() * (F.logsigmoid(p_logits) - F.logsigmoid(q_logits))
    tails = (-p_logits).sigmoid() * (F.logsigmoid(-p_logits) - F.logsigmoid(-q_logits))
    return heads + tails


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)), from log p. At p = 1, where it is infinite, it is large, and its gradient 0."""
    x = logprobs.clamp(max=_LARGEST_MEAN_LOGPROB)
    is_small = x < -0.6931471805599453
    # Each branch gets only inputs at which it is exact: a NaN in the gradient of the unused branch would propagate.
    small = torch.log1p(-x.masked_fill(~is_small, -1.0).exp())
    large = torch.log(-torch.expm1(x.masked_fill(is_small, -0.1)))
    return x - torch.where(is_small, small, large)
