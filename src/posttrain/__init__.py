"""posttrain tunes language models from rewards, preferences and agents.

    import posttrain

    run = posttrain.grpo("Qwen/Qwen3-0.6B", "prompts.jsonl", reward=right, lora=16, lr=1e-5, steps=200)

The interface is in `posttrain.apps.api`; it is loaded when one of its names is used, so that `import posttrain` is
instant.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.apps.api import Run, RunFailed, distill, dpo, evaluate, grpo, load_run, ppo, rm, sft

__version__ = "0.1.0"
__all__ = [
    "Run",
    "RunFailed",
    "__version__",
    "distill",
    "dpo",
    "evaluate",
    "grpo",
    "load_run",
    "ppo",
    "rm",
    "sft",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("posttrain.apps.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Moved(MetaPathFinder, Loader):
    """Documented packages under the names that they had before `apps/`: the same modules."""

    names = {  # noqa: RUF012
        "posttrain.api": "posttrain.apps.api",
        "posttrain.demo": "posttrain.apps.demo",
        "posttrain.doctor": "posttrain.reporting.doctor",
        "posttrain.registry": "posttrain.apps.ship.registry",
    }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = ".".join(fullname.split(".")[:2])
        return ModuleSpec(fullname, self) if package in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = ".".join(spec.name.split(".")[:2])
        module = import_module(self.names[old] + spec.name.removeprefix(old))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Moved())  # before the finder of files, which would load a second copy
