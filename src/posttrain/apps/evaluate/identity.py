"""The identity of an evaluation: model, problems, prompts, sampling and judge. Metrics are not part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from posttrain.config.named_files import files_named_in, settings_with_files
from posttrain.config.tree import dotted, leaves
from posttrain.files.digests import digest, hash_files
from posttrain.types import Task

# Speed and cost of a judge: they do not change its scores.
_SPEED_AND_COST = (
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

Judge = Mapping[str, object]  # by dotted key of its settings: a value, or the content of what the value names


def prompts_hash(problems: Sequence[Task]) -> str:
    """Digest of the prompts and their order."""
    return digest([[dict(message) for message in problem.messages] for problem in problems])


def files_digest(values: object) -> dict[str, str]:
    """SHA-256 of every file that settings name: a judge is identified by the content of its file, not by its name."""
    files = files_named_in(values)
    return {str(file): found for file, found in zip(files, hash_files(files), strict=True)}


# -- what decides how answers are scored: the settings of a judge, and the content of the files that they name ----------


def judge_settings(env: Mapping[str, object]) -> dict[str, object]:
    """By dotted key, without settings of speed and cost."""
    flat = {dotted(path): value for path, value in leaves(dict(env))}
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in _SPEED_AND_COST}


def judge_of(env: Mapping[str, object]) -> dict[str, object]:
    """The same with files, folders and modules by their content instead of their name."""
    found = judge_settings(env)
    for named in settings_with_files(dict(env)):
        if named.key in found:
            content = digest(list(zip(named.names, hash_files(named.files), strict=True)))
            found[named.key] = {_NAMED: found[named.key], _CONTENT: content, _PART: named.part}
    return found


def differences(ours: Judge, theirs: Judge) -> list[tuple[str, object, object]]:
    """(key, ours, theirs) of the settings in which two judges differ, for messages."""
    keys = dict.fromkeys([*ours, *theirs])
    return [
        (key, _shown(ours.get(key)), _shown(theirs.get(key)))
        for key in keys
        if _identity_of(ours.get(key)) != _identity_of(theirs.get(key))
    ]


def _is_content(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and _CONTENT in value


def _identity_of(value: object) -> object:
    return (value[_CONTENT], value[_PART]) if _is_content(value) else value


def _shown(value: object) -> object:
    return f"{value[_NAMED]} (content {value[_CONTENT][:8]})" if _is_content(value) else value
