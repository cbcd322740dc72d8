"""NeMo RL's keys that posttrain does not read, and its older names: `nemo_rl.yaml`, `rules.yaml`, `renames.yaml`.

Every key of NeMo RL may stand in a file. A value that would change results is refused, one that would not is mentioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path as FilePath
from typing import Any

from posttrain.config.base import Section
from posttrain.config.runs import KINDS, VARIANTS, Kind, kind_named
from posttrain.config.schema import Node, schema_of, unknown_keys
from posttrain.config.tree import DEFAULT, Path, Tree, Values, dotted, leaves, overlay, without_marks
from posttrain.config.yaml_files import parse_document
from posttrain.files.redaction import shown_setting

OPEN_MARK = "_open_"  # other keys than those in the file are accepted as well
DATASETS = ("train", "validation", "default")  # maps of `data` that have the keys of a dataset
FOREIGN_ENVIRONMENTS = (
    "code", "code_jaccard", "math_multi_reward", "nemo_gym", "reward_model", "sliding_puzzle_game", "vlm",
)  # fmt: skip
OTHER_MODELS = {"teacher", "value"}  # sections that NeMo RL gives all settings of a policy
ABSENT = object()
_ENGINE_SIZE = (
    "policy.generation.vllm_cfg.tensor_parallel_size"  # of native engines too, where they have their own GPUs
)


@cache
def read_data(name: str) -> Values:
    """One of the YAML files beside this one."""
    return parse_document(FilePath(__file__).with_name(name).read_text(encoding="utf-8"), name).values


@dataclass(frozen=True)
class KeyRule:
    """One row of rules.yaml for one pattern of dotted keys, in which * stands for anything."""

    pattern: str
    accepted: Any
    note: str  # what is missing, or what happens instead; ignored keys with the same note share one warning

    @property
    def ignores(self) -> bool:
        """Nothing reads the key, whatever its value."""
        return self.accepted == "anything"

    def accepts(self, value: object) -> bool:
        if isinstance(self.accepted, dict):
            return value not in self.accepted["not"]
        if isinstance(self.accepted, list):
            return value in self.accepted
        return {"anything": True, "implemented": True, "nothing": False, "empty": not value, "true": bool(value)}[
            self.accepted
        ]


@cache
def read_rules(file: str, name: str = "rules") -> tuple[KeyRule, ...]:
    rows = read_data(file)[name]
    return tuple(KeyRule(key, row["accepts"], row["note"]) for row in rows for key in _listed(row["keys"]))


@lru_cache(maxsize=4096)
def rule_for(key: str, file: str = "rules.yaml", *, vllm_samples: bool = False) -> KeyRule | None:
    rules = (*(read_rules(file, "vllm_rules") if vllm_samples else ()), *read_rules(file))
    return next((rule for rule in rules if fnmatchcase(key, rule.pattern)), None)


@dataclass(frozen=True)
class Rename:
    """One row of renames.yaml or aligner.yaml, which explain the fields, for one key."""

    old: str
    new: tuple[str, ...]
    row: Values

    def converted(self, value: object) -> Any:
        """What `value` is today; ABSENT if the row has `values` and it is none of them."""
        return counterpart(self.row["values"], value) if "values" in self.row else value


def counterpart(pairs: Sequence[Sequence[object]], value: object) -> Any:
    """The second of the first pair whose first is `value`, or is a pattern that fits it as text."""
    for old, new in pairs:
        if (type(old) is type(value) and old == value) or (isinstance(old, str) and fnmatchcase(str(value), old)):
            return new
    return ABSENT


@cache
def read_renames(file: str, name: str) -> tuple[Rename, ...]:
    return tuple(
        Rename(row["old"].replace("*", key), tuple(new.replace("*", key) for new in _listed(row.get("new", []))), row)
        for row in read_data(file)[name]
        for key in row.get("keys", ("",))
    )


def _listed(one_or_many: Any) -> list[str]:
    return one_or_many if isinstance(one_or_many, list) else [one_or_many]


def apply_renames(tree: Tree, name: str, warnings: list[str]) -> bool:
    """Rewrite old keys in `tree`, a file or one override, with a line in `warnings` for each; whether there was any.
    `name` is that of a kind of run or a variant.

    The new name wins where both are written.
    """
    before, kind = len(warnings), kind_named(name)
    if name in VARIANTS:
        _rename_section(VARIANTS[name].section, kind, tree, warnings)
    for rename in read_renames("renames.yaml", "renames"):
        if kind in rename.row.get("kinds", KINDS):
            _apply(rename, tree, warnings)
    _rewrite_validation_sets(tree, before, warnings)
    _rewrite_values(tree, warnings)
    return len(warnings) > before


def _rename_section(old: str, new: str, tree: Tree, warnings: list[str]) -> None:
    """A section under its other name. Expressions may refer to one of a file that this one is laid over."""
    _rewrite_references(f"${{{old}.", f"${{{new}.", tree)
    if not isinstance(section := tree.get((old,)), dict):
        return
    warnings.append(f"{tree.origin((old,))}: `{old}` is now `{new}`")
    for path, value in list(leaves(section)):
        origin = tree.origin((old, *path))
        if tree.get((new, *path), ABSENT) is ABSENT:
            tree.put((new, *path), value, origin)
    tree.remove((old,))


def _rewrite_references(old: str, new: str, tree: Tree) -> None:
    """In expressions."""
    for path, value in list(leaves(tree.values)):
        if isinstance(value, str) and old in value:
            tree.put(path, value.replace(old, new), tree.origin(path))


def _apply(rename: Rename, tree: Tree, warnings: list[str]) -> None:
    old = tuple(rename.old.split("."))
    value = tree.get(old, ABSENT)
    converted = rename.converted(value)
    if rename.new and (value is ABSENT or converted is not ABSENT):
        _rewrite_references(f"${{{rename.old}}}", f"${{{rename.new[0]}}}", tree)
    if value is ABSENT or converted is ABSENT or value in rename.row.get("unless", ()):
        return
    targets = [tuple(key.split(".")) for key in rename.new]
    if any(isinstance(tree.get(target[:-1]), list) for target in targets):
        return  # there is a list of datasets beside the flat keys; the old key stays, as an unknown one
    origin = tree.origin(old)
    tree.remove(old)
    if len(old) > 2 and tree.get(old[:-1]) == {}:
        tree.remove(old[:-1])
    if not targets:
        warnings.append(f"{origin}: `{rename.old}` is not used: {rename.row['reason']}")
        return
    taken = [target for target in targets if tree.get(target, ABSENT) is not ABSENT]
    for target in targets:
        if target not in taken:
            tree.put(target, converted, origin)
    for key, value_of in rename.row.get("also", {}).items():
        if tree.get(tuple(key.split(".")), ABSENT) is ABSENT:
            tree.put(tuple(key.split(".")), value_of, origin)
    names = " and ".join(f"`{key}`" for key in rename.new)
    if taken:
        warnings.append(f"{origin}: `{rename.old}` is ignored, because {names} is set as well")
    elif rename.new == (rename.old,):
        warnings.append(f"{origin}: `{rename.old}: {value}` is now `{converted}`")
    else:
        warnings.append(f"{origin}: `{rename.old}` is now {names}")


def _rewrite_validation_sets(tree: Tree, before: int, warnings: list[str]) -> None:
    """`data.val_data_paths: {name: path}` becomes a list. Flat files name the dataset once, for validation too."""
    old, new = ("data", "val_data_paths"), ("data", "validation")
    dataset, paths = tree.get(("data", "train", "dataset_name")), tree.get(old)
    if isinstance(paths, dict) and paths:
        origin = tree.origin(old)
        tree.remove(old)
        shared = {"dataset_name": dataset} if dataset else {}
        tree.put(new, [{"name": name, **shared, "data_path": path} for name, path in paths.items()], origin)
        warnings.append(
            f"{origin}: `data.val_data_paths` is now `data.validation`, a list of datasets with `name` and `data_path`"
        )
    was_flat = any("`data.val_data_path`" in line for line in warnings[before:])
    validation = tree.get(new)
    if was_flat and dataset and isinstance(validation, dict) and "dataset_name" not in validation:
        tree.put((*new, "dataset_name"), dataset, tree.origin((*new, "data_path")))


def _rewrite_values(tree: Tree, warnings: list[str]) -> None:
    """Values that once implied what must be stated today."""
    path: Path = ("env", "dapo")
    settings = tree.get(path)
    if isinstance(settings, dict) and settings and not {"math_verify_impl", "function"} & set(settings):
        origin = tree.origin(path)
        tree.put((*path, "math_verify_impl"), "dapo_math_verify", origin)
        warnings.append(f"{origin}: `env.dapo` is now any environment with `math_verify_impl: dapo_math_verify`")
    # `tis` was the default of a switch that did nothing without a ratio.
    path = ("loss_fn", "truncated_importance_sampling_type")
    ratio = tree.get(("loss_fn", "truncated_importance_sampling_ratio"), ABSENT)
    corrects = tree.get(("loss_fn", "use_importance_sampling_correction")) is True
    if tree.get(path) == "tis" and ratio is None and not corrects:
        origin = tree.origin(path)
        tree.put(path, None, origin)
        warnings.append(f"{origin}: `{dotted(path)}: tis` without a ratio is now `null`")


def usual_values(kind: Kind) -> Values:
    """The values that NeMo RL's own files give to keys that posttrain does not read."""
    values: Values = without_marks(_of_kind(kind), OPEN_MARK)
    return values


