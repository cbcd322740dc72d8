"""Which settings of a pipeline name files of the demo. Names are checked before the demo makes the files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from posttrain.apps.ship.pipeline.demo_world import MODEL, TRACES, UNSEEN
from posttrain.apps.ship.pipeline.records import StageName
from posttrain.apps.ship.pipeline.stages.evaluate import PLACEHOLDER, load_evaluation
from posttrain.apps.ship.pipeline.stages.train import load_training
from posttrain.config import LoadedConfig
from posttrain.config.named_files import DATA_OR_MODEL
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError

MADE = (MODEL, TRACES, UNSEEN)


def check_names_in_the_demo(config: PipelineConfig, stages: Collection[StageName]) -> None:
    """Raise for a path into the demo's folder that the demo will not make, before it spends minutes on the others."""
    if config.demo is None:
        return
    for key, path in _paths_in_the_demo(config, stages):
        if not (Path(config.demo.folder) / path).exists() and not _names(path, MADE):
            raise InputError(f"{key}: the demo makes {', '.join(MADE)} in {config.demo.folder}, and no {path}")


def settings_naming(made: Sequence[str], config: PipelineConfig, stages: Collection[StageName]) -> list[str]:
    """The settings that name one of these: base_model, traces.path, evaluate.main.data.dataset_name."""
    return list(dict.fromkeys(key for key, path in _paths_in_the_demo(config, stages) if _names(path, made)))


def _names(path: Path, made: Sequence[str]) -> bool:
    """The folder itself, one of these names, something in one of these, or a pattern for them."""
    first = path.parts[0] if path.parts else "*"
    return any(fnmatch(name, first) for name in made)


def _paths_in_the_demo(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[tuple[str, Path]]:
    """(setting, its path relative to the demo's folder)"""
    assert config.demo is not None
    home = Path(config.demo.folder).expanduser().absolute()
    for key, text in _data_and_models(config, stages):
        path = Path(text).expanduser().absolute()
        if path.is_relative_to(home):
            yield key, path.relative_to(home)


def _data_and_models(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[tuple[str, str]]:
    """(setting, text), of these stages; every run reads the base model and the traces."""
    yield "base_model", config.base_model
    for path in [config.traces.path] if isinstance(config.traces.path, str) else config.traces.path:
        yield "traces.path", path
    configs: dict[str, LoadedConfig[Any]] = {}
    if "train" in stages:
        own = {"model": PLACEHOLDER, "data": PLACEHOLDER, "folder": PLACEHOLDER}
        configs["train"] = load_training(config, tokenizer=None, **own)
    if "evaluate" in stages:
        configs |= {f"evaluate.{name}": load_evaluation(config, name, PLACEHOLDER) for name in config.evaluate}
    for section, loaded in configs.items():
        for key, value in loaded.flat().items():
            if isinstance(value, str) and f".{key}".endswith(DATA_OR_MODEL):
                yield f"{section}.{key}", value
