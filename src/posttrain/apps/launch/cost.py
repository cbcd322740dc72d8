"""What a run costs on a cluster: hours × machines × price, start-up, storage, and what interruptions of Spot machines
waste.

With M the mean time between interruptions of the gang (that of one machine over their number), C the seconds that a
save blocks training, τ the time between saves, q the share of interruptions before which a notice lets the run save,
and R the seconds from an interruption to the next step, the share of time that is wasted is, to first order,

    C / τ + ((1 − q) · τ / 2 + R) / M,   least at   τ* = √(2 · C · M / (1 − q))

q = 0 is the formula of Young (1974). M is never assumed silently: it is given, or a range is shown.

Prices are those of `machines.yaml`, which a profile's own replace. Spot prices move hourly and by zone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.launch.instances import INSTANCES, MACHINES, find_instance
from posttrain.config import RunConfig
from posttrain.config.cluster_profile import ClusterProfile, PriceSection
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.files.text_templates import render_text

if TYPE_CHECKING:
    from posttrain.apps.plan.plan import RunEstimate

SHOWN_MTBF_HOURS = (12.0, 24.0, 72.0)  # of one machine, where none is given: no rates of H100 and newer were found
OLD_AFTER_DAYS = 90
# Measured with a checkpoint of 30.2 GiB (8B, bf16 weights, 8-bit moments) on one H200, bench/LOG.md 2026-11-15.
BACKGROUND_SAVE_S = 0.32  # that training stands still while the copy is queued
WAITING_SAVE_BYTES_PER_S = 30.2 * 2**30 / 46.0  # where training waits for the files


@dataclass(frozen=True)
class Price:
    on_demand: float | None  # of a whole machine
    spot: tuple[float, float] | None  # lowest and highest zone
    region: str
    as_of: str
    source: str

    def range_of(self, capacity: str) -> tuple[float, float] | None:
        if capacity == "spot":
            return self.spot
        return None if self.on_demand is None else (self.on_demand, self.on_demand)


def _price(name: str) -> Price:
    row = {"on_demand": None, **MACHINES["prices"][INSTANCES[name].provider], **MACHINES["prices"][name]}
    return Price(**{**row, "spot": (row["spot"][0], row["spot"][1])})


PRICES = {name: _price(name) for name in INSTANCES}


def price_of(instance_type: str, own: PriceSection | None) -> Price:
    """The profile's price, or that of the table."""
    if own is not None:
        spot = None if own.spot is None else (own.spot, own.spot)
        return Price(own.on_demand, spot, "", own.as_of, own.source)
    if instance_type not in PRICES:
        raise InputError(
            f"no price is known for {instance_type or 'a machine without a type'}; give cost.price with as_of, "
            "and on_demand or spot"
        )
    return PRICES[instance_type]


# -- of a run ----------------------------------------------------------------------------------------------------------


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


def planned_save_s(found: RunEstimate) -> float:
    """Seconds that training stands still for one save. In the background that is the start of the copy; of several
    ranks the first one gathers the weights meanwhile, and the others wait."""
    rank, ranks = found.rank, found.settings.ranks
    trained = [one for one in (rank, rank.critic) if one is not None]
    weights = found.settings.element * sum(one.num_trained for one in trained)
    if found.settings.checkpoint_copy != "none":
        return BACKGROUND_SAVE_S + (weights / found.gpu.host_bytes_per_s if ranks > 1 else 0.0)
    return (weights + sum(one.state_bytes() for one in trained) / ranks) / WAITING_SAVE_BYTES_PER_S


def launch_cost(
    profile: ClusterProfile, *, hours: float, num_nodes: int, node_price: float, overhead: float
) -> LaunchCost:
    cost = profile.cost
    storage = profile.storage.size_gib * cost.storage_per_gib_month * cost.storage_months
    return LaunchCost(hours, num_nodes, node_price, overhead, cost.boot_s, storage, cost.other)


# -- as a table: Spot beside on-demand, per run and per year, with what was assumed ------------------------------------


@dataclass(frozen=True)
class CostRow:
    capacity: str
    node_mtbf_hours: float | None  # None: not interrupted
    overhead: float
    low: LaunchCost
    high: LaunchCost


@dataclass(frozen=True)
class CostReport:
    rows: list[CostRow]
    price: Price
    num_nodes: int
    num_steps: int
    step_s: float
    step_source: str
    save_period: int
    best_save_period: int | None  # at the given, or the middle, MTBF
    runs_per_year: int
    assumed: list[str]
    warnings: list[str]

    @property
    def hours(self) -> float:
        return self.num_steps * self.step_s / 3600

    def lines(self) -> list[str]:
        return render_text(Path(__file__).with_name("cost.txt"), report=self, usd=_usd, span=_span).splitlines()

    def as_json(self) -> JsonObject:
        return {
            "hours": self.hours,
            "num_nodes": self.num_nodes,
            "num_steps": self.num_steps,
            "step_s": self.step_s,
            "step_source": self.step_source,
            "price": {"region": self.price.region, "as_of": self.price.as_of, "source": self.price.source},
            "best_save_period": self.best_save_period,
            "assumed": self.assumed,
            "warnings": self.warnings,
            "rows": [
                {
                    "capacity": row.capacity,
                    "node_mtbf_hours": row.node_mtbf_hours,
                    "overhead": row.overhead,
                    "usd": [row.low.in_all, row.high.in_all],
                    "usd_per_year": [row.low.in_all * self.runs_per_year, row.high.in_all * self.runs_per_year],
                }
                for row in self.rows
            ],
        }


