"""Rules as data: the rows of `rules/*.yaml`, evaluated over objects by the engine of CEL (package `cel`).

A rule has a sentence (`about`) and one check or several (`checks`; they inherit what the rule says):

| key | what |
|---|---|
| `of` | what it looks at, one or several: a kind (`karpenter.sh/NodePool`), or a part of workloads (`scopes_of`) |
| `each` | a path with wildcards below it: every item of a list (`env[*]`) or entry of a map (`labels.*`) is checked |
| `at` | path of the field that is checked, from there; several: each of them |
| `error`, `warning` | expression that is true where the field is wrong |
| `refers` | also: the kind of object whose name the field is; `@namespace` behind it: in the same namespace |
| `let` | expressions with names, for the other expressions; null where one cannot be evaluated |
| `show` | expression of the value in the finding; without it, the field |
| `message`, `remedy` | texts with `${expression}` |

Names in expressions: `value` (the field), `self` and `key` (of `each`), `keys` (of all wildcards), `earlier` (items
before it), `name` (of the object), what the scope knows (`gpus`, `count`, …) and the functions in `_FUNCTIONS` and
`_readers`. An expression that cannot be evaluated, as a key is missing or a value has another type, reports nothing:
schemas do. A rule without checks is in `check.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import yaml

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE
from posttrain.apps.launch.lint.findings import Findings, Level
from posttrain.apps.launch.lint.reading import (
    GKE_SPOT,
    RAY_SPECS,
    ZONE_LABEL,
    Item,
    ManifestPlace,
    Pods,
    every,
    get,
    gpus_of,
    is_kind,
    job_specs,
    list_of,
    map_of,
    number,
    pods_of,
    ray_groups,
    read,
)
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.apps.launch.quantities import is_fsx_size, is_lustre_size, lustre_step_gib, quantity
from posttrain.files.json_files import JsonObject
from posttrain.files.redaction import is_secret_key, redact

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that in C is ten times as fast
EXPRESSION = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True)
class LintCheck:
    rule: str
    level: Level
    of: tuple[str, ...]
    wrong: str = "true"
    each: tuple[str, ...] = ("",)
    at: tuple[str, ...] = ("",)
    let: Mapping[str, str] | None = None
    show: str = ""
    message: str = ""
    remedy: str = ""
    refers: str = ""


def _texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@cache
def load_rules() -> tuple[dict[str, str], tuple[LintCheck, ...]]:
    """Sentences by rule, and all checks."""
    about: dict[str, str] = {}
    checks: list[LintCheck] = []
    for path in sorted((Path(__file__).parent / "rules").glob("*.yaml")):
        for rule, fields in yaml.load(path.read_text(encoding="utf-8"), _LOADER).items():
            about[rule] = fields.pop("about")
            for check in fields.pop("checks", [{}] if fields else []):
                row: dict[str, Any] = {**fields, **check}
                level: Level = "warning" if "warning" in row else "error"
                row["wrong"] = row.pop(level, "true")
                row |= {key: _texts(row[key]) for key in ("of", "each", "at") if key in row}
                checks.append(LintCheck(rule, level, **row))
    return about, tuple(checks)


# -- what expressions can read -----------------------------------------------------------------------------------------


def _text_of(value: object) -> str:
    return "" if value is None else str(value)


def found(value: object, pattern: str) -> str:
    """What matches first in a text; empty if nothing does."""
    match = re.search(pattern, _text_of(value))
    return match[0] if match else ""


def _part(value: object, pattern: str) -> str:
    """The group of a pattern, where it matches first."""
    match = re.search(pattern, _text_of(value))
    return match[1] if match else ""


def _is_pattern(value: object) -> bool:
    try:
        re.compile(str(value))
    except re.error:
        return False
    return True


def _is_inside(value: object, network: object) -> bool:
    """Whether one network is a part of another, or is it."""
    try:
        part, whole = (ip_network(str(one), strict=False) for one in (value, network))
        return part.version == whole.version and part.subnet_of(whole)  # type: ignore[arg-type]
    except ValueError:
        return False


def _json(value: object) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None


_NOWHERE = ManifestPlace(Manifest("", 0, None))
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "amount": lambda value: quantity(value) or 0.0,
    "either": lambda value, default: default if value is None else value,
    "fields": map_of,
    "filled": bool,
    "find": lambda items, key, value: next((item for item in list_of(items) if get(item, key) == value), None),
    "each": lambda value, path: [item.value for item in every(Item(_NOWHERE, value), path)],
    "first": lambda items, value: items.index(value) if value in items else len(items),
    "found": found,
    "has_secret": lambda value: (text := str(value).replace("://anonymous@", "://")) != redact(text),
    "is_address": lambda value: "/" not in str(value) and _is_inside(value, value),
    "is_fsx_size": is_fsx_size,
    "is_lustre_size": lambda gib, tier: is_lustre_size(gib, int(tier)),
    "is_inside": _is_inside,
    "is_pattern": _is_pattern,
    "is_secret_key": lambda value: is_secret_key(str(value)),
    "is_text": lambda value: isinstance(value, str),
    "items": list_of,
    "join": lambda items: ", ".join(map(str, items)),
    "json": _json,
    "keys_of": lambda value: list(map_of(value)),
    "like": lambda value, pattern: isinstance(value, str) and re.fullmatch(pattern, value) is not None,
    "lustre_step_gib": lambda tier: lustre_step_gib(int(tier)),
    "num_bytes": lambda values: sum(len(text.encode()) for text in map_of(values).values() if isinstance(text, str)),
    "number": number,
    "numbers": lambda value: [int(part) for part in re.findall(r"\d+", _text_of(value))],
    "part": _part,
    "pluck": lambda items, key: [get(item, key) for item in list_of(items)],
    "quantity": quantity,
    "read": read,
    "short": lambda value: f"{value:g}",
    "sum": lambda values: sum((quantity(value) or 0.0 for value in values), 0.0),
    "text": _text_of,
    "unique": lambda items: list(dict.fromkeys(map(str, items))),
}


@dataclass(frozen=True)
class Scope:
    """A part of an object that rules look at, and what is known about it."""

    item: Item
    manifest: Manifest
    facts: Mapping[str, object]
    pod: JsonObject | None = None  # spec of the pod around a container
    files: Sequence[Manifest] = ()  # all objects


def _facts_of(pods: Pods) -> dict[str, object]:
    machine = pods.instance
    volumes: dict[str, object] = {}  # mounted at /dev/shm by a container with GPUs: its limit of memory
    mounted: list[str] = []
    for _, container in pods.containers():
        for mount in list_of(container, "volumeMounts"):
            mounted.append(str(get(mount, "name")))
            if get(mount, "mountPath") == "/dev/shm" and quantity(get(container, "resources", "limits", GPU_RESOURCE)):
                volumes[str(get(mount, "name"))] = get(container, "resources", "limits", "memory")
    return {
        "count": pods.count,
        "gang_size": pods.gang_size,
        "by_job": pods.restarts_by_job,
        "spot": pods.is_spot,
        "gke_spot": pods.selected(GKE_SPOT) == ["true"],
        "zones": pods.selected(ZONE_LABEL),
        "gpus": pods.limit(GPU_RESOURCE),
        "efa": pods.limit(EFA_RESOURCE),
        "machine": {
            "name": machine.name if machine else "",
            "gpus": machine.gpus if machine else 0,
            "efa": machine.efa if machine else 0,
            "rdma": machine is not None and machine.rdma,
        },
        "env": pods.env,
        "annotations": pods.annotations,
        "mounted": mounted,
        "shm_limits": volumes,
    }


def scopes_of(manifest: Manifest, files: Sequence[Manifest] = ()) -> Iterator[tuple[str, Scope]]:
    """The object by its kind (`batch/Job`), and its parts by their names."""
    for name, scope in _parts_of(manifest):
        yield name, replace(scope, files=files)


def _parts_of(manifest: Manifest) -> Iterator[tuple[str, Scope]]:
    root, all_pods = ManifestPlace(manifest), pods_of(manifest)
    cpu_only = not any(pods.limit(GPU_RESOURCE) or not list_of(pods.spec, "containers") for pods in all_pods)
    size: dict[str, object] = {"gang_size": sum(pods.count for pods in all_pods), "cpu_only": cpu_only}
    size["total_gpus"] = gpus_of(manifest)
    whole = Scope(Item(root, manifest.body), manifest, size)
    for name in (f"{manifest.group}/{manifest.kind}", f"{manifest.group}/*", "objects"):
        yield name, whole
    facts = {pods.place.path: _facts_of(pods) for pods in all_pods}
    for pods in all_pods:
        known, own = facts[pods.place.path], [place.path for place, _ in pods.containers("containers")]
        yield "pods" if own else "empty pods", Scope(Item(pods.place, pods.template), manifest, known)
        for place, container in pods.containers() if own else ():
            role = {"is_main": place.path in own, "is_first": place.path == own[0]}
            yield "containers", Scope(Item(place, container), manifest, {**known, **role}, pods.spec)
    for place, spec in job_specs(manifest):
        known = {**facts[place.at("template").path], "is_job": is_kind(manifest, "batch", "Job")}
        yield "jobs", Scope(Item(place, spec), manifest, known)
    groups = list(ray_groups(manifest))
    workers = [group for _, group, is_head in groups if not is_head]
    for place, group, is_head in groups:
        before = [] if is_head else workers[: next(i for i, other in enumerate(workers) if other is group)]
        item = Item(place, group, (len(before),), workers)
        yield "ray groups", Scope(item, manifest, {"is_head": is_head})
    if manifest.group == "ray.io" and (keys := RAY_SPECS.get(manifest.kind)):
        yield "ray clusters", Scope(Item(root.at(*keys), map_of(manifest.body, *keys)), manifest, {})


def _readers(scope: Scope, item: Item) -> dict[str, Callable[..., Any]]:
    return {
        "get": lambda path: read(item.value, path),  # from the item of `each`
        "outer": lambda path: read(scope.item.value, path),  # from the scope
        "root": lambda path: read(scope.manifest.body, path),  # from the object
        "pod": lambda path: read(scope.pod, path),  # from the spec of a container's pod
        # other objects of the files: those of a kind; one by its name (`@namespace` as in `refers`), null if it is not
        # there; the most GPUs that one needs; a label of all their pods
        "objects": lambda kind: [other.body for other in _of_kind(kind, scope)],
        "object": lambda kind, name: next((one.body for one in _of_kind(kind, scope) if one.name == str(name)), None),
        "most_gpus": lambda: max(map(gpus_of, scope.files)),
        "pod_labels": lambda key: [pods.labels.get(key) for other in scope.files for pods in pods_of(other)],
    }


def _of_kind(text: str, scope: Scope) -> list[Manifest]:
    kind, _, namespaced = text.partition("@")
    group, _, name = kind.rpartition("/")
    found = [other for other in scope.files if is_kind(other, group, name)]
    return [other for other in found if not namespaced or other.namespace == scope.manifest.namespace]


class Expressions:
    """Expressions of a check at one item."""

    def __init__(self, check: LintCheck, scope: Scope, item: Item, value: object) -> None:
        key = item.keys[-1] if item.keys else None
        earlier = item.siblings[:key] if isinstance(key, int) and isinstance(item.siblings, list) else []
        prefix = get(scope.manifest.body, "metadata", "generateName")
        self.names: dict[str, object] = {
            **scope.facts,
            "value": value,
            "self": item.value,
            "key": key,
            "keys": list(item.keys),
            "earlier": earlier,
            "name": scope.manifest.name or (f"{prefix}xxxxx" if prefix else ""),  # as the API server makes one
        }
        self.functions = {**_FUNCTIONS, **_readers(scope, item)}
        for name, expression in (check.let or {}).items():
            self.names[name] = self.result(expression)

    def result(self, expression: str) -> Any:
        """None if it cannot be evaluated."""
        from cel import Context

        program, names, functions = compile_expression(expression)
        try:
            context = Context(
                variables={name: self.names[name] for name in names if name in self.names},
                functions={name: self.functions[name] for name in functions if name in self.functions},
            )
            return program.execute(context)
        except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError):
            return None

    def text(self, text: str) -> str:
        return EXPRESSION.sub(lambda match: _text_of(self.result(match[1])), text)


@cache
def compile_expression(expression: str) -> tuple[Any, list[str], list[str]]:
    """The program, and the variables and functions that it names."""
    from cel import compile as compile_cel

    program = compile_cel(expression)
    return program, program.variables(), program.functions()


# -- findings ----------------------------------------------------------------------------------------------------------


def check_rules(manifests: Sequence[Manifest]) -> Findings:
    by_scope: dict[str, list[LintCheck]] = {}
    for check in load_rules()[1]:
        for name in check.of:
            by_scope.setdefault(name, []).append(check)
    for manifest in manifests:
        for name, scope in scopes_of(manifest, manifests):
            for check in by_scope.get(name, ()):
                yield from _check(check, scope)


def _check(check: LintCheck, scope: Scope) -> Findings:
    for each in check.each:
        for item in every(scope.item, each) if each else [scope.item]:
            for at in check.at:
                field = next(every(item, at)) if at else item
                evaluation = Expressions(check, scope, item, field.value)
                if evaluation.result(check.wrong) is not True:
                    continue
                if check.refers:
                    yield from _check_name(check, field, scope)
                else:
                    report = field.place.error if check.level == "error" else field.place.warning
                    shown = evaluation.result(check.show) if check.show else field.value
                    yield report(check.rule, shown, evaluation.text(check.message), evaluation.text(check.remedy))


def _check_name(check: LintCheck, field: Item, scope: Scope) -> Findings:
    """An error if objects of this kind are in the files, and none has this name."""
    kind, name = check.refers.partition("@")[0], field.value
    known = _of_kind(kind, scope)
    same_name = [other for other in known if other.name == str(name)]
    if not name or not known or any(other in _of_kind(check.refers, scope) for other in same_name):
        return
    kind = kind.rpartition("/")[2]
    if same_name:
        message = f"{kind} {name} is in namespace {same_name[0].namespace}, this in {scope.manifest.namespace}"
        yield field.place.error("namespace", name, message)
    else:
        remedy = f"there is {', '.join(other.name for other in known)}"
        yield field.place.error("reference", name, f"no {kind} of this name", remedy)
