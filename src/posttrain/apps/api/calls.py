"""`posttrain.grpo`, `ppo`, `distill`, `dpo`, `rm` and `sft` train and return the run; `evaluate` measures a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.apps.api.inputs import Inputs
from posttrain.apps.api.notebook import LiveChart, in_notebook
from posttrain.apps.api.run import Run, RunFailed
from posttrain.apps.api.settings import (
    ENVIRONMENT,
    dataset_block,
    environment_block,
    loaded_config,
    overrides_of,
    rows_of,
)
from posttrain.apps.train import WITH_APPS
from posttrain.data.columns import PROMPT_COLUMNS, REFERENCE_COLUMNS, first_row, has_conversations
from posttrain.errors import ExitCode
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.run import quieten_libraries, start_run

if TYPE_CHECKING:
    from posttrain.apps.api.settings import Config, Data, Reward
    from posttrain.apps.evaluate.results import Evaluation
    from posttrain.config import LoadedConfig, RunConfig


def grpo(
    model: str | Path,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    validation: Data | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """Reinforcement learning: sample answers, score them, and prefer what scored better in its group.

        run = posttrain.grpo("Qwen/Qwen3-0.6B", "prompts.jsonl", reward=right, lora=16, lr=1e-5, steps=200)

    model: a folder, a hub name, or the folder of a run.
    data: a file, a dataset by name, a `datasets.Dataset`, a list of rows, or a map with the keys of `data.train`.
    reward: a function of your own, `file.py:name`, a type such as "math", or several in a list or a map. A function
        takes some of prompt, response, reference_answer, messages, metadata, …, and returns a number or a map of
        named numbers; it may be `async`. A function with a parameter `completions` has TRL's signature. None: the
        config's, mathematics.
    validation: rows kept for validation, given like data.
    config: a YAML file, or settings by their keys, such as {"policy.precision": "float32"}.
    settings: short names (lr, lora, steps, prompts, generations, folder, …) and, as **{"policy.x": …}, any other
        setting; also resume_with_changes, restart, quiet and verbose, which are switches of the command line.

    The same call resumes a run that was stopped. Returns the run when it is finished; raises RunFailed if it ended
    without success, KeyboardInterrupt after Ctrl-C (the run is saved first), and InputError for what must be fixed.
    """
    return _train("grpo", model, data, reward, validation, config, **settings)


def ppo(
    model: str | Path,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    validation: Data | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """Reinforcement learning with a critic, which values every token. Arguments as for `grpo`."""
    return _train("ppo", model, data, reward, validation, config, **settings)


def distill(
    model: str | Path,
    teacher: str | Path,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    validation: Data | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """On-policy distillation: learn a teacher's distributions over own answers to the prompts of `data`.

    teacher: a model with the same tokenizer, named as `model` is. reward: only with a setting
        **{"teacher.reward_weight": 1.0}, or to be shown. Other arguments as for `grpo`.
    """
    settings["teacher.model_name"] = str(teacher)
    return _train("distill", model, data, reward, validation, config, **settings)


def dpo(
    model: str | Path,
    data: Data | None = None,
    *,
    validation: Data | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """Preference optimisation on pairs: rows with prompt, chosen and rejected. Arguments as for `grpo`."""
    return _train("dpo", model, data, None, validation, config, **settings)


def rm(
    model: str | Path,
    data: Data | None = None,
    *,
    validation: Data | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """A reward model from pairs: rows with prompt, chosen and rejected. Arguments as for `grpo`."""
    return _train("rm", model, data, None, validation, config, **settings)


def sft(
    model: str | Path,
    data: Data | None = None,
    *,
    validation: Data | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """Supervised fine-tuning on rows with messages, or with a prompt and an answer. Arguments as for `grpo`."""
    return _train("sft", model, data, None, validation, config, **settings)


def _train(
    name: str,
    model: str | Path,
    data: Data | None,
    reward: Reward | None,
    validation: Data | None,
    config: Config | None,
    *,
    resume_with_changes: bool = False,
    restart: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    **settings: object,
) -> Run:
    from posttrain.config.runs import kind_named

    inputs, kind = Inputs("${checkpointing.checkpoint_dir}"), kind_named(name)
    words: JsonObject = {"policy.model_name": str(model)}
    with ExitStack() as cleanup:
        cleanup.callback(inputs.close)
        row: JsonMapping = {}
        if data is not None:
            words["data.train"], row = dataset_block(kind, "train", data, inputs, reward)
        if validation is not None:
            words["data.validation"], _ = dataset_block(kind, "validation", validation, inputs, reward)
        if reward is not None:
            words[f"env.{ENVIRONMENT}"] = environment_block(reward, inputs, as_messages=has_conversations(row))
            words["data.default.env_name"] = ENVIRONMENT

        def prepare(loaded: LoadedConfig[RunConfig]) -> Callable[[], None]:
            inputs.write(Path(loaded.config.checkpointing.checkpoint_dir))
            if in_notebook() and not quiet:
                cleanup.enter_context(LiveChart(_folder(loaded)))
            return inputs.withdraw

        code, loaded = start_run(
            name,
            loaded_config(name, config, [*overrides_of(words), *overrides_of(settings)]),
            accept_changes=resume_with_changes,
            restart=restart,
            quiet=quiet or in_notebook(),
            verbose=verbose,
            prepare=prepare,
            extensions=WITH_APPS,
        )
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code == ExitCode.SAVED:
        raise SystemExit(code)
    run = Run(_folder(loaded), loaded.config.checkpointing.checkpoint_dir)
    if code != 0:
        raise RunFailed(f"{run.folder}: {run.info.get('reason') or f'the run ended with code {code}'}", run, code)
    return run


def _folder(loaded: LoadedConfig[RunConfig]) -> Path:
    from posttrain.checkpointing.run_folder import run_folder

    return run_folder(loaded.config.logger.log_dir, loaded.config.checkpointing.checkpoint_dir)


def evaluate(
    model: str | Path,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: Config | None = None,
    quiet: bool = False,
    **settings: object,
) -> Evaluation:
    """Measure a model: `evaluate("results/grpo", "gsm8k").summary.score`.

    `model` is a folder of a run, a checkpoint, a model, a hub name or the URL of a server. `data` is a benchmark by
    its name, a file, or rows; `reward` judges the answers, mathematics by default. Further settings are those of
    `posttrain config show eval`, by their dotted keys. Finished problems are saved, and the same call resumes.
    """
    from posttrain.apps.evaluate.build import DEFAULT_FOLDER

    inputs = Inputs(str(DEFAULT_FOLDER))
    try:
        words: JsonObject = {"generation.model_name": str(model)}
        row: JsonMapping = {}
        if data is not None:
            block, row = _problems(data, inputs)
            words |= {f"data.{key}": value for key, value in block.items()}
        if reward is not None:
            as_messages = has_conversations(row)
            words |= {f"env.{ENVIRONMENT}": environment_block(reward, inputs, as_messages=as_messages)}
            words["data.env_name"] = ENVIRONMENT
        loaded = loaded_config("eval", config, [*overrides_of(words), *overrides_of(settings)])([])
        inputs.write(DEFAULT_FOLDER)
    finally:
        inputs.close()
    loaded.print_warnings()
    quieten_libraries()
    from posttrain.apps.evaluate.build import EvaluationBuild
    from posttrain.apps.evaluate.results import read_evaluation
    from posttrain.reporting.console import Console

    console = Console(sys.stderr, quiet=quiet)
    evaluation = EvaluationBuild(loaded, say=console.note)
    _, _, folder = evaluation.execute(console.progress)
    return read_evaluation(folder)


def _problems(data: Data, inputs: Inputs) -> tuple[JsonObject, JsonMapping]:
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return dict(data), {}
    if isinstance(data, str | Path):
        path = str(data)
        first = first_row(path)
        row = first.values if first is not None else {}
    else:
        rows = rows_of(data, "problems")
        row = next(iter(rows), {})
        path = inputs.add_rows("problems", rows)
    block = {"dataset_name": path}
    for key, columns in (("problem_key", PROMPT_COLUMNS), ("solution_key", REFERENCE_COLUMNS)):
        if (column := next((column for column in columns if column in row), None)) is not None:
            block[key] = column
    return block, row