def report_cost(
    profile: ClusterProfile,
    *,
    num_nodes: int,
    num_steps: int,
    step_s: float,
    step_source: str,
    save_period: int,
    save_s: float,
    save_source: str,
    today: date,
) -> CostReport:
    instance = find_instance(profile.nodes, profile.cluster.kind)
    price = price_of(instance.name, profile.cost.price)
    given = profile.cost.node_mtbf_hours
    mtbf_hours = (given,) if given is not None else SHOWN_MTBF_HOURS
    hours, interval_s = num_steps * step_s / 3600, min(save_period, num_steps) * step_s
    rows, warnings = [], []

    def row(capacity: str, mtbf: float | None, overhead: float, prices: tuple[float, float]) -> CostRow:
        low, high = (
            launch_cost(profile, hours=hours, num_nodes=num_nodes, node_price=node_price, overhead=overhead)
            for node_price in prices
        )
        return CostRow(capacity, mtbf, overhead, low, high)

    def interruptions(mtbf: float) -> Interruptions:
        cost = profile.cost
        return Interruptions(mtbf * 3600, num_nodes, save_s, cost.notice_share, cost.restart_s)

    best = None
    if (spot := price.range_of("spot")) is not None:
        for mtbf in mtbf_hours:
            rows.append(row("spot", mtbf, interruptions(mtbf).overhead(interval_s), spot))
        best = interruptions(mtbf_hours[len(mtbf_hours) // 2]).steps_between_saves(step_s)
        best = best and min(best, num_steps)
        if given is None:
            warnings.append(
                "how often a Spot machine is lost is not known: three cases are shown; give cost.node_mtbf_hours"
            )
    if (on_demand := price.range_of("on_demand")) is not None:
        rows.append(row("on_demand", None, save_s / interval_s, on_demand))
    if (days := (today - date.fromisoformat(price.as_of)).days) > OLD_AFTER_DAYS:
        warnings.append(
            f"the price is {days} days old ({price.source}, {price.as_of}); give today's in the profile: cost.price"
        )
    if num_nodes > 1 and step_source == "planned":
        warnings.append(
            "the planner does not count traffic between machines: the time is a lower bound until a run is measured"
        )
    cost = profile.cost
    assumed = [
        f"counted with {save_s:.3g} s that training stands still for a save ({save_source}), {cost.restart_s:g} s to "
        f"the next step after an interruption, and {cost.notice_share:.0%} of them announced (cost.save_s, restart_s, "
        "notice_share)"
    ]
    return CostReport(
        rows, price, num_nodes, num_steps, step_s, step_source, save_period, best, cost.runs_per_year, assumed, warnings
    )


def _usd(value: float) -> str:
    return f"${value:,.0f}"


def _span(low: float, high: float) -> str:
    return _usd(low) if round(low) == round(high) else f"{_usd(low)}–{high:,.0f}"


def gpu_of(profile: ClusterProfile) -> str:
    name = find_instance(profile.nodes, profile.cluster.kind).gpu
    if not name:
        raise InputError(
            "the profile names no instance_type, so its GPU is not known: name one, or give --gpu NAME to "
            "`posttrain plan`"
        )
    return name


def cost_on_cluster(
    profile: ClusterProfile,
    config: RunConfig,
    step_s: float | None = None,
    step_source: str = "measured",
    save_s: float | None = None,
    save_source: str = "measured",
) -> CostReport:
    """By the planned times of a step and a save, unless they are given. InputError where they cannot be planned."""
    from posttrain.apps.plan.plan import estimate_run, find_gpu, planned_step_s

    steps = num_steps_of(config)
    if step_s is None:
        found = estimate_run(config, find_gpu(gpu_of(profile)))
        step_s, step_source = planned_step_s(found, config), "planned"
        save_s, save_source = planned_save_s(found), "planned"
    if profile.cost.save_s is not None:
        save_s, save_source = profile.cost.save_s, "cost.save_s"
    if save_s is None:
        save_s, save_source = BACKGROUND_SAVE_S, "in the background"
    return report_cost(
        profile,
        num_nodes=config.cluster.num_nodes,
        num_steps=steps,
        step_s=step_s,
        step_source=step_source,
        save_period=config.checkpointing.save_period,
        save_s=save_s,
        save_source=save_source,
        today=date.today(),
    )


def num_steps_of(config: RunConfig) -> int:
    from posttrain.apps.plan.plan import NO_LIMIT

    if config.schedule.max_num_steps >= NO_LIMIT:
        raise InputError("how many steps the run has depends on the data; give the section's max_num_steps")
    return config.schedule.max_num_steps
