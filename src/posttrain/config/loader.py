"""From files and overrides to a typed config: read, rename, lay over the defaults, resolve, validate, check.

Every value keeps the place where it was set, so that an error can name the file and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path as FilePath
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from posttrain.config.aliases import MANY_EPOCHS, expand_aliases
from posttrain.config.base import UNKNOWN_KEY, ConfigError, Section, cautions_of, message_of, problems_of
from posttrain.config.dpo import DpoRunConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.foreign.aligner import SECTIONS as ALIGNER_SECTIONS
from posttrain.config.foreign.aligner import translate
from posttrain.config.foreign.nemo_rl import (
    apply_renames,
    foreign_environments,
    review,
    separate,
    usual_values,
    vocabulary_of,
)
from posttrain.config.grpo_run import GrpoRunConfig
from posttrain.config.interpolation import resolve
from posttrain.config.overrides import apply_overrides, parse_override
from posttrain.config.presets import chosen_preset, is_preset_origin
from posttrain.config.render import plain_values, to_yaml_text, with_override_marks, without_credentials_of_config
from posttrain.config.runs import ALL_KINDS, RUN_CONFIGS, Kind
from posttrain.config.schema import (
    find,
    is_field,
    schema_defaults,
    schema_of,
    sections_that_are_not_maps,
    unknown_keys,
)
from posttrain.config.suggestions import hint_for
from posttrain.config.tree import COMMAND_LINE, DEFAULT, Path, Tree, Values, dotted, leaves, overlay
from posttrain.config.yaml_files import read_built_in, read_with_defaults
from posttrain.files.redaction import Replace, hide, name_credentials, shown_setting

C = TypeVar("C", bound=Section)
BATCH_SIZE = ("policy", "train_global_batch_size")
FP8 = ("policy", "fp8")
PRECISION = ("policy", "generation", "native_cfg", "precision")
BACKEND = ("policy", "generation", "backend")
VLLM_PYTHON = ("policy", "generation", "vllm_cfg", "python")
CORRECTION = ("loss_fn", "use_importance_sampling_correction")
TRUNCATION = ("loss_fn", "truncated_importance_sampling_type")
TRUNCATION_RATIO = ("loss_fn", "truncated_importance_sampling_ratio")


@dataclass(frozen=True)
class LoadedConfig(Generic[C]):
    kind: Kind
    config: C
    origins: dict[str, str]  # dotted key -> "default", "configs/x.yaml:12" or "command line"
    warnings: list[str]  # one line each
    expressions: dict[str, str] = field(default_factory=dict)  # dotted key -> the ${...} that it was written as
    unused_epochs: str = ""  # max_num_epochs of the file and its place, if `steps` is given instead

    def to_yaml(self) -> str:
        """Every value, as YAML that `load_config` reads back to the same config, but for credentials (see `_values`)."""
        return to_yaml_text(self._marked_values())

    def to_yaml_and_credentials(self) -> tuple[str, dict[str, str]]:
        """The same for a child process: a credential is a reference to an environment variable that the child is given."""
        variables: dict[str, str] = {}

        def refer(secret: str) -> str:
            name = f"POSTTRAIN_CREDENTIAL_{len(variables) + 1}"
            variables[name] = secret
            return f"${{oc.env:{name}}}"

        return to_yaml_text(self._marked_values(refer)), variables

    def flat(self) -> Values:
        """Every value by its dotted key."""
        return {dotted(path): value for path, value in leaves(self._values())}

    def annotated_yaml(self, *, all_origins: bool = False) -> str:
        """The same with a remark at each value that is not a default (or at all of them)."""

        def remark(path: Path) -> str:
            origin = self.origins.get(dotted(path), "")
            parts = [f"from {origin}"] if origin and (all_origins or origin != DEFAULT) else []
            expression = self.expressions.get(dotted(path))
            return ", ".join([*parts, expression] if expression else parts)

        return to_yaml_text(self._marked_values(), remark)

    def _marked_values(self, replace: Replace = hide) -> Values:
        defaults, _ = separate(self.kind, built_in_defaults(self.kind).values)
        marked: Values = with_override_marks(self._values(replace), defaults)
        return marked

    def _values(self, replace: Replace = hide) -> Values:
        """The algorithm's own sections first. A credential stands there as the `${oc.env:…}` it was written as, or as `***`."""
        values = without_credentials_of_config(plain_values(self.config), self.expressions, replace)
        first = [key for key in ("preset", self.kind, "loss_fn") if key in values]
        return {key: values[key] for key in [*first, *(key for key in values if key not in first)]}


