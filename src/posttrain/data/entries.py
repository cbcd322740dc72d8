"""One entry of `data.train` or `data.validation`: what it says, what it leaves to defaults, and the rows it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from posttrain.data.errors import DataError, nearest
from posttrain.data.prompts import PromptFiles
from posttrain.data.sources import Row, looks_like_path, read_hub, read_local

# NeMo RL's names. All of them mean: the question into the prompt, the answer as the reference.
PROCESSORS = (
    "default",
    "math_hf_data_processor",
    "math_data_processor",
    "sft_processor",
    "preference_preprocessor",
    "helpsteer3_data_processor",
)


class HubDataset(Protocol):
    """What a named dataset knows of its home."""

    @property
    def hub(self) -> str | None: ...

    @property
    def subsets(self) -> tuple[str | None, ...]: ...

    @property
    def split(self) -> str: ...


@dataclass(frozen=True)
class Entry:
    dataset_name: str | None = None
    name: str | None = None
    data_path: str | None = None
    input_key: str | None = None
    output_key: str | None = None
    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    chosen_reward_key: str | None = None
    rejected_reward_key: str | None = None
    default_chosen_reward: float | None = None
    default_rejected_reward: float | None = None
    completion_key: str | None = None
    label_key: str | None = None
    prompt_is_templated: bool | None = None
    trace_columns: Mapping[str, Any] | None = None
    trace_filters: Mapping[str, Any] | None = None
    pair_rules: Mapping[str, Any] | None = None
    chat_key: str | None = None
    system_key: str | None = None
    subset: str | None = None
    split: str | None = None
    prompt_file: str | None = None
    system_prompt_file: str | None = None
    system_prompt: str | None = None
    env_name: str | None = None
    processor: str | None = None
    download_dir: str | None = None
    repeat: int | None = None
    split_validation_size: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.dataset_name and not self.data_path:
            raise DataError("a dataset needs `dataset_name` (a known name, a hub name or a path) or `data_path`")
        if self.processor and self.processor not in PROCESSORS:
            raise DataError(
                f"processor: unknown {self.processor!r}{nearest(self.processor, PROCESSORS)}; known: {', '.join(PROCESSORS)}"
            )
        if self.repeat is not None and self.repeat < 1:
            raise DataError(f"repeat: {self.repeat} is not possible; a dataset is used at least once")
        if self.split_validation_size is not None and self.split_validation_size < 0:
            raise DataError(
                f"split_validation_size: {self.split_validation_size} is negative; a share or a number of rows"
            )

    @property
    def prompts(self) -> PromptFiles:
        files = PromptFiles.read(self.prompt_file, self.system_prompt_file)
        return files if files.system else replace(files, system=self.system_prompt or "")

    @property
    def local_path(self) -> str | None:
        """The file or folder that the entry names, if it names one."""
        if self.data_path:
            return self.data_path
        name = self.dataset_name or ""
        return name if looks_like_path(name) or Path(name).exists() else None

    @property
    def file(self) -> str:
        """The path that an entry must have whose data lies in files only."""
        if self.data_path is None:
            raise DataError(f"{self.dataset_name} has no data of its own: point `data_path` at a file or folder")
        return self.data_path

    def rows(self, known: HubDataset | None) -> Iterator[Row]:
        """The rows, from local files where the entry names some, otherwise from the hub."""
        if self.data_path or (known is None and self.local_path):
            default_split = known.split if known else "train"
            path = self.local_path
            assert path is not None
            return read_local(path, self.split, self.subset, default_split)
        hub = known.hub if known else self.dataset_name
        if hub is None:
            raise DataError(f"{self.dataset_name} has no data of its own: point `data_path` at a file or folder")
        subsets = (self.subset,) if self.subset else (known.subsets if known else (None,))
        return read_hub(hub, subsets, self.split or (known.split if known else "train"), self.download_dir)


def read_entries(entries: Any, defaults: Any) -> list[Entry]:
    """The entries of a config section: one mapping or several, plain or pydantic, with `defaults` for the keys they lack."""
    if entries is None:
        raise DataError("no dataset is named; set `data.train.dataset_name` or `data.train.data_path`")
    listed = entries if isinstance(entries, Sequence) and not isinstance(entries, str) else [entries]
    if not listed:
        raise DataError("the list of datasets is empty; name at least one")
    filling = _plain(defaults) if defaults is not None else {}
    return [Entry(**_checked({**filling, **_plain(entry)})) for entry in listed]


def _plain(section: Any) -> dict[str, Any]:
    """A section as a dict of the keys that were really set: those left alone take the default."""
    if hasattr(section, "model_dump"):
        return dict(section.model_dump(exclude_unset=True))
    if isinstance(section, Mapping):
        return dict(section)
    raise DataError(f"a dataset is described by keys such as `dataset_name`, not by {section!r}")


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that we do not know, which is fine as long as they ask for nothing."""
    known = [field.name for field in fields(Entry)]
    for name, value in values.items():
        if name not in known and value not in (None, False):
            raise DataError(f"unknown dataset key {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return {name: value for name, value in values.items() if name in known}
