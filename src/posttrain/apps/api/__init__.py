"""The Python interface: `import posttrain`, then `posttrain.grpo(…)`. Importing this package loads nothing heavy."""

import posttrain.apps.ship.registry  # noqa: F401 - registry:NAME@STAGE may be named as a model
from posttrain.apps.api.calls import dpo, evaluate, grpo, rm, sft
from posttrain.apps.api.run import Run, RunFailed

__all__ = ["Run", "RunFailed", "dpo", "evaluate", "grpo", "load_run", "rm", "sft"]


def load_run(folder: str) -> Run:
    """The run in a folder, finished or not."""
    return Run(folder)
