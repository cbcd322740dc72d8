"""From files and overrides to a typed config: read, rename, lay over the defaults, resolve, validate, check.

Every value keeps the place where it was set, so that an error can name the file and the line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path as FilePath
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from posttrain.config.base import UNKNOWN_KEY, ConfigError, Section, cautions_of, message_of, problems_of
from posttrain.config.command_line import MANY_EPOCHS, apply_overrides, expand_aliases, parse_override
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
from posttrain.config.render import to_yaml_text, with_override_marks, without_credentials_of_config
from posttrain.config.rewards import NO_REWARD
from posttrain.config.runs import ALL_KINDS, RUN_CONFIGS, TRAINING_NAMES, VARIANT_OF_SECTION, VARIANTS, Kind, kind_named
from posttrain.config.schema import (
    Node,
    find,
    hint_for,
    is_field,
    schema_defaults,
    schema_of,
    schema_of_model,
    sections_that_are_not_maps,
    unknown_keys,
)
from posttrain.config.tree import COMMAND_LINE, DEFAULT, Path, Tree, Values, dotted, leaves, overlay, resolve
from posttrain.config.yaml_files import parse_document, read_built_in, read_with_defaults
from posttrain.files.redaction import Replace, hide, name_credentials, shown_setting

C = TypeVar("C", bound=Section)
S = TypeVar("S", bound=Section)
ALL_NAMES = (*TRAINING_NAMES, "eval")
PRESETS_DIR = FilePath(__file__).parent / "presets"
_ABSENT = object()
_BATCH_SIZE = ("policy", "train_global_batch_size")
_CORRECTION = ("loss_fn", "use_importance_sampling_correction")


@dataclass(frozen=True)
class LoadedConfig(Generic[C]):
    kind: Kind
    config: C
    origins: dict[str, str]  # dotted key -> "default", "configs/x.yaml:12" or "command line"
    warnings: list[str]  # one line each
    expressions: dict[str, str] = field(default_factory=dict)  # dotted key -> the ${...} that it was written as
    unused_epochs: str = ""  # max_num_epochs of the file and its place, if `steps` is given instead

    def to_yaml(self) -> str:
        """Every value, as YAML that `load_config` reads back to the same config, but for credentials."""
        return to_yaml_text(self._marked_values())

    def to_yaml_and_credentials(self) -> tuple[str, dict[str, str]]:
        """The same for a child process: credentials are references to environment variables that it is given."""
        variables: dict[str, str] = {}

        def refer(secret: str) -> str:
            name = f"POSTTRAIN_CREDENTIAL_{len(variables) + 1}"
            variables[name] = secret
            return f"${{oc.env:{name}}}"

        return to_yaml_text(self._marked_values(refer)), variables

    def print_warnings(self) -> None:
        for warning in self.warnings:
            print(f"warning: {warning}", file=sys.stderr)

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
        """The algorithm's own sections first. A credential is the `${oc.env:…}` that it was written as, or `***`."""
        values = without_credentials_of_config(self.config.model_dump(by_alias=True), self.expressions, replace)
        first = [key for key in ("preset", self.kind, "loss_fn") if key in values]
        return {key: values[key] for key in [*first, *(key for key in values if key not in first)]}


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
def load_config(
    kind: str, path: FilePath | None = None, overrides: Sequence[str] = (), *, may_be_incomplete: bool = False
) -> LoadedConfig[Any]: ...