@cache
def vocabulary_of(kind: Kind) -> Node:
    """Every key that a file may have: those of the schema, and those of NeMo RL."""
    node = _with_foreign(schema_of(kind), _of_kind(kind))
    data = node.children["data"]
    names = dict.fromkeys(read_data("nemo_rl.yaml")["dataset"])
    datasets = {key: _with_foreign(data.children[key], names) for key in DATASETS if key in data.children}
    for other in OTHER_MODELS & node.children.keys():  # with all keys that the policy has
        children = {**node.children["policy"].children, **node.children[other].children}
        node = replace(node, children={**node.children, other: replace(node.children[other], children=children)})
    return replace(node, children={**node.children, "data": replace(data, children={**data.children, **datasets})})


def _of_kind(kind: Kind) -> Values:
    file = read_data("nemo_rl.yaml")
    shared = {} if kind == "eval" else file["training"]
    return overlay(Tree(shared), Tree(file.get(kind, {})), lambda path: True).values


def _with_foreign(node: Node, foreign: Values) -> Node:
    children = dict(node.children)
    for key, value in foreign.items():
        if isinstance(value, dict):
            children[key] = _with_foreign(children.get(key, Node("section", nullable=False)), value)
        elif key != OPEN_MARK:
            children[key] = Node("free" if value is None or isinstance(value, list) else "value", nullable=True)
    return replace(node, children=children, open=node.open or OPEN_MARK in foreign)


