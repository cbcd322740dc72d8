"""Types: labelled traces, and the settings for reading them: columns, filters, rules for pairs.

A *trace* is one answer that some model gave to a prompt, with a reward. The traces of one prompt are a *group*. Nothing
here reads a file, and nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from typing import Literal, get_args

from posttrain.data.errors import DataError, nearest
from posttrain.files.json_files import JsonMapping

Message = JsonMapping
Prompt = str | list[Message]  # text, or the turns of a conversation
Response = str | list[Message]  # the text of one answer, or the turns that followed the prompt where there were several

Duplicates = Literal["keep", "exact", "near"]
Strategy = Literal["best_worst", "all", "one_per_preferred", "by_margin"]


@dataclass(frozen=True)
class Trace:
    """One recorded answer. `origin` is "file, row N", for people."""

    prompt: Prompt
    response: Response
    reward: float
    trace_id: str | None = None
    group_id: str | None = None
    model: str | None = None
    time: datetime | None = None  # UTC
    reference: str | None = None  # the expected answer, where the file has it
    origin: str = ""

    @property
    def response_text(self) -> str:
        """What the model wrote: the answer, or the assistant's turns of a longer trace, one after another."""
        return text_of(self.response, only_role="assistant")


@dataclass(frozen=True)
class TraceGroup:
    """The traces of one prompt, in the order of the files."""

    prompt: Prompt
    traces: list[Trace]
    group_id: str | None = None

    @property
    def rewards(self) -> list[float]:
        return [trace.reward for trace in self.traces]


@dataclass(frozen=True)
class TraceColumns:
    """Which column means what. None: the usual name, where the file has it; "": not used; a name: it must be there.

    Three shapes of rows are known. `messages` with `prompt_len`: the first `prompt_len` messages are the prompt; the
    rest, up to the assistant's last turn, is the response (without that column the response is the last turn). `input`
    and `output`: each a text or messages. Preference rows with `chosen` and `rejected`: two traces each, with their
    scores where the row has some, otherwise with the rewards 1 and 0.
    """

    input: str | None = None  # usually "input", or "prompt"
    output: str | None = None  # usually "output", "response" or "completion"
    messages: str | None = None
    prompt_len: str | None = None
    reward: str = "final_reward"
    group_id: str | None = None  # with it, traces belong together when their id and their prompt are equal
    trace_id: str | None = None
    model: str | None = None
    time: str | None = None  # usually "time", "timestamp" or "created_at"
    reference: str | None = None  # the expected answer; usually "reference_answer" or "reference"

    def __post_init__(self) -> None:
        if self.messages and (self.input or self.output):
            raise DataError(
                "columns: `messages` holds the prompt and the response; name either it, or `input` and `output`, not "
                "both"
            )
        if not self.reward:
            raise DataError("columns: `reward` needs the name of a column; the usual one is 'final_reward'")


@dataclass(frozen=True)
class TraceFilters:
    """Which traces are used. What is left out is counted, by reason."""

    min_reward_threshold: float | None = None  # traces with a lower reward are left out
    since: str | date | None = None  # first moment that counts; a day means its beginning; UTC unless it has a zone
    until: str | date | None = None  # first moment that counts no more; "2026-03-01" leaves that day out
    where: JsonMapping = field(default_factory=dict)  # column -> the value, or the list of values, that it must have
    duplicates: Duplicates = "keep"  # of equal, or nearly equal, responses to one prompt: else the first is kept
    near_similarity: float = 0.9  # Jaccard similarity of five-word shingles from which "near" calls two texts the same

    def __post_init__(self) -> None:
        _one_of(self.duplicates, get_args(Duplicates), "duplicates")
        threshold = self.min_reward_threshold
        if threshold is not None and not math.isfinite(threshold):
            raise DataError(f"min_reward_threshold: {threshold} is not a finite number")
        if not 0.7 <= self.near_similarity <= 1:
            raise DataError(f"near_similarity: {self.near_similarity} is not possible; between 0.7 and 1")
        if self.since_moment and self.until_moment and self.since_moment >= self.until_moment:
            raise DataError(f"since {self.since} is not before until {self.until}: no trace could pass")

    @property
    def since_moment(self) -> datetime | None:
        return None if self.since is None else as_moment(self.since, "since")

    @property
    def until_moment(self) -> datetime | None:
        return None if self.until is None else as_moment(self.until, "until")

    @property
    def by_time(self) -> bool:
        return self.since is not None or self.until is not None


@dataclass(frozen=True)
class PairRules:
    """How the traces of one prompt become preference pairs.

    A trace is preferred when its reward is at least `preferred`, and rejected when it is below `rejected_below`.
    - `best_worst`: the best preferred one against the worst rejected one; one pair a prompt.
    - `all`: each preferred one against each rejected one.
    - `one_per_preferred`: each preferred one once; the rejected ones take turns, the worst first.
    - `by_margin`: any two traces whose rewards differ by `min_margin`, wherever the two thresholds are.
    Pairs come widest margin first, so `max_pairs_per_prompt` keeps the clearest ones; equal ones keep the order of the
    files.
    """

    preferred: float = 0.7
    rejected_below: float = 0.5
    strategy: Strategy = "best_worst"
    min_margin: float = 0.0
    max_pairs_per_prompt: int | None = None

    def __post_init__(self) -> None:
        _one_of(self.strategy, get_args(Strategy), "strategy")
        for name in ("preferred", "rejected_below", "min_margin"):
            if not math.isfinite(getattr(self, name)):
                raise DataError(f"{name}: {getattr(self, name)} is not a finite number")
        if self.preferred < self.rejected_below:
            raise DataError(
                f"preferred {self.preferred:g} is below rejected_below {self.rejected_below:g}: "
                "a trace would be preferred and rejected at once; raise the one or lower the other"
            )
        if self.min_margin < 0 or (self.strategy == "by_margin" and self.min_margin == 0):
            need = "above 0 with the strategy by_margin, such as 0.2" if self.strategy == "by_margin" else "at least 0"
            raise DataError(f"min_margin: {self.min_margin:g} is not possible; it must be {need}")
        if self.max_pairs_per_prompt is not None and self.max_pairs_per_prompt < 1:
            raise DataError(f"max_pairs_per_prompt: {self.max_pairs_per_prompt} is not possible; at least 1, or none")


def as_moment(value: str | date, name: str) -> datetime:
    """A date or a time in ISO form as a moment; UTC unless it names another zone."""
    moment: date
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as error:
            raise DataError(
                f"{name}: {value!r} is not a date; write it like 2026-03-01 or 2026-03-01T12:00:00+01:00"
            ) from error
    else:
        moment = value
    if not isinstance(moment, datetime):
        moment = datetime.combine(moment, time())
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def text_of(turns: str | list[Message], *, only_role: str | None = None) -> str:
    """The text of a prompt or a response; of several turns, their contents with a line break between."""
    if isinstance(turns, str):
        return turns
    chosen = [turn for turn in turns if only_role is None or turn.get("role") == only_role]
    return "\n".join(turn["content"] for turn in chosen if turn["content"])


def _one_of(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise DataError(f"{name}: unknown {value!r}{nearest(str(value), known)}; known: {', '.join(known)}")