def load_config(
    kind: str, path: FilePath | None = None, overrides: Sequence[str] = (), *, may_be_incomplete: bool = False
) -> LoadedConfig[Any]:
    """The config of a run: built-in defaults, then the file at `path`, then `overrides`. Raises ConfigError.

    `kind` may be a variant, such as ppo. `may_be_incomplete`: without what such a run needs, a teacher.
    """
    known = next((name for name in ALL_KINDS if name == kind_named(kind)), None)
    if known is None:
        raise ConfigError(f"unknown kind of run {kind!r}: one of {', '.join(ALL_NAMES)} is needed")
    variant = VARIANTS.get(kind)
    overrides = [*variant.settings, *overrides] if variant is not None else overrides
    warnings: list[str] = []
    overrides = expand_aliases(known, overrides)
    vocabulary = vocabulary_of(known)
    keeps_null = partial(_keeps_null, vocabulary)

    def rename(tree: Tree) -> bool:
        return apply_renames(tree, kind, warnings)

    own = Tree() if path is None else read_with_defaults(FilePath(path), rename, keeps_null, warnings)
    if known == "dpo":
        overrides = _with_aligner_names(own, overrides, warnings)
    defaults = overlay(built_in_defaults(known), _chosen_preset(known, own, overrides), keeps_null, over_built_in=True)
    tree = overlay(defaults, own, keeps_null, over_built_in=True)
    tree = apply_overrides(tree, overrides, rename, partial(is_field, vocabulary), defaults)
    _refuse_wrong_shape(vocabulary, tree, known)

    def is_set(key: str) -> bool:
        origin = tree.origin(tuple(key.split(".")))
        return origin != DEFAULT and not origin.startswith("preset ")

    _fit_defaults(known, tree, is_set)
    resolved = _resolved_with_fitting_batch(known, tree)
    name_credentials(resolved)
    values, foreign = separate(known, resolved)
    config = _validated(RUN_CONFIGS[known], values, tree)
    errors, notices = review(config, foreign, tree, _default_test(tree, defaults))
    errors += problems_of(config, is_set)
    if variant is not None and not may_be_incomplete and (problem := variant.problem(config)):
        errors.append(problem)
    if errors:
        raise ConfigError("\n".join(errors))
    epochs = (known, "max_num_epochs")
    given = own.get(epochs)
    is_unused = given not in (None, MANY_EPOCHS) and tree.get(epochs) == MANY_EPOCHS
    return LoadedConfig(
        kind=known,
        config=config,
        origins={dotted(key): tree.origins.get(key, DEFAULT) for key, _ in leaves(config.model_dump(by_alias=True))},
        warnings=[*warnings, *notices, *cautions_of(config, is_set)],
        expressions={dotted(key): value for key, value in leaves(tree.values) if _is_expression(value)},
        unused_epochs=f"{dotted(epochs)} = {given} ({own.origin(epochs)})" if is_unused else "",
    )


def load_words(
    words: Sequence[str],
    path: FilePath | None,
    kinds: Sequence[str] = ALL_NAMES,
    *,
    may_be_incomplete: bool = False,
) -> LoadedConfig[Any]:
    """`KIND key=value …`, as on the command line. The kind may be left out where the file at `path` tells it."""
    if not words or words[0] not in kinds:
        if path is None:
            unknown = f"unknown run type {words[0]!r}: " if words and "=" not in words[0] else ""
            raise ConfigError(f"{unknown}give the kind of run ({', '.join(kinds)}), or --config FILE")
        words = [guess_kind(path), *words]
        if words[0] not in kinds:
            raise ConfigError(f"{path} is the config of an evaluation; a training is needed: {', '.join(kinds)}")
    return load_config(words[0], path, words[1:], may_be_incomplete=may_be_incomplete)


def load_standalone(model: type[S], path: FilePath, overrides: Sequence[str] = ()) -> S:
    """A file that is not the config of a run (gate.yaml and the like), read with the same strictness.

    There are no built-in values but those of the schema, and no names of other systems to understand.
    """
    root = schema_of_model(model)
    tree = read_with_defaults(path, lambda tree: False, partial(_keeps_null, root), [])
    tree = apply_overrides(tree, overrides, lambda written: False, has_default=partial(is_field, root))
    _refuse_wrong_shape(root, tree)
    return _validated(model, resolve(tree), tree, str(path))


def guess_kind(path: FilePath) -> str:
    """The kind of run, or the variant, that a file is for, from its top-level sections."""
    sections = read_with_defaults(path, lambda tree: False, lambda key: True, []).values
    kinds = [kind for kind in ALL_KINDS if kind in sections]
    variants = [variant for section, variant in VARIANT_OF_SECTION.items() if section in sections]
    if len(variants) == 1 and not kinds:
        return variants[0]
    if not kinds and "loss_fn" in sections:
        return "grpo"
    if not kinds and "dpo" in (sections.get("trainer") or {}):
        return "dpo"
    if len(kinds) != 1:
        found = "none of them" if not kinds else " and ".join(f"`{kind}:`" for kind in kinds)
        raise ConfigError(f"{path}: cannot tell the kind of run: it has {found}; say which: {', '.join(ALL_KINDS)}")
    return kinds[0]


def built_in_defaults(kind: Kind) -> Tree:
    """The defaults of the schema, the packaged YAML file over them, and the usual values of foreign keys."""
    return _built_in_defaults(kind).copy()


