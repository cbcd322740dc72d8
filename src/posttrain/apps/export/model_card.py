"""The README.md of a converted model: where it comes from, what it was trained on and how, what was measured.

Everything is read from the run's folder. It holds no dates, so that converting the same checkpoint twice gives the same
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from posttrain import __version__
from posttrain.apps.export.conversion_input import ConversionInput
from posttrain.apps.export.verification import Verification
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping, JsonObject, read_json
from posttrain.files.redaction import without_credentials
from posttrain.models.hub import looks_like_hub_name
from posttrain.models.loading import auto_class_of
from posttrain.recipes import KINDS
from posttrain.reporting.examination import errors_of_model
from posttrain.reporting.results import shown_name
from posttrain.reporting.run_files import METRICS_FILE, read_rows

EVALUATED = (
    "validation/accuracy",
    "validation/reward",
    "validation/loss",
    "validation/mean_generation_length",
    "validation/truncation_rate",
)
TRAINING = tuple(
    f"train/{name}"
    for name in ("reward", "accuracy", "loss", "kl_penalty", "kl_to_start", "approx_entropy", "mean_generation_length",
                 "truncation_rate", "rewards_margin_mean", "grad_norm", "lr")
)  # fmt: skip


def lineage(source: ConversionInput, shown_as: str, *, merged: bool, verification: Verification | None) -> JsonObject:
    """Where the model comes from, for programs: `conversion.json`."""
    kind = next((kind for kind in KINDS if kind in source.run_config), None)
    text = yaml.safe_dump(dict(source.run_config), sort_keys=True).encode() if source.run_config else None
    return {
        "posttrain_version": __version__,
        "source": shown_as,
        "step": source.step,
        "algorithm": kind,
        "base_model": source.base if source.base != str(source.folder) else None,
        "lora": None if not source.has_adapter else ("merged" if merged else "adapter"),
        "data": training_data(source.run_config),
        "config_sha256": sha256_of(text) if text else None,
        "metrics": metrics_of(source),
        "verification": None if verification is None else verification.as_json(),
    }


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
    kind = facts["algorithm"]
    front: JsonObject = {
        "library_name": "peft" if facts["lora"] == "adapter" else "transformers",
        "pipeline_tag": "text-classification" if _scores_answers(source.run_config) else "text-generation",
        "tags": ["posttrain", *([kind] if kind else [])],
    }
    if facts["base_model"] and looks_like_hub_name(facts["base_model"]):  # the hub refuses anything else there
        front["base_model"] = facts["base_model"]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        _introduction(facts),
        _usage_section(
            facts, name, auto_class_of(source.shape.config).__name__, scores_answers=_scores_answers(source.run_config)
        ),
        _data_section(facts["data"]),
        _evaluation_section(source, facts),
        _training_section(facts["metrics"]),
        _lineage_section(facts),
        _config_section(source.run_config),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(facts: JsonMapping) -> str:
    base = f" from `{facts['base_model']}`" if facts["base_model"] else ""
    how = f" with {KINDS[facts['algorithm']].method}" if facts["algorithm"] else ""
    what = {"adapter": "A LoRA adapter trained", "merged": "A model with its LoRA adapter merged in, trained"}.get(
        facts["lora"], "A model trained" if facts["algorithm"] else "A model converted"
    )
    return f"{what}{base}{how} by posttrain {facts['posttrain_version']}."


def _data_section(data: list[JsonObject]) -> str:
    if not data:
        return ""
    lines = [
        f"- {entry['role']}: " + ", ".join(f"{key} `{value}`" for key, value in entry.items() if key != "role")
        for entry in data
    ]
    return "## Data\n\n" + "\n".join(lines)


def _usage_section(facts: JsonMapping, name: str, kind: str, *, scores_answers: bool) -> str:
    """A few lines of Python that load the folder and use it."""
    lines, module = [], "transformers"
    if scores_answers:
        kind = "AutoModelForSequenceClassification"
    elif facts["lora"] == "adapter":
        kind, module = "AutoPeftModelForCausalLM", "peft"
    if module == "transformers":
        lines.append(f"from transformers import {kind}, AutoTokenizer")
    else:
        lines += [f"from {module} import {kind}", "from transformers import AutoTokenizer"]
    on_top = f"  # on top of {facts['base_model']}" if module == "peft" and facts["base_model"] else ""
    lines += [
        f'model = {kind}.from_pretrained("{name}"){on_top}',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]
    if scores_answers:
        lines += [
            'chat = [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]',
            'inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)',
            "print(model(**inputs).logits[0, 0].item())  # the reward of the answer",
        ]
    else:
        lines += [
            'chat = [{"role": "user", "content": "…"}]',
            "inputs = tokenizer.apply_chat_template("
            'chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
            'answer = model.generate(**inputs, max_new_tokens=256)[0, inputs["input_ids"].shape[1]:]',
            "print(tokenizer.decode(answer, skip_special_tokens=True))",
        ]
    return "## Usage\n\n```python\n" + "\n".join(lines) + f"\n```\n\nOr in a terminal: `posttrain chat {name}`."


def _evaluation_section(source: ConversionInput, facts: JsonMapping) -> str:
    """The validation of the run: before training, where it was measured, and at the checkpoint; and the doctor's
    verdict."""
    if source.checkpoint is None or facts["step"] is None:
        return ""
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
        lines.append(f"| {name} | {before} | {last[key]:.4g} | {last['step']} |")
    errors = [error.line for error in errors_of_model(str(source.checkpoint))]
    doctor = "".join(f"\n\nThe doctor found: {line}." for line in errors)
    if not lines:
        return f"## Evaluation\n\nNot measured on held-out data.{doctor}"
    header = "On the held-out rows of the run:\n\n| | before training | then | step |\n|---|---|---|---|\n"
    return "## Evaluation\n\n" + header + "\n".join(lines) + doctor


def _training_section(metrics: Mapping[str, float]) -> str:
    """The main metrics of training at the checkpoint's step; `conversion.json` has all of them."""
    rows = [f"| `{name}` | {metrics[name]:.6g} |" for name in TRAINING if name in metrics]
    if not rows:
        return ""
    return (
        "## Training\n\nAt the last step; conversion.json has all metrics.\n\n| metric | value |\n|---|---|\n"
        + "\n".join(rows)
    )


def _lineage_section(facts: JsonMapping) -> str:
    rows = {
        "source": f"`{facts['source']}`",
        "step": facts["step"],
        "base model": f"`{facts['base_model']}`" if facts["base_model"] else None,
        "LoRA": facts["lora"],
        "SHA-256 of the run's config": f"`{facts['config_sha256']}`" if facts["config_sha256"] else None,
        "posttrain": facts["posttrain_version"],
        "verified": _verified(facts["verification"]),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "## Lineage\n\n| | |\n|---|---|\n" + "\n".join(lines)


def _verified(check: JsonMapping | None) -> str:
    if check is None:
        return "no"
    return (
        f"the most likely token is that of the source at {check['num_same_top']} of {check['num_tokens']} positions; "
        f"logits differ by at most {check['max_logit_difference']:.3g} (their standard deviation is "
        f"{check['logit_standard_deviation']:.3g}), model {check['how']}"
    )


def _config_section(run_config: JsonMapping) -> str:
    if not run_config:
        return ""
    text = yaml.safe_dump(without_credentials(dict(run_config)), sort_keys=False, allow_unicode=True)
    return f"## Config\n\n<details><summary>The run's whole config</summary>\n\n```yaml\n{text}```\n\n</details>"
