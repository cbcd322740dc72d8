"""The identity of an evaluation: model, problems, prompts, sampling and judge. Metrics are not part of it.

A resumed evaluation must have the same identity. Two evaluations are compared (by `posttrain eval compare` and the
gate) if their judges are the same, and their thresholds where a metric uses one; other settings that change answers are
reported. Files are compared by their content, which `identity.json` holds; in a folder without it, only settings can be
compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from posttrain.apps.evaluate.results import IDENTITY_FILE, Evaluation, EvaluationError
from posttrain.config.named_files import files_named_in, settings_with_files
from posttrain.config.tree import dotted, leaves
from posttrain.files.digests import digest, hash_files
from posttrain.files.json_files import read_json
from posttrain.files.redaction import without_credentials
from posttrain.types import Task

Difference = tuple[str, object, object]  # what, in the first, in the second
Judge = Mapping[str, object]  # by dotted key of its settings: a value, or the content of what the value names

# By what they mean: keys of settings, or their beginnings.
_KEYS = yaml.safe_load(Path(__file__).with_name("identity.yaml").read_text("utf-8"))
_MATTERS, _MAY_DIFFER, _OF_THE_PROBLEMS = (
    tuple(_KEYS[name]) for name in ("matters", "may_differ", "decides_what_is_asked")
)
_ADDED_LATER = {"eval.max_rollout_turns": 1}  # keys that older folders lack, with the value that they stand for
_NAMED, _CONTENT, _PART = "named", "content", "part"


def prompts_hash(problems: Sequence[Task]) -> str:
    """Digest of the prompts and their order."""
    asked = [[dict(message) for message in problem.messages] for problem in problems]
    images = [image.digest for problem in problems for image in problem.images]
    return digest([*asked, images] if images else asked)


def files_digest(values: object) -> dict[str, str]:
    """SHA-256 of every file that settings name: a judge is identified by the content of its file, not by its name."""
    files = files_named_in(values)
    return {str(file): found for file, found in zip(files, hash_files(files), strict=True)}


# -- what decides how answers are scored: the settings of a judge, and the content of the files that they name ---------


def judge_settings(env: Mapping[str, object]) -> dict[str, object]:
    """By dotted key, without settings of speed and cost."""
    flat = {dotted(path): value for path, value in leaves(dict(env))}
    unset = [key for key, value in flat.items() if key.rpartition(".")[2] in _KEYS["agent"] and not value]
    return {
        key: value
        for key, value in flat.items()
        if key not in unset and key.rpartition(".")[2] not in _KEYS["speed_and_cost"]
    }


def judge_of(env: Mapping[str, object]) -> dict[str, object]:
    """The same with files, folders and modules by their content instead of their name."""
    found = judge_settings(env)
    for named in settings_with_files(dict(env)):
        if named.key in found:
            content = digest(list(zip(named.names, hash_files(named.files), strict=True)))
            found[named.key] = {_NAMED: found[named.key], _CONTENT: content, _PART: named.part}
    return found


def differences(ours: Judge, theirs: Judge) -> list[Difference]:
    """(key, ours, theirs) of the settings in which two judges differ, for messages."""

    def compared_and_shown(value: object) -> tuple[object, object]:
        if not isinstance(value, dict) or _CONTENT not in value:
            return value, value
        return (value[_CONTENT], value[_PART]), f"{value[_NAMED]} (content {value[_CONTENT][:8]})"

    found = []
    for key in dict.fromkeys([*ours, *theirs]):
        (one, shown), (other, shown_other) = (compared_and_shown(judge.get(key)) for judge in (ours, theirs))
        if one != other:
            found.append((key, shown, shown_other))
    return found


# -- the same evaluation again -----------------------------------------------------------------------------------------


def plain_identity(identity: Mapping[str, object]) -> dict[str, object]:
    """As it is read back: JSON has no tuples."""
    plain: dict[str, object] = json.loads(json.dumps(identity, default=str))
    return plain


def what_differs(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The first keys of two identities that differ, for messages; empty if they are equal."""
    before = without_credentials(before)
    shown = [
        _difference(key, before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)
    ]
    return "; ".join(shown[:3]) + "; …" * (len(shown) > 3)


