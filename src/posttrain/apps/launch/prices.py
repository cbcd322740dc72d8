"""Prices of machines, USD an hour, each with its day, source and region. A profile's own price replaces them.

Spot prices move hourly and by zone: a row has the lowest and the highest of its region's zones on that day.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from posttrain.config.cluster_profile import PriceSection
from posttrain.errors import InputError

OLD_AFTER_DAYS = 90
_AWS = ("us-east-2", "2026-08-22", "skypilot-catalog v7")
_GCP = ("us-central1", "2026-08-21", "skypilot-catalog v8, GPU row and host row")


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

    def age_days(self, today: date) -> int:
        return (today - date.fromisoformat(self.as_of)).days


PRICES = {
    "p4d.24xlarge": Price(21.96, (9.86, 19.87), *_AWS),
    "p5.48xlarge": Price(55.04, (19.97, 20.39), *_AWS),
    "p5e.48xlarge": Price(None, (23.99, 25.19), *_AWS),
    "p5en.48xlarge": Price(63.30, (26.28, 26.92), *_AWS),
    "p6-b200.48xlarge": Price(113.93, (41.6, 42.2), *_AWS),
    "a3-highgpu-8g": Price(87.83, (52.70, 52.70), *_GCP),
    "a3-megagpu-8g": Price(92.21, (55.32, 55.32), *_GCP),
    "a3-ultragpu-8g": Price(86.76, (50.38, 50.38), *_GCP),
    "a4-highgpu-8g": Price(
        90.22, (39.63, 39.63), _GCP[0], _GCP[1], "skypilot-catalog v8; its host row is 0: least certain"
    ),
}


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


def age_warning(price: Price, today: date) -> str | None:
    days = price.age_days(today)
    if days <= OLD_AFTER_DAYS:
        return None
    return f"the price is {days} days old ({price.source}, {price.as_of}); give today's in the profile: cost.price"
