"""The README.md of a converted model: where it comes from, what it was trained on and how, what was measured.

What was measured in training is read from the run's folder; evaluations and the verdict of a gate are given by the
caller. It holds no dates, so that converting the same checkpoint twice gives the same files.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import yaml

from posttrain import __version__
from posttrain.apps.export.conversion_input import ConversionInput
from posttrain.apps.export.verification import Verification
from posttrain.config.tree import Tree
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping, JsonObject, read_json
from posttrain.files.redaction import without_credentials
from posttrain.files.text_templates import render_text
from posttrain.models.hub import looks_like_hub_name
from posttrain.models.loading import auto_class_of
from posttrain.recipes import KINDS
from posttrain.reporting.examination import errors_of_model
from posttrain.reporting.results import shown_name
from posttrain.reporting.rows import is_accuracy
from posttrain.reporting.run_files import METRICS_FILE, Row, read_rows

EVALUATED = (
    "validation/accuracy",
    "validation/reward",
    "validation/loss",
    "validation/mean_generation_length",
    "validation/truncation_rate",
)
Z_975 = 1.959964  # of the standard normal distribution
TRAINING = tuple(
    f"train/{name}"
    for name in ("reward", "accuracy", "loss", "kl_penalty", "kl_to_start", "approx_entropy", "mean_generation_length",
                 "truncation_rate", "rewards_margin_mean", "grad_norm", "lr")
)  # fmt: skip


def lineage(
    source: ConversionInput,
    shown_as: str,
    *,
    merged: bool,
    verification: Verification | None,
    measured: JsonMapping | None = None,
) -> JsonObject:
    """Where the model comes from, for programs: `conversion.json`. `measured` may have `evaluations` by name, `gate`
    and `license`."""
    kind = next((kind for kind in KINDS if kind in source.run_config), None)
    text = yaml.safe_dump(dict(source.run_config), sort_keys=True).encode() if source.run_config else None
    return {
        "posttrain_version": __version__,
        "source": shown_as,
        "step": source.step,
        "algorithm": kind,
        "base_model": source.base if source.base != str(source.folder) else None,
        "license": _license_of(source.base),
        "lora": None if not source.has_adapter else ("merged" if merged else "adapter"),
        "data": training_data(source.run_config),
        "config_sha256": sha256_of(text) if text else None,
        "metrics": metrics_of(source),
        **(measured or {}),
        "verification": None if verification is None else verification.as_json(),
    }


def _license_of(model: str) -> str | None:
    """What the card of a model on this machine says."""
    from huggingface_hub import try_to_load_from_cache

    card: object = Path(model) / "README.md"
    if looks_like_hub_name(model):
        card = try_to_load_from_cache(model, "README.md")
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return None
    found = re.match(r"---\n(?:.*\n)*?license: *([\w.-]+) *\n", Path(card).read_text("utf-8", errors="replace"))
    return found[1] if found else None


def training_data(run_config: JsonMapping) -> list[JsonObject]:
    """The datasets that the config names, training first."""
    section = run_config.get("data") or {}
    found = []
    for role in ("train", "validation"):
        entries = section.get(role) or []
        for entry in entries if isinstance(entries, list) else [entries]:
            known = ("dataset_name", "data_path", "split", "subset")
            found.append({"role": role, **{key: entry[key] for key in known if entry.get(key)}})
    if not found and section.get("dataset_name"):  # older configs name one dataset
        found.append({"role": "train", "dataset_name": section["dataset_name"]})
    return found


def metrics_of(source: ConversionInput) -> dict[str, float]:
    """What was measured at the checkpoint's step, and the newest validation before it."""
    if source.checkpoint is None or source.step is None:
        return {}
    found: dict[str, float] = {}
    for row in read_rows(_metrics_file(source)):
        if row["step"] > source.step:
            continue
        for name, value in row.items():
            wanted = name.startswith("validation/") or (name.startswith("train/") and row["step"] == source.step)
            if wanted and isinstance(value, int | float):
                found[name] = value
    info = source.checkpoint / "training_info.json"
    if info.is_file():
        for name, value in read_json(info).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, value)
    return found


def _scores_answers(run_config: JsonMapping) -> bool:
    section = (run_config.get("policy") or {}).get("reward_model_cfg") or {}
    return bool(section.get("enabled"))