def built_in_defaults(kind: Kind) -> Tree:
    """The defaults of the schema and the usual values of foreign keys, the packaged YAML file over them; nothing resolved."""
    return _built_in_defaults(kind).copy()


@cache
def _built_in_defaults(kind: Kind) -> Tree:
    def keeps_null(path: Path) -> bool:
        return _keeps_null(kind, path)

    schema = Tree(schema_defaults(RUN_CONFIGS[kind]))
    own = overlay(schema, read_built_in(kind), keeps_null, over_built_in=True)
    merged = overlay(own, Tree(usual_values(kind)), keeps_null)
    return Tree.from_one_origin(merged.values, DEFAULT)


@overload
def load_config(
    kind: Literal["grpo"], path: FilePath | None = None, overrides: Sequence[str] = ()
) -> LoadedConfig[GrpoRunConfig]: ...
@overload
def load_config(
    kind: Literal["dpo"], path: FilePath | None = None, overrides: Sequence[str] = ()
) -> LoadedConfig[DpoRunConfig]: ...
@overload
def load_config(
    kind: Literal["eval"], path: FilePath | None = None, overrides: Sequence[str] = ()
) -> LoadedConfig[EvalRunConfig]: ...
@overload
def load_config(kind: str, path: FilePath | None = None, overrides: Sequence[str] = ()) -> LoadedConfig[Any]: ...


def load_config(kind: str, path: FilePath | None = None, overrides: Sequence[str] = ()) -> LoadedConfig[Any]:
    """The config of a run: built-in defaults, then the file at `path`, then `overrides`. Raises ConfigError."""
    known = _known_kind(kind)
    warnings: list[str] = []
    overrides = expand_aliases(known, overrides)
    own = _read_file(known, FilePath(path), warnings) if path is not None else Tree()
    if known == "dpo":
        overrides = _with_aligner_names(own, overrides, warnings)

    def keeps_null(key: Path) -> bool:
        return _keeps_null(known, key)

    defaults = overlay(built_in_defaults(known), chosen_preset(known, own, overrides), keeps_null, over_built_in=True)
    tree = apply_overrides(
        overlay(defaults, own, keeps_null, over_built_in=True),
        overrides,
        rename=lambda written: apply_renames(written, known, warnings),
        has_default=lambda key: is_field(vocabulary_of(known), key),
    )
    _refuse_unknown(known, tree)
    _forget_unfitting_validation(tree)
    _correct_for_other_samplers(known, tree)
    resolved = _resolved_with_fitting_batch(known, tree)
    name_credentials(resolved)
    values, foreign = separate(known, resolved)
    config = _validated(known, values, tree)
    errors, notices = review(config, foreign, tree, _default_test(tree, defaults))

    def is_set(key: str) -> bool:
        return _is_set_by_user(tree, tuple(key.split(".")))

    errors += problems_of(config, is_set)
    if errors:
        raise ConfigError("\n".join(errors))
    return LoadedConfig(
        kind=known,
        config=config,
        origins={dotted(key): tree.origins.get(key, DEFAULT) for key, _ in leaves(plain_values(config))},
        warnings=[*warnings, *notices, *cautions_of(config, is_set)],
        expressions={dotted(key): value for key, value in leaves(tree.values) if _is_expression(value)},
        unused_epochs=_unused_epochs(own, tree, (known, "max_num_epochs")),
    )


def _unused_epochs(own: Tree, tree: Tree, key: Path) -> str:
    given = own.get(key)
    unused = given is not None and given != MANY_EPOCHS and tree.get(key) == MANY_EPOCHS
    return f"{dotted(key)} = {given} ({own.origin(key)})" if unused else ""


