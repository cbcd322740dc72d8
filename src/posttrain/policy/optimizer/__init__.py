"""The optimizer of one rank: `mixed_precision` has fp32 state and masters, `compact` smaller or offloaded state."""

from __future__ import annotations

from torch import nn

from posttrain.config.policy import ADAMS, OptimizerConfig
from posttrain.policy.optimizer.compact import CompactOptimizer
from posttrain.policy.optimizer.compact_adam import StateFormat
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer
from posttrain.policy.optimizer.schedule import SchedulerSpec


def make_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    scheduler: SchedulerSpec,
    seed: int,
    *,
    in_host_memory: bool = False,
) -> MixedPrecisionOptimizer:
    """The optimizer of the config section `policy.optimizer`, over the trainable parameters.

    `in_host_memory`: where those are. Adam's pass through the device; other optimizers compute where they are.
    """
    streams = config.offload_states or (in_host_memory and config.name in ADAMS)
    form = StateFormat(config.state_dtype, config.master_weights != "none", streams)
    if form.is_plain:
        return MixedPrecisionOptimizer(model, config.name, config.kwargs, scheduler)
    return CompactOptimizer(model, config.name, config.kwargs, scheduler, form, seed)
