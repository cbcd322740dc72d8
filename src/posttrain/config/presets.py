"""Presets: packaged settings that make a run compute what another system computes. `preset: NAME` lays one over the defaults.

A preset sets how rewards become advantages and which loss is used. It sets no models, data, batch sizes, lengths or
learning rates. Whatever your file or the command line sets wins over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as FilePath

from posttrain.config.base import ConfigError
from posttrain.config.overrides import parse_override
from posttrain.config.tree import COMMAND_LINE, Tree
from posttrain.config.yaml_files import parse_document

PRESETS_DIR = FilePath(__file__).parent / "presets"
KEY = ("preset",)


@dataclass(frozen=True)
class Preset:
    kind: str
    name: str
    summary: str  # its file's first line


def presets(kind: str) -> list[Preset]:
    """Those for one kind of run, by name."""
    files = sorted((PRESETS_DIR / kind).glob("*.yaml"))
    return [Preset(kind, file.stem, _first_line(file)) for file in files]


def origin_of(name: str) -> str:
    """The origin of values that a preset sets."""
    return f"preset {name}"


def is_preset_origin(origin: str) -> bool:
    return origin.startswith("preset ")


def chosen_preset(kind: str, own: Tree, overrides: Sequence[str]) -> Tree:
    """The settings of the preset that the command line or else the file names; nothing if neither does."""
    name, origin = own.get(KEY), own.origin(KEY)
    for override in map(parse_override, overrides):
        if override.path == KEY:
            name, origin = (None if override.deletes else override.value), COMMAND_LINE
    if name is None:
        return Tree()
    known = [preset.name for preset in presets(kind)]
    if name not in known:
        raise ConfigError(f"{origin}: `preset` = {name!r}: {_suggestion(kind, str(name), known)}")
    file = PRESETS_DIR / kind / f"{name}.yaml"
    values = parse_document(file.read_text(encoding="utf-8"), origin_of(name)).values
    return Tree.from_one_origin(values, origin_of(name))


def _suggestion(kind: str, name: str, known: Sequence[str]) -> str:
    if not known:
        return f"there are no presets for {kind}"
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no such preset for {kind}; {hint}There are {', '.join(known)}"


def _first_line(file: FilePath) -> str:
    with file.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()