def separate(kind: Kind, values: Values) -> tuple[Values, Values]:
    """The values that belong to the schema, and those that do not."""
    own, foreign = Tree(deepcopy(values)), Tree()
    for path in list(unknown_keys(schema_of(kind), values)):
        foreign.put(path, own.remove(path), DEFAULT)
    return own.values, foreign.values


def _every_value(values: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Like `leaves`, but also inside lists of maps."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = {str(index): item for index, item in enumerate(values)}
    if not isinstance(values, dict) or not values:
        yield path, values
        return
    for key, value in values.items():
        yield from _every_value(value, (*path, str(key)))


def review(
    config: Section, foreign: Values, tree: Tree, is_default: Callable[[Path, object], bool]
) -> tuple[list[str], list[str]]:
    """(errors, warnings) for what is not implemented. Only values that the user set can be mentioned."""
    errors: list[str] = []
    ignored: dict[str, list[str]] = {}
    policy = getattr(config, "policy", None)
    generation = getattr(policy, "generation", None)
    vllm_samples = generation is not None and generation.uses_vllm
    own = [one for one in _every_value(config.model_dump(by_alias=True)) if one[0][0] not in OTHER_MODELS]
    of_policy = {path[1:]: value for path, value in [*own, *_every_value(foreign)] if path[0] == "policy"}
    for path, value in [*own, *_every_value(foreign)]:
        key = dotted(path)
        if path[0] in OTHER_MODELS and (value is None or of_policy.get(path[1:], ABSENT) == value):
            continue
        rule = rule_for(key, vllm_samples=vllm_samples)
        if rule is None or (key == _ENGINE_SIZE and generation is not None and not generation.colocated.enabled):
            continue
        if not rule.accepts(value):
            errors.append(f"{tree.origin(path)}: `{key}` = {shown_setting(key, value)} is not implemented: {rule.note}")
        elif rule.ignores and value is not None and not is_default(path, value):
            ignored.setdefault(rule.note, []).append(key)
    notices = []
    if generation is not None and generation.backend == "vllm" and not vllm_samples:
        notices.append(
            "policy.generation.backend: vllm needs policy.generation.vllm_cfg.python, the Python of an environment "
            "that has vLLM (docs/vllm.md); the native engine samples instead"
        )
    position = Tree(foreign).get(("policy", "dtensor_cfg", "lora_cfg", "dropout_position"))
    lora = None if policy is None else policy.dtensor_cfg.lora_cfg
    if lora is not None and lora.enabled and lora.dropout and position == "post":
        notices.append(
            "policy.dtensor_cfg.lora_cfg.dropout_position: adapters drop their input (pre), not their output (post)"
        )
    for note, keys in ignored.items():
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        notices.append(f"{', '.join(keys[:3])}{more}: {note}")
    return errors, notices


def foreign_environments(tree: Tree) -> dict[Path, str]:
    """What to say about judges of NeMo RL that posttrain does not have; their settings are not in the schema either."""
    environments = tree.get(("env",))
    if not isinstance(environments, dict):
        return {}
    return {
        (
            "env",
            name,
        ): f"{tree.origin(('env', name))}: `env.{name}` is not implemented: use `env.math`, say what it is with "
        f"`env.{name}.type` (`posttrain rewards list`), or `env.{name}.function` with a Python reward function"
        for name, settings in environments.items()
        if name in FOREIGN_ENVIRONMENTS
        and not (isinstance(settings, dict) and any(settings.get(key) for key in ("function", "type", "rewards")))
    }
