"""What every section of the config has in common (strict types, no unknown keys, a sentence a field), and its errors.

A section checks types and ranges of its own fields, and in `problems` what they must agree on; the config of a run does
so for fields of several sections. Values that posttrain does not implement are in `foreign/rules.yaml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic_core import ErrorDetails

from posttrain.errors import InputError
from posttrain.files.redaction import shown_setting

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FreeMap = dict[str, Any]
Parsed = TypeVar("Parsed")
MAX_INTEGER = 2**63
UNKNOWN_KEY = "unknown_key"  # type of an error; the value is not shown, because the key may be a misspelled `api_key`
MAX_FLOAT = 1e30  # what float32 can still multiply


def matching(pattern: str, message: str) -> AfterValidator:
    """For a text that must fit a pattern as a whole."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(message)
        return text

    return AfterValidator(check)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field of a section. A default of `...` means that it must be given; a class is called to make one."""
    if isinstance(default, type):
        return Field(default_factory=default, description=description, **limits)
    return Field(default, description=description, **limits)


IsSetByUser = Callable[[str], bool]  # of a dotted key: in a file or on the command line, not by a default or preset


@dataclass(frozen=True)
class UsedIf:
    """Mark of a field that is read only while another field of its section has one of these values."""

    switch: str
    values: tuple[object, ...] = (True,)


def members(annotation: object) -> Iterator[object]:
    """Of a union, or the type itself; `Annotated` is taken off."""
    if get_origin(annotation) is Annotated:
        yield from members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from members(option)
    else:
        yield annotation


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
    def _whole_floats_are_integers(cls, value: object) -> Any:
        # People write `max_num_steps: 1e6`. A float field turns the integer back into a float.
        if isinstance(value, float) and value.is_integer() and abs(value) < MAX_INTEGER:
            return int(value)
        if isinstance(value, int) and abs(value) >= MAX_INTEGER:  # computed: no file can spell it
            raise ValueError("must be a number of at most 64 bits")
        if isinstance(value, float) and math.isfinite(value) and abs(value) > MAX_FLOAT:
            raise ValueError(f"must be a number within ±{MAX_FLOAT:g}")
        return value

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        """What contradicts itself: each line names fields, values and the remedy. Reads neither data nor models."""
        return iter(())

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        """What is allowed and probably not meant."""
        return iter(())


class OpenSection(Section):
    """A section that posttrain reads nothing from but its switch: unknown keys are carried along."""

    model_config = ConfigDict(extra="allow")


def sections_in(value: object, path: str = "") -> Iterator[tuple[str, Section]]:
    """The section itself and every one inside, each with its dotted key."""
    if isinstance(value, Section):
        yield path, value
        value = dict(value)
    if isinstance(value, list):
        value = {str(index): inner for index, inner in enumerate(value)}
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from sections_in(inner, f"{path}.{name}".lstrip("."))


def problems_of(config: Section, is_set: IsSetByUser) -> list[str]:
    return [line for _, section in sections_in(config) for line in section.problems(is_set)]


def cautions_of(config: Section, is_set: IsSetByUser) -> list[str]:
    found: list[str] = []
    for path, section in sections_in(config):
        found += section.cautions(is_set)
        found += _unused_fields(section, path, is_set)
    return found


def _unused_fields(section: Section, path: str, is_set: IsSetByUser) -> Iterator[str]:
    """Fields that were written, that differ from the default, and that their switch turns off."""
    written: dict[UsedIf, list[str]] = {}
    for name, info in type(section).model_fields.items():
        for mark in info.metadata:
            if not isinstance(mark, UsedIf) or getattr(section, mark.switch) in mark.values:
                continue
            if is_set(f"{path}.{name}") and getattr(section, name) != info.get_default(call_default_factory=True):
                written.setdefault(mark, []).append(f"{path}.{name}")
    for mark, keys in written.items():
        if mark.values == (True,):
            yield f"{', '.join(keys)}: not used, because {path}.{mark.switch} is off"
        else:
            readers, value = " and ".join(map(str, mark.values)), getattr(section, mark.switch)
            yield f"{', '.join(keys)}: read by {readers} only, and {path}.{mark.switch} is {value}"


class ConfigError(InputError):
    """A config problem that the user can repair; the message names the key, where it was set, and the remedy."""


def message_of(problem: ErrorDetails) -> str:
    """Pydantic's message about one value, worded like the config's own errors."""
    return problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def explain_errors(error: ValidationError, path: str = "") -> list[str]:
    """One line for each key that pydantic refuses; `path` is the key of the map that was validated."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        key = ".".join([*([path] if path else []), *map(str, problem["loc"])])
        value = problem["input"]
        if problem["type"] == "missing":
            line = f"{key} is missing"
        elif isinstance(value, Mapping) or problem["type"] == UNKNOWN_KEY:
            line = f"{key}: {message_of(problem)}"
        else:
            line = f"{key} is {shown_setting(key, value):.200}: {message_of(problem)}"
        lines.setdefault(key, line)
    return list(lines.values())


def parse_as(kind: type[Parsed], value: object, where: str, error: type[InputError] = InputError) -> Parsed:
    """A dataclass of a JSON object in a file, checked by its annotations; `error` names the field that does not fit."""
    try:
        parsed: Parsed = _adapter(kind).validate_python(value)
        return parsed
    except ValidationError as refused:
        raise error(f"{where}: {explain_errors(refused)[0].strip()}") from None


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
