"""The data of a run: which loader reads it, and how many rows make a step."""

from __future__ import annotations

from typing import Any

from posttrain.config import DpoRunConfig, GrpoRunConfig, RmRunConfig, SftRunConfig
from posttrain.config.preference_losses import LOSSES
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import (
    load_example_dataset,
    load_judged_dataset,
    load_pair_dataset,
    load_task_dataset,
)

RunConfig = GrpoRunConfig | DpoRunConfig | RmRunConfig | SftRunConfig


def samples_per_step(config: RunConfig) -> int:
    """Prompts, pairs or examples drawn from the stream in one step."""
    if isinstance(config, GrpoRunConfig):
        return config.grpo.num_prompts_per_step
    return config.policy.train_global_batch_size


def load_datasets(config: RunConfig, chat: ChatFormat, seed: int) -> tuple[Any, Any]:
    """Training and validation data; the second may be None."""
    data = config.data
    train = _load(config, data.train, chat, seed)
    if data.validation is not None:
        return train, _load(config, data.validation, chat, seed)
    return train.held_out()


def _load(config: RunConfig, entries: Any, chat: ChatFormat, seed: int) -> Any:
    data, length = config.data, config.policy.max_total_sequence_length
    if isinstance(config, GrpoRunConfig):
        limit = min(data.max_input_seq_length or length, length - 1)
        return load_task_dataset(
            entries,
            data.default,
            chat,
            max_prompt_tokens=limit,
            seed=seed,
            max_total_tokens=length,
            needs_signal=config.grpo.num_fresh_per_prompt == 0,  # a fresh answer could still differ from equal ones
        )
    if isinstance(config, DpoRunConfig) and not LOSSES[config.dpo.preference_loss].is_paired:
        return load_judged_dataset(entries, data.default, chat, max_total_tokens=length, seed=seed)
    if isinstance(config, DpoRunConfig | RmRunConfig):
        return load_pair_dataset(entries, data.default, chat, max_total_tokens=length, seed=seed)
    return load_example_dataset(
        entries,
        data.default,
        chat,
        max_total_tokens=length,
        only_unmask_final=config.sft.only_unmask_final,
        seed=seed,
    )


def first_rows(dataset: Any, count: int) -> list[Any]:
    """The first `count` rows; all of them if it is not positive."""
    if dataset is None:
        return []
    return [dataset[i] for i in range(len(dataset) if count <= 0 else min(count, len(dataset)))]


def options(section: Any, target: type) -> dict[str, Any]:
    """The fields of a config section that a value object takes, by name."""
    return {name: getattr(section, name) for name in target.__dataclass_fields__}  # type: ignore[attr-defined]
