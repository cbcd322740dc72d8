"""What a run costs: hours × machines × price, start-up, storage, and what interruptions of Spot machines waste.

With M the mean time between interruptions of the gang (that of one machine over their number), C the seconds that a
save blocks training, τ the time between saves, q the share of interruptions before which a notice lets the run save,
and R the seconds from an interruption to the next step, the share of time that is wasted is, to first order,

    C / τ + ((1 − q) · τ / 2 + R) / M,   least at   τ* = √(2 · C · M / (1 − q))

q = 0 is the formula of Young (1974). M is never assumed silently: it is given, or a range is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.config.cluster_profile import ClusterProfile

SHOWN_MTBF_HOURS = (12.0, 24.0, 72.0)  # of one machine, where none is given: no rates of H100 and newer were found


@dataclass(frozen=True)
class Interruptions:
    node_mtbf_s: float
    num_nodes: int
    save_s: float
    notice_share: float
    restart_s: float

    @property
    def gang_mtbf_s(self) -> float:
        return self.node_mtbf_s / self.num_nodes

    @property
    def best_interval_s(self) -> float:
        """Time between saves that wastes least; infinite if every interruption is announced."""
        unannounced = 1 - self.notice_share
        return math.inf if unannounced == 0 else math.sqrt(2 * self.save_s * self.gang_mtbf_s / unannounced)

    def overhead(self, interval_s: float) -> float:
        """Wasted time, as a share of the time without interruptions and saves."""
        lost = (1 - self.notice_share) * interval_s / 2 if self.notice_share < 1 else 0.0
        return self.save_s / interval_s + (lost + self.restart_s) / self.gang_mtbf_s

    def steps_between_saves(self, step_s: float) -> int | None:
        """The best interval in whole steps; None: never."""
        interval = self.best_interval_s
        return None if math.isinf(interval) else max(1, round(interval / step_s))


@dataclass(frozen=True)
class LaunchCost:
    """USD of one run."""

    hours: float  # of training, without interruptions
    num_nodes: int
    node_price: float  # USD an hour
    overhead: float = 0.0
    boot_s: float = 0.0
    storage: float = 0.0
    other: float = 0.0

    @property
    def machines(self) -> float:
        return self.hours * (1 + self.overhead) * self.num_nodes * self.node_price

    @property
    def start(self) -> float:
        """Machines that wait for the others and for the first step are billed as well."""
        return self.boot_s / 3600 * self.num_nodes * self.node_price

    @property
    def in_all(self) -> float:
        return self.machines + self.start + self.storage + self.other


def interruptions_of(profile: ClusterProfile, num_nodes: int, node_mtbf_hours: float) -> Interruptions:
    cost = profile.cost
    return Interruptions(node_mtbf_hours * 3600, num_nodes, cost.save_s, cost.notice_share, cost.restart_s)


def launch_cost(
    profile: ClusterProfile, *, hours: float, num_nodes: int, node_price: float, overhead: float
) -> LaunchCost:
    cost = profile.cost
    storage = profile.storage.size_gib * cost.storage_per_gib_month * cost.storage_months
    return LaunchCost(hours, num_nodes, node_price, overhead, cost.boot_s, storage, cost.other)