def _metrics_file(source: ConversionInput) -> Path:
    assert source.checkpoint is not None
    log_dir = (source.run_config.get("logger") or {}).get("log_dir")
    beside = source.checkpoint.parent / METRICS_FILE
    return Path(log_dir) / METRICS_FILE if log_dir and not beside.is_file() else beside


def model_card(source: ConversionInput, facts: JsonMapping, *, name: str) -> str:
    kind, scores_answers, metrics = facts["algorithm"], _scores_answers(source.run_config), facts["metrics"]
    front: JsonObject = {
        "library_name": "peft" if facts["lora"] == "adapter" else "transformers",
        "pipeline_tag": "text-classification" if scores_answers else "text-generation",
        "tags": ["posttrain", *([kind] if kind else [])],
    }
    if facts["license"]:
        front["license"] = facts["license"]
    if facts["base_model"] and looks_like_hub_name(facts["base_model"]):  # the hub refuses anything else there
        front["base_model"] = facts["base_model"]
    text = render_text(
        Path(__file__).with_name("model_card.md"),
        front=yaml.safe_dump(front, sort_keys=False),
        name=name,
        facts=facts,
        method=_method(kind, source.run_config),
        scores_answers=scores_answers,
        auto_class=auto_class_of(source.shape.config).__name__,
        validated=_validated(source, facts),
        errors=[error.line for error in errors_of_model(str(source.checkpoint))] if source.checkpoint else [],
        training={key: metrics[key] for key in TRAINING if key in metrics},
    )
    text = re.sub(r"\n{3,}", "\n\n", text)  # between parts of which some are missing
    if not source.run_config:
        return text
    config = yaml.safe_dump(without_credentials(dict(source.run_config)), sort_keys=False, allow_unicode=True)
    summary = "<details><summary>The run's whole config</summary>"
    return f"{text}\n## Config\n\n{summary}\n\n```yaml\n{config}```\n\n</details>\n"


def _method(kind: str | None, run_config: JsonMapping) -> str:
    if kind is None:
        return ""
    config = Tree(dict(run_config))
    teaches_alone = config.get(("teacher", "model_name")) and not config.get(("teacher", "reward_weight"))
    has_critic = config.get(("grpo", "adv_estimator", "name")) == "gae"
    return KINDS["ppo" if has_critic else "distill" if teaches_alone else kind].method


def _validated(source: ConversionInput, facts: JsonMapping) -> list[list[str]] | None:
    """The validation of the run: before training, where it was measured, and at the checkpoint. None: it had none."""
    if source.checkpoint is None or facts["step"] is None:
        return None
    rows = [row for row in read_rows(_metrics_file(source)) if row["step"] <= facts["step"]]
    measured = [row for row in rows if any(key.startswith("validation/") for key in row)]
    lines = []
    for key in EVALUATED:
        with_key = [row for row in measured if isinstance(row.get(key), int | float)]
        if not with_key or (key == "validation/reward" and shown_name("validation/accuracy", measured) == key):
            continue
        first, last = with_key[0], with_key[-1]
        before = f"{first[key]:.4g}" if first["step"] == 0 else ""
        name = shown_name(key, measured).removeprefix("validation/").replace("_", " ")
        lines.append([name, before, f"{last[key]:.4g}", *_certainty(last, key, source.run_config), str(last["step"])])
    return lines


def _certainty(row: Row, key: str, run_config: JsonMapping) -> tuple[str, str]:
    """The 95 % interval of a mean, and the number of prompts or pairs that it is over; empty where that is unknown.

    Answers to one prompt are not independent, so they count as one: the interval is too wide rather than too narrow.
    """
    answers = (run_config.get("grpo") or {}).get("val_num_generations_per_prompt") or 1
    scored = (row.get("validation/num_samples") or 0) - (row.get("validation/unscored") or 0)
    count = int(row.get("validation/num_valid_samples") or scored / answers)
    if key not in ("validation/accuracy", "validation/reward") or count < 1:
        return "", ""
    if is_accuracy(row):
        low, high = wilson_interval(row[key], count)
    elif (spread := row.get("validation/reward_std")) is not None and count > 1:
        half = Z_975 * spread / math.sqrt(count - 1)
        low, high = row[key] - half, row[key] + half
    else:
        return "", f"{count:,}"
    return f"{low:.4g} to {high:.4g}", f"{count:,}"


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """E. B. Wilson's 95 % interval of a probability, from the share of `count` independent trials."""
    weight = Z_975**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)