@cache
def _built_in_defaults(kind: Kind) -> Tree:
    keeps_null = partial(_keeps_null, vocabulary_of(kind))
    own = overlay(Tree(schema_defaults(RUN_CONFIGS[kind])), read_built_in(kind), keeps_null, over_built_in=True)
    return Tree.from_one_origin(overlay(own, Tree(usual_values(kind)), keeps_null).values, DEFAULT)


def _keeps_null(vocabulary: Node, path: Path) -> bool:
    node = find(vocabulary, path)
    return node is None or node.nullable


@dataclass(frozen=True)
class Preset:
    """Packaged settings, after `preset: NAME`, that make a run compute what another system computes.

    A preset sets how rewards become advantages and which loss is used. It sets no models, data, batch sizes, lengths or
    learning rates. Whatever your file or the command line sets wins over it.
    """

    kind: str
    name: str
    summary: str  # its file's first line


def presets(kind: str) -> list[Preset]:
    """Those for one kind of run or variant, by name."""
    kind = kind_named(kind)
    files = sorted((PRESETS_DIR / kind).glob("*.yaml"))
    return [Preset(kind, file.stem, file.read_text("utf-8").split("\n")[0].removeprefix("#").strip()) for file in files]


def _chosen_preset(kind: str, own: Tree, overrides: Sequence[str]) -> Tree:
    """The settings of the preset that the command line or else the file names; nothing if neither does."""
    name, origin = own.get(("preset",)), own.origin(("preset",))
    for override in map(parse_override, overrides):
        if override.path == ("preset",):
            name, origin = (None if override.deletes else override.value), COMMAND_LINE
    if name is None:
        return Tree()
    known = [preset.name for preset in presets(kind)]
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        there = f"no such preset for {kind}; {hint}There are {', '.join(known)}"
        raise ConfigError(f"{origin}: `preset` = {name!r}: {there if known else f'there are no presets for {kind}'}")
    text = (PRESETS_DIR / kind / f"{name}.yaml").read_text(encoding="utf-8")
    return Tree.from_one_origin(parse_document(text, f"preset {name}").values, f"preset {name}")


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


def _refuse_wrong_shape(root: Node, tree: Tree, kind: Kind | None = None) -> None:
    """Unknown keys, and plain values in place of sections, before values are looked at."""
    foreign = {} if kind is None else foreign_environments(tree)
    lines = []
    for path in unknown_keys(root, tree.values):
        if path[:2] in foreign:
            continue
        hint = hint_for(root, path, None if kind is None else schema_of(kind))
        if kind is not None and len(path) == 1 and path[0] in ALL_KINDS:
            hint = f" in a {kind} config; this section belongs to `posttrain {path[0]}`"
        elif kind is not None and path[0] in VARIANT_OF_SECTION and len(path) == 1:
            hint = f" in a {kind} config; this section belongs to `posttrain {VARIANT_OF_SECTION[path[0]]}`"
        elif kind is not None and path[0] in ALIGNER_SECTIONS:
            hint = f" in a {kind} config; names of NeMo-Aligner are understood by `posttrain dpo`"
        lines.append(f"{tree.origin(path)}: unknown key `{dotted(path)}`{hint}")
    for path in sections_that_are_not_maps(root, tree.values):
        shown = shown_setting(dotted(path), tree.get(path))
        lines.append(f"{tree.origin(path)}: `{dotted(path)}` = {shown}: must be a map of settings")
    if lines or foreign:
        raise ConfigError("\n".join([*lines, *foreign.values()]))


