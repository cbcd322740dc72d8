"""Labelled traces as preference rows (`dataset_name: TracePairs`): pairs for DPO, good and bad answers for KTO.

`posttrain.data.traces` reads, filters and matches traces; this module connects it to the keys of a dataset entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from posttrain.config.base import Section
from posttrain.data.conversations import as_prompt
from posttrain.data.entries import Entry
from posttrain.data.preference_shapes import ALIGNER, Judgement
from posttrain.data.sources import Row

if TYPE_CHECKING:
    from posttrain.data.traces import Trace

Values = TypeVar("Values")

BETWEEN = "a reward between pair_rules.rejected_below and pair_rules.preferred"
SEVERAL_TURNS = "an answer of several turns"


def _value(kind: type[Values], section: Section | None) -> Values:
    """A value of `posttrain.data.traces` from its section of the config."""
    return kind(**({} if section is None else section.model_dump()))


class TraceRows:
    """The trace settings of an entry, and counts of what was left out."""

    def __init__(self, entry: Entry) -> None:
        from posttrain.data.traces import PairReport, PairRules, ReadReport, TraceColumns, TraceFilters

        self._path = entry.file
        self._columns = _value(TraceColumns, entry.trace_columns)
        self._filters = _value(TraceFilters, entry.trace_filters)
        self._rules = _value(PairRules, entry.pair_rules)
        self._read, self._paired = ReadReport(), PairReport()
        self._is_templated = bool(entry.prompt_is_templated)  # otherwise the text of a trace is a user's message
        self._of_several_turns = 0

    def left_out(self) -> Mapping[str, int]:
        """Traces and prompts that gave no row, by reason; complete when all rows have been read."""
        counts: Counter[str] = Counter()
        for tallies in (self._read.problems, self._read.filtered):
            counts.update({f"trace: {reason}": tally.count for reason, tally in tallies.items()})
        counts.update({f"prompt without a pair: {reason}": count for reason, count in self._paired.none.items()})
        counts.update({f"pair: {reason}": count for reason, count in self._paired.not_writable.items()})
        if self._of_several_turns:
            counts[f"pair with {SEVERAL_TURNS}"] = self._of_several_turns
        if self._paired.over_the_cap:
            counts["pair over max_pairs_per_prompt"] = self._paired.over_the_cap
        return counts


class TracePairRows(TraceRows):
    """Rows with a prompt, a better and a worse answer."""

    def rows(self) -> Iterator[Row]:
        from posttrain.data.traces import iter_pair_rows

        found = iter_pair_rows(
            self._path, self._columns, self._filters, self._rules, report=self._read, pair_report=self._paired
        )
        for number, values in enumerate(found, start=1):
            # Turns of a tool or a user in between must not be trained, and the two answers share no prompt beyond the first.
            if not all(isinstance(values[key], str) for key in ALIGNER):
                self._of_several_turns += 1
                continue
            yield Row(values, f"pairs of {self._path}", number)


class JudgedTraceRows(TraceRows):
    """One row per trace. `judge` labels it desirable or not by its reward, with the thresholds of `pair_rules`."""

    def rows(self) -> Iterator[Row]:
        from posttrain.data.traces import iter_trace_groups

        groups = iter_trace_groups(self._path, self._columns, self._filters, report=self._read)
        for number, trace in enumerate((trace for group in groups for trace in group.traces), start=1):
            yield Row({"trace": trace}, f"traces of {self._path}", number)

    def judge(self, row: Row) -> list[Judgement]:
        trace: Trace = row.values["trace"]
        desirable = trace.reward >= self._rules.preferred
        prompt = as_prompt(trace.prompt, row, "prompt")
        templated = self._is_templated and isinstance(prompt, str)
        if not isinstance(trace.response, str):
            return [Judgement(prompt, "", desirable, SEVERAL_TURNS)]
        between = not desirable and trace.reward >= self._rules.rejected_below
        return [Judgement(prompt, trace.response, desirable, BETWEEN if between else "", templated)]
