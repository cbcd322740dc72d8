"""Short names of settings that are typed often: `lr=1e-5 lora=16 steps=200`, or `--lr 1e-5`. On the command line only.

A config file has the full names, and so has the `config.yaml` of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from posttrain.config.base import ConfigError
from posttrain.config.data import REWARD
from posttrain.config.overrides import parse_override
from posttrain.config.runs import KINDS, PAIR_KINDS

LORA = "policy.dtensor_cfg.lora_cfg"
MANY_EPOCHS = 1_000_000
# {kind} is the kind of run, whose section has the same name.
ALIASES = {
    "model": "policy.model_name",
    "lr": "policy.optimizer.kwargs.lr",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "weight_decay": "policy.optimizer.kwargs.weight_decay",
    "steps": "{kind}.max_num_steps",
    "max_steps": "{kind}.max_num_steps",
    "epochs": "{kind}.max_num_epochs",
    "seed": "{kind}.seed",
    "batch_size": "policy.train_global_batch_size",
    "max_length": "policy.max_total_sequence_length",
    "precision": "policy.precision",
    "device": "policy.device",
    "folder": "checkpointing.checkpoint_dir",
    "gpus": "cluster.gpus_per_node",
    "nodes": "cluster.num_nodes",
}
ALIASES_OF_KIND = {
    "grpo": {
        "kl": "loss_fn.reference_policy_kl_penalty",
        "prompts": "grpo.num_prompts_per_step",
        "generations": "grpo.num_generations_per_prompt",
        "temperature": "policy.generation.temperature",
        "max_new_tokens": "policy.generation.max_new_tokens",
    },
    "dpo": {"beta": "dpo.reference_policy_kl_penalty"},
}
_CLOSE = 0.75  # no section of a config is that close to a short name
# Written with their section, and in the wrong one.
MISPLACED = {"policy.learning_rate": "lr", "policy.lr": "lr", "policy.optimizer.lr": "lr"}


def aliases_of(kind: str) -> dict[str, str]:
    """The full name of each short one. `lora`, `data` and `reward` set several keys and are not among them."""
    found = {name: key.format(kind=kind) for name, key in ALIASES.items()}
    return {**found, **ALIASES_OF_KIND.get(kind, {})}


def file_dataset(kind: str) -> str:
    """The dataset_name of a file that is named without one."""
    return "PreferenceDataset" if kind in PAIR_KINDS else "ResponseDataset"


def short_names(kind: str) -> tuple[str, ...]:
    return ("lora", "data", *(("reward",) if kind == "grpo" else ()), *aliases_of(kind))


def expand_aliases(kind: str, overrides: Sequence[str]) -> list[str]:
    """The overrides with full names.

    `steps` alone is the length of a run: epochs end it earlier only if they are given on the command line, too.
    """
    known = aliases_of(kind)
    expanded = [text for override in overrides for text in _expanded(kind, known, override)]
    if kind in KINDS and any(_short_name(override) in ("steps", "max_steps") for override in overrides):
        return [f"{kind}.max_num_epochs={MANY_EPOCHS}", *expanded]  # first: what else is given replaces it
    return expanded


def _short_name(text: str) -> str:
    return text.lstrip("+").partition("=")[0].strip()


def _expanded(kind: str, known: dict[str, str], text: str) -> list[str]:
    sign = text[: len(text) - len(text.lstrip("+"))]
    name, equals, value = text[len(sign) :].partition("=")
    name = name.strip()
    name = MISPLACED.get(name, name)
    if not equals or ("." in name):
        return [text]
    if name in known:
        return [f"{known[name]}={value}"]
    if name == "lora":
        return _lora(text)
    if name == "data" and not value.lstrip().startswith(("{", "[")):
        return [f"data.train={{dataset_name: {file_dataset(kind)}, data_path: {_quoted(value)}}}"]
    if name == "reward" and kind == "grpo" and not value.lstrip().startswith(("{", "[")):
        key = "function" if {":", "."} & set(value) else "type"
        return [f"env.{REWARD}.{key}={_quoted(value)}", f"data.default.env_name={REWARD}"]
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
