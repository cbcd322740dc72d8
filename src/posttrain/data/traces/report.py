"""Row counts by outcome and reason, with the first locations of each; never text of a trace.

Invariant at the end: rows = kept + problems + filtered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from posttrain.data.reward_values import MAX_REWARD
from posttrain.files.json_files import JsonObject

EXAMPLES_PER_REASON = 5

# Why a row cannot be used at all.
BROKEN_LINE = "broken JSON"
NOT_A_RECORD = "not a record"
NO_REWARD = "no reward"
REWARD_NOT_FINITE = f"reward is NaN, infinite or beyond ±{MAX_REWARD:g}"
REWARD_NOT_A_NUMBER = "reward is not a number"
NO_PROMPT = "no prompt"
NO_RESPONSE = "no response"
BAD_MESSAGES = "messages without role and content"
OTHER_PROMPT = "the response begins with turns that are not its prompt"
BAD_PROMPT_LEN = "prompt_len does not fit the messages"
NOT_UNICODE = "text is not valid Unicode"

# Why a usable row is left out on request.
BELOW_THRESHOLD = "reward below min_reward_threshold"
OUT_OF_TIME = "outside the dates"
NO_TIME = "no readable time"
EXACT_DUPLICATE = "exact duplicate"
NEAR_DUPLICATE = "near duplicate"


@dataclass
class Tally:
    """How often something was seen, and where first."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, count: int, places: Iterable[str] = ()) -> None:
        self.count += count
        self.examples += islice(places, EXAMPLES_PER_REASON - len(self.examples))


@dataclass
class ReadReport:
    """Filled while traces are read; complete when the reading has ended."""

    files: int = 0
    rows: int = 0  # rows found, usable or not
    kept: int = 0
    problems: dict[str, Tally] = field(default_factory=dict)  # rows that cannot be used
    filtered: dict[str, Tally] = field(default_factory=dict)  # rows that the filters leave out
    broken_files: dict[str, str] = field(default_factory=dict)  # file -> what is wrong; rows before the break are used
    conflicting_duplicates: int = 0  # equal responses to one prompt whose rewards differ from the first one's
    ids_with_several_prompts: int = 0  # each (id, prompt) is a group of its own
    pair_files: int = 0  # whose rows are preference pairs already

    @property
    def holds_pairs_only(self) -> bool:
        return 0 < self.files == self.pair_files

    def problem(self, reason: str, count: int = 1, places: Iterable[str] = ()) -> None:
        self.problems.setdefault(reason, Tally()).add(count, places)

    def filter(self, reason: str, count: int = 1, places: Iterable[str] = ()) -> None:
        self.filtered.setdefault(reason, Tally()).add(count, places)

    def as_dict(self) -> JsonObject:
        def plain(tallies: dict[str, Tally]) -> JsonObject:
            return {reason: {"rows": tally.count, "first": tally.examples} for reason, tally in tallies.items()}

        return {
            "files": self.files,
            "rows": self.rows,
            "kept": self.kept,
            "problems": plain(self.problems),
            "filtered": plain(self.filtered),
            "broken_files": dict(self.broken_files),
            "conflicting_duplicates": self.conflicting_duplicates,
            "ids_with_several_prompts": self.ids_with_several_prompts,
        }


@dataclass
class PairReport:
    """Prompt counts by outcome."""

    prompts: int = 0
    prompts_with_pairs: int = 0
    pairs: int = 0
    margin_sum: float = 0.0
    none: Counter[str] = field(default_factory=Counter)  # why prompts yield no pair -> how many of them
    over_the_cap: int = 0  # pairs that max_pairs_per_prompt left out
    not_writable: Counter[str] = field(default_factory=Counter)  # pairs that the file's format cannot hold, by reason

    @property
    def mean_margin(self) -> float | None:
        return self.margin_sum / self.pairs if self.pairs else None

    def as_dict(self) -> JsonObject:
        return {
            "prompts": self.prompts,
            "prompts_with_pairs": self.prompts_with_pairs,
            "pairs": self.pairs,
            "mean_margin": self.mean_margin,
            "prompts_without_pairs": dict(self.none.most_common()),
            "over_the_cap": self.over_the_cap,
            "not_writable": dict(self.not_writable),
        }
