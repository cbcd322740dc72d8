"""Predicts time and cost of a training: from the planner on the machines of a cluster profile, or from the measured
steps of an earlier run. Recorded with the training, for comparison with the actual values.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.apps.launch.cost import cost_on_cluster, launch_cost, num_steps_of, price_of
from posttrain.apps.launch.instances import find_instance
from posttrain.config import RunConfig
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.loader import load_standalone
from posttrain.config.pipeline import PipelineSettings
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.reporting.wording import duration


@dataclass(frozen=True)
class TrainingCost:
    hours: float
    num_steps: int
    cost: tuple[float, float] | None  # by the lowest and the highest price; None: no price is known
    currency: str = ""  # that of pipeline.gpu_hour_price is not known

    @property
    def text(self) -> str:
        words = [duration(self.hours * 3600)]
        if self.cost is not None:
            words.append(self.currency + "–".join(dict.fromkeys(f"{amount:,.4g}" for amount in self.cost)))
        return ", ".join([*words, f"{self.num_steps:,} steps"])


def profile_of(settings: PipelineSettings) -> ClusterProfile | None:
    return None if settings.cluster_profile is None else load_standalone(ClusterProfile, Path(settings.cluster_profile))


def predict(config: RunConfig, settings: PipelineSettings, earlier: Path | None) -> JsonObject:
    """For the record of a training: `predicted`, or why there is none, and the `price` that was used. `earlier` is the
    folder of a run with the same settings."""
    profile = profile_of(settings)
    price = _price(config, settings, profile)
    try:
        return {"predicted": _predicted(config, profile, price, earlier), "price": price}
    except InputError as error:
        return {"not_predicted": str(error).splitlines()[0], "price": price}


def _predicted(
    config: RunConfig, profile: ClusterProfile | None, price: JsonObject | None, earlier: Path | None
) -> JsonObject:
    step_s = save_s = None
    if earlier is not None:
        from posttrain.apps.plan.measured import read_measured

        with suppress(InputError):  # without its metrics: as if there was no run before
            measured = read_measured(earlier)
            step_s, save_s = (measured.get(f"timing/train/{key}") for key in ("total_step_time", "checkpointing"))
    if profile is not None:
        report = cost_on_cluster(profile, config, step_s, save_s=save_s or None)
        rows = [row for row in report.rows if row.capacity == profile.nodes.capacity]
        cost = [min(row.low.in_all for row in rows), max(row.high.in_all for row in rows)] if rows else None
        return {"hours": report.hours, "num_steps": report.num_steps, "cost": cost}
    if step_s is None:
        raise InputError(
            "no machine is known to plan for, and no iteration before it had these settings; pipeline.cluster_profile "
            "names one"
        )
    hours = num_steps_of(config) * step_s / 3600
    cost = None if price is None else [hours * hourly for hourly in price["hourly"]]
    return {"hours": hours, "num_steps": num_steps_of(config), "cost": cost}


def _price(config: RunConfig, settings: PipelineSettings, profile: ClusterProfile | None) -> JsonObject | None:
    """Of all machines for an hour, the lowest and the highest; and what is paid once."""
    if profile is None:
        if settings.gpu_hour_price is None:
            return None
        hourly = settings.gpu_hour_price * config.cluster.num_workers
        return {"hourly": [hourly, hourly], "once": 0.0, "currency": ""}
    try:
        found = price_of(find_instance(profile.nodes, profile.cluster.kind).name, profile.cost.price)
    except InputError:
        return None
    if (prices := found.range_of(profile.nodes.capacity)) is None:
        return None
    nodes = config.cluster.num_nodes
    once = [launch_cost(profile, hours=0, num_nodes=nodes, node_price=one, overhead=0).in_all for one in prices]
    return {"hourly": [one * nodes for one in prices], "once": max(once), "currency": "$"}


def predicted_cost(values: Mapping[str, Any]) -> TrainingCost | None:
    if (found := values.get("predicted")) is None:
        return None
    cost = None if found["cost"] is None else (found["cost"][0], found["cost"][1])
    return TrainingCost(found["hours"], found["num_steps"], cost, (values["price"] or {}).get("currency", ""))


def actual_cost(values: Mapping[str, Any], seconds: float) -> TrainingCost:
    """Of a training that took `seconds`, at the price that was used for the prediction."""
    hours, price = seconds / 3600, values.get("price")
    if price is None:
        return TrainingCost(hours, values["step"], None)
    low, high = (hours * hourly + price["once"] for hourly in price["hourly"])
    return TrainingCost(hours, values["step"], (low, high), price["currency"])