def _is_set_by_user(tree: Tree, path: Path) -> bool:
    origin = tree.origin(path)
    return origin != DEFAULT and not is_preset_origin(origin)


def _with_aligner_names(own: Tree, overrides: Sequence[str], warnings: list[str]) -> list[str]:
    """Translate NeMo-Aligner's keys of the file and of the command line in `own`. Returns the other overrides."""
    others = []
    for text in overrides:
        override = parse_override(text)
        if override.path[0] in ALIGNER_SECTIONS and not override.deletes:
            own.put(override.path, override.value, COMMAND_LINE)
        else:
            others.append(text)
    translate(own, warnings)
    return others


def guess_kind(path: FilePath) -> Kind:
    """The kind of run that a file is for, from its top-level sections."""
    sections = read_with_defaults(path, lambda tree: None, lambda key: True, []).values
    kinds = [kind for kind in ALL_KINDS if kind in sections]
    if not kinds and "loss_fn" in sections:
        return "grpo"
    if not kinds and "dpo" in (sections.get("trainer") or {}):
        return "dpo"
    if len(kinds) != 1:
        found = "none of them" if not kinds else " and ".join(f"`{kind}:`" for kind in kinds)
        raise ConfigError(f"{path}: cannot tell the kind of run: it has {found}; say which: {', '.join(ALL_KINDS)}")
    return kinds[0]


def _known_kind(kind: str) -> Kind:
    for known in ALL_KINDS:
        if kind == known:
            return known
    raise ConfigError(f"unknown kind of run {kind!r}: one of {', '.join(ALL_KINDS)} is needed")


def _keeps_null(kind: Kind, path: Path) -> bool:
    node = find(vocabulary_of(kind), path)
    return node is None or node.nullable


def _read_file(kind: Kind, path: FilePath, warnings: list[str]) -> Tree:
    def rename(tree: Tree) -> None:
        apply_renames(tree, kind, warnings)

    return read_with_defaults(path, rename, lambda key: _keeps_null(kind, key), warnings)


def _refuse_unknown(kind: Kind, tree: Tree) -> None:
    """Everything that has the wrong shape, before values are looked at."""
    vocabulary, foreign = vocabulary_of(kind), foreign_environments(tree)
    lines = [
        f"{tree.origin(path)}: {_describe_unknown(kind, path)}"
        for path in unknown_keys(vocabulary, tree.values)
        if path[:2] not in foreign
    ]
    lines += [
        f"{tree.origin(path)}: `{dotted(path)}` = {shown_setting(dotted(path), tree.get(path))}: must be a map of settings"
        for path in sections_that_are_not_maps(vocabulary, tree.values)
    ]
    if lines or foreign:
        raise ConfigError("\n".join([*lines, *foreign.values()]))


def _describe_unknown(kind: Kind, path: Path) -> str:
    if len(path) == 1 and path[0] in ALL_KINDS:
        return f"unknown key `{path[0]}` in a {kind} config; this section belongs to `posttrain {path[0]}`"
    if path[0] in ALIGNER_SECTIONS:
        return (
            f"unknown key `{dotted(path)}` in a {kind} config; names of NeMo-Aligner are understood by `posttrain dpo`"
        )
    return f"unknown key `{dotted(path)}`{hint_for(vocabulary_of(kind), path)}"


def _forget_unfitting_validation(tree: Tree) -> None:
    """The built-in validation set belongs to the built-in training set; it goes when you choose another one."""
    validation = ("data", "validation")
    given = any(origin != DEFAULT for path, origin in tree.origins.items() if path[:2] == validation)
    if tree.get(validation) is None or tree.origin(validation) != DEFAULT or given:
        return
    chosen = [("data", "train", key) for key in ("dataset_name", "data_path")]
    is_list = isinstance(tree.get(("data", "train")), list)
    if is_list or any(tree.origin(key) != DEFAULT for key in chosen if tree.get(key) is not None):
        tree.put(validation, None, DEFAULT)


