"""The command line: overrides in Hydra's grammar (`a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`, `~a.b=c`), and short names.

Every key of the schema exists from the start, so the three ways to set mean the same here; what Hydra's `+` guards
against, an unknown key, is an error in any case. Settings that are typed often have a short name: `lr=1e-5 lora=16
steps=200`, or `--lr 1e-5`. A config file has the full names, and so has the `config.yaml` of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any

import yaml

from posttrain.config.base import ConfigError
from posttrain.config.data import REWARD
from posttrain.config.runs import KINDS, PAIR_KINDS
from posttrain.config.tree import (
    COMMAND_LINE,
    DEFAULT,
    REPLACES_BUILT_IN,
    Path,
    Tree,
    dotted,
    forget_arguments_of_another_class,
    leaves,
)
from posttrain.config.yaml_files import parse_value
from posttrain.files.redaction import redact_argument, shown_setting

_KEY = re.compile(r"[A-Za-z_][\w\-]*(?:\.[\w\-]+|\[\d+\])*")
_HYDRA_MAP_KEY = re.compile(r"([{,]\s*[\w.\-]+):(?=[^\s/])")
LORA = "policy.dtensor_cfg.lora_cfg"
MANY_EPOCHS = 1_000_000
ALIASES: dict[str, dict[str, str]] = yaml.safe_load(FilePath(__file__).with_name("short_names.yaml").read_text("utf-8"))
_CLOSE = 0.75  # no section of a config is that close to a short name


@dataclass(frozen=True)
class Override:
    text: str
    path: Path
    deletes: bool
    has_value: bool
    value: Any


def parse_override(text: str) -> Override:
    match = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(?:(=)(.*))?", text, flags=re.DOTALL)
    assert match is not None, "every string has this form"
    sign, key, equals, raw = match.groups()
    key = key.strip()
    deletes = sign == "~"
    if not _KEY.fullmatch(key) or (equals is None and not deletes):
        hint = f"; a config file is given with --config {text}" if text.endswith((".yaml", ".yml")) else ""
        raise ConfigError(
            f"command line: {redact_argument(text)!r} is not an override; write key=value (e.g. "
            f"policy.precision=float32), or ~key to remove{hint}"
        )
    try:
        if (raw or "").lstrip().startswith("{"):
            raw = _HYDRA_MAP_KEY.sub(r"\1: ", raw)  # Hydra accepts {a:1}; YAML needs {a: 1}
        value = (parse_value(raw) if raw.strip() else "") if equals else None
    except ValueError as error:
        shown = redact_argument(text)
        reason = f" ({error})" if shown == text else ""  # it may quote a part of the value
        raise ConfigError(
            f"command line: the value of {shown!r:.200} is not valid{reason}; put it in quotes if it is text"
        ) from error
    return Override(text, tuple(re.sub(r"\[(\d+)\]", r".\1", key).split(".")), deletes, bool(equals), value)


def apply_overrides(
    tree: Tree,
    overrides: Sequence[str],
    rename: Callable[[Tree], bool],
    has_default: Callable[[Path], bool],
    defaults: Tree | None = None,
) -> Tree:
    """`tree` with the overrides applied in order. `rename` rewrites old keys of one; whether it did is returned."""
    result = tree.copy()
    for text in overrides:
        override = parse_override(text)
        if override.deletes:
            _delete(result, override, has_default)
            continue
        written = Tree()
        written.put(override.path, override.value, COMMAND_LINE)
        if not rename(written):
            _assign(result, override.path, override.value, override)
            continue
        if written.get(override.path, result) is result and result.get(override.path, result) is not result:
            # The override has another name, but a value of the file has none.
            result.put(override.path, (defaults or Tree()).get(override.path), COMMAND_LINE)
        for path, value in leaves(written.values):
            if value != {}:  # the section of a key that was dropped
                _assign(result, path, value, override)
    return result


def _delete(tree: Tree, override: Override, has_default: Callable[[Path], bool]) -> None:
    absent = object()
    present = tree.get(override.path, absent)
    if present is absent:
        if has_default(override.path):
            return  # it has nothing but the default of the schema
        raise ConfigError(f"command line: {redact_argument(override.text)!r} removes a key that is not there")
    if override.has_value and present != override.value:
        raise ConfigError(
            f"command line: {redact_argument(override.text)!r} does not apply: `{dotted(override.path)}` is "
            f"{shown_setting(dotted(override.path), present)} ({tree.origin(override.path)})"
        )
    tree.remove(override.path)


def _assign(tree: Tree, path: Path, value: object, override: Override) -> None:
    _check_way(tree, path, override)
    below = tree.get(path)
    if path[-1] == "name" and isinstance(tree.get(path[:-1]), dict):
        forget_arguments_of_another_class(tree, path[:-1], {"name": value})
    replaces = path in REPLACES_BUILT_IN and tree.origin(path) == DEFAULT
    if isinstance(value, dict) and value and isinstance(below, dict) and not replaces:
        if "name" in value:
            forget_arguments_of_another_class(tree, path, value)
        for rest, inner in leaves(value):
            tree.put((*path, *rest), inner, COMMAND_LINE)
        return
    tree.put(path, value, COMMAND_LINE)


def _check_way(tree: Tree, path: Path, override: Override) -> None:
    """What is on the way to the key must be a map, or a list with that entry."""
    for length in range(1, len(path)):
        node = tree.get(path[:length])
        key = path[length]
        if isinstance(node, list) and not (key.isdecimal() and int(key) < len(node)):
            raise ConfigError(
                f"command line: {redact_argument(override.text)!r}: `{dotted(path[:length])}` is a list of "
                f"{len(node)}; name an entry, e.g. {dotted(path[:length])}[0]"
            )
        if node is not None and not isinstance(node, dict | list):
            raise ConfigError(
                f"command line: {redact_argument(override.text)!r}: `{dotted(path[:length])}` is "
                f"{shown_setting(dotted(path[:length]), node)}, which has no keys"
            )


def aliases_of(kind: str) -> dict[str, str]:
    """The full name of each short one; without those that set several keys: lora, data, reward, cliprange."""
    return {name: key.format(kind=kind) for name, key in {**ALIASES["all"], **ALIASES.get(kind, {})}.items()}


def file_dataset(kind: str) -> str:
    """The dataset_name of a file that is named without one."""
    return "PreferenceDataset" if kind in PAIR_KINDS else "ResponseDataset"


def short_names(kind: str) -> tuple[str, ...]:
    return ("lora", "data", *(("reward", "cliprange") if kind == "grpo" else ()), *aliases_of(kind))


def expand_aliases(kind: str, overrides: Sequence[str]) -> list[str]:
    """The overrides with full names.

    `steps` alone is the length of a run: epochs end it earlier only if they are given on the command line, too.
    """
    known = aliases_of(kind)
    expanded = [text for override in overrides for text in _expanded(kind, known, override)]
    names = {override.lstrip("+").partition("=")[0].strip() for override in overrides}
    if kind in KINDS and names & {"steps", "max_steps", "num_iterations"}:
        return [f"{kind}.max_num_epochs={MANY_EPOCHS}", *expanded]  # first: what else is given replaces it
    return expanded


def _expanded(kind: str, known: dict[str, str], text: str) -> list[str]:
    sign = text[: len(text) - len(text.lstrip("+"))]
    name, equals, value = text[len(sign) :].partition("=")
    name = name.strip()
    name = ALIASES["misplaced"].get(name, name)
    if not equals or ("." in name):
        return [text]
    if name in known and not (name == "teacher" and value.lstrip().startswith("{")):  # the section has that name too
        return [f"{known[name]}={value}"]
    if name == "lora":
        return _lora(text)
    if name == "data" and not value.lstrip().startswith(("{", "[")):
        return [f"data.train={{dataset_name: {file_dataset(kind)}, data_path: {_quoted(value)}}}"]
    if name == "reward" and kind == "grpo" and not value.lstrip().startswith(("{", "[")):
        key = "function" if {":", "."} & set(value) else "type"
        return [f"env.{REWARD}.{key}={_quoted(value)}", f"data.default.env_name={REWARD}"]
    if name == "cliprange" and kind == "grpo":
        return [f"loss_fn.ratio_clip_{end}={value}" for end in ("min", "max")]
    if name not in short_names(kind) and (near := get_close_matches(name, short_names(kind), 1, _CLOSE)):
        raise ConfigError(f"command line: unknown key `{name}`; did you mean `{near[0]}`?")
    return [text]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _lora(text: str) -> list[str]:
    """`lora=16` is the rank; `lora=true` keeps the default rank."""
    value = parse_override(text).value
    if isinstance(value, bool):
        return [f"{LORA}.enabled={str(value).lower()}"]
    if isinstance(value, int) and value >= 0:
        return [f"{LORA}.enabled=true", f"{LORA}.dim={value}"] if value else [f"{LORA}.enabled=false"]
    if isinstance(value, dict):
        return [text.replace("lora=", f"{LORA}=", 1)]
    raise ConfigError(f"command line: {text!r}: lora takes the rank of the adapters, true or false, e.g. lora=16")
