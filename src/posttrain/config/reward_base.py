"""What every type of reward has in common. The types are in `rewards.py` and `judge_reward.py`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from posttrain.config.base import PositiveFloat, PositiveInt, Section, setting

WHAT_TYPE_MEANS = "What kind of reward this is."


class RewardConfig(Section):
    """One reward. The built-in ones give 0 to 1, and 1 is best, so that weights compare."""

    default_timeout_s: ClassVar[float] = 10.0
    default_num_workers: ClassVar[int] = 8
    keeps_cores_busy: ClassVar[bool] = False  # then more workers than cores only cost
    mostly_waits: ClassVar[bool] = False  # then there may be more workers than cores

    type: str = setting(..., WHAT_TYPE_MEANS)
    weight: float = setting(1.0, "Factor in the sum of the environment's rewards; 0 only records, negative punishes.")
    num_workers: PositiveInt | None = setting(
        None, "Processes that score side by side; null is the environment's number."
    )
    timeout_s: PositiveFloat | None = setting(
        None, "Seconds after which scoring one answer is given up; null is the environment's limit."
    )


def _is_regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f", character {error.pos + 1}"
        raise ValueError(f"not a regular expression: {error.msg}{where}") from None
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression that can be used: {error}") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_is_regular_expression)]
