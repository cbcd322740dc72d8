"""Statistics of a set of traces. They contain no text of prompts or responses."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.data.traces.canonical import SCHEMA
from posttrain.data.traces.chat_text import decoded
from posttrain.data.traces.files import locate
from posttrain.data.traces.filters import repeated_responses
from posttrain.data.traces.grouping import GroupedPart, GroupParts
from posttrain.data.traces.pairs import paired_rows
from posttrain.data.traces.reading import COMPARED, Reading
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import PairRules, text_of
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_BINS = 20
SAMPLE_SIZE = 5000
MAX_MODELS = 50
OTHER_MODELS = "(others)"
SIZES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))


@dataclass
class Lengths:
    """Percentiles of a sample that the row numbers choose; of fewer rows than that, of all."""

    unit: str  # "characters" or "tokens"
    sampled: int
    prompt: dict[str, int]
    response: dict[str, int]


@dataclass
class TraceStatistics:
    read: ReadReport = field(default_factory=ReadReport)
    pairs: PairReport = field(default_factory=PairReport)
    rules: PairRules = field(default_factory=PairRules)

    groups: int = 0  # by group id where there is one, otherwise by prompt
    single: int = 0  # groups of one trace
    with_signal: int = 0  # groups whose rewards are not all equal
    prompts_with_signal: int = 0  # the same of prompts; fewer where an id covers several prompts
    graded: int = 0  # groups with three or more different rewards
    diverse: int = 0  # groups with three or more different responses
    group_sizes: dict[str, int] = field(default_factory=dict)

    reward_mean: float = 0.0
    reward_std: float = 0.0
    reward_min: float = 0.0
    reward_max: float = 0.0
    preferred: int = 0  # traces at or above rules.preferred
    rejected: int = 0  # traces below rules.rejected_below
    bin_edges: list[float] = field(default_factory=list)
    bin_counts: list[int] = field(default_factory=list)

    exact_duplicates: int = 0  # responses that stood under the same prompt before
    conflicting_duplicates: int = 0  # those of them whose reward is another one
    lengths: Lengths | None = None
    models: dict[str, tuple[int, float]] = field(default_factory=dict)  # traces, mean reward

    @property
    def traces(self) -> int:
        return self.read.kept

    @property
    def between(self) -> int:
        """Traces that are neither preferred nor rejected."""
        return self.traces - self.preferred - self.rejected

    @property
    def all_equal(self) -> int:
        """Groups of several traces with one and the same reward."""
        return self.groups - self.single - self.with_signal

    @property
    def bin_kinds(self) -> list[str]:
        """Of each bar whether its rewards are rejected ("low"), preferred ("high") or neither ("mid"), by its
        middle."""
        middles = [(left + right) / 2 for left, right in pairwise(self.bin_edges)]
        rules = self.rules
        return ["high" if x >= rules.preferred else "low" if x < rules.rejected_below else "mid" for x in middles]

    @property
    def headline(self) -> str:
        return f"{self.traces:,} traces in {self.groups:,} groups, {self.with_signal:,} of them with different rewards"

    def as_dict(self) -> JsonObject:
        return {
            "read": self.read.as_dict(),
            "groups": {
                "count": self.groups,
                "with_signal": self.with_signal,
                "prompts_with_signal": self.prompts_with_signal,
                "all_rewards_equal": self.all_equal,
                "single_trace": self.single,
                "three_or_more_rewards": self.graded,
                "three_or_more_responses": self.diverse,
                "sizes": self.group_sizes,
            },
            "rewards": {
                "mean": self.reward_mean,
                "std": self.reward_std,
                "min": self.reward_min,
                "max": self.reward_max,
                "preferred": self.preferred,
                "rejected": self.rejected,
                "between": self.between,
                "histogram": {"edges": self.bin_edges, "counts": self.bin_counts},
            },
            "duplicates": {"exact": self.exact_duplicates, "with_another_reward": self.conflicting_duplicates},
            "lengths": None if self.lengths is None else vars(self.lengths),
            "models": {name: {"traces": count, "mean_reward": mean} for name, (count, mean) in self.models.items()},
            "pairs": {"rules": vars(self.rules), **self.pairs.as_dict()},
        }


def collect_statistics(
    reading: Reading, rules: PairRules, tokenizer: PreTrainedTokenizerBase | None = None
) -> TraceStatistics:
    """Reads everything once. `tokenizer` measures lengths in its tokens; without one they are characters."""
    found = TraceStatistics(rules=rules)
    files = locate(reading.path)
    first = _FirstPass()
    with tempfile.TemporaryDirectory(prefix="posttrain-traces-", dir=reading.scratch) as folder:
        parts = GroupParts(Path(folder), reading.memory_bytes)
        edges: NDArray[np.float64] | None = None
        for part in reading.grouped(found.read, parts, files, columns=COMPARED, on_table=first.add):
            if edges is None:  # everything has been read, so the range is known
                edges = histogram_edges(first.low, first.high)
                found.bin_counts = [0] * (len(edges) - 1)
            _add_part(found, part, edges)
    first.fill(found)
    found.bin_edges = [] if edges is None else [float(f"{edge:.12g}") for edge in edges]
    found.lengths = first.sample.lengths(tokenizer)
    return found


class _FirstPass:
    """Statistics collected in the first pass over the rows."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.models: Counter[str] = Counter()
        self.model_rewards: Counter[str] = Counter()
        self.sample = _Sample(SAMPLE_SIZE)

    def add(self, table: pa.Table) -> None:
        rewards = table["reward"].to_numpy()
        self.low, self.high = min(self.low, rewards.min()), max(self.high, rewards.max())
        # Chan's update of mean and squared deviations: exact for large counts, unlike a sum of squares.
        count, mean = len(rewards), float(rewards.mean())
        total, shift = self.count + count, mean - self.mean
        self.squares += float(((rewards - mean) ** 2).sum()) + shift * shift * self.count * count / total
        self.mean += shift * count / total
        self.count = total
        for row in table.group_by("model").aggregate([("reward", "sum"), ("reward", "count")]).to_pylist():
            name = row["model"] if row["model"] is not None else ""
            if name not in self.models and len(self.models) >= MAX_MODELS:
                name = OTHER_MODELS
            self.models[name] += row["reward_count"]
            self.model_rewards[name] += row["reward_sum"]
        self.sample.add(table)

    def fill(self, found: TraceStatistics) -> None:
        if not self.count:
            return
        found.reward_min, found.reward_max = float(self.low), float(self.high)
        found.reward_mean, found.reward_std = self.mean, float(np.sqrt(self.squares / self.count))
        if set(self.models) != {""}:
            found.models = {
                name or "(none)": (count, self.model_rewards[name] / count) for name, count in self.models.most_common()
            }


