"""NeMo-Aligner's names of a DPO config, translated by `aligner.yaml`: `model.dpo.*`, `trainer.*`, `exp_manager.*` etc.

`posttrain dpo` understands them in files and on the command line. All of them are translated together, because one
setting here may come from several there. A key that posttrain has no counterpart for is refused with what to use, or,
where it changes no result, mentioned. The value of posttrain's own name wins where both are given.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from posttrain.config.base import ConfigError
from posttrain.config.foreign.nemo_rl import ABSENT, Rename, counterpart, read_data, read_renames, read_rules, rule_for
from posttrain.config.tree import COMMAND_LINE, MISSING, Tree, Values, dotted, leaves, resolve

FILE = "aligner.yaml"
SECTIONS = ("model", "trainer", "exp_manager", "pretrained_checkpoint")
LORA = "policy.dtensor_cfg.lora_cfg"


class Untranslatable(Exception):
    """The value has no counterpart; the text is what to use."""


def translate(tree: Tree, warnings: list[str]) -> None:
    """Replace the sections of NeMo-Aligner in `tree`. Raises ConfigError for what has no counterpart."""
    sections = [section for section in SECTIONS if section in tree.values]
    if not sections:
        return
    given = Tree(origins={path: origin for path, origin in tree.origins.items() if path[0] in SECTIONS})
    given.values = {section: tree.remove((section,)) for section in sections}
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
        for key in read_renames(FILE, "keys"):
            value = self._take(key.old)
            if value is not ABSENT:
                try:
                    self._put(key.old, key.new, _converted(key, value))
                except Untranslatable as error:
                    self._refuse(key.old, value, str(error))
        ignored = self._rest()
        if self._errors:
            raise ConfigError("\n".join(self._errors))
        if ignored:
            self._warnings.append(f"{', '.join(ignored)}: {read_rules(FILE)[-1].note}")

    def _take(self, key: str) -> Any:
        *section, name = key.split(".")
        settings = self._given.get(tuple(section))
        return settings.pop(name, ABSENT) if isinstance(settings, dict) else ABSENT

    def _refuse(self, key: str, value: object, why: str) -> None:
        self._errors.append(f"{self._given.origin(tuple(key.split('.')))}: `{key}` = {value!r}: {why}")

    def _put(self, old: str, new: tuple[str, ...], value: object) -> None:
        origin = self._given.origin(tuple(old.split(".")))
        for path in (paths := [tuple(name.split(".")) for name in new]):
            present = self._tree.get(path, ABSENT)
            # The value of our own name wins, unless only the command line has the other.
            is_overridden = origin == COMMAND_LINE and self._tree.origin(path) != COMMAND_LINE
            if present is not ABSENT and present != value and not is_overridden:
                self._warnings.append(f"{origin}: `{old}` is ignored, because `{dotted(path)}` is set as well")
                return
        for path in paths:
            self._tree.put(path, value, origin)
        self._warnings.append(f"{origin}: `{old}` is now {' and '.join(f'`{name}`' for name in new)}")

    def _data(self) -> None:
        """`model.data.data_prefix`: a file, a list of files, or those of training and validation by name."""
        old = "model.data.data_prefix"
        prefix, kind = self._take(old), self._given.get(("model", "data", "data_impl"))
        if prefix is ABSENT or prefix is None:
            return
        name = "PackedPairs" if kind == "packed_jsonl" else "NeMo-Aligner"
        files = prefix if isinstance(prefix, dict) else {"train": prefix}
        for split in ("train", "validation"):
            paths = files.get(split)
            paths = paths if isinstance(paths, list) else [] if paths is None else [paths]
            sets = [{"dataset_name": name, "data_path": str(path)} for path in paths]
            if sets:
                key = f"{old}.{split}" if isinstance(prefix, dict) else old
                self._put(key, (f"data.{split}",), sets[0] if len(sets) == 1 else sets)

    def _schedule(self) -> None:
        old = "model.optim.sched"
        schedule = self._take(old)
        if schedule is ABSENT:
            return
        max_steps = self._given.get(("trainer", "dpo", "max_steps"))
        lr = self._given.get(("model", "optim", "lr"))
        try:
            self._put(old, ("policy.scheduler",), cosine_schedule(schedule, max_steps, lr))
        except Untranslatable as error:
            self._refuse(old, schedule, str(error))

    def _folder(self) -> None:
        """`exp_dir` and `name`, where there is no `explicit_log_dir`."""
        if self._given.get(("exp_manager", "explicit_log_dir")) is not None:
            return
        self._take("exp_manager.explicit_log_dir")
        if self._given.get(("exp_manager", "exp_dir")) is not None:
            folder, name = self._take("exp_manager.exp_dir"), self._take("exp_manager.name")
            whole = folder if name in (ABSENT, None) else f"{folder}/{name}"
            self._put("exp_manager.exp_dir", ("checkpointing.checkpoint_dir",), whole)

    def _adapters(self) -> None:
        """NeMo's adapters are scaled by alpha / dim, where alpha is dim unless it is given."""
        section = "model.peft.lora_tuning"
        rank, alpha = self._take(f"{section}.adapter_dim"), self._take(f"{section}.alpha")
        if alpha is not ABSENT and alpha is not None:
            self._put(f"{section}.alpha", (f"{LORA}.alpha",), alpha)
        if rank is not ABSENT:
            is_alone = alpha is ABSENT or alpha is None
            self._put(f"{section}.adapter_dim", (f"{LORA}.dim", *([f"{LORA}.alpha"] if is_alone else [])), rank)
        modules = self._take(f"{section}.target_modules")
        if modules is ABSENT or modules is None:
            return
        names = modules if isinstance(modules, list) else [modules]
        layers: dict[str, list[str]] = read_data(FILE)["modules"]
        self._put(f"{section}.target_modules", (f"{LORA}.match_all_linear",), "all" in names)
        if "all" in names:
            return
        if unknown := [name for name in names if name not in layers]:
            known = f"{', '.join(layers)}, all; else use {LORA}.target_modules"
            self._refuse(f"{section}.target_modules", names, f"{unknown[0]} is none of {known}")
        else:
            adapted = [layer for name in names for layer in layers[name]]
            self._put(f"{section}.target_modules", (f"{LORA}.target_modules",), adapted)

    def _rest(self) -> list[str]:
        """What was not translated: returns keys that change no result, and notes an error for each other key."""
        ignored = []
        for path, value in leaves(self._given.values):
            key, origin = dotted(path), self._given.origin(path)
            rule = rule_for(key, FILE)
            if rule is not None and not rule.accepts(value):
                self._errors.append(f"{origin}: `{key}` = {value!r} is not implemented: {rule.note}")
            elif value is None or value == {}:
                continue
            elif rule is not None:
                ignored.append(key)
            else:
                self._errors.append(
                    f"{origin}: `{key}` is not a supported key of NeMo-Aligner's DPO; docs/seeds/differences.md lists "
                    "those it translates, and `posttrain config show dpo` its own"
                )
        return ignored


