"""How labelled traces are read: keys of a dataset under `data`. What they mean is in `posttrain.data.traces`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import FreeMap, PositiveInt, Section


class TraceColumnsConfig(Section):
    """Which column means what. null: the usual name, where the file has it; "": not used."""

    input: str | None = Field(default=None, description="Column with the prompt, text or messages.")
    output: str | None = Field(default=None, description="Column with the answer.")
    messages: str | None = Field(default=None, description="Column with prompt and answer as messages.")
    prompt_len: str | None = Field(
        default=None, description="Column with the number of leading messages that are the prompt."
    )
    reward: str = Field(default="final_reward", description="Column with the reward.")
    group_id: str | None = Field(default=None, description="Column with an id of the prompt.")
    trace_id: str | None = Field(default=None, description="Column with an id of the trace.")
    model: str | None = Field(default=None, description="Column with the model that answered.")
    time: str | None = Field(default=None, description="Column with the time of the answer.")
    reference: str | None = Field(default=None, description="Column with the expected answer.")


class TraceFiltersConfig(Section):
    """Which traces are used; the others are counted by reason."""

    min_reward_threshold: float | None = Field(
        default=None, description="Traces with a lower reward are left out; null keeps all."
    )
    since: str | None = Field(default=None, description="First moment that counts, such as 2026-03-01; UTC.")
    until: str | None = Field(default=None, description="First moment that counts no more.")
    where: FreeMap = Field(default_factory=dict, description="Column: the value, or the values, that it must have.")
    duplicates: Literal["keep", "exact", "near"] = Field(
        default="keep", description="Of equal, or nearly equal, answers to one prompt the first is kept."
    )
    near_similarity: Annotated[float, Field(ge=0.7, le=1)] = Field(
        default=0.9, description="Similarity, 0 to 1, from which two texts are nearly equal."
    )


class PairRulesConfig(Section):
    """How the traces of one prompt become pairs."""

    preferred: float = Field(default=0.7, description="A trace with at least this reward is preferred.")
    rejected_below: float = Field(default=0.5, description="A trace with a reward below this is rejected.")
    strategy: Literal["best_worst", "all", "one_per_preferred", "by_margin"] = Field(
        default="best_worst", description="Which preferred trace meets which rejected one."
    )
    min_margin: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Least difference of the two rewards of a pair."
    )
    max_pairs_per_prompt: PositiveInt | None = Field(
        default=None, description="Most pairs of one prompt; null is no limit."
    )
