"""Whether two evaluations can be compared. Shared by `posttrain eval compare` and the gate.

Scores of different judges, or pass rates under different thresholds, are not comparable and are rejected. Other
settings that change answers are reported. Files are compared by their content, which `identity.json` holds; in a folder
without it, only settings can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from posttrain.apps.evaluate.identity import differences, judge_settings
from posttrain.apps.evaluate.results import IDENTITY_FILE, Evaluation, EvaluationError
from posttrain.config.tree import dotted, leaves
from posttrain.files.json_files import read_json

Difference = tuple[str, object, object]  # what, in the first, in the second

_ADDRESS_OF_A_JUDGE = ("base_url", "extra_headers")  # the same model at another address is the same judge
# Settings that may differ between two models without making their evaluations incomparable, …
_MAY_DIFFER = (
    "env.",  # compared as judges
    "generation.model_name",
    "generation.backend",
    "generation.device",
    "generation.precision",
    "generation.num_threads",
    "generation.num_prompts_per_step",
    "generation.native_cfg",
    "generation.vllm_cfg",
    "generation.vllm_kwargs",
    "generation.openai_cfg",
    "generation.colocated",
    "eval.save_path",
    "eval.gpu_hour_price",
    "eval.confidence",
    "eval.bootstrap_resamples",
    "eval.metric",
    "eval.k_value",
    "tokenizer.name",
    "cluster",
)
# … but not these: they cut answers off, or ask for others.
_MATTERS = ("generation.vllm_cfg.max_model_len", "generation.openai_cfg.extra_body")
_ADDED_LATER = {"eval.max_rollout_turns": 1}  # keys that older folders lack, with the value that they stand for
_DECIDES_WHAT_IS_ASKED = ("data.", "eval.max_problems")


def why_incomparable(
    first: Evaluation, second: Evaluation, names: tuple[str, str], *, uses_threshold: bool
) -> str | None:
    """Why their scores are not comparable; None if they are. `names` are those of the two in messages."""
    if judges := [difference for difference in _judge_differences(first, second) if not _is_address(difference[0])]:
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
    ours, theirs = (_flat(evaluation.summary.config) for evaluation in (first, second))
    found = [difference for difference in _differences(ours, theirs) if _is_reported(difference[0])]
    one, other = _identity(first), _identity(second)
    if one.get("prompts_hash") is not None and one.get("prompts_hash") == other.get("prompts_hash"):
        found = [difference for difference in found if not difference[0].startswith(_DECIDES_WHAT_IS_ASKED)]
    # Files of the same name may differ in content.
    for key, setting in (("prompts_hash", _DECIDES_WHAT_IS_ASKED), ("chat_template", ("tokenizer.chat_template",))):
        is_seen = any(difference[0].startswith(setting) for difference in found)
        if key in one and key in other and one[key] != other[key] and not is_seen:
            found.append((key, one[key], other[key]))
    return found + _judge_differences(first, second)


def _is_reported(key: str) -> bool:
    return key.startswith(_MATTERS) or not key.startswith(_MAY_DIFFER)


def _is_address(key: str) -> bool:
    return key.rpartition(".")[2] in _ADDRESS_OF_A_JUDGE or ".extra_headers." in key


def describe_difference(difference: Difference, names: tuple[str, str]) -> str:
    key, ours, theirs = difference
    return f"{key} is {ours!r:.200} in {names[0]} and {theirs!r:.200} in {names[1]}"


def _judge_differences(first: Evaluation, second: Evaluation) -> list[Difference]:
    one, other = _identity(first).get("judge"), _identity(second).get("judge")
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        one, other = (judge_settings(evaluation.summary.config.get("env") or {}) for evaluation in (first, second))
    return [(f"env.{key}", ours, theirs) for key, ours, theirs in differences(one, other)]


def _differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[Difference]:
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            yield key, ours.get(key), theirs.get(key)


def _flat(settings: Mapping[str, object]) -> dict[str, object]:
    return _ADDED_LATER | {dotted(path): value for path, value in leaves(dict(settings))}


def _identity(evaluation: Evaluation) -> dict[str, object]:
    """`identity.json` of the evaluation; empty where it has none."""
    file = evaluation.folder / IDENTITY_FILE
    if not file.exists():
        return {}
    return read_json(file, EvaluationError)