def _converted(key: Rename, value: object) -> Any:
    """What the value is called here, by the fields of its row of aligner.yaml."""
    row = key.row
    refusal = counterpart(row.get("refused", ()), value)
    if refusal is not ABSENT:
        raise Untranslatable(refusal)
    found = counterpart(row.get("values", ()), value)
    if found is not ABSENT:
        return found
    if "only" in row or ("whole" in row and (isinstance(value, bool) or not isinstance(value, int))):
        raise Untranslatable(row.get("only") or row["whole"])
    return row.get("else", value)


def cosine_schedule(schedule: Any, max_steps: Any, lr: Any) -> list[Values] | Values | None:
    """NeMo's CosineAnnealing: a linear warm-up, a cosine down to min_lr, then min_lr for constant_steps."""
    if schedule is None:
        return None
    known = {"name", "warmup_steps", "constant_steps", "min_lr", "max_steps"}
    if not isinstance(schedule, dict) or schedule.get("name") != "CosineAnnealing" or set(schedule) - known:
        raise Untranslatable(f"only CosineAnnealing with {', '.join(sorted(known))}; else use policy.scheduler")
    total, least = schedule.get("max_steps") or max_steps, schedule.get("min_lr") or 0.0
    warm_up, constant = schedule.get("warmup_steps") or 0, schedule.get("constant_steps") or 0
    if not all(isinstance(count, int) for count in (warm_up, constant)) or not isinstance(least, float | int):
        raise Untranslatable("warmup_steps and constant_steps are numbers of steps, min_lr is a learning rate")
    if not isinstance(total, int) or total < 1:
        raise Untranslatable("it needs trainer.dpo.max_steps, because the steps of an epoch are not known yet")
    decay = total - warm_up - constant
    if decay < 1:
        raise Untranslatable(f"{warm_up} warmup_steps and {constant} constant_steps leave no step of {total} to decay")
    if constant and not isinstance(lr, float | int):
        raise Untranslatable("constant_steps needs model.optim.lr beside it")
    parts = [(decay, "CosineAnnealingLR", {"T_max": decay, "eta_min": least})]
    if warm_up:
        rise = {"start_factor": 1 / (warm_up + 1), "end_factor": 1.0, "total_iters": warm_up}
        parts.insert(0, (warm_up, "LinearLR", rise))
    if constant:
        parts.append((constant, "ConstantLR", {"factor": least / lr, "total_iters": 10_000_000_000}))
    ends = list(accumulate(steps for steps, _, _ in parts))[:-1]
    listed = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for _, name, kwargs in parts]
    return [*listed, {"milestones": ends}] if ends else listed[0]
