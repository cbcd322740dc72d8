"""What every section of the config has in common: strict types, no unknown keys, a sentence for each field.

A section checks types and ranges of its own fields. Constraints between sections are in `checks.py`; values that posttrain
does not implement are in `foreign_keys.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
FreeMap = dict[str, Any]


class Section(BaseModel):
    """One map of the YAML file. Strict: `"8"` is not a number and `true` is not 1; `1e3` is accepted where 1000 is."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        validate_assignment=True,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole_floats_are_integers(cls, value: Any) -> Any:
        # People write `max_num_steps: 1e6`. A float field turns the integer back into a float.
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value


class OpenSection(Section):
    """A section that posttrain reads nothing from but its switch: keys it has not heard of are carried along."""

    model_config = ConfigDict(extra="allow")
