"""What a run costs at a price for an hour of one GPU. In the currency of the price; only GPUs are counted."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import RunConfig

NO_LIMIT = 1_000_000  # steps: the run ends with its epochs, and how many steps those have depends on the data


@dataclass(frozen=True)
class RunCost:
    gpu_hour_price: float
    num_gpus: int
    num_steps: int | None  # None: not known before the data is read
    step_s: float

    @property
    def per_step(self) -> float:
        return self.gpu_hour_price * self.num_gpus * self.step_s / 3600

    @property
    def in_all(self) -> float | None:
        return None if self.num_steps is None else self.per_step * self.num_steps

    def lines(self) -> list[str]:
        gpus = f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} at {self.gpu_hour_price:g} an hour each"
        lines = [f"  {_amount(self.per_step)} for a step of {self.step_s:.1f} s on {gpus}"]
        if self.num_steps is None or self.in_all is None:
            lines.append(
                f"  {_amount(1000 * self.per_step)} for 1,000 steps; how many a run has depends on the data, or on max_num_steps"
            )
        else:
            hours = self.num_steps * self.step_s / 3600
            steps = f"{self.num_steps:,} steps, {hours:,.1f} hours"
            lines.append(f"  {_amount(self.in_all)} for {steps}; less if the epochs end before")
        return lines


def cost_of(config: RunConfig, step_s: float, gpu_hour_price: float) -> RunCost:
    steps = config.schedule.max_num_steps
    return RunCost(gpu_hour_price, config.cluster.num_workers, steps if steps < NO_LIMIT else None, step_s)


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"
