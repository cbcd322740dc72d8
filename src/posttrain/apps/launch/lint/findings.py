"""A finding: which rule, how bad, where, which value, and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.redaction import redact

Level = Literal["error", "warning"]
_SHOWN = 80  # characters of a value


@dataclass(frozen=True)
class LintFinding:
    level: Level
    rule: str
    file: str
    title: str  # kind and name of the object
    path: str  # spec.template.spec.containers[0].image
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        value = f" = {self.value}" if self.value else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.file}: {self.title}: {self.path}{value}: {self.message}{remedy} [{self.rule}]"


Findings = Iterator[LintFinding]


@dataclass(frozen=True)
class ManifestPlace:
    """A position in an object. `at` goes deeper; `error` and `warning` make the finding."""

    manifest: Manifest
    path: str = ""

    def at(self, *keys: str | int) -> ManifestPlace:
        path = self.path
        for key in keys:
            if isinstance(key, int):
                path += f"[{key}]"
            elif "." in key or "/" in key:
                path += f"[{key!r}]"
            else:
                path += f".{key}" if path else key
        return ManifestPlace(self.manifest, path)

    def error(self, rule: str, value: object, message: str, remedy: str = "") -> LintFinding:
        return self._finding("error", rule, value, message, remedy)

    def warning(self, rule: str, value: object, message: str, remedy: str = "") -> LintFinding:
        return self._finding("warning", rule, value, message, remedy)

    def _finding(self, level: Level, rule: str, value: object, message: str, remedy: str) -> LintFinding:
        shown = "" if value is None else redact(repr(value))
        if len(shown) > _SHOWN:
            shown = shown[:_SHOWN] + "…"
        return LintFinding(level, rule, self.manifest.file, self.manifest.title, self.path, shown, message, remedy)
