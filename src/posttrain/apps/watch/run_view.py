"""One run for the dashboard, from its folder only: state, figures, charts, findings, config, workers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import numpy as np

from posttrain.apps.watch.metric_table import MetricTable, row_of, tail_rows
from posttrain.apps.watch.places import Place, Stamp, Unreadable, read_whole
from posttrain.apps.watch.rollout_store import Kind, RolloutStore, StepCache
from posttrain.config.tree import dotted, leaves, without_marks
from posttrain.config.yaml_files import parse_document
from posttrain.files.json_files import JsonObject, parse_json
from posttrain.files.run_folder_lock import ATTEMPTS_FOLDER, STALE_S
from posttrain.reporting.chart_specs import MAX_CURVES, bands_at_start, charts_of
from posttrain.reporting.doctor import Finding
from posttrain.reporting.doctor.findings import SEVERITIES, health, kept_findings, up_to_date, worst
from posttrain.reporting.examination import DEFAULT_KIND, examine
from posttrain.reporting.presentation import Band, ChartSpec, Headline, headline_from_json
from posttrain.reporting.rows import TOTAL_STEP, is_accuracy
from posttrain.reporting.run_files import (
    CONFIG_FILE,
    FINDINGS_FILE,
    INFO_FILE,
    METRICS_FILE,
    UNSCORED_FILE,
    WORKERS_FILE,
    parse_info,
)

T = TypeVar("T")
log = logging.getLogger("posttrain.watch")

WATCHED = (METRICS_FILE, INFO_FILE, FINDINGS_FILE, WORKERS_FILE, UNSCORED_FILE)
MAX_SMALL_FILE = 2**20  # bytes of run.json, of a config, of the record of an attempt
MAX_FINDINGS_FILE = 8 * 2**20
MAX_CONFIGS = 100
MAX_ATTEMPTS = 20
MAX_DEVICE_CHARACTERS = 40
UNREADABLE = "unreadable"
NUM_RECENT = 5  # values whose median is "now"
STEP_TIME = f"timing/train/{TOTAL_STEP}"
VALIDATIONS = (("validation/accuracy", False), ("validation/reward", False), ("validation/loss", True))
_MISSING = object()
_STEP_FOLDER = re.compile(r"step_(\d{1,12})")
_ATTEMPT = re.compile(r"(\d{4,12})\.json")
_CONFIG = re.compile(r"config_from_step_(\d{1,12})\.yaml")


class RunView:
    def __init__(self, run_id: str, place: Place, name: str, cache: StepCache, clock: Callable[[], float]) -> None:
        self.id = run_id
        self.place = place
        self.name = name
        self.rollouts = RolloutStore(place, cache)
        self.metrics = MetricTable(place)
        self._clock = clock
        self._kept: dict[str, tuple[Stamp | None, Any]] = {}
        self._problems: dict[str, str] = {}  # by file

    # ------------------------------------------------------------------ files

    def stamps(self) -> tuple[object, ...]:
        """Changes when something that is shown changes."""
        return tuple(self.place.stamp(name) for name in WATCHED)

    def _read(self, name: str, default: T, read: Callable[[], T]) -> T:
        """What `read` makes of a file; the default, and a problem of this run, if the file cannot be read."""
        try:
            found = read()
        except ValueError as error:  # Unreadable is one, and names the file itself
            self._problems[name] = str(error) if isinstance(error, Unreadable) else f"{name}: {error}"
            return default
        self._problems.pop(name, None)
        return found

    def _parsed(self, name: str, default: T, parse: Callable[[bytes], T], max_bytes: int = MAX_SMALL_FILE) -> T:
        """The content of a small file, parsed again when the file changes; the default if there is none."""
        stamp = self.place.stamp(name)
        before = self._kept.get(name)
        if before is None or before[0] != stamp:

            def read() -> T:
                content = read_whole(self.place, name, max_bytes) if stamp is not None else b""
                return parse(content) if content else default

            before = self._kept[name] = (stamp, self._read(name, default, read))
        found: T = before[1]
        return found

    def _tail(self, name: str) -> list[JsonObject]:
        return self._read(name, [], lambda: tail_rows(self.place, name))

    @property
    def info(self) -> JsonObject:
        return self._parsed(INFO_FILE, {}, parse_info)

    @property
    def findings(self) -> list[Finding]:
        return up_to_date(self._parsed(FINDINGS_FILE, [], _findings, MAX_FINDINGS_FILE), self.info)

    @property
    def problem(self) -> str:
        """Why a file of this run cannot be shown."""
        return self.metrics.problem or next(iter(self._problems.values()), "")

    def configs(self) -> dict[int, str]:
        """The text of each config by the first step that was trained with it."""
        names = {CONFIG_FILE: 1} | {name: int(m[1]) for name in self.place.names() if (m := _CONFIG.fullmatch(name))}
        ordered = sorted(names.items(), key=lambda item: item[1])[-MAX_CONFIGS:]
        decode = partial(str, encoding="utf-8", errors="replace")
        texts = {step: self._parsed(name, "", decode) for name, step in ordered}
        return {step: text for step, text in texts.items() if text}

    def settings(self) -> dict[str, object]:
        """The settings of the newest steps by their dotted keys."""
        text = next(reversed(self.configs().values()), "")
        try:
            values = without_marks(parse_document(text, CONFIG_FILE).values)
        except ValueError:
            return {}
        return {dotted(key): value for key, value in leaves(values)}

    def drop_metrics(self) -> None:
        self.metrics = MetricTable(self.place)

    # ------------------------------------------------------------------ state

    def attempts(self) -> list[JsonObject]:
        """The latest starts of the run, the oldest first."""
        numbers = {name: int(m[1]) for name in self.place.names(ATTEMPTS_FOLDER) if (m := _ATTEMPT.fullmatch(name))}
        names = sorted(numbers, key=lambda name: numbers[name])[-MAX_ATTEMPTS:]
        none: JsonObject = {}
        found = (self._parsed(f"{ATTEMPTS_FOLDER}/{name}", none, _attempt) for name in names)
        return [row for row in found if row]

    def state(self) -> tuple[str, str]:
        """The state of the run, with the reason: from `run.json`; a run without a live process is not running."""
        status, reason = str(self.info.get("status", "unknown")), str(self.info.get("reason") or "")
        newest = next(reversed(self.attempts()), None)
        if self.problem:
            return UNREADABLE, self.problem
        if status != "running":
            return status, "" if reason == status else reason
        if newest is None:
            return status, reason
        if newest.get("ended"):
            return "stopped", f"ended without a last word, exit code {newest.get('exit_code')}"
        age_s = self._clock() - (newest.get("heartbeat") or 0.0)
        if age_s > STALE_S:
            return "no heartbeat", f"the last one was {_ago(age_s)} ago; the process was probably killed"
        return status, reason

    def headline(self) -> Headline:
        return headline_from_json(self.info.get("headline"), self.metrics.keys or list(self._last_row()))

    def _last_row(self) -> JsonObject:
        """Of the steps, from the end of the file: a list of runs must not read them all."""
        stamp = self.place.stamp(METRICS_FILE)
        kept = self._kept.get("last row")
        if kept is None or kept[0] != stamp:
            rows = [row for row in self._tail(METRICS_FILE) if any(key.startswith("train/") for key in row)]
            kept = self._kept["last row"] = (stamp, rows[-1] if rows else {})
        row: JsonObject = kept[1]
        return row

    def row(self) -> JsonObject:
        """The run as one row of the list, whatever is in its folder."""
        try:
            return self.summary()
        except Exception as error:
            log.exception("the run %r cannot be shown", self.name)
            reason = f"{type(error).__name__}, see the log of posttrain watch"
            return self._row({}, UNREADABLE, reason, {}, headline_from_json(None, ()), [])

    def summary(self) -> JsonObject:
        row, headline, findings = self._last_row(), self.headline(), self.findings
        status, reason = self.state()  # last: it depends on what could be read
        return self._row(self.info, status, reason, row, headline, findings)

    def _row(
        self,
        info: JsonObject,
        status: str,
        reason: str,
        row: JsonObject,
        headline: Headline,
        findings: Sequence[Finding],
    ) -> JsonObject:
        value = row.get(headline.metric)
        return {
            "id": self.id,
            "name": self.name,
            "title": str(info.get("title") or self.name),
            "kind": str(info.get("algorithm") or ""),
            "status": status,
            "reason": reason,
            "step": row.get("step", 0),
            "max_steps": info.get("max_steps"),
            "headline": {
                "metric": headline.metric,
                "name": headline.name,
                "lower_is_better": headline.lower_is_better,
                "value": value if isinstance(value, int | float) and abs(value) < 1e100 else None,
            },
            "started_at": info.get("started_at"),
            "updated_at": self._updated_at(info),
            "health": health(findings, step if isinstance(step := row.get("step"), int) else 0),
            "findings": {level: sum(one.severity == level for one in findings) for level in SEVERITIES},
        }

    def _updated_at(self, info: JsonObject) -> float | None:
        """When the files changed last, in seconds since 1970."""
        stamp = self.place.stamp(METRICS_FILE) or self.place.stamp(INFO_FILE)
        if stamp is not None and isinstance(stamp.changed, tuple):
            return float(stamp.changed[0]) / 1e9
        try:
            return datetime.fromisoformat(str(info.get("updated_at"))).timestamp()
        except (ValueError, OverflowError):
            return None

    def page(self) -> JsonObject:
        """Everything of the run's page but the curves."""
        table, info = self.metrics.refresh(), self.info
        headline = self.headline()
        logged = [key for key in table.keys if np.isfinite(table.series(key)[1]).any()]
        charts = charts_of(headline, logged)
        shown = {key for chart in charts for key in chart.keys}
        device = str(info.get("device_word", "device"))[:MAX_DEVICE_CHARACTERS]
        bands = {chart.title: self._bands(chart) for chart in charts}
        return {
            **self.summary(),
            "step": table.last_step,
            "wall_s": info.get("wall_s"),
            "num_devices": info.get("num_devices"),
            "device_word": device,
            "eta_s": self._eta_s(),
            "validation": next((found for key, lower in VALIDATIONS if (found := self._best(key, lower))), None),
            "best": self._best(headline.metric, headline.lower_is_better),
            "vitals": list(self._vitals(charts, bands)),
            "num_recent": NUM_RECENT,
            "num_answers": int(np.nansum(table.series("train/num_samples")[1])),
            "validation_name": "reward" if self._validates_rewards() else None,
            "charts": [
                {
                    "title": chart.title,
                    "curves": [list(curve) for curve in chart.curves[:MAX_CURVES] if curve[0] in logged],
                    "note": chart.note_for(device),
                    "bands": [asdict(band) for band in bands[chart.title]],
                }
                for chart in charts
            ],
            "other_keys": [key for key in logged if key not in shown and np.any(table.series(key)[1])],
            "stages": self._stages(),
            "marks": {"resumes": info.get("resumed_at_steps") or [], "saves": self.saves()},
            "all_findings": [finding.to_json() for finding in self.findings],
            "config_changes": info.get("config_changes") or [],
            "warnings": info.get("warnings") or [],
            "rollouts": {kind: self.rollout_range(kind) for kind in ("train", "validation")},
        }

    def rollout_range(self, kind: Kind) -> JsonObject:
        steps = self.rollouts.steps(kind)
        return {"count": len(steps), "first": steps[0] if steps else None, "last": steps[-1] if steps else None}

    def saves(self) -> list[int]:
        """Steps with a checkpoint, where checkpoints are in the run folder."""
        return sorted(int(match[1]) for name in self.place.names() if (match := _STEP_FOLDER.fullmatch(name)))

    def _eta_s(self) -> float | None:
        max_steps = self.info.get("max_steps")
        values = self.metrics.series(STEP_TIME)[1][-20:]
        values = values[np.isfinite(values)]
        if self.state()[0] != "running" or not isinstance(max_steps, int) or not len(values):
            return None
        return float(values.mean()) * max(0, max_steps - self.metrics.last_step)

    def _best(self, metric: str, lower_is_better: bool) -> JsonObject | None:
        steps, values = self.metrics.series(metric)
        finite = np.isfinite(values)
        steps, values = steps[finite], values[finite]
        if not len(values):
            return None
        best = int(np.argmin(values) if lower_is_better else np.argmax(values))
        first, last = {"step": int(steps[0]), "value": float(values[0])}, float(values[-1])
        return {"metric": metric, "first": first, "last": last, "step": int(steps[best]), "value": float(values[best])}

    def _stages(self) -> list[JsonObject]:
        """The stages that take most of the time: mean seconds of the recent steps."""
        prefix = "timing/train/"
        names = [key.removeprefix(prefix) for key in self.metrics.keys if key.startswith(prefix)]
        top = [name for name in names if "/" not in name and name != TOTAL_STEP]
        found = {name: self.metrics.last(prefix + name, NUM_RECENT) or 0.0 for name in top}
        return [{"name": name, "seconds": s} for name, s in sorted(found.items(), key=lambda item: -item[1]) if s > 0]

    # ------------------------------------------------------------------ health

    def _bands(self, chart: ChartSpec) -> list[Band]:
        values = self.metrics.series(chart.keys[0])[1]
        return bands_at_start(chart, [value if np.isfinite(value) else None for value in values[:50].tolist()])

    def _validates_rewards(self) -> bool:
        """Whether `validation/accuracy` is a mean of rewards other than 0 and 1."""
        names = ("reward", "reward_min", "reward_max", "reward_std")
        measured = {f"validation/{name}": self.metrics.series(f"validation/{name}")[1].tolist() for name in names}
        rows = [dict(zip(measured, values, strict=True)) for values in zip(*measured.values(), strict=False)]
        return not all(map(is_accuracy, rows))

    def _vitals(self, charts: list[ChartSpec], bands: dict[str, list[Band]]) -> Iterator[JsonObject]:
        """One figure per chart with thresholds: the recent value, and what the doctor says of it. A value that has
        passed a threshold is unusual until it has lasted long enough for a finding."""
        for chart in charts:
            if not chart.bands:
                continue
            key = chart.keys[0] if chart.keys[0] in self.metrics.keys else chart.keys[-1]
            value = self.metrics.last(key, NUM_RECENT)
            if value is None:
                continue
            found = worst(one for one in self.findings if one.metric in chart.keys) or "unusual"
            level = found if any(band.holds(value) for band in bands[chart.title]) else "good"
            yield {"title": chart.title, "key": key, "value": value, "level": level}

    def examined(self) -> list[Finding]:
        """The findings of all rules over the whole run, computed now."""
        stamp = self.place.stamp(METRICS_FILE)
        kept = self._kept.get("examined")
        if kept is None or kept[0] != stamp:
            rows, kind = self.metrics.refresh().rows(), str(self.info.get("algorithm") or DEFAULT_KIND)
            found = examine(rows, kind, self.settings(), lambda step: self.rollouts.first_groups("train", step))
            kept = self._kept["examined"] = (stamp, found)
        findings: list[Finding] = kept[1]
        return findings

    # ------------------------------------------------------------------ workers

    def cluster(self) -> JsonObject:
        rows = self._tail(WORKERS_FILE)
        newest: JsonObject = next((row for row in reversed(rows) if isinstance(row.get("ranks"), list)), {})
        phases = [{key: row.get(key) for key in ("time", "step", "phase")} for row in rows[-200:]]
        return {
            "now": self._clock(),
            "stale_s": STALE_S,
            "attempts": self.attempts(),
            "ranks": newest.get("ranks") or [],
            "ranks_at": newest.get("time"),
            "phases": phases,
        }

    def unscored(self) -> list[JsonObject]:
        """The newest reasons for which answers could not be scored."""
        return list(reversed(self._tail(UNSCORED_FILE)))[:50]


