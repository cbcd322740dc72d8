"""The cost of a run on a cluster, as a table: Spot beside on-demand, per run and per year, with what was assumed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from posttrain.apps.launch.cost import SHOWN_MTBF_HOURS, LaunchCost, interruptions_of, launch_cost
from posttrain.apps.launch.instances import find_instance
from posttrain.apps.launch.prices import Price, age_warning, price_of
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.files.json_files import JsonObject


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
        where = f" in {self.price.region}" if self.price.region else ""
        lines = [
            f"  {self.num_steps:,} steps of {self.step_s:.1f} s ({self.step_source}): {self.hours:,.1f} hours on "
            f"{self.num_nodes} machine{'s' if self.num_nodes > 1 else ''}",
            f"  price{where} of {self.price.as_of}, {self.price.source}",
            f"  {'':<34}{'wasted':>8}{'a run':>20}{self.runs_per_year:>8} runs",
        ]
        for row in self.rows:
            name = row.capacity.replace("_", "-")
            if row.node_mtbf_hours is not None:
                name += f", a machine lost every {row.node_mtbf_hours:g} h"
            yearly = _span(row.low.in_all * self.runs_per_year, row.high.in_all * self.runs_per_year)
            lines.append(f"  {name:<34}{row.overhead:>8.1%}{_span(row.low.in_all, row.high.in_all):>20}{yearly:>24}")
        first = self.rows[0].low
        lines.append(
            f"  in each run: start {_usd(first.start)}, storage {_usd(first.storage)}, other {_usd(first.other)}"
        )
        lines += [f"  {line}" for line in self.assumed]
        if self.best_save_period is not None:
            lines.append(
                f"  best checkpointing.save_period on Spot: {self.best_save_period} (this config: {self.save_period})"
            )
        return [*lines, *(f"  warning: {warning}" for warning in self.warnings)]

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

    best = None
    if (spot := price.range_of("spot")) is not None:
        for mtbf in mtbf_hours:
            rows.append(row("spot", mtbf, interruptions_of(profile, num_nodes, mtbf).overhead(interval_s), spot))
        usual = interruptions_of(profile, num_nodes, mtbf_hours[len(mtbf_hours) // 2])
        best = usual.steps_between_saves(step_s)
        best = best and min(best, num_steps)
        if given is None:
            warnings.append(
                "how often a Spot machine is lost is not known: three cases are shown; give cost.node_mtbf_hours"
            )
    if (on_demand := price.range_of("on_demand")) is not None:
        rows.append(row("on_demand", None, profile.cost.save_s / interval_s, on_demand))
    if (old := age_warning(price, today)) is not None:
        warnings.append(old)
    if num_nodes > 1 and step_source == "planned":
        warnings.append(
            "the planner does not count traffic between machines: the time is a lower bound until a run is measured"
        )
    cost = profile.cost
    assumed = [
        f"counted with a save of {cost.save_s:g} s, {cost.restart_s:g} s to the next step after an interruption, and "
        f"{cost.notice_share:.0%} of them announced (cost.save_s, restart_s, notice_share)"
    ]
    return CostReport(
        rows, price, num_nodes, num_steps, step_s, step_source, save_period, best, cost.runs_per_year, assumed, warnings
    )


def _usd(value: float) -> str:
    return f"${value:,.0f}"


def _span(low: float, high: float) -> str:
    return _usd(low) if round(low) == round(high) else f"{_usd(low)}–{high:,.0f}"
