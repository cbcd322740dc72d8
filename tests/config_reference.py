"""The page "Every setting" of the site: type, default and meaning, read off the sections of the config."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from posttrain.apps.launch.lint.check import RULES
from posttrain.config import load_config
from posttrain.config.base import Section
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.gate import GateConfig
from posttrain.config.pipeline import PipelineConfig
from posttrain.config.rewards import REWARD_TYPES, RewardConfig
from posttrain.config.runs import RUN_CONFIGS

KINDS = ("grpo", "dpo", "rm", "sft")
SAME_AS_TRAIN = ("data.validation.", "data.default.")  # have the keys of data.train
HEADER = "| key | type | default | meaning |\n|---|---|---|---|\n"
HEAD = """# Every setting

Type, default and meaning of each key. [Config](config.md) explains files, overrides and short names. A default such as
`${policy.model_name}` is the value of another key. Where kinds of run have different defaults, each is named.

"""
PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false"}
BOUNDS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
OTHER_FILES = {
    "Evaluation: `posttrain eval`": EvalRunConfig,
    "Gate: `posttrain gate`": GateConfig,
    "Pipeline: `posttrain pipeline`": PipelineConfig,
    "Cluster profile: `posttrain launch`": ClusterProfile,
}


def config_reference() -> str:
    kinds = {kind: dict(_fields(RUN_CONFIGS[kind])) for kind in KINDS}
    defaults = {kind: _built_in(kind) for kind in KINDS}
    keys = dict.fromkeys(key for fields in kinds.values() for key in fields)
    rows: dict[str, list[str]] = {}
    for key in keys:
        info = next(fields[key] for fields in kinds.values() if key in fields)
        if _section_of(info.annotation) is not None or key.startswith(SAME_AS_TRAIN):
            continue
        having = [kind for kind in kinds if key in kinds[kind] and not _is_off(defaults[kind], key)]
        values = {kind: _built_in_value(defaults[kind], key, _schema_default(info)) for kind in having}
        top = key.partition(".")[0]
        only = "" if len(having) in (1, len(kinds)) else f" ({', '.join(having).upper()})"
        rows.setdefault(top, []).append(_row(key, info, _one_or_each(values), only))
    text = HEAD + "## Runs: `posttrain grpo`, `dpo`, `rm`, `sft`\n"
    for top, lines in rows.items():
        what = next(fields[top].description or "" for fields in kinds.values() if top in fields)
        more = " `data.validation` and `data.default` have the same keys as `data.train`." if top == "data" else ""
        text += f"\n### `{top}`\n\n{what}{more}\n\n{HEADER}{''.join(lines)}"
    text += "\n## Types of reward: `env.NAME.type`\n\nEvery type also has these:\n\n" + HEADER
    common = {name: info for name, info in RewardConfig.model_fields.items() if name != "type"}
    text += "".join(_row(name, info, _schema_default(info)) for name, info in common.items())
    for name, section in REWARD_TYPES.items():
        own = [(key, info) for key, info in _fields(section) if key not in RewardConfig.model_fields]
        lines = "".join(_row(key, info, _schema_default(info)) for key, info in own)
        text += f"\n### `{name}`\n\n{_first_sentence(section)}\n" + (f"\n{HEADER}{lines}" if lines else "")
    for heading, model in OTHER_FILES.items():
        others = [(key, info) for key, info in _fields(model) if _section_of(info.annotation) is None]
        text += f"\n## {heading}\n\n{HEADER}" + "".join(_row(key, info, _schema_default(info)) for key, info in others)
    rules = "".join(f"| `{name}` | {about} |\n" for name, about in RULES.items())
    return f"{text}\n## Rules of `posttrain launch check`\n\n| rule | requirement |\n|---|---|\n{rules}"


def _fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field by its dotted key, sections before what is in them."""
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        yield key, info
        section = _section_of(info.annotation)
        if section is not None:
            inner = f"{key}.NAME." if get_origin(_plain(info.annotation)[0]) is dict else f"{key}."
            yield from _fields(section, inner)


def _section_of(annotation: object) -> type[Section] | None:
    for option in _plain(annotation):
        for candidate in (option, *get_args(option)):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                return candidate
    return None


def _plain(annotation: object) -> list[Any]:
    """The members of a union, without None, and with `Annotated` taken off."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in _plain(member)]
    return [] if annotation is types.NoneType else [annotation]


def _type(info: FieldInfo) -> str:
    words = []
    for option in dict.fromkeys(_plain(info.annotation)):
        if get_origin(option) is Literal:
            words += [f"`{value}`" for value in get_args(option)]
        elif get_origin(option) is list:
            words.append("list")
        elif get_origin(option) is dict or option is dict:
            words.append("map")
        else:
            words.append(PLAIN.get(option, "value"))
    bounds = [*info.metadata, *_bounds_in(info.annotation)]
    limits = [
        f"{sign} {getattr(bound, name):g}"
        for bound in bounds
        for kind, (name, sign) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    null = ["null"] if types.NoneType in get_args(info.annotation) else []
    return ", ".join([" or ".join([*words, *null]), *dict.fromkeys(limits)])


def _bounds_in(annotation: object) -> Iterator[object]:
    for member in (annotation, *get_args(annotation)):
        if get_origin(member) is Annotated:
            for extra in get_args(member)[1:]:
                yield from extra.metadata if isinstance(extra, FieldInfo) else (extra,)


def _built_in(kind: str) -> Mapping[str, object]:
    """The built-in values of a kind of run; of one that is computed from others, how."""
    loaded = load_config(kind)
    return {**loaded.flat(), **loaded.expressions}


def _is_off(values: Mapping[str, object], key: str) -> bool:
    """Whether the section of a key is null in this kind of run, as `policy.generation` is where nothing is sampled."""
    return key.startswith("policy.generation.") and values.get("policy.generation", 0) is None


def _built_in_value(values: Mapping[str, object], key: str, default: object) -> object:
    """The value of a key; of a map, its entries."""
    entries = {name.removeprefix(f"{key}."): value for name, value in values.items() if name.startswith(f"{key}.")}
    return values.get(key, entries or default)


def _schema_default(info: FieldInfo) -> object:
    if info.default is PydanticUndefined and info.default_factory is None:
        return "required"
    return info.get_default(call_default_factory=True)


def _one_or_each(values: Mapping[str, object]) -> object:
    """One default, or those of each kind where they differ."""
    groups: dict[str, list[str]] = {}
    for kind, value in values.items():
        groups.setdefault(_shown(value), []).append(kind.upper())
    if len(groups) == 1:
        return next(iter(values.values()))
    return _Shown("; ".join(f"{shown} ({', '.join(kinds)})" for shown, kinds in groups.items()))


class _Shown(str):
    """A default that is written already."""


def _shown(value: object) -> str:
    if isinstance(value, _Shown):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "required":
        return "required"
    if isinstance(value, Section):
        return "see its keys"
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}…`"


def _row(key: str, info: FieldInfo, default: object, remark: str = "") -> str:
    meaning = (info.description or "").replace("|", "\\|")
    return f"| `{key}` | {_type(info)} | {_shown(default)} | {meaning}{remark} |\n"


def _first_sentence(section: type[Section]) -> str:
    lines: Sequence[str] = (section.__doc__ or "").strip().split("\n\n")
    return " ".join(lines[0].split()) if section.__doc__ and section.__doc__ != RewardConfig.__doc__ else ""
