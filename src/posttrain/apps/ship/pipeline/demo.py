"""The files of the pipeline's demo, made before the first stage, and the settings that name them.

    FOLDER/model          a Hugging Face folder: a small model trained on mostly wrong answers
    FOLDER/traces.jsonl   answers of the same quality, each with a reward of 1 or 0
    FOLDER/unseen.jsonl   problems that are in no trace

`num_prompts` is the number of prompts in the traces. Raising it simulates new data. `posttrain demo` has the same task.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from posttrain.apps.ship.pipeline.records import StageName
from posttrain.apps.ship.pipeline.stage import Stop
from posttrain.apps.ship.pipeline.stages.evaluate import load_evaluation
from posttrain.apps.ship.pipeline.stages.train import load_training
from posttrain.apps.ship.pipeline.training_process import run_training
from posttrain.config import LoadedConfig, load_config
from posttrain.config.named_files import DATA_OR_MODEL
from posttrain.config.pipeline import DemoSection, PipelineConfig
from posttrain.errors import ExitCode, InputError
from posttrain.files import durable
from posttrain.files.digests import digest

MARK = "world.json"
MODEL, TRACES, UNSEEN = "model", "traces.jsonl", "unseen.jsonl"
MADE = (MODEL, TRACES, UNSEEN)


def unmade(demo: DemoSection) -> tuple[str, ...]:
    """Files that are missing, or were made with other settings."""
    return (*([] if _has_model(demo) else [MODEL]), *_unwritten(demo))


def make_files(demo: DemoSection, say: Callable[[str], None], *, quiet: bool, lock: int | None) -> None:
    """Make the files that are missing, or were made with other settings."""
    folder = Path(demo.folder)
    durable.make_folder(folder)
    if not _has_model(demo):
        say(f"demo      makes a model and trains it on the format: SFT, {demo.sft_steps} steps")
        _make_model(demo, folder, say, quiet=quiet, lock=lock)
        durable.write_text(folder / MARK, json.dumps(_mark(demo)) + "\n")
    for name, text in _unwritten(demo).items():
        durable.write_text(folder / name, text)


def _mark(demo: DemoSection) -> dict[str, int]:
    return {"seed": demo.seed, "sft_steps": demo.sft_steps}


def _has_model(demo: DemoSection) -> bool:
    folder = Path(demo.folder)
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(mark == _mark(demo) and (folder / MODEL / "config.json").is_file())


def _unwritten(demo: DemoSection) -> dict[str, str]:
    """The data files that do not hold what these settings make, with the text that they ought to hold."""
    from posttrain.apps.demo.arithmetic import labelled_traces, unseen_problems

    rows = {
        TRACES: labelled_traces(demo.seed, demo.num_prompts, demo.answers_per_prompt),
        UNSEEN: unseen_problems(demo.seed),
    }
    texts = {Path(demo.folder) / name: "".join(json.dumps(row) + "\n" for row in found) for name, found in rows.items()}
    return {
        file.name: text
        for file, text in texts.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != text
    }


def _make_model(demo: DemoSection, folder: Path, say: Callable[[str], None], *, quiet: bool, lock: int | None) -> None:
    from posttrain.apps.demo.arithmetic import build_model, sft_settings, write_data
    from posttrain.apps.export.convert import ConversionSettings, convert

    taught = folder / f"taught-{digest(_mark(demo))[:8]}"
    if not (taught / "sft.yaml").is_file():
        shutil.rmtree(taught, ignore_errors=True)
        build_model(taught / "fresh", demo.seed)
        write_data(taught / "data", demo.seed)
        settings = [
            *sft_settings(taught / "fresh", taught / "data", taught / "run", demo.seed, demo.sft_steps),
            "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, "
            "total_iters: 20}}]",
            "sft.max_num_epochs=1000",
            "checkpointing.save_period=100",
            "checkpointing.keep_top_k=1",
        ]
        durable.write_text(taught / "sft.yaml", load_config("sft", None, settings).to_yaml())
    if code := run_training("sft", taught / "sft.yaml", quiet=quiet, lock=lock):
        is_passed_on = code in set(ExitCode) - {
            ExitCode.ERROR_FOUND,
            ExitCode.MORE_SAMPLES,
            ExitCode.NO_PROGRESS,
            ExitCode.UNREACHABLE,
        }
        raise Stop(code if is_passed_on else ExitCode.CRASHED, f"demo: SFT ended with exit code {code}")
    conversion = ConversionSettings(force=True, verify=False)
    convert(str(taught / "run"), folder / MODEL, conversion, shown_as="careless arithmetic", say=say)


# -- settings that name these files ------------------------------------------------------------------------------------


def check_names_in_the_demo(config: PipelineConfig, stages: Collection[StageName]) -> None:
    """Raise for a path into the demo's folder that the demo will not make, before it spends minutes on the others."""
    for key, path in _paths_in_the_demo(config, stages):
        if config.demo and not (Path(config.demo.folder) / path).exists() and not _names(path, MADE):
            raise InputError(f"{key}: the demo makes {', '.join(MADE)} in {config.demo.folder}, and no {path}")


def settings_naming(made: Sequence[str], config: PipelineConfig, stages: Collection[StageName]) -> list[str]:
    """The settings that name one of these: base_model, traces.path, evaluate.main.data.dataset_name."""
    return list(dict.fromkeys(key for key, path in _paths_in_the_demo(config, stages) if _names(path, made)))


def _names(path: Path, made: Sequence[str]) -> bool:
    """The folder itself, one of these names, something in one of these, or a pattern for them."""
    first = path.parts[0] if path.parts else "*"
    return any(fnmatch(name, first) for name in made)


def _paths_in_the_demo(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[tuple[str, Path]]:
    """(setting, its path relative to the demo's folder) of these stages; every run reads base model and traces."""
    if config.demo is None:
        return
    traces = [config.traces.path] if isinstance(config.traces.path, str) else config.traces.path
    named = [("base_model", config.base_model), *(("traces.path", path) for path in traces)]
    configs: dict[str, LoadedConfig[Any]] = {"train": load_training(config)} if "train" in stages else {}
    if "evaluate" in stages:
        configs |= {f"evaluate.{name}": load_evaluation(config, name) for name in config.evaluate}
    for section, loaded in configs.items():
        for key, value in loaded.flat().items():
            if isinstance(value, str) and f".{key}".endswith(DATA_OR_MODEL):
                named.append((f"{section}.{key}", value))
    home = Path(config.demo.folder).expanduser().absolute()
    for key, text in named:
        path = Path(text).expanduser().absolute()
        if path.is_relative_to(home):
            yield key, path.relative_to(home)
