"""The schema of gate.yaml: what a candidate has to show before it may replace the model in production."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Fraction, NonNegativeFloat, PositiveInt, Section, setting
from posttrain.config.rewards import Regex

Direction = Literal["higher", "lower"]
COST = "cost_per_answer"
Confidence = Annotated[float, Field(gt=0.5, lt=1)]


class GateSettings(Section):
    confidence: Confidence = setting(0.95, "Confidence of each one-sided bound: 0.95 errs in 1 of 20 cases at most.")
    power: float = setting(
        0.8, "Chance of a decision, as a share, that the suggested number of problems should give.", gt=0, lt=1
    )
    looks: PositiveInt = setting(
        1, "How often one candidate may be looked at as problems are added; the error is shared among the looks."
    )
    min_problems: PositiveInt = setting(30, "Problems below which no interval is trusted and nothing is decided.")
    max_problems: PositiveInt | None = setting(
        None, "A check that is open with so many problems, or would be even at best, has failed; null: no limit."
    )
    max_unscored_rate: Fraction = setting(
        0.05, "Share of the answers of an evaluation that may lack a score; above, nothing is decided."
    )
    on_doctor_error: Literal["note", "reject"] = setting(
        "note", "What an error that the doctor found in the candidate's training does: it is noted, or rejects."
    )
    speed_noise: NonNegativeFloat = setting(
        0.15, "Relative difference in speed, and so in cost_per_answer, between equal evaluations."
    )

    @model_validator(mode="after")
    def _something_can_be_decided(self) -> GateSettings:
        if self.max_problems is not None and self.max_problems < self.min_problems:
            raise ValueError(f"max_problems {self.max_problems} is below min_problems {self.min_problems}")
        return self


class CheckConfig(Section):
    """One requirement on one metric of one evaluation. Every bound that is set has to hold."""

    metric: str = setting(
        ...,
        "pass@k, cons@k, avg@k, reward, part:NAME, mean_length_tokens, truncation_rate, unscored_rate, refusal_rate, "
        "format_rate, kl_from_base or cost_per_answer.",
    )
    evaluation: str = setting("main", "Name under which --candidate and --production give the folder.")
    at_least: float | None = setting(None, "The candidate's mean must be at least this.")
    at_most: float | None = setting(None, "The candidate's mean must be at most this.")
    better_by: NonNegativeFloat | None = setting(
        None, "It must be better than production's by at least this; 0 is better at all."
    )
    worse_by_at_most: NonNegativeFloat | None = setting(
        None, "It must not be worse than production's by more than this (non-inferiority)."
    )
    relative: bool = setting(
        False, "better_by and worse_by_at_most are shares of production's mean, without its sign: 0.1 is 10 %."
    )
    better: Direction | None = setting(None, "Which way is better; null is what the metric's name implies.")
    confidence: Confidence | None = setting(None, "Overrides gate.confidence for this check.")
    patterns: list[Regex] | None = setting(
        None,
        "Regular expressions, any of which makes an answer count; format_rate needs them, refusal_rate has its own.",
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> CheckConfig:
        bounds = (self.at_least, self.at_most, self.better_by, self.worse_by_at_most)
        if all(bound is None for bound in bounds):
            raise ValueError("sets no bound: set at_least, at_most, better_by or worse_by_at_most")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is above at_most {self.at_most:g}")
        if self.relative and self.better_by is None and self.worse_by_at_most is None:
            raise ValueError("relative is for better_by and worse_by_at_most; at_least and at_most are absolute")
        return self

    @model_validator(mode="after")
    def _shares_are_no_percentages(self) -> CheckConfig:
        """`truncation_rate at_most 5`, meant as 5 %, would let everything through."""
        if not (self.metric.startswith(("pass@", "cons@")) or self.metric.endswith("_rate")):
            return self
        margins = {} if self.relative else {"better_by": self.better_by, "worse_by_at_most": self.worse_by_at_most}
        for name, bound in {"at_least": self.at_least, "at_most": self.at_most, **margins}.items():
            if bound is not None and not 0 <= bound <= 1:
                share = f"{self.metric} is a share between 0 and 1; write 5 % as 0.05"
                raise ValueError(f"{name} is {bound:g}, and {share}")
        return self

    @property
    def compares(self) -> bool:
        return self.better_by is not None or self.worse_by_at_most is not None


class GateConfig(Section):
    gate: GateSettings = setting(GateSettings, "What holds for all checks.")
    checks: dict[str, CheckConfig] = setting(..., "The requirements, by names of your own.", min_length=1)

    @model_validator(mode="after")
    def _equal_cost_can_pass(self) -> GateConfig:
        noise = self.gate.speed_noise
        for name, check in self.checks.items():
            margin = check.worse_by_at_most
            if check.metric != COST or not check.relative or margin is None or margin > noise * (1 + margin):
                continue
            least = f"more than {noise / (1 - noise):.3g}" if noise < 1 else "a smaller gate.speed_noise"
            raise ValueError(
                f"checks.{name}.worse_by_at_most is {margin:g}, and the cost of equal evaluations may differ by "
                f"{noise:g} of itself (gate.speed_noise): not even an equal cost could pass, which takes {least}"
            )
        return self
