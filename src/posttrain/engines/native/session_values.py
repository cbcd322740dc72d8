"""What goes into a session of the native engine and what comes out of it. Values only: no tensors, no model."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.types import FinishReason, Sampling


@dataclass(frozen=True)
class SessionRequest:
    """A prompt to be continued `num_samples` times. The same seed gives the same answers, whatever else is running."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    num_samples: int = 1
    adapter: str = ""  # "" is the model as it was loaded
    num_top_logprobs: int | None = None  # None: nobody asks for the model's own log-probabilities


@dataclass(frozen=True)
class ModelLogprobs:
    """Log-probabilities at temperature 1, whatever the token was drawn with: of the token, and of the most probable ones."""

    of_token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenEvent:
    """One more token of one sample. `logprob` is the sampler's, under the temperature used, as in `Completion`."""

    request_id: str
    sample: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None = None
    model_logprobs: ModelLogprobs | None = None


@dataclass(frozen=True)
class FailureEvent:
    """The request is over and has no answer."""

    request_id: str
    message: str


Event = TokenEvent | FailureEvent