def _correct_for_other_samplers(kind: Kind, tree: Tree) -> None:
    """A sampler in FP8, or in vLLM, or beside training in FP8, is another policy than the one that is trained: its samples are
    weighted, those of vLLM with truncated weights, unless the user says no."""
    if kind != "grpo" or _is_set_by_user(tree, CORRECTION):
        return
    if tree.get(PRECISION) == "fp8":
        tree.put(CORRECTION, True, f"{dotted(PRECISION)}: fp8")
    elif tree.get(BACKEND) == "vllm" and tree.get(VLLM_PYTHON):
        tree.put(CORRECTION, True, f"{dotted(BACKEND)}: vllm")
        if not any(_is_set_by_user(tree, key) for key in (TRUNCATION, TRUNCATION_RATIO)):
            tree.put(TRUNCATION, "tis", f"{dotted(BACKEND)}: vllm")
            tree.put(TRUNCATION_RATIO, 2.0, f"{dotted(BACKEND)}: vllm")
    elif tree.get(FP8) is True:
        tree.put(CORRECTION, True, f"{dotted(FP8)}: true")


def _resolved_with_fitting_batch(kind: Kind, tree: Tree) -> Values:
    """The resolved values. A default batch size that does not divide the samples is replaced by their number."""
    values = resolve(tree)
    if kind != "grpo" or tree.origin(BATCH_SIZE) != DEFAULT:
        return values
    counts = [values["grpo"].get(key) for key in ("num_prompts_per_step", "num_generations_per_prompt")]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return values  # validation reports what is wrong with them
    samples = counts[0] * counts[1]
    if samples % values["policy"]["train_global_batch_size"] == 0:
        return values
    tree.put(BATCH_SIZE, samples, "grpo.num_prompts_per_step * grpo.num_generations_per_prompt")
    return resolve(tree)


def _validated(kind: Kind, values: Values, tree: Tree) -> Any:
    try:
        return RUN_CONFIGS[kind].model_validate(values)
    except ValidationError as error:
        lines: dict[Path, str] = {}
        for problem in error.errors():
            path = _key_of(kind, problem["loc"], problem["type"] == "missing", tree)
            lines.setdefault(path, _explain(path, problem, tree))
        raise ConfigError("\n".join(lines.values())) from error


def _key_of(kind: Kind, location: tuple[int | str, ...], is_missing: bool, tree: Tree) -> Path:
    """The key that pydantic's location points at. Pydantic also puts members of unions into a location; they are not keys."""
    absent = object()
    path: Path = ()
    for index, part in enumerate(location):
        here = (*path, str(part))
        is_last = index == len(location) - 1
        if tree.get(here, absent) is not absent or (is_missing and is_last and find(schema_of(kind), here)):
            path = here
    return path


def _explain(path: Path, problem: ErrorDetails, tree: Tree) -> str:
    message = message_of(problem)
    if problem["type"] == "missing":
        return f"`{dotted(path)}` is missing: set it in the file or with {dotted(path)}=… on the command line"
    value = problem["input"]
    if problem["type"] == UNKNOWN_KEY:
        return f"{tree.origin(path)}: `{dotted(path)}`: {message}"
    if isinstance(value, dict):
        shown = f"a map with {', '.join(map(str, value)) or 'nothing in it'}"
    else:
        shown = shown_setting(dotted(path), value)
    return f"{tree.origin(path)}: `{dotted(path)}` = {shown}: {message}"


def _is_expression(value: object) -> bool:
    return isinstance(value, str) and "${" in value and "\\${" not in value


def _default_test(tree: Tree, defaults: Tree) -> Callable[[Path, object], bool]:
    """Says whether a value is what it would have been had the user not set it, everything else being equal."""
    absent = object()

    @cache
    def plain() -> Tree:
        return Tree(resolve(defaults))

    @cache
    def in_context() -> Tree:
        usual = tree.copy()
        for path, value in leaves(defaults.values):
            if _is_expression(value) and tree.origin(path) != DEFAULT:
                usual.put(path, value, DEFAULT)
        return Tree(resolve(usual))

    def is_default(path: Path, value: object) -> bool:
        if tree.origin(path) == DEFAULT or value == plain().get(path, absent):
            return True
        return _is_expression(defaults.get(path)) and value == in_context().get(path, absent)

    return is_default
