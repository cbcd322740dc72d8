"""The Python interface: `import posttrain`, then `posttrain.grpo(…)`. Importing this package loads nothing heavy."""

import posttrain.apps.ship.registry  # noqa: F401 - registry:NAME@STAGE may be named as a model
from posttrain.apps.api.evaluating import evaluate
from posttrain.apps.api.run import Run, RunFailed
from posttrain.apps.api.training import dpo, grpo, rm, sft

__all__ = ["Run", "RunFailed", "dpo", "evaluate", "grpo", "load_run", "rm", "sft"]


def load_run(folder: str) -> Run:
    """The run in a folder, finished or not."""
    return Run(folder)
