"""`doctor`: when a KL without price is estimated, and that it changes no training."""

from __future__ import annotations

import pytest

from posttrain.config import load_config
from posttrain.config.base import ConfigError
from posttrain.config.changes import changes_since

FREE, PRICED = "loss_fn.reference_policy_kl_penalty=0", "loss_fn.reference_policy_kl_penalty=0.01"
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"


@pytest.mark.parametrize(
    ("settings", "period", "needs_reference"),
    [
        ([PRICED], 0, True),  # measured in every step
        ([FREE], 0, False),  # a copy of the model would be needed
        ([FREE, LORA], 10, True),  # the model under the adapters is there anyway
        ([FREE, "doctor.kl_period=5"], 5, True),
        ([FREE, LORA, "doctor.kl_period=0"], 0, False),
    ],
)
def test_period_of_the_kl_estimate(settings: list[str], period: int, needs_reference: bool) -> None:
    config = load_config("grpo", None, settings).config
    assert (config.kl_period, config.needs_reference) == (period, needs_reference)


def test_an_estimate_every_few_steps_is_no_scoring_of_every_step() -> None:
    plain, estimating = (
        load_config("grpo", None, [FREE, more]).config for more in ("doctor.kl_period=0", "doctor.kl_period=5")
    )
    assert plain.step_sizes() == estimating.step_sizes()


def test_settings_of_the_doctor_may_change_when_a_run_is_resumed() -> None:
    before, now = load_config("sft"), load_config("sft", None, ["doctor.on_error=stop"])
    assert [change.is_training for change in changes_since(before.to_yaml(), now)] == [False]


def test_what_an_error_does_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"doctor\.on_error"):
        load_config("grpo", None, ["doctor.on_error=die"])
