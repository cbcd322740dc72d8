"""`posttrain.evaluate`: a model on a benchmark or on rows of your own, as `posttrain eval` does it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.api.inputs import Inputs
from posttrain.apps.api.settings import (
    ENVIRONMENT,
    PROMPT_COLUMNS,
    REFERENCE_COLUMNS,
    environment_block,
    first_row,
    has_conversations,
    loaded_config,
    overrides_of,
)
from posttrain.errors import called_from_python
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.run import quieten_libraries

if TYPE_CHECKING:
    from posttrain.apps.api.settings import Config, Data, Reward
    from posttrain.apps.evaluate.results import Evaluation


@called_from_python()
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

    `model` is a folder of a run, a checkpoint, a model, a hub name or the URL of a server. `data` is a benchmark by its name, a
    file, or rows; `reward` judges the answers, mathematics by default. Further settings are those of `posttrain config show
    eval`, by their dotted keys. Finished problems are saved, and the same call resumes.
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
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    quieten_libraries()
    from posttrain.apps.evaluate.build import EvaluationBuild
    from posttrain.apps.evaluate.results import read_evaluation
    from posttrain.reporting.console import Console
    from posttrain.reporting.wording import Line

    console = Console(sys.stderr, quiet=quiet)
    evaluation = EvaluationBuild(loaded, say=lambda text: console.show([Line(text, "muted")]))
    _, _, folder = evaluation.execute(console.progress)
    return read_evaluation(folder)


def _problems(data: Data, inputs: Inputs) -> tuple[JsonObject, JsonMapping]:
    from posttrain.apps.api.settings import rows_of

    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return dict(data), {}
    if isinstance(data, str | Path):
        path, row = str(data), first_row(str(data))
    else:
        rows = rows_of(data, "problems")
        row = next(iter(rows), {})
        path = inputs.add_rows("problems", rows)
    block = {"dataset_name": path}
    for key, columns in (("problem_key", PROMPT_COLUMNS), ("solution_key", REFERENCE_COLUMNS)):
        if (column := next((column for column in columns if column in row), None)) is not None:
            block[key] = column
    return block, row
