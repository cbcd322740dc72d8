"""Every field of the schema is read by the source outside `config/`, or is named here with what the config layer does.

A read is an attribute access, or a string constant (for `getattr`), with the field's name, or one in a template. The
keys of other systems that nothing reads belong into `config/foreign/nemo_rl.yaml`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path

import posttrain.config
from posttrain.config.base import Section

SOURCE = Path(posttrain.config.__file__).parents[1]

# "Section.field": what the config layer itself does with it.
RESOLVED_BY_CONFIG = {
    "RunConfig.preset": "names the packaged settings that loader.py lays over the defaults",
    "CheckpointingConfig.checkpoint_must_save_by": "read through must_save_by_s",
    "GrpoConfig.num_recorded_per_prompt": "read through num_recorded and num_fresh_per_prompt",
    "GrpoConfig.skip_reference_policy_logprobs_calculation": "refused where a reference is needed",
    "LossFnConfig.force_on_policy_ratio": "refused with several updates per step; with one it holds",
    "EnvironmentConfig.reward_functions": "read through reward_configs",
    "EvalConfig.k_value": "read through metric_name",
    "TolerationSection.effect": "a toleration is written into the pod as it is",
    **{
        f"LoggerConfig.{tool}_enabled": "read by the name of the logger"
        for tool in ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
    },
}


@cache
def names_read() -> set[str]:
    names: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        if (SOURCE / "config") in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    for file in (SOURCE / "apps/launch/manifests").iterdir():
        for inside in re.findall(r"\{[{%](.*?)[}%]\}", file.read_text(encoding="utf-8")):
            names |= set(re.findall(r"(?<=[.\"])\w+", inside))
    return names


def sections() -> list[type[Section]]:
    for module in pkgutil.iter_modules(posttrain.config.__path__, "posttrain.config."):
        importlib.import_module(module.name)

    def below(model: type[Section]) -> list[type[Section]]:
        return [found for child in model.__subclasses__() for found in (child, *below(child))]

    return sorted(set(below(Section)), key=lambda model: model.__name__)


def unread(models: list[type[Section]]) -> set[str]:
    return {
        f"{model.__name__}.{name}"
        for model in models
        for name in model.__annotations__
        if name in model.model_fields and name not in names_read()
    }


def test_every_field_is_read_by_the_source() -> None:
    assert unread(sections()) - set(RESOLVED_BY_CONFIG) == set()


def test_exceptions_are_still_needed() -> None:
    assert set(RESOLVED_BY_CONFIG) - unread(sections()) == set()


def test_a_field_that_nothing_reads_is_found() -> None:
    class Unread(Section):
        never_read_by_anything: int = 0

    assert unread([Unread]) == {"Unread.never_read_by_anything"}