def _add_part(found: TraceStatistics, part: GroupedPart, edges: NDArray[np.float64]) -> None:
    if not len(part):
        return
    rewards = part.rewards
    counts, _ = np.histogram(rewards, edges)
    found.bin_counts = [a + b for a, b in zip(found.bin_counts, counts.tolist(), strict=True)]
    found.preferred += int((rewards >= found.rules.preferred).sum())
    found.rejected += int((rewards < found.rules.rejected_below).sum())

    original = repeated_responses(part)
    again = original != np.arange(len(original))
    found.exact_duplicates += int(again.sum())
    found.conflicting_duplicates += int((again & (rewards != rewards[original])).sum())

    starts = part.group_starts
    sizes = np.diff(starts)
    low, high = np.minimum.reduceat(rewards, starts[:-1]), np.maximum.reduceat(rewards, starts[:-1])
    found.groups += len(sizes)
    found.single += int((sizes == 1).sum())
    found.with_signal += int((low != high).sum())
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    found.graded += int((_distinct_per_group(group_of, rewards) >= 3).sum())
    found.diverse += int((_distinct_per_group(group_of, part.response_codes) >= 3).sum())
    units = part.starts[:-1]
    found.prompts_with_signal += int((np.minimum.reduceat(rewards, units) != np.maximum.reduceat(rewards, units)).sum())
    for least, most in SIZES:
        name = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
        number = int(((sizes >= least) & (sizes <= (most or np.inf))).sum())
        found.group_sizes[name] = found.group_sizes.get(name, 0) + number
    paired_rows(part, found.rules, found.pairs)


def _distinct_per_group(group_of: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.int64]:
    """How many different values each group has. `group_of` is sorted."""
    order = np.lexsort((values, group_of))
    same = (group_of[order][1:] == group_of[order][:-1]) & (values[order][1:] == values[order][:-1])
    return np.bincount(group_of[order][np.concatenate([[True], ~same])], minlength=int(group_of[-1]) + 1)


def histogram_edges(low: float, high: float) -> NDArray[np.float64]:
    """Round edges that cover the rewards; the unit interval for rewards that lie in it."""
    from posttrain.reporting.charts import tick_size

    if not np.isfinite(low) or (low >= 0 and high <= 1):
        return np.linspace(0.0, 1.0, NUM_BINS + 1)
    largest = max(abs(low), abs(high))
    span = min(high - low, np.finfo(np.float64).max)
    size = tick_size(span if span > 1e-9 * largest else largest, NUM_BINS)
    first, last = np.floor(low / size), np.floor(high / size) + 1
    if first * size > low:  # 1.7 / 0.1 is 17, but 17 * 0.1 is more than 1.7
        first -= 1
    return np.asarray(np.arange(first, last + 1) * size)


class _Sample:
    """The rows with the smallest hashed numbers: an unbiased sample that is the same for the same files."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept = SCHEMA.empty_table().select(["prompt", "prompt_is_chat", "response", "response_is_chat"])
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def add(self, table: pa.Table) -> None:
        keys = _mixed(table["row"].to_numpy())
        if len(self._keys) == self._size:  # most rows of a large file end here
            fresh = np.flatnonzero(keys < self._keys.max())
            if not len(fresh):
                return
            table, keys = table.take(pa.array(fresh)), keys[fresh]
        self._kept = pa.concat_tables([self._kept, table.select(self._kept.schema.names)])
        self._keys = np.concatenate([self._keys, keys])
        if len(self._keys) > self._size:
            best = np.sort(np.argpartition(self._keys, self._size)[: self._size])
            self._kept, self._keys = self._kept.take(pa.array(best)).combine_chunks(), self._keys[best]

    def lengths(self, tokenizer: PreTrainedTokenizerBase | None) -> Lengths | None:
        rows = self._kept.to_pylist()
        if not rows:
            return None
        prompts = [text_of(decoded(row["prompt"], row["prompt_is_chat"])) for row in rows]
        responses = [text_of(decoded(row["response"], row["response_is_chat"]), only_role="assistant") for row in rows]
        unit = "characters" if tokenizer is None else "tokens"
        lengths = (_lengths(texts, tokenizer) for texts in (prompts, responses))
        shares = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        percentiles = (
            {name: int(np.percentile(found, share, method="higher")) for name, share in shares.items()}
            for found in lengths
        )
        return Lengths(unit, len(rows), *percentiles)


def _mixed(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """splitmix64."""
    with np.errstate(over="ignore"):
        x = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def _lengths(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer is None:
        return [len(text) for text in texts]
    lengths: list[int] = []
    for begin in range(0, len(texts), 512):
        encoded = tokenizer(
            texts[begin : begin + 512], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        lengths += [len(ids) for ids in encoded["input_ids"]]
    return lengths
