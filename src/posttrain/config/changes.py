"""Which settings differ between the config of a run's folder and the config the run is started with now.

The two are compared value by value, not as text. A default that a newer version of posttrain added, a key that it
removed or renamed, and another spelling of the same path are not differences.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path as FilePath

import yaml

from posttrain.config.base import ConfigError
from posttrain.config.foreign.nemo_rl import apply_renames
from posttrain.config.loader import LoadedConfig, built_in_defaults
from posttrain.config.policy import is_automatic
from posttrain.config.runs import KINDS
from posttrain.config.schema import find, schema_of, unknown_keys
from posttrain.config.tree import DEFAULT, Path, Values, dotted, leaves, without_marks
from posttrain.config.yaml_files import parse_document
from posttrain.files.redaction import same_but_for_credentials, without_credentials

FREE_TO_CHANGE = tuple(yaml.safe_load(FilePath(__file__).with_name("free_to_change.yaml").read_text("utf-8")))
_SCHEDULER = ("policy", "scheduler")
NOT_SET = "not set"
MAX_SHOWN = 120  # characters of a value in a message


@dataclass(frozen=True)
class ConfigChange:
    key: str  # dotted
    old: str  # as JSON, or NOT_SET
    new: str
    is_training: bool  # the run is only resumed with it if the user asks for that

    def __str__(self) -> str:
        shown = [text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…" for text in (self.old, self.new)]
        return f"{self.key}: {' -> '.join(shown)}"


def changes_since(old_yaml: str, loaded: LoadedConfig, label: str = "config.yaml") -> tuple[ConfigChange, ...]:
    """The settings that differ, in the order of the config. `old_yaml` is a file that `LoadedConfig.to_yaml` wrote."""
    old_tree = parse_document(old_yaml, label)
    kinds = [kind for kind in KINDS if kind in old_tree.values]
    if kinds and loaded.kind not in kinds:
        raise ConfigError(f"{label} is the config of a {kinds[0]} run, and this is a {loaded.kind} run")
    apply_renames(old_tree, loaded.kind, [])
    plain = without_marks(old_tree.values)
    _name_old_deviation(plain)
    # A key that this version does not have was written by another version and has no value to compare with.
    removed = set(unknown_keys(schema_of(loaded.kind), plain))
    old = {
        path: value for path, value in leaves(plain) if not any(path[: len(unknown)] == unknown for unknown in removed)
    }
    new = dict(leaves(without_marks(parse_document(loaded.to_yaml(), label).values)))
    if new.get(_SCHEDULER) == "auto" and is_automatic(old.get(_SCHEDULER)):
        del new[_SCHEDULER], old[_SCHEDULER]  # it is kept, whatever the number of steps is now
    changes = {dotted(path): change for path, change in _differences(old, new, loaded)}
    return tuple(change for change in changes.values() if not _follows(change, changes, loaded))


def _name_old_deviation(values: Values) -> None:
    """Before there was a section `teacher`, `std_over: group` with a leave-one-out baseline was what `others` is."""
    estimator = (values.get("grpo") or {}).get("adv_estimator")
    if "teacher" in values or not isinstance(estimator, dict):
        return
    if estimator.get("std_over") == "group" and estimator.get("use_leave_one_out_baseline") is True:
        estimator["std_over"] = "others"


def same_but_for_the_version(old: Mapping[str, object], new: Mapping[str, object], loaded: LoadedConfig) -> bool:
    """Whether settings by dotted key, `old` of another version of posttrain, are those of `loaded`.

    A key that this version does not have, and a new one at its default, are not differences.
    """
    schema = schema_of(loaded.kind)
    for key in old.keys() | new.keys():
        if key in old and key in new:
            if not same_but_for_credentials(key, old[key], new[key]):
                return False
        elif key in new:
            if new[key] is not None and loaded.origins.get(key, DEFAULT) != DEFAULT:
                return False
        elif find(schema, tuple(key.split("."))) is not None:
            return False
    return True


def _differences(
    old: dict[Path, object], new: dict[Path, object], loaded: LoadedConfig
) -> Iterator[tuple[Path, ConfigChange]]:
    defaults = built_in_defaults(loaded.kind)
    for path in [*new, *(path for path in old if path not in new)]:
        if path in old and path in new:
            if _is_same(old[path], new[path]) or same_but_for_credentials(dotted(path), old[path], new[path]):
                continue
        elif path in new:
            # What the old config does not have, and the default of this version sets.
            is_default = loaded.origins.get(dotted(path)) == DEFAULT or _is_same(defaults.get(path), new[path])
            if new[path] is None or new[path] == {} or is_default:
                continue
        elif old[path] is None or old[path] == {}:
            continue  # the settings below it are named one by one
        is_free = any(fnmatchcase(dotted(path), pattern) for pattern in FREE_TO_CHANGE)
        is_training = not is_free and not _has_moved(path, old.get(path), new.get(path))
        yield path, ConfigChange(dotted(path), _shown(old, path), _shown(new, path), is_training)


def _is_same(old: object, new: object) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_is_same(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if isinstance(old, str) and isinstance(new, str):
        # The name of a file that the Python API writes holds a digest of its content.
        is_digested = re.search(r"-[0-9a-f]{16}\.(jsonl|pkl:\w+)$", old) is not None
        return _absolute(old) == _absolute(new) or (is_digested and old.rpartition("/")[2] == new.rpartition("/")[2])
    return old == new and isinstance(old, bool) == isinstance(new, bool)


def _absolute(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _has_moved(path: Path, old: object, new: object) -> bool:
    """A file or folder that kept its name. Data is compared with the checkpoint when it is loaded; anything else counts
    as moved only if nothing is left at its old place, or a file with the same content."""
    if not isinstance(old, str) or not isinstance(new, str) or os.sep not in old + new:
        return False
    after = _place(new)
    if not after.exists() or FilePath(old).name != FilePath(new).name:
        return False
    if path[0] == "data" or not (before := _place(old)).exists():
        return True
    return before.is_file() and after.is_file() and before.read_bytes() == after.read_bytes()


def _place(text: str) -> FilePath:
    """The file or folder that `text` names; of path.py:name, the file."""
    whole = FilePath(text).expanduser()
    return whole if whole.exists() or ":" not in text else FilePath(text.rpartition(":")[0]).expanduser()


def _follows(change: ConfigChange, changes: dict[str, ConfigChange], loaded: LoadedConfig) -> bool:
    """Whether the value is computed from another changed setting that counts at least as much."""
    expression = loaded.expressions.get(change.key, "")
    others = [other for other in changes.values() if f"${{{other.key}}}" in expression]
    return any(other.is_training or not change.is_training for other in others)


def _shown(values: dict[Path, object], path: Path) -> str:
    if path not in values:
        return NOT_SET
    return json.dumps(without_credentials(values[path], dotted(path)), ensure_ascii=False, default=str)
