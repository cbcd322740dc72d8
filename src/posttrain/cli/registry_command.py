"""`posttrain registry`: model versions with lineage, their stages, and the history of every change."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import pick_unit_and_suffix

from posttrain.apps.ship.registry import Registry, gather_lineage, resolve_version
from posttrain.apps.ship.registry.lineage import doubtful_evaluations
from posttrain.apps.ship.registry.model_folder import check_model_folder
from posttrain.apps.ship.registry.stages import HistoryEntry
from posttrain.apps.ship.registry.version import ABSENT, Difference, ModelVersion, as_row, differences
from posttrain.cli.overrides_parser import OverridesParser, Subparsers, pairs
from posttrain.cli.tables import QUIET, console, facts, table
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.models.accepted_names import REGISTRY_PREFIX
from posttrain.reporting.console import Console

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_WAIT_S = 30.0
EXIT_DAMAGED = 2
STAGE_STYLES = {"production": "green", "canary": "yellow", "candidate": "", "archived": QUIET}
MAX_SHOWN = 44
SIZE_WITH_A_BAR = 200 * 2**20  # bytes; less needs no progress bar
# `show` is for new models and `resolve` for those in use, so their defaults differ.
WHICH_SHOWN = "a number, production or canary (default: the newest version; `resolve` and `serve` take production)"
WHICH_RESOLVED = (
    "NAME@production, NAME@canary or NAME@3 (default: production; `show` takes the newest), with or without registry:"
)
ROLLBACK_TO = "go back to this one, which was in production before (default: the last that was)"


def add_arguments(parser: OverridesParser) -> None:
    commands = parser.commands()
    add = _command(commands, "add", _add)
    add.add_argument("name", metavar="NAME", help="name of the model; the first version makes it")
    add.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder, adapter or checkpoint step_N")
    add.option("--base-model MODEL", "what it was trained from (default: from its config)")
    add.config_file("config of the run (default: config.yaml of FOLDER)")
    add.option("--data PATH", "training data to hash; may be repeated", action="append", default=[])
    add.option("--eval NAME=FOLDER", "evaluation whose metrics are recorded", action="append", default=[])
    add.option("--metric NAME=NUMBER", "a metric of your own", action="append", default=[])
    add.option("--gate FILE", "what `posttrain gate --json FILE` wrote", type=Path)
    add.option("--note", "free text, stored with the version", default="")
    add.option("--by WHO", "name recorded in the history (default: you)")
    add.switch("--in-place", "leave the files where they are instead of copying them")
    add.switch("--json", "print the version as JSON")
    listing = _command(commands, "list", _list)
    listing.add_argument("name", nargs="?", metavar="NAME", help="only this model")
    show = _command(commands, "show", _show)
    show.add_argument("name", metavar="NAME", help="may also name the version: NAME@WHICH")
    show.add_argument("which", nargs="?", metavar="WHICH", help=WHICH_SHOWN)
    show.switch("--verify", "compare every file with its checksum")
    history = _command(commands, "history", _history)
    history.add_argument("name", metavar="NAME")
    diff = _command(commands, "diff", _diff)
    diff.add_argument("name", metavar="NAME")
    diff.add_argument("left", metavar="A", help="a number, production or canary")
    diff.add_argument("right", metavar="B", help="a number, production or canary")
    for reading in (listing, show, history, diff):
        reading.switch("--json", "print JSON")
    _command(commands, "resolve", _resolve).add_argument("reference", metavar="REFERENCE", help=WHICH_RESOLVED)

    promote, rollback = _command(commands, "promote", _promote), _command(commands, "rollback", _rollback)
    promote.add_argument("name", metavar="NAME")
    promote.add_argument("version", type=int, metavar="VERSION")
    promote.option("--to", "default: the next stage", choices=("canary", "production", "archived"))
    promote.option("--expect VERSION", "only if this version is in that place now (or: none)")
    promote.switch("--force", "override the gate; the history records it")
    rollback.add_argument("name", metavar="NAME")
    rollback.option("--stage", "stage to roll back", choices=("production", "canary"), default="production")
    rollback.option("--to VERSION", ROLLBACK_TO, type=int)
    for change in (promote, rollback):
        change.option("--why TEXT", "the reason, for the history", required=True)
        change.option("--by WHO", "name recorded in the history (default: you)")
        change.switch("--no-verify", "do not compare the files with their checksums first")


def _command(commands: Subparsers, name: str, run: Callable[..., int]) -> OverridesParser:
    about = inspect.getdoc(run) or ""
    parser = commands.add_parser(name, help=about.split("\n")[0].rstrip(".").lower(), description=about)
    parser.set_defaults(run=partial(_run, run))
    parser.option("--registry WHERE", "folder or MLflow URI (default: POSTTRAIN_REGISTRY, ./registry)")
    parser.option("--wait-s S", "wait this long for another writer", default=DEFAULT_WAIT_S)
    return parser


def _run(run: Callable[..., int], args: argparse.Namespace) -> int:
    if getattr(args, "name", None):
        # As `serve` takes it: accepted in every command.
        args.name = args.name.removeprefix(REGISTRY_PREFIX)
    if not args.wait_s >= 0:
        raise InputError(f"--wait-s is {args.wait_s}: 0 or more seconds are accepted")
    return run(Registry(args.registry, wait_s=args.wait_s), args)


# -- the commands ------------------------------------------------------------------------------------------------------


def _add(registry: Registry, args: argparse.Namespace) -> int:
    """Register a model folder as the next version, a candidate.

    The files are copied into the registry and their checksums recorded, with the lineage.
    """
    folder: Path = args.folder.expanduser()
    check_model_folder(folder)
    metrics = {name: _number(name, value) for name, value in pairs("--metric", args.metric).items()}
    evaluations = {name: Path(path) for name, path in pairs("--eval", args.eval).items()}
    lineage = gather_lineage(
        folder,
        base_model=args.base_model,
        config=args.config,
        data=args.data,
        evaluations=evaluations,
        metrics=metrics,
        gate=args.gate,
    )
    doubts = [f"--eval {name}: {why}" for name, why in doubtful_evaluations(folder, evaluations).items()]
    if other := lineage.judged_another:
        doubts.append(f"the gate judged {other}, whose files are not those in {folder}: promoting needs --force")
    elif unknown := lineage.judged_unknown:
        doubts.append(f"the gate judged {unknown}, which is not known to be this model: promoting needs --force")
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    console = Console(sys.stderr, quiet=args.json or size < SIZE_WITH_A_BAR)
    label, passes = ("hashing, MiB", 1) if args.in_place else ("hashing and copying, MiB", 2)
    with console.progress(label, passes * size >> 20) as advance:
        version = registry.add(
            args.name,
            folder,
            lineage,
            by=args.by,
            note=args.note,
            in_place=args.in_place,
            progress=lambda num_bytes: advance(num_bytes >> 20),
        )
    if args.json:
        print(json.dumps(as_row(version), indent=2))
    else:
        gate = lineage.verdict or "no gate verdict"
        unit, name = pick_unit_and_suffix(version.num_bytes, ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
        size_shown = f"{version.num_bytes / unit:.{0 if unit == 1 else 1}f} {name}"
        print(f"{version.reference}: {len(version.files)} files, {size_shown}, candidate, {gate}")
        print(f"  {version.path}")
    return 0


def _list(registry: Registry, args: argparse.Namespace) -> int:
    """Show the models and their versions."""
    names = [args.name] if args.name else registry.names()
    versions = [version for name in names for version in registry.versions(name)]
    if args.json:
        print(json.dumps([as_row(version) for version in versions], indent=2))
    elif versions:
        show_versions(versions)
    else:
        empty = f"{registry.location.text}: no models yet; `posttrain registry add NAME FOLDER` adds one"
        print(empty, file=sys.stderr)
    return 0


def _show(registry: Registry, args: argparse.Namespace) -> int:
    """Show one version: stage, lineage, metrics, files."""
    name, _, which = args.name.partition("@")
    if which and args.which:
        raise InputError(f"{args.name} names a version already; remove {args.which!r}")
    which = which or args.which
    version = registry.get(name, which) if which else registry.versions(name)[-1]
    damage = registry.verify(version) if args.verify else None
    if args.json:
        print(json.dumps({**as_row(version), **({} if damage is None else {"damage": damage})}, indent=2))
    else:
        show_version(version, registry.history(name), damage)
    return EXIT_DAMAGED if damage else 0


def _history(registry: Registry, args: argparse.Namespace) -> int:
    """Show every stage change: what, who, when and why."""
    entries = registry.history(args.name)
    if args.json:
        print(json.dumps([history_row(entry) for entry in entries], indent=2))
    elif entries:
        console(soft_wrap=False).print(_history_table(entries))
    else:
        print(f"{args.name}: nothing has been promoted yet")
    return 0


def _diff(registry: Registry, args: argparse.Namespace) -> int:
    """Show what two versions differ in: lineage, config, metrics, files."""
    left, right = registry.get(args.name, args.left), registry.get(args.name, args.right)
    found = differences(left, right)
    if args.json:
        print(json.dumps([vars(difference) for difference in found], indent=2))
    elif not found:
        print(f"versions {left.version} and {right.version} of {left.name} do not differ")
    else:
        show_differences(left, right, found)
    return 0


def _resolve(registry: Registry, args: argparse.Namespace) -> int:
    """Print the folder of a version, after comparing its files with their checksums."""
    print(resolve_version(args.reference, registry=registry.location.text, wait_s=args.wait_s).path)
    return 0


def _promote(registry: Registry, args: argparse.Namespace) -> int:
    """Move a version to the next stage, or to another one.

    What was in that place is archived. A version whose gate did not say "promote", or is not known to have
    judged this model, needs --force.
    """
    entry = registry.promote(
        args.name,
        args.version,
        args.to,
        why=args.why,
        by=args.by,
        expect=_expected(args.expect),
        force=args.force,
        verify=not args.no_verify,
    )
    print(describe_entry(entry) if entry else f"version {args.version} is there already; nothing to do")
    return 0


def _rollback(registry: Registry, args: argparse.Namespace) -> int:
    """Take production back to the version before, or take a canary away.

    The version that is taken out is archived.
    """
    entry = registry.rollback(
        args.name, why=args.why, by=args.by, stage=args.stage, to=args.to, verify=not args.no_verify
    )
    print(describe_entry(entry))
    return 0


# -- arguments ---------------------------------------------------------------------------------------------------------


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"--metric {name}={text}: {text!r} is not a finite number")
    return value


def _expected(text: str | None) -> int | None:
    if text is None:
        return None
    if text == "none":
        return 0
    if not text.isdecimal():
        raise InputError(f"--expect {text}: expected the number of a version, or none")
    return int(text)


# -- views -------------------------------------------------------------------------------------------------------------


def show_versions(versions: Sequence[ModelVersion]) -> None:
    rows = table("model", "version", "stage", "gate", "base model", "added", "by", "note", right=("version",))
    for version in versions:
        rows.add_row(
            version.name,
            str(version.version),
            version.stage,
            version.lineage.verdict or ABSENT,
            version.lineage.base_model or ABSENT,
            _when(version.at),
            version.by,
            version.note,
            style=STAGE_STYLES[version.stage],
        )
    console(soft_wrap=False).print(rows)


def show_version(version: ModelVersion, history: Sequence[HistoryEntry], damage: list[str] | None) -> None:
    out, lineage = console(soft_wrap=False), version.lineage
    out.print(f"{version.reference}  {version.stage}", style=f"bold {STAGE_STYLES[version.stage]}")
    judged = f"{lineage.judged_unknown}, not known to be this model" if lineage.judged_unknown else None
    if other := lineage.judged_another:
        judged = f"the files of {other}, not these"
    about = {
        "added": f"{_when(version.at)} by {version.by}",
        "note": version.note,
        "files": f"{len(version.files)} in {version.path}" + (" (in place)" if version.in_place else ""),
        "uploaded to": version.uploaded_to,
        "base model": lineage.base_model,
        "data": "\n".join(f"{name}  {_short(digest) or 'not hashed'}" for name, digest in lineage.data.items()),
        "config": f"{len(lineage.config)} keys, sha256 {_short(lineage.config_sha256)}" if lineage.config else None,
        "code": lineage.code_version,
        "judged": judged,
        "gate": "\n".join([lineage.verdict or ABSENT, *(lineage.gate or {}).get("reasons", [])]),
        "metrics": "\n".join(f"{name}  {value:.6g}" for name, value in lineage.metrics.items()),
    }
    out.print(facts(about))
    own = [entry for entry in history if any(move.version == version.version for move in entry.moves)]
    if own:
        out.print()
        out.print(_history_table(own))
    if damage is not None:
        out.print()
        for line in damage:
            out.print(f"damaged: {line}", style="red")
        if not damage:
            out.print(f"{len(version.files)} files are what was registered", style="green")


def _history_table(entries: Sequence[HistoryEntry]) -> Table:
    rows = table("#", "when", "who", "what", "why", right=("#",))
    for entry in entries:
        change = entry.change
        what = _moves(entry) + (" (forced)" if change.forced else "")
        style = QUIET if entry.refused else ""
        rows.add_row(str(change.ordinal), _when(change.at), change.by, what, change.why, style=style)
    return rows


def describe_entry(entry: HistoryEntry) -> str:
    return f"{_moves(entry)}; change {entry.change.ordinal}, by {entry.change.by}: {entry.change.why}"


def _moves(entry: HistoryEntry) -> str:
    if entry.refused:
        return f"{entry.change.action} of version {entry.change.version} refused: {entry.refused}"
    moves = sorted(entry.moves, key=lambda move: move.version != entry.change.version)
    changes = [f"version {move.version}: {move.before} -> {move.after}" for move in moves]
    return ", ".join(changes) or f"version {entry.change.version} was {entry.change.to} already"


def history_row(entry: HistoryEntry) -> JsonObject:
    moves = [{"version": move.version, "from": move.before, "to": move.after} for move in entry.moves]
    return {"ordinal": entry.change.ordinal, **entry.change.to_row(), "moves": moves, "refused": entry.refused}


def show_differences(left: ModelVersion, right: ModelVersion, found: Sequence[Difference]) -> None:
    rows = table("", "key", f"version {left.version}", f"version {right.version}", "change", right=())
    section = ""
    for difference in found:
        shown = "" if difference.section == section else difference.section
        section = difference.section
        rows.add_row(shown, difference.key, _value(difference.left), _value(difference.right), _change(difference))
    console(soft_wrap=False).print(rows)


def _change(difference: Difference) -> str:
    left, right = difference.left, difference.right
    if difference.section != "metrics" or not isinstance(left, int | float) or not isinstance(right, int | float):
        return ""
    return f"{right - left:+.4g}"


def _value(value: object) -> str:
    text = ABSENT if value is None else f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _when(timestamp: str) -> str:
    return timestamp[:19].replace("T", " ")


def _short(digest: str | None) -> str:
    return digest[:12] if digest else ""
