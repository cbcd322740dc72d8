"""`doctor`: what becomes of problems that are found while a run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import NonNegativeInt, Section


class DoctorConfig(Section):
    on_error: Literal["warn", "stop"] = Field(
        default="warn",
        description="What an error of the doctor does: a line on the console, or the run saves and stops.",
    )
    kl_period: NonNegativeInt | Literal["auto"] = Field(
        default="auto",
        description="GRPO without KL penalty: steps between estimates of the KL; 0 is never, auto 10 with LoRA and 0 without.",
    )