def _attempt(content: bytes) -> JsonObject:
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    heartbeat = found.get("heartbeat")
    is_number = isinstance(heartbeat, int | float) and not isinstance(heartbeat, bool) and abs(heartbeat) < 1e100
    if heartbeat is not None and not is_number:
        raise ValueError(f"heartbeat is {str(heartbeat)[:40]!r}, not a number of seconds")
    return found


def _findings(content: bytes) -> list[Finding]:
    found = []
    for line in content.split(b"\n"):
        try:
            row = row_of(line)
            found += [] if row is None else [one for one in kept_findings([row]) if _is_sound(one)]
        except (TypeError, KeyError, AttributeError, ValueError):
            continue  # a line of another version
    return kept_findings([one.to_json() for one in found])


def _is_sound(finding: Finding) -> bool:
    texts = (finding.rule, finding.severity, finding.metric, finding.text, finding.source, *finding.fixes)
    shown = [text for answer in finding.answers for text in (answer.id, answer.text)]
    numbers = [number for answer in finding.answers for number in (answer.reward, answer.num_tokens)]
    return all(isinstance(text, str) for text in (*texts, *shown)) and all(
        number is None or isinstance(number, int | float) for number in (finding.value, finding.last_step, *numbers)
    )


def _ago(seconds: float) -> str:
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"


def config_differences(runs: Sequence[RunView]) -> JsonObject:
    """The keys whose values are not the same in all runs, and how many are."""
    settings = [run.settings() for run in runs]
    keys = sorted({key for one in settings for key in one})
    rows = []
    for key in keys:
        values = [one.get(key, _MISSING) for one in settings]
        if any(value != values[0] for value in values[1:]):
            texts = ["null" if value is None else str(value) for value in values]
            shown = [None if value is _MISSING else text for value, text in zip(values, texts, strict=True)]
            rows.append({"key": key, "values": shown})
    return {"differences": rows, "num_equal": len(keys) - len(rows), "known": [bool(one) for one in settings]}
