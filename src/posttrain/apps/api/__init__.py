"""The Python interface: `import posttrain`, then `posttrain.grpo(…)`. Importing this package loads nothing heavy."""

import posttrain.apps.ship.registry  # registry:NAME@STAGE may be named as a model
from posttrain.apps.api.calls import distill, dpo, evaluate, grpo, ppo, rm, sft
from posttrain.apps.api.run import Run, RunFailed

__all__ = ["Run", "RunFailed", "distill", "dpo", "evaluate", "grpo", "load_run", "ppo", "rm", "sft"]


def load_run(folder: str) -> Run:
    """The run in a folder, finished or not."""
    return Run(folder)
