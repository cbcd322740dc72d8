"""What decides how answers are scored: the settings of a judge, and the content of the files that they name.

An evaluation keeps it in its identity, and two evaluations are compared by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.named_files import settings_with_files
from posttrain.config.tree import dotted, leaves
from posttrain.hashing import digest, hash_files

# How fast a judge is, and what it costs: it says the same.
_PACE = (
    "num_workers",
    "timeout_s",
    "request_timeout_s",
    "max_retries",
    "retry_base_s",
    "retry_max_s",
    "cache",
    "cache_path",
    "usage_file",
    "input_price",
    "output_price",
    "api_key_env",
    "device",
    "max_batch_tokens",
)
_NAMED, _CONTENT, _PART = "named", "content", "part"

Judge = Mapping[str, Any]  # by dotted key of its settings: a value, or the content of what the value names


def judge_settings(env: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted key, without what only decides how fast it is."""
    flat = {dotted(path): value for path, value in leaves(dict(env))}
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in _PACE}


def judge_of(env: Mapping[str, Any]) -> dict[str, Any]:
    """The same with files looked at. Names of files, folders and modules do not count, what is in them does."""
    found = judge_settings(env)
    for named in settings_with_files(dict(env)):
        if named.key in found:
            content = digest(list(zip(named.names, hash_files(named.files), strict=True)))
            found[named.key] = {_NAMED: found[named.key], _CONTENT: content, _PART: named.part}
    return found


def differences(ours: Judge, theirs: Judge) -> list[tuple[str, Any, Any]]:
    """(key, ours to show, theirs to show) of what makes them two judges."""
    keys = dict.fromkeys([*ours, *theirs])
    return [
        (key, _shown(ours.get(key)), _shown(theirs.get(key)))
        for key in keys
        if _meant(ours.get(key)) != _meant(theirs.get(key))
    ]


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and _CONTENT in value


def _meant(value: Any) -> Any:
    return (value[_CONTENT], value[_PART]) if _is_content(value) else value


def _shown(value: Any) -> Any:
    return f"{value[_NAMED]} (content {value[_CONTENT][:8]})" if _is_content(value) else value
