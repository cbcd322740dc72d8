"""Whether a run can train on the datasets that its config names. Checks names only; also used by `posttrain config
check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config import DpoRunConfig, GrpoRunConfig, RunConfig
from posttrain.config.data import TRACE_GROUPS, DatasetConfig
from posttrain.data.errors import DataError
from posttrain.data.named_datasets import (
    PREFERENCE_DATASETS,
    RESPONSE_DATASETS,
    PreferenceSpec,
    ResponseSpec,
    find_spec,
    refusal,
    unknown_dataset,
)
from posttrain.data.sources import looks_like_path


def check_dataset_names(config: RunConfig) -> None:
    """DataError for the first dataset of `data.train` or `data.validation` that a run would refuse by its name."""
    learns_from_pairs = isinstance(config, DpoRunConfig) or config.scores_answers
    for written in (*config.data.train_sets(), *config.data.validation_sets()):
        entry = written.filled_from(config.data.default)
        if entry.holds_recorded_groups and isinstance(config, GrpoRunConfig):
            continue
        if learns_from_pairs:
            preference_spec(entry)
        else:
            response_spec(entry, needs_reference=isinstance(config, GrpoRunConfig))


def named_path(entry: DatasetConfig) -> str | None:
    """The file or folder that the entry names, if it names one."""
    if entry.data_path:
        return entry.data_path
    name = entry.dataset_name or ""
    return name if looks_like_path(name) or Path(name).exists() else None


def response_spec(entry: DatasetConfig, *, needs_reference: bool) -> ResponseSpec | None:
    """The dataset of that name; None for a path or a hub name, whose rows are read by their keys."""
    _refuse(entry, has_pairs=False, needs_reference=needs_reference)
    found = find_spec(entry.dataset_name or "", RESPONSE_DATASETS)
    return _known(entry, found, RESPONSE_DATASETS, also=(TRACE_GROUPS,))


def preference_spec(entry: DatasetConfig) -> PreferenceSpec | None:
    _refuse(entry, has_pairs=True, needs_reference=False)
    return _known(entry, find_spec(entry.dataset_name or "", PREFERENCE_DATASETS), PREFERENCE_DATASETS)


def _refuse(entry: DatasetConfig, *, has_pairs: bool, needs_reference: bool) -> None:
    name = entry.dataset_name or ""
    reason = refusal(name, has_pairs=has_pairs, needs_reference=needs_reference and entry.output_key is None)
    if reason is not None:
        raise DataError(f"dataset {name!r}: {reason}")


def _known(entry: DatasetConfig, found: Any, specs: Any, also: Sequence[str] = ()) -> Any:
    name = entry.dataset_name
    if found or not name or "/" in name or (not entry.data_path and named_path(entry)):
        return found
    raise unknown_dataset(name, specs, also)
