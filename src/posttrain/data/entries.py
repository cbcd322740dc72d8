"""One entry of `data.train` or `data.validation`: its settings, with defaults filled in, and the rows it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError

from posttrain.config.base import explain_errors
from posttrain.config.data import DatasetConfig
from posttrain.data.conversations import PromptFiles
from posttrain.data.errors import DataError, nearest
from posttrain.data.named_datasets import NamedDataset, named_path
from posttrain.data.sources import Row, read_hub, read_local

Section = DatasetConfig | Mapping[str, object]
Entries = Section | Sequence[Section] | None


class Entry(DatasetConfig):
    """The section of one dataset, with what it leaves to `data.default` filled in, and the way to its rows."""

    @classmethod
    def of(cls, config: DatasetConfig) -> Entry:
        """From a section that has been validated: its values are taken as they are."""
        return cls.model_construct(_fields_set=config.model_fields_set, **dict(config))

    @property
    def prompts(self) -> PromptFiles:
        files = PromptFiles.read(self.prompt_file, self.system_prompt_file)
        return files if files.system else replace(files, system=self.system_prompt or "")

    @property
    def local_path(self) -> str | None:
        return named_path(self)

    @property
    def file(self) -> str:
        """The path that an entry must have whose data lies in files only."""
        if self.data_path is None:
            raise DataError(f"{self.dataset_name} has no data of its own: point `data_path` at a file or folder")
        return self.data_path

    def rows(self, known: NamedDataset | None) -> Iterator[Row]:
        """The rows with their images, from local files where the entry names some, otherwise from the hub."""
        from posttrain.data.image_rows import with_images  # loads torch

        return with_images(self.raw_rows(known), self, known or NamedDataset(""))

    def holds_images(self, row: Row) -> bool:
        """Of a row of `raw_rows`: whether it has images, good or bad."""
        from posttrain.data.image_rows import ImageReader

        return ImageReader(self, NamedDataset("")).has_images(row)

    def raw_rows(self, known: NamedDataset | None = None) -> Iterator[Row]:
        """The rows as they are stored."""
        if self.data_path or (known is None and self.local_path):
            default_split = known.split if known else "train"
            path = self.local_path
            assert path is not None
            return read_local(path, self.split, self.subset, default_split)
        hub = known.hub if known else self.dataset_name
        if hub is None:
            raise DataError(f"{self.dataset_name} has no data of its own: point `data_path` at a file or folder")
        split = self.split or (known.split if known else "train")
        if known and split in known.hub_of_split:
            hub, split = known.hub_of_split[split], "train"
        subsets = (self.subset,) if self.subset else (known.subsets if known else (None,))
        return read_hub(hub, subsets, split, self.download_dir)


def read_entries(entries: Entries, defaults: Section | None) -> list[Entry]:
    """The datasets of `data.train` or `data.validation`, with `defaults` for the keys they lack."""
    if entries is None:
        raise DataError("no dataset is named; set `data.train.dataset_name` or `data.train.data_path`")
    listed = entries if isinstance(entries, Sequence) and not isinstance(entries, str) else [entries]
    if not listed:
        raise DataError("the list of datasets is empty; name at least one")
    filling = None if defaults is None else _validated(defaults)
    found = [Entry.of(_validated(entry).filled_from(filling)) for entry in listed]
    for entry in found:
        if not entry.dataset_name and not entry.data_path:
            raise DataError("a dataset needs `dataset_name` (a known name, a hub name or a path) or `data_path`")
    return found


def _validated(section: Section) -> DatasetConfig:
    """A section of a config has been validated already; a map has not."""
    if isinstance(section, DatasetConfig):
        return section
    if not isinstance(section, Mapping):
        raise DataError(f"a dataset is described by keys such as `dataset_name`, not by {section!r}")
    known = list(DatasetConfig.model_fields)
    for name in section:
        if name not in known:
            raise DataError(f"unknown dataset key {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    try:
        return DatasetConfig.model_validate(dict(section))
    except ValidationError as error:
        raise DataError("\n".join(explain_errors(error))) from error