def _difference(key: str, before: object, now: object) -> str:
    """For messages: hashes are left out, and of nested settings only the one that differs is shown."""
    if key == "model_fingerprint" and before and now:
        return "the files of the model are others"
    if key.endswith("_hash"):
        return f"other {key.removesuffix('_hash').replace('_', ' ')}"
    if isinstance(before, dict) and isinstance(now, dict):
        inner = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        return _difference(f"{key}.{inner}", before.get(inner), now.get(inner))
    if key.endswith(".content"):
        return f"{key.removesuffix('.content')} names a file of other content"
    return f"{key} was {before!r:.100} and is {now!r:.100}"


# -- two evaluations ---------------------------------------------------------------------------------------------------


def why_incomparable(
    first: Evaluation, second: Evaluation, names: tuple[str, str], *, uses_threshold: bool
) -> str | None:
    """Why their scores are not comparable; None if they are. `names` are those of the two in messages."""
    address = _KEYS["address_of_a_judge"]
    judges = [
        difference
        for difference in _judge_differences(first, second)
        if difference[0].rpartition(".")[2] not in address and ".extra_headers." not in difference[0]
    ]
    if judges:
        shown = "; ".join(describe_difference(difference, names) for difference in judges[:3])
        return f"{names[0]} and {names[1]} were scored by different judges: {shown}"
    thresholds = first.summary.pass_threshold, second.summary.pass_threshold
    if uses_threshold and thresholds[0] != thresholds[1]:
        return (
            f"a sample passes from a reward of {thresholds[0]:g} in {names[0]} and of {thresholds[1]:g} in {names[1]}"
        )
    return None


def different_settings(first: Evaluation, second: Evaluation) -> list[Difference]:
    """Other settings that differ and change what a score means."""
    ours, theirs = (
        _ADDED_LATER | {dotted(path): value for path, value in leaves(dict(evaluation.summary.config))}
        for evaluation in (first, second)
    )
    found = [
        (key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key) and (key.startswith(_MATTERS) or not key.startswith(_MAY_DIFFER))
    ]
    one, other = _identity(first), _identity(second)
    if one.get("prompts_hash") is not None and one.get("prompts_hash") == other.get("prompts_hash"):
        found = [difference for difference in found if not difference[0].startswith(_OF_THE_PROBLEMS)]
    # Files of the same name may differ in content.
    for key, setting in (
        ("prompts_hash", _OF_THE_PROBLEMS),
        ("chat_template", ("tokenizer.chat_template",)),
    ):
        is_seen = any(difference[0].startswith(setting) for difference in found)
        if key in one and key in other and one[key] != other[key] and not is_seen:
            found.append((key, one[key], other[key]))
    return found + _judge_differences(first, second)


def describe_difference(difference: Difference, names: tuple[str, str]) -> str:
    key, ours, theirs = difference
    return f"{key} is {ours!r:.200} in {names[0]} and {theirs!r:.200} in {names[1]}"


def _judge_differences(first: Evaluation, second: Evaluation) -> list[Difference]:
    one, other = _identity(first).get("judge"), _identity(second).get("judge")
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        one, other = (judge_settings(evaluation.summary.config.get("env") or {}) for evaluation in (first, second))
    return [(f"env.{key}", ours, theirs) for key, ours, theirs in differences(one, other)]


def _identity(evaluation: Evaluation) -> dict[str, object]:
    """`identity.json` of the evaluation; empty where it has none."""
    file = evaluation.folder / IDENTITY_FILE
    return read_json(file, EvaluationError) if file.exists() else {}
