"""The registry: model versions with their lineage, their stages, and a history of changes with author, time and reason.

Files are copied to a folder beside the database, named by their content, or stay where they are (`in_place`). A stage
change is one appended line of the log (`stages.py`), so it is atomic even if the process is killed.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

from posttrain.apps.ship.registry.artifacts import (
    Copy,
    PartialFolder,
    Progress,
    clear_abandoned,
    find_damage,
    measure,
    no_progress,
    put_in_place,
)
from posttrain.apps.ship.registry.lineage import Lineage
from posttrain.apps.ship.registry.stages import (
    NO_VERSION,
    NOTHING_EXPECTED,
    STAGES,
    Change,
    HistoryEntry,
    Stage,
    Stages,
    replay,
)
from posttrain.apps.ship.registry.store import ARTIFACTS, HISTORY_SUFFIX, DatabaseCopy, Location, MlflowStore
from posttrain.apps.ship.registry.version import ModelVersion, record_of, version_from_record
from posttrain.data.errors import nearest
from posttrain.errors import RegistryBusy, RegistryConflict, RegistryError
from posttrain.files.json_files import JsonMapping
from posttrain.models.accepted_names import REGISTRY_PREFIX

DEFAULT_LOCATION = "registry"
LOCATION_VARIABLE = "POSTTRAIN_REGISTRY"
DEFAULT_WAIT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Registry:
    """`location`: a folder (made by the first `add`), or a URI that MLflow understands. Opened on first use.
    `database`: what a database held, to read in place of the file."""

    def __init__(
        self, location: str | Path | None = None, *, wait_s: float = DEFAULT_WAIT_S, database: bytes | None = None
    ) -> None:
        chosen = location or os.environ.get(LOCATION_VARIABLE) or DEFAULT_LOCATION
        self.location = Location(str(chosen))
        self._store = MlflowStore(self.location, wait_s=wait_s)
        if database is not None:
            self._store = DatabaseCopy(self.location, database)

    # -- reading -------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return self._store.names()

    def has(self, name: str) -> bool:
        """Whether there are versions of this model."""
        self._check_name(name)
        return bool(self._store.versions(name))

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, the oldest first."""
        return list(self._read(name)[0].values())

    def get(self, name: str, which: str | int = "production") -> ModelVersion:
        """The version with this number, or in this stage (production or canary)."""
        versions, stages, _ = self._read(name)
        return versions[self._number(name, str(which), versions, stages)]

    def history(self, name: str) -> list[HistoryEntry]:
        """Every stage change that was ever written, in order, with what it did; also those that lost a race."""
        return self._read(name)[2]

    def verify(self, version: ModelVersion, *, contents: bool = True) -> list[str]:
        """What is wrong with the files of a version; empty if nothing is. `contents` False looks at sizes only.

        Files on a tracking server are downloaded, unless intact copies are cached.
        """
        damage = find_damage(version.path, version.files, extra_files=not version.in_place, contents=contents)
        return self._fetch(version) if damage and version.uploaded_to is not None else damage

    def resolve(self, name: str, which: str | int = "production", *, verify: bool = True) -> ModelVersion:
        """The version, with its files available locally. A damaged or missing file is an error."""
        version = self.get(name, which)
        self._refuse_damaged(version, contents=verify)
        return version

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        folder: str | Path,
        lineage: Lineage,
        *,
        by: str | None = None,
        note: str = "",
        in_place: bool = False,
        progress: Progress = no_progress,
    ) -> ModelVersion:
        """Register the files in `folder` as the next version, a candidate. `progress` gets bytes hashed and copied."""
        self._check_name(name)
        folder = Path(folder).expanduser().absolute()
        files = measure(folder, progress)
        home = self.location.folder
        copy = Copy(folder, files, home / ARTIFACTS / name, progress) if home and not in_place else None
        uploaded_to = run_id = None
        if not in_place and copy is None:
            if not self.location.is_server:
                raise RegistryError(
                    f"{self.location.text} is a database without a place for files; use --in-place to leave them in "
                    f"{folder}"
                )
            uploaded_to, run_id = self._store.upload(name, folder, files)
        path = copy.target if copy else folder
        new = ModelVersion(
            name=name,
            version=NO_VERSION,
            stage="candidate",
            path=path,
            files=files,
            lineage=lineage,
            by=by or who(),
            at=now(),
            note=note,
            in_place=in_place,
            uploaded_to=uploaded_to,
        )
        # A tracking server refuses local paths as sources; the record has the path.
        source = uploaded_to or (f"posttrain-folder://folder/{name}" if self.location.is_server else str(path))
        record = record_of(new, home)
        with copy or nullcontext(), self._store.writing():
            number = self._write_version(name, source, record, run_id, copy)
        return version_from_record(name, number, record, Stages(), home)

    def promote(
        self,
        name: str,
        version: int,
        to: Stage | None = None,
        *,
        why: str,
        by: str | None = None,
        expect: int | None = None,
        force: bool = False,
        verify: bool = True,
    ) -> HistoryEntry | None:
        """Move a version to a stage; without `to`, to the next one. None if it is there already.

        The version that was in that stage is archived. `expect` is the version that must be in the stage (0: none);
        RegistryConflict if it is another. A version whose gate's verdict is not "promote", or may be about another
        model, needs `force`, which the history records.
        """
        chosen = self.get(name, version)
        if to is None and chosen.stage not in ("candidate", "canary"):
            moves = " | ".join(STAGES[1:])
            raise RegistryError(
                f"{chosen.reference} is {chosen.stage}: give the stage it should move to (--to {moves})"
            )
        target = to or STAGES[STAGES.index(chosen.stage) + 1]
        if chosen.stage == target:
            with self._store.writing():  # the command that moved it may have been killed before this
                self._align_aliases(name, self._replayed(name)[0])
            return None
        objection = chosen.lineage.objection
        if target in ("canary", "production"):
            if chosen.stage == "production":
                raise RegistryError(
                    f"{chosen.reference} is in production; only rollback or another version takes it out"
                )
            if objection and not force:
                raise RegistryError(
                    f"{chosen.reference} may not become {target}: {objection}. --force overrides it, and is logged"
                )
            if verify:
                self._refuse_damaged(chosen)
        elif target == "candidate":
            raise RegistryError(f"{chosen.reference}: a version is a candidate once, when it is added")
        elif chosen.stage == "production" and not force:
            raise RegistryError(
                f"{chosen.reference} is in production: archiving it leaves none. Promote another version, roll back, "
                "or use --force"
            )
        expected = NOTHING_EXPECTED if expect is None else expect
        forced = force and objection is not None and target != "archived"
        change = Change("promote", chosen.version, target, by or who(), now(), _reason(why), expected, forced)
        return self._append(name, change)

    def rollback(
        self,
        name: str,
        *,
        why: str,
        by: str | None = None,
        stage: Stage = "production",
        to: int | None = None,
        verify: bool = True,
    ) -> HistoryEntry:
        """Production returns to the previous version (or to `to`); a canary is removed. The replaced version is
        archived.

        `to` must have been in production before: a rollback checks no gate verdict.
        """
        if stage not in ("production", "canary"):
            raise RegistryError(f"only production and canary can be rolled back, not {stage}")
        versions, stages, entries = self._read(name)
        if stage == "canary":
            if not stages.canary:
                raise RegistryError(f"{name} has no canary")
            change = Change("rollback", stages.canary, "archived", by or who(), now(), _reason(why), stages.canary)
            return self._append(name, change)
        target = to if to is not None else stages.previous_production()
        if target == NO_VERSION:
            raise RegistryError(f"{name}: there is no earlier production version to go back to")
        chosen = versions[self._number(name, str(target), versions, stages)]
        if chosen.stage == "production":
            raise RegistryError(f"{chosen.reference} is in production already")
        if not any(move.version == target and move.after == "production" for entry in entries for move in entry.moves):
            raise RegistryError(
                f"{chosen.reference} has never been in production, so it cannot be rolled back to. Use: posttrain "
                f"registry promote {name} {target} --to production --why … (against the gate: --force)"
            )
        if verify:
            self._refuse_damaged(chosen)
        change = Change("rollback", target, "production", by or who(), now(), _reason(why), stages.production)
        return self._append(name, change)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _write_version(self, name: str, source: str, record: JsonMapping, run_id: str | None, copy: Copy | None) -> int:
        """The number of the new version. Its files are kept only if it was written."""
        if copy is None:
            return self._store.add_version(name, source, record, run_id)
        before = set(self._store.versions(name))  # an unreadable database is detected before files are put there
        copy.keep()
        try:
            return self._store.add_version(name, source, record, run_id)
        except BaseException:
            # After an interrupt the database may have the version: then its files must stay.
            if set(self._store.versions(name)) == before:
                copy.withdraw()
            raise

    def _append(self, name: str, change: Change) -> HistoryEntry:
        with self._store.writing():
            # Checked before writing, so that an invalid change leaves no line, and again afterwards: without a lock (on
            # a server) another writer may have come first. Then the order of the log decides.
            if refused := self._replayed(name)[0].apply(change).refused:
                raise RegistryConflict(f"{name}: {refused}; nothing was changed")
            ordinal = self._store.add_change(name, change.to_row())
            stages, entries = self._replayed(name)
            entry = next(entry for entry in entries if entry.change.ordinal == ordinal)
            try:
                self._align_aliases(name, stages)
            except RegistryBusy as busy:
                raise RegistryBusy(f"{busy}. The change is made; MLflow's aliases follow with the next one") from busy
        if entry.refused:
            raise RegistryConflict(f"{name}: another change came first: {entry.refused}; nothing was changed")
        return entry

    def _align_aliases(self, name: str, stages: Stages) -> None:
        self._store.set_aliases(name, {"production": stages.production, "canary": stages.canary})

    def _replayed(self, name: str) -> tuple[Stages, list[HistoryEntry]]:
        rows = self._store.changes(name)
        return replay(Change(**row, ordinal=ordinal) for ordinal, row in rows.items())

    def _read(self, name: str) -> tuple[dict[int, ModelVersion], Stages, list[HistoryEntry]]:
        """All versions of a model by their number, the stages, and what each change did."""
        self._check_name(name)
        records = self._store.versions(name)
        if not records:
            known = self.names()
            listed = f"; there are {', '.join(known)}" if known else "; the registry is empty"
            raise RegistryError(f"{self.location.text}: no model {name!r}{nearest(name, known)}{listed}")
        stages, entries = self._replayed(name)
        home = self.location.folder
        versions = {
            number: version_from_record(name, number, record, stages, home) for number, record in records.items()
        }
        return versions, stages, entries

    def _number(self, name: str, which: str, versions: Mapping[int, ModelVersion], stages: Stages) -> int:
        places = {"production": stages.production, "canary": stages.canary}
        span = " to ".join(dict.fromkeys(map(str, (min(versions), max(versions)))))
        if which in places:
            if places[which]:
                return places[which]
            filled = ", ".join(f"{place} is version {number}" for place, number in places.items() if number)
            raise RegistryError(
                f"{name} has no {which} version ({filled or 'no version is in a stage'}); versions: "
                f"{span}. Promote one: posttrain registry promote {name} VERSION --to {which} --why …"
            )
        if which.isdecimal() and int(which) in versions:
            return int(which)
        raise RegistryError(f"{name}@{which}: no such version; versions are {span}, or use production or canary")

    def _fetch(self, version: ModelVersion) -> list[str]:
        """Download the files of a version atomically and verify them. Returns what is wrong with them."""
        assert version.uploaded_to is not None
        clear_abandoned(version.path.parent)
        partial = PartialFolder(version.path.parent)
        try:
            self._store.download(version.uploaded_to, partial.path)
            damage = find_damage(partial.path / "model", version.files, extra_files=True)
            if not damage:
                put_in_place(partial.path / "model", version.path, version.files)
        finally:
            partial.remove()
        return damage

    def _refuse_damaged(self, version: ModelVersion, *, contents: bool = True) -> None:
        if damage := self.verify(version, contents=contents):
            more = f" (and {len(damage) - 3} more)" if len(damage) > 3 else ""
            raise RegistryError(
                f"{version.reference} in {version.path} is not what was registered: {'; '.join(damage[:3])}{more}"
            )

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name.endswith(HISTORY_SUFFIX):
            raise RegistryError(
                f"{name!r} cannot be the name of a model: letters, digits, '.', '_' and '-' are accepted, up to 200, "
                f"not beginning with a sign and not ending with {HISTORY_SUFFIX}"
            )


def who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _reason(why: str) -> str:
    if not why.strip():
        raise RegistryError("a stage change needs a reason (--why): the history records it")
    return why.strip()


def resolve_version(
    reference: str, *, registry: str | Path | None = None, verify: bool = True, wait_s: float = DEFAULT_WAIT_S
) -> ModelVersion:
    """The version that `registry:NAME@WHICH` or `NAME@WHICH` names; WHICH is production (the default), canary or a
    number.

    Its files are at `.path`, compared with their checksums (`verify` False: only with their sizes). `registry` is where
    the registry is: POSTTRAIN_REGISTRY, or ./registry, if it is not given.
    """
    name, at, which = reference.removeprefix(REGISTRY_PREFIX).partition("@")
    if not name or (at and not which):
        raise RegistryError(
            f"{reference!r}: expected registry:NAME@production, registry:NAME@canary or registry:NAME@3 ('registry:' "
            "may be left out)"
        )
    return Registry(registry, wait_s=wait_s).resolve(name, which or "production", verify=verify)
