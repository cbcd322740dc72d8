"""posttrain tunes language models from preferences and rewards.

    import posttrain

    run = posttrain.grpo("Qwen/Qwen3-0.6B", "prompts.jsonl", reward=right, lora=16, lr=1e-5, steps=200)

The interface is in `posttrain.apps.api`; it is loaded when one of its names is used, so that `import posttrain` is
instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.apps.api import Run, RunFailed, dpo, evaluate, grpo, load_run, rm, sft

__version__ = "0.1.0"
__all__ = ["Run", "RunFailed", "__version__", "dpo", "evaluate", "grpo", "load_run", "rm", "sft"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("posttrain.apps.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
