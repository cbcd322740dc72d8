"""Applies the rules to a run, row by row. Findings are a function of the rows, so live and later results are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from posttrain.files.json_files import JsonMapping
from posttrain.reporting.doctor.common_rules import COMMON_RULES
from posttrain.reporting.doctor.findings import Finding, Shown, rank, worst_first
from posttrain.reporting.doctor.history import History
from posttrain.reporting.doctor.policy_rules import POLICY_RULES
from posttrain.reporting.doctor.preference_rules import PREFERENCE_RULES
from posttrain.reporting.doctor.rule import Rule, Sighting
from posttrain.reporting.doctor.sampling_rules import SAMPLING_RULES

RULES: tuple[Rule, ...] = (*POLICY_RULES, *SAMPLING_RULES, *PREFERENCE_RULES, *COMMON_RULES)


class Doctor:
    def __init__(
        self,
        kind: str,
        settings: Mapping[str, object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.history = History(kind, settings, names)
        self._rules = [rule for rule in RULES if kind in rule.kinds]
        self._found: dict[str, Finding] = {}  # by rule: the worst so far
        self.shown: dict[str, Shown] = {}  # by rule: which answers show it

    @property
    def findings(self) -> list[Finding]:
        """The worst of each rule, the worst first."""
        return worst_first(list(self._found.values()))

    def observe(self, row: JsonMapping) -> list[Finding]:
        """What a row of metrics.jsonl adds: rules that report for the first time, or something worse than before."""
        self.history.append(row)
        if not any(key.startswith("train/") for key in row):
            return []  # a validation row: the next step evaluates it
        return self._apply(rule for rule in self._rules if not rule.at_end)

    def replay(self, rows: Sequence[JsonMapping]) -> None:
        for row in rows:
            self.observe(row)

    def finish(self) -> list[Finding]:
        """Findings about the run as a whole, when it is over."""
        return self._apply(rule for rule in self._rules if rule.at_end)

    def _apply(self, rules: Iterable[Rule]) -> list[Finding]:
        new = []
        for rule in rules:
            sighting = rule.check(self.history)
            if sighting is None:
                continue
            before = self._found.get(rule.id)
            if before is not None and rank(sighting.severity) <= rank(before.severity):
                self._found[rule.id] = replace(before, last_step=self.history.step)
                continue
            self.shown[rule.id] = sighting.shown
            self._found[rule.id] = self._finding(rule, sighting)
            new.append(self._found[rule.id])
        return worst_first(new)

    def _finding(self, rule: Rule, sighting: Sighting) -> Finding:
        return Finding(
            step=self.history.step,
            rule=rule.id,
            severity=sighting.severity,
            metric=sighting.metric,
            value=sighting.value,
            text=sighting.text,
            fixes=tuple(fix for fix in sighting.fixes if fix),
            source=rule.source,
            last_step=self.history.step,
        )
