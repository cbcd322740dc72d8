"""The names of NeMo-Aligner's DPO config, translated: `model.dpo.*`, `model.data.*`, `trainer.dpo.*`, `exp_manager.*` and so on.

`posttrain dpo` understands them in files and on the command line. All of them are translated together, because one setting here
may come from several there. A key that posttrain has no counterpart for is refused with what to use, or, where it changes no
result, mentioned. The value of posttrain's own name wins where both are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from posttrain.config.aligner_keys import (
    IGNORED,
    KEYS,
    LORA,
    MEGATRON,
    REFUSED,
    SECTIONS,
    Convert,
    Untranslatable,
    cosine_schedule,
    linear_layers,
    one_or_all,
    unchanged,
)
from posttrain.config.base import ConfigError
from posttrain.config.interpolation import MISSING, resolve
from posttrain.config.tree import COMMAND_LINE, Path, Tree, dotted, leaves

_ABSENT = object()


def translate(tree: Tree, warnings: list[str]) -> None:
    """Replace the sections of NeMo-Aligner in `tree`. Raises ConfigError for what has no counterpart."""
    given = Tree(
        {section: tree.get((section,)) for section in SECTIONS if tree.get((section,), _ABSENT) is not _ABSENT}
    )
    if not given.values:
        return
    given.origins = {path: origin for path, origin in tree.origins.items() if path[0] in SECTIONS}
    for section in SECTIONS:
        if section in tree.values:
            tree.remove((section,))
    for path, value in list(leaves(given.values)):
        if value == MISSING:  # to be given elsewhere; what it stands for has a default here, or is asked for
            given.remove(path)
    given.values = resolve(given)
    _Translation(given, tree, warnings).run()


class _Translation:
    def __init__(self, given: Tree, tree: Tree, warnings: list[str]) -> None:
        self._given, self._tree, self._warnings = given, tree, warnings
        self._errors: list[str] = []

    def run(self) -> None:
        self._data()
        self._schedule()
        self._folder()
        self._adapters()
        for key in KEYS:
            value = self._take(key.old)
            if value is not _ABSENT:
                self._put(key.old, key.new, value, key.convert)
        ignored = list(self._rest())
        if self._errors:
            raise ConfigError("\n".join(self._errors))
        if ignored:
            self._warnings.append(f"{', '.join(ignored)}: {MEGATRON}")

    def _take(self, key: str) -> Any:
        path = tuple(key.split("."))
        value = self._given.get(path, _ABSENT)
        if value is not _ABSENT:
            self._given.values = _without(self._given.values, path)
        return value

    def _put(self, old: str, new: tuple[str, ...], value: object, convert: Convert = unchanged) -> None:
        origin = self._given.origin(tuple(old.split(".")))
        try:
            converted = convert(value)
        except Untranslatable as error:
            self._errors.append(f"{origin}: `{old}` = {value!r}: {error}")
            return
        names = " and ".join(f"`{name}`" for name in new)
        taken = [name for name in new if self._is_set_otherwise(tuple(name.split(".")), converted, origin)]
        if taken:
            self._warnings.append(f"{origin}: `{old}` is ignored, because `{taken[0]}` is set as well")
            return
        for name in new:
            self._tree.put(tuple(name.split(".")), converted, origin)
        self._warnings.append(f"{origin}: `{old}` is now {names}")

    def _is_set_otherwise(self, path: Path, value: object, origin: str) -> bool:
        """Whether posttrain's own name holds another value, which wins unless it is a file's against the command line's."""
        present = self._tree.get(path, _ABSENT)
        is_overridden = origin == COMMAND_LINE and self._tree.origin(path) != COMMAND_LINE
        return present is not _ABSENT and present != value and not is_overridden

    def _data(self) -> None:
        """`model.data.data_prefix`: a file, a list of files, or those of training and validation by name."""
        old = "model.data.data_prefix"
        prefix, kind = self._take(old), self._given.get(("model", "data", "data_impl"))
        if prefix is _ABSENT or prefix is None:
            return
        name = "PackedPairs" if kind == "packed_jsonl" else "NeMo-Aligner"
        files = prefix if isinstance(prefix, dict) else {"train": prefix}
        for split in ("train", "validation"):
            paths = files.get(split)
            paths = paths if isinstance(paths, list) else [] if paths is None else [paths]
            sets = [{"dataset_name": name, "data_path": str(path)} for path in paths]
            if sets:
                self._put(f"{old}.{split}" if isinstance(prefix, dict) else old, (f"data.{split}",), sets, one_or_all)

    def _schedule(self) -> None:
        old = "model.optim.sched"
        schedule = self._take(old)
        if schedule is _ABSENT:
            return
        max_steps = self._given.get(("trainer", "dpo", "max_steps"))
        lr = self._given.get(("model", "optim", "lr"))
        self._put(old, ("policy.scheduler",), schedule, lambda value: cosine_schedule(value, max_steps, lr))

    def _folder(self) -> None:
        """`exp_dir` and `name`, where there is no `explicit_log_dir`."""
        if self._given.get(("exp_manager", "explicit_log_dir")) is not None:
            return
        self._take("exp_manager.explicit_log_dir")
        if self._given.get(("exp_manager", "exp_dir")) is not None:
            folder, name = self._take("exp_manager.exp_dir"), self._take("exp_manager.name")
            whole = folder if name in (_ABSENT, None) else f"{folder}/{name}"
            self._put("exp_manager.exp_dir", ("checkpointing.checkpoint_dir",), whole)

    def _adapters(self) -> None:
        """NeMo's adapters are scaled by alpha / dim, where alpha is dim unless it is given."""
        section = "model.peft.lora_tuning"
        rank = self._take(f"{section}.adapter_dim")
        if rank is not _ABSENT:
            alpha = self._given.get((*section.split("."), "alpha"))
            names = (f"{LORA}.dim",) if alpha is not None else (f"{LORA}.dim", f"{LORA}.alpha")
            self._put(f"{section}.adapter_dim", names, rank)
        if self._given.get((*section.split("."), "alpha"), 0) is None:
            self._take(f"{section}.alpha")
        modules = self._take(f"{section}.target_modules")
        if modules is not _ABSENT and modules is not None:
            listed = modules if isinstance(modules, list) else [modules]
            self._put(f"{section}.target_modules", (f"{LORA}.match_all_linear",), listed, lambda names: "all" in names)
            if "all" not in listed:
                self._put(f"{section}.target_modules", (f"{LORA}.target_modules",), listed, linear_layers)

    def _rest(self) -> Iterator[str]:
        """What was not translated: yields the keys that change no result, and notes an error for each of the others."""
        for path, value in leaves(self._given.values):
            key, origin = dotted(path), self._given.origin(path)
            remedy = next(
                (text for pattern, applies, text in REFUSED if fnmatchcase(key, pattern) and applies(value)), None
            )
            if remedy is not None:
                self._errors.append(f"{origin}: `{key}` = {value!r} is not implemented: {remedy}")
            elif value is None or value == {}:
                continue
            elif any(fnmatchcase(key, pattern) for pattern in IGNORED):
                yield key
            else:
                self._errors.append(
                    f"{origin}: `{key}` is no key of NeMo-Aligner's DPO that posttrain knows; docs/seeds.md lists those it "
                    "translates, and `posttrain config show dpo` its own"
                )


def _without(values: dict[str, Any], path: Path) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {name: value for name, value in values.items() if name != key}
    return {name: _without(value, tuple(rest)) if name == key else value for name, value in values.items()}
