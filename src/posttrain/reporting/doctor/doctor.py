"""Applies the rules to a run, row by row. Findings are a function of the rows, so live and later results are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from posttrain.config.runs import KINDS, PAIR_KINDS, SUPERVISED_KINDS
from posttrain.files.json_files import JsonMapping
from posttrain.reporting.doctor import agent_rules, common_rules, policy_rules, preference_rules, sampling_rules
from posttrain.reporting.doctor.findings import Finding, Shown, rank, worst_first
from posttrain.reporting.doctor.history import RunHistory
from posttrain.reporting.doctor.policy_rules import ABOUT_GROUPS, ABOUT_REWARDS
from posttrain.reporting.doctor.rule import Rule

_MODULES = (policy_rules, sampling_rules, agent_rules, preference_rules, common_rules)  # of the checks, by rule
KINDS_OF = {"all": KINDS, "pairs": PAIR_KINDS, "supervised": SUPERVISED_KINDS, "grpo": ("grpo",), "dpo": ("dpo",)}


def _rules() -> tuple[Rule, ...]:
    said = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text("utf-8"))
    checks = {name.replace("_", "-"): value for module in _MODULES for name, value in vars(module).items()}
    return tuple(Rule(name, KINDS_OF[row.pop("kinds")], checks[name], **row) for name, row in said.items())


RULES = _rules()


class Doctor:
    def __init__(
        self,
        kind: str,
        settings: Mapping[str, object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.history = RunHistory(kind, settings, names)
        known = settings or {}
        only_taught = known.get("teacher.model_name") is not None and not known.get("teacher.reward_weight")
        has_critic = known.get("grpo.adv_estimator.name") == "gae"
        ignored = ABOUT_REWARDS if only_taught else ABOUT_GROUPS if has_critic else ()
        self._rules = [rule for rule in RULES if kind in rule.kinds and rule.check not in ignored]
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

    def replay(self, rows: Iterable[JsonMapping]) -> None:
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
            self._found[rule.id] = Finding(
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
            new.append(self._found[rule.id])
        return worst_first(new)