def _fit_defaults(kind: Kind, tree: Tree, is_set: Callable[[str], bool]) -> None:
    """Defaults that follow from what else is set."""
    # The built-in validation set belongs to the built-in training set; it goes when you choose another one.
    validation, train = ("data", "validation"), tree.get(("data", "train"))
    given = any(origin != DEFAULT for path, origin in tree.origins.items() if path[:2] == validation)
    if tree.get(validation) is not None and not given:
        chosen = [key for key in ("dataset_name", "data_path") if tree.get(("data", "train", key)) is not None]
        if isinstance(train, list) or any(tree.origin(("data", "train", key)) != DEFAULT for key in chosen):
            tree.put(validation, None, DEFAULT)
    if (
        kind == "grpo"
        and tree.get(("teacher", "model_name")) is not None
        and not tree.get(("teacher", "reward_weight"))
    ):
        # Distillation alone needs no rewards, and no others to compare an answer with.
        alone = ("grpo", "adv_estimator", "group_of_one")
        if tree.get(("grpo", "num_generations_per_prompt")) == 1 and tree.origin(alone) == DEFAULT:
            tree.put(alone, "reward", "teacher.model_name")
        origins = [path for path, origin in tree.origins.items() if origin != DEFAULT]
        if not any(path[0] == "env" or path[-1] == "env_name" for path in origins):
            tree.put(("env", NO_REWARD), {"type": NO_REWARD}, "teacher.model_name")
            tree.put(("data", "default", "env_name"), NO_REWARD, "teacher.model_name")
            if not any(path[-1] == "output_key" for path in origins):
                tree.put(("data", "default", "output_key"), "", "teacher.model_name")
    if kind != "grpo" or is_set(dotted(_CORRECTION)):
        return
    # A sampler in FP8, or in vLLM, or beside training in FP8, is another policy than the one that is trained: its
    # samples are weighted, those of vLLM with truncated weights, unless the user says no.
    generation = tree.get(("policy", "generation")) or {}
    truncation = {
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": 2.0,
    }
    if Tree(generation).get(("native_cfg", "precision")) == "fp8":
        tree.put(_CORRECTION, True, "policy.generation.native_cfg.precision: fp8")
    elif generation.get("backend") == "vllm" and Tree(generation).get(("vllm_cfg", "python")):
        origin = "policy.generation.backend: vllm"
        tree.put(_CORRECTION, True, origin)
        for key, value in truncation.items() if not any(map(is_set, truncation)) else ():
            tree.put(tuple(key.split(".")), value, origin)
    elif tree.get(("policy", "fp8")) is True:
        tree.put(_CORRECTION, True, "policy.fp8: true")


def _resolved_with_fitting_batch(kind: Kind, tree: Tree) -> Values:
    """The resolved values. A default batch size that does not divide the samples is replaced by their number."""
    values = resolve(tree)
    if kind != "grpo" or tree.origin(_BATCH_SIZE) != DEFAULT:
        return values
    counts = [values["grpo"].get(key) for key in ("num_prompts_per_step", "num_generations_per_prompt")]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return values  # validation reports what is wrong with them
    samples = counts[0] * counts[1]
    if samples % values["policy"]["train_global_batch_size"] == 0:
        return values
    tree.put(_BATCH_SIZE, samples, "grpo.num_prompts_per_step * grpo.num_generations_per_prompt")
    return resolve(tree)


def _validated(model: type[S], values: Values, tree: Tree, file: str = "") -> S:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines: dict[Path, str] = {}
        for problem in error.errors():
            path = _key_of(schema_of_model(model), problem, tree)
            lines.setdefault(path, _explain(path, problem, tree, file))
        raise ConfigError("\n".join(lines.values())) from error


def _key_of(root: Node, problem: ErrorDetails, tree: Tree) -> Path:
    """The key that pydantic's location points at; members of unions in a location are no keys."""
    path: Path = ()
    for index, part in enumerate(problem["loc"]):
        here = (*path, str(part))
        is_missing = problem["type"] == "missing" and index == len(problem["loc"]) - 1
        if tree.get(here, _ABSENT) is not _ABSENT or (is_missing and find(root, here)):
            path = here
    return path


def _explain(path: Path, problem: ErrorDetails, tree: Tree, file: str) -> str:
    key, message, value = dotted(path), message_of(problem), problem["input"]
    if problem["type"] == "missing":
        where = f"{file}: " if file else ""
        return f"{where}`{key}` is missing: set it in the file or with {key}=… on the command line"
    if not path:
        return f"{file}: {message}"
    shown = ""
    if isinstance(value, dict) and problem["type"] != "value_error":
        shown = f" = a map with {', '.join(map(str, value)) or 'nothing in it'}"
    elif not isinstance(value, dict | Section) and problem["type"] != UNKNOWN_KEY:
        shown = f" = {shown_setting(key, value)}"
    return f"{tree.origin(path)}: `{key}`{shown}: {message}"


def _is_expression(value: object) -> bool:
    return isinstance(value, str) and "${" in value and "\\${" not in value


def _default_test(tree: Tree, defaults: Tree) -> Callable[[Path, object], bool]:
    """A test whether a value is what it would have been had the user not set it, everything else being equal."""

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
        if tree.origin(path) == DEFAULT or value == plain().get(path, _ABSENT):
            return True
        return _is_expression(defaults.get(path)) and value == in_context().get(path, _ABSENT)

    return is_default
