"""Losses: small picklable values that turn the log-probabilities of a micro-batch into its share of the loss.

Two rules hold for all of them. The loss and every metric are sums already divided by the denominators of the whole
optimizer batch, so adding up micro-batches and ranks gives the value of the batch. Metrics whose name ends in `_min` or
`_max` are extremes instead, and are combined as such.
"""

from posttrain.policy.objectives.clipped import ClippedPolicyGradient, ValueLoss
from posttrain.policy.objectives.distillation import Distillation
from posttrain.policy.objectives.kto import KtoLoss
from posttrain.policy.objectives.preference import PreferenceLoss
from posttrain.policy.objectives.supervised import BradleyTerry, NegativeLogLikelihood

__all__ = [
    "BradleyTerry",
    "ClippedPolicyGradient",
    "Distillation",
    "KtoLoss",
    "NegativeLogLikelihood",
    "PreferenceLoss",
    "ValueLoss",
]
