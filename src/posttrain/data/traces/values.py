"""Types: labelled traces, and the settings for reading them: columns, filters, rules for pairs.

A *trace* is one answer that some model gave to a prompt, with a reward. The traces of one prompt are a *group*. Nothing
here reads a file, and nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from pydantic import ValidationError

from posttrain.config.base import Section, explain_errors
from posttrain.config.data import PairRulesConfig, TraceColumnsConfig, TraceFiltersConfig
from posttrain.data.errors import DataError
from posttrain.files.json_files import JsonMapping

Message = JsonMapping
Prompt = str | list[Message]  # text, or the turns of a conversation
Response = str | list[Message]  # the text of one answer, or the turns that followed the prompt where there were several


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


class _Settings(Section):
    """A section of the config as Python code makes it, too: what does not fit is a DataError."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise DataError("\n".join(explain_errors(error))) from None


class TraceColumns(_Settings, TraceColumnsConfig):
    """Which column means what. None: the usual name, where the file has it; "": not used; a name: it must be there.

    Three shapes of rows are known. `messages` with `prompt_len`: the first `prompt_len` messages are the prompt; the
    rest, up to the assistant's last turn, is the response (without that column the response is the last turn). `input`
    and `output`: each a text or messages. Preference rows with `chosen` and `rejected`: two traces each, with their
    scores where the row has some, otherwise with the rewards 1 and 0.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.messages and (self.input or self.output):
            raise DataError(
                "columns: `messages` holds the prompt and the response; name either it, or `input` and `output`, not "
                "both"
            )
        if not self.reward:
            raise DataError("columns: `reward` needs the name of a column; the usual one is 'final_reward'")


class TraceFilters(_Settings, TraceFiltersConfig):
    """Which traces are used. What is left out is counted, by reason. A day means its beginning; UTC unless it has a
    zone: `until` 2026-03-01 leaves that day out."""

    def __init__(self, **values: Any) -> None:
        plain = {name: one.isoformat() if isinstance(one, date) else one for name, one in values.items()}
        super().__init__(**plain)
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


class PairRules(_Settings, PairRulesConfig):
    """How the traces of one prompt become preference pairs.

    A trace is preferred when its reward is at least `preferred`, and rejected when it is below `rejected_below`.
    - `best_worst`: the best preferred one against the worst rejected one; one pair a prompt.
    - `all`: each preferred one against each rejected one.
    - `one_per_preferred`: each preferred one once; the rejected ones take turns, the worst first.
    - `by_margin`: any two traces whose rewards differ by `min_margin`, wherever the two thresholds are.
    Pairs come widest margin first, so `max_pairs_per_prompt` keeps the clearest ones; equal ones keep the order of the
    files.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.preferred < self.rejected_below:
            raise DataError(
                f"preferred {self.preferred:g} is below rejected_below {self.rejected_below:g}: "
                "a trace would be preferred and rejected at once; raise the one or lower the other"
            )
        if self.strategy == "by_margin" and self.min_margin == 0:
            raise DataError(
                "min_margin: 0 is not possible with the strategy by_margin; it must be above 0, such as 0.2"
            )


def as_moment(value: str, name: str) -> datetime:
    """A date or a time in ISO form as a moment; UTC unless it names another zone."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise DataError(
            f"{name}: {value!r} is not a date; write it like 2026-03-01 or 2026-03-01T12:00:00+01:00"
        ) from error
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def text_of(turns: str | list[Message], *, only_role: str | None = None) -> str:
    """The text of a prompt or a response; of several turns, their contents with a line break between."""
    if isinstance(turns, str):
        return turns
    chosen = [turn for turn in turns if only_role is None or turn.get("role") == only_role]
    return "\n".join(turn["content"] for turn in chosen if turn["content"])
