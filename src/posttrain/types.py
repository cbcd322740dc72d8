"""Values that cross a boundary between two parts of posttrain. Data only: no behaviour that needs a model.

The words: a *Task* is a prompt with what is needed to judge an answer; a *Completion* is one sampled answer; a
*Rollout* is a completion with its score; a *Group* is the rollouts of one task; a *TokenBatch* is what a policy trains
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# Texts `role` and `content`; what else there is, such as `tool_calls`, templates may read. With images, `content` is a
# list of parts: {"type": "text", "text": …} and {"type": "image"}.
Message = Mapping[str, Any]
FinishReason = Literal["stop", "length"]
ROUTES = "routed_experts"  # the column of a `TokenBatch` with the sampler's choice of experts


@dataclass(frozen=True)
class ImageRef:
    """An encoded image, checked when its row was read. Its pixels: `data/images.py`. Two are equal if their bytes are.

    A dataset holds many, so the bytes may stay in a file until `data` is read. They travel to other processes.
    """

    digest: str  # sha256 of the bytes
    width: int  # upright, as `open_image` returns it
    height: int
    format: str  # PNG, JPEG, WEBP, GIF, BMP
    num_bytes: int
    source: bytes | Callable[[], bytes] = field(compare=False, repr=False)
    where: str = field(default="", compare=False, repr=False)  # it was given first: row and file, for messages

    @property
    def data(self) -> bytes:
        """The file as it came."""
        return self.source if isinstance(self.source, bytes) else self.source()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": self.data}


@dataclass(frozen=True)
class Task:
    """A prompt in the model's format, and the data that the environment needs to score an answer.

    `draw` is the position of this task in the run's stream of tasks. It is unique within a run, so it, and never the
    text, is what groups are formed by and what sampling noise is keyed by.
    """

    draw: int
    id: str  # "<dataset>:<row>", for messages and reports
    prompt: str  # the rendered prompt, special tokens included
    prompt_ids: tuple[int, ...]
    reference: object = None  # the expected answer, as the dataset gives it
    environment: str = ""  # key under `env:` of the config
    messages: tuple[Message, ...] = ()  # the conversation before the chat template
    metadata: Mapping[str, object] = field(default_factory=dict)
    recorded: tuple[Rollout, ...] = ()  # answers from elsewhere, with their rewards, to train on
    # A later turn of one sample is a task of its own. These two keep its sampling noise apart from that of the turns
    # and samples beside it: which sample of `draw` it is, and how many tokens stand between the first prompt and what
    # follows.
    first_sample: int = 0
    first_token: int = 0
    images: tuple[ImageRef, ...] = ()  # in the order of the image parts in `messages`
    max_new_tokens: int | None = None  # where it is less than that of all


# Below this a temperature can only mean greedy: its inverse would overflow.
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `top_k` 0 and `top_p` 1 are off; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own ends of sequence
    end_of_turn_ids: tuple[int, ...] = ()  # what the chat template ends an answer with
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # sample exactly max_new_tokens; for benchmarks

    def limit_of(self, task: Task) -> int:
        """Tokens that an answer to this task may have."""
        own = task.max_new_tokens
        return self.max_new_tokens if own is None else min(own, self.max_new_tokens)


@dataclass(frozen=True)
class NoiseKey:
    """Everything outside the request that sampling noise depends on: (seed, step); the rest is (draw, sample, token).

    Sample and token count from the task's `first_sample` and `first_token`.
    """

    seed: int
    step: int


@dataclass(frozen=True)
class Completion:
    """One sampled answer. `logprobs[i]` is the sampler's log-probability of `token_ids[i]` under the temperature used.

    A stop token that ended the answer is part of `token_ids`; `text` is decoded without special tokens. In a
    conversation of several turns, the environment's tokens stand between the model's turns; `mask` separates the two.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # 0 where the token is not the model's; empty where unknown (a recorded answer)
    text: str
    finish_reason: FinishReason
    mask: tuple[bool, ...] = ()  # True: the model's own token, to be trained; empty: all of them are
    conversation: Conversation | None = None  # set when the environment took turns with the model
    # Which weights sampled which tokens: (index of the first token, version), each up to the next pair. Version v is
    # the weights after v training steps of the run, -1 an unknown earlier one; empty: unknown, taken as the current
    # weights.
    versions: tuple[tuple[int, int], ...] = ()
    error: str | None = None  # why no answer came (a request to a server failed); such a completion stays unscored
    prompt_ids: tuple[int, ...] = ()  # what `token_ids` follow, where an agent wrote it; empty: the task's prompt
    # Where an agent asked with another history: what was sampled there, one branch for each. A token is trained in one
    # of them.
    branches: tuple[Completion, ...] = ()
    # Experts that the sampler chose, [tokens of prompt and answer but the last, layers, experts of a token]; -1 or
    # missing rows at the end: unknown.
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)

    is_finished: ClassVar[bool] = True

    @property
    def rows(self) -> tuple[Completion, ...]:
        """The sequences to train on."""
        return (self, *self.branches)

    @property
    def trained(self) -> tuple[bool, ...]:
        return self.mask or (True,) * len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model wrote; the environment's do not count as its length."""
        own = sum(self.mask) if self.mask else len(self.token_ids)
        return own + sum(branch.num_sampled for branch in self.branches)


@dataclass(frozen=True)
class Unfinished:
    """The tokens so far of an answer that the end of a round interrupted. A later round continues it."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()  # as in `Completion`
    is_finished: ClassVar[bool] = False

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids)


class OpenAnswer(Protocol):
    """A `Completion`, an `Unfinished` one, or a conversation."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def versions(self) -> Sequence[tuple[int, int]]: ...

    @property
    def num_sampled(self) -> int:
        """Tokens that the model wrote."""

    @property
    def is_finished(self) -> bool: ...


@dataclass(frozen=True)
class OpenGroup:
    """A task whose answers are being sampled, in one round or over several."""

    task: Task
    born: int  # the step in which sampling began; it keys the sampling noise
    answers: tuple[OpenAnswer, ...]  # in sample order

    @property
    def is_whole(self) -> bool:
        return all(answer.is_finished for answer in self.answers)


class PrefillTokens(NamedTuple):
    """Tokens of prompts that engines have computed, and that they found in the cache instead."""

    computed: int = 0
    reused: int = 0

    def __add__(self, other: PrefillTokens) -> PrefillTokens:  # type: ignore[override]
        return PrefillTokens(self.computed + other.computed, self.reused + other.reused)


def completions_of(groups: Iterable[OpenGroup]) -> list[list[Completion]]:
    return [[answer for answer in group.answers if isinstance(answer, Completion)] for group in groups]


@dataclass(frozen=True)
class Quota:
    """When the round of step `step` may end: `num_groups` groups are whole, and no other group can become too old.

    A group that is born in step s must be trained in step s + `max_age` at the latest, and a step trains `num_groups`.
    """

    num_groups: int
    step: int
    max_age: int  # steps

    def is_met(self, born: Sequence[int], is_whole: Sequence[bool]) -> bool:
        """Of all open groups: the steps in which they were born, and whether they are whole."""
        if sum(is_whole) < min(self.num_groups, len(born)):
            return False
        for steps_later in range(self.max_age):
            # Of the groups that must be trained by then, the later steps can take only so many.
            last_born = self.step + steps_later - self.max_age
            due = [whole for step, whole in zip(born, is_whole, strict=True) if step <= last_born]
            if sum(due) < len(due) - steps_later * self.num_groups:
                return False
        return True


@dataclass(frozen=True)
class Utterance:
    """One turn of the model or of the environment."""

    role: str  # "assistant" is the model, any other the environment
    text: str
    num_tokens: int


@dataclass(frozen=True)
class Conversation:
    """The turns of a completion, and what the environment counted in them."""

    utterances: tuple[Utterance, ...]
    counts: Mapping[str, float] = field(default_factory=dict)  # e.g. tool_calls, malformed_tool_calls
    rewards: tuple[float, ...] = ()  # for each of the model's turns, without the judge's; empty: unknown
    answer: str | None = None  # what an agent returned to be judged; None: the last turn is the answer

    @property
    def num_turns(self) -> int:
        return sum(utterance.role == "assistant" for utterance in self.utterances)


@dataclass(frozen=True)
class Score:
    """An environment's score of one completion. `reward` None means unscored; `error` is then the reason."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward
    error: str | None = None  # one line, e.g. "timeout after 5 s" or "ValueError: bad input"
    traceback: str | None = None

    @property
    def scored(self) -> bool:
        return self.reward is not None


@dataclass(frozen=True)
class Rollout:
    completion: Completion
    score: Score
    advantage: float = 0.0
    shaped_reward: float | None = None  # what credit was given for, where scaling or shaping changed the reward
    is_taught: bool = False  # trained on also without a reward: a teacher judges it

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"


@dataclass(frozen=True)
class Group:
    """The rollouts of one task, in sample order."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float | None]:
        return [rollout.score.reward for rollout in self.rollouts]


@dataclass(frozen=True)
class TakenGroups:
    """The result of one call of a rollout source: scored groups, with timings and metrics of the source."""

    groups: tuple[Group, ...]  # to train on
    sampled: tuple[Group, ...]  # all that were sampled for this call; dynamic sampling keeps only some of them
    timings_s: Mapping[str, float]  # stage -> seconds: generation, reward_calculation
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the source itself


@dataclass(frozen=True)
class Pair:
    """A preference: two answers to one prompt. Token ids exclude the prompt and include the end of the turn."""

    draw: int
    id: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen_reward: float = 1.0  # of the annotator or a reward model; RPO learns their difference
    rejected_reward: float = 0.0
    pack: int = -1  # of a file of precomputed packs, which pack it is in; -1: of none
    images: tuple[ImageRef, ...] = ()  # of the prompt


@dataclass(frozen=True)
class Judged:
    """An answer on its own that is labelled good or bad, for losses that need no pairs (KTO)."""

    draw: int
    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    desirable: bool
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True)
class Example:
    """A supervised example. `mask[i]`: whether `response_ids[i]` is trained."""

    draw: int
    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[bool, ...] = ()  # empty: all of them
    images: tuple[ImageRef, ...] = ()  # of the whole conversation


@dataclass(frozen=True)
class TokenBatch:
    """Sequences to train on, each a prompt and a response. Responses that name the same prompt share its computation.

    `columns` holds one value per *response token*, all responses one after another in order; prompt tokens are never
    trained and have no column. `mask` is the column that always exists: 1 where the token counts, 0 where it does not.
    `num_tokens` and `num_sequences` are the denominators of the *whole* optimizer batch. They travel with every part
    that is cut from it, so that losses do not depend on micro-batches, packing or the number of ranks. So does
    `num_computed_tokens`, the denominator of metrics: rows may be left out whose share of the loss is known to be 0.
    """

    prompts: tuple[Tensor, ...]
    responses: tuple[Tensor, ...]
    prompt_of: tuple[int, ...]  # response -> index in `prompts`
    columns: Mapping[str, Tensor]
    num_tokens: float
    num_sequences: float
    num_computed_tokens: float
    # Of each prompt, the experts that the sampler chose for all its tokens but the last; those of that one and of
    # responses are the column `ROUTES`, at the token that they lead to.
    prompt_routes: tuple[Tensor | None, ...] = ()
    prompt_images: tuple[tuple[ImageRef, ...], ...] = ()  # of each prompt; empty: no prompt has any

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        prompt_of: Sequence[int],
        columns: Mapping[str, Tensor] | None = None,
        images: Sequence[tuple[ImageRef, ...]] = (),
    ) -> TokenBatch:
        """A whole optimizer batch: the denominators are counted here, from `mask`; without one all tokens count."""
        total = sum(map(len, responses))
        columns = {**({} if columns and "mask" in columns else {"mask": torch.ones(total)}), **(columns or {})}
        assert all(len(column) == total for column in columns.values()), "one value per response token"
        batch = cls(
            prompts=tuple(torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts),
            responses=tuple(torch.as_tensor(response, dtype=torch.long) for response in responses),
            prompt_of=tuple(prompt_of),
            columns=columns,
            num_tokens=0.0,
            num_sequences=0.0,
            num_computed_tokens=0.0,
            prompt_images=tuple(images) if any(images) else (),
        )
        return batch._recounted()

    @property
    def response_lengths(self) -> list[int]:
        return [len(response) for response in self.responses]

    @cached_property
    def _ends(self) -> list[int]:
        """Where each response begins in the columns, and where the last one ends."""
        return [0, *accumulate(self.response_lengths)]

    def column_parts(self, name: str) -> list[Tensor]:
        """The column cut into one piece per response."""
        return list(self.columns[name].split(self.response_lengths))

    def with_columns(self, **columns: Tensor) -> TokenBatch:
        return replace(self, columns={**self.columns, **columns})

    def select(self, rows: Sequence[int], *, recount: bool = False) -> TokenBatch:
        """The responses `rows`, with the prompts they need. `recount` makes the selection an optimizer batch of its
        own.
        """
        prompt_rows = sorted({self.prompt_of[row] for row in rows})
        place = {prompt: index for index, prompt in enumerate(prompt_rows)}
        ends = self._ends
        columns = {
            name: torch.cat([column[ends[row] : ends[row + 1]] for row in rows]) if rows else column[:0]
            for name, column in self.columns.items()
        }
        chosen = replace(
            self,
            prompts=tuple(self.prompts[prompt] for prompt in prompt_rows),
            responses=tuple(self.responses[row] for row in rows),
            prompt_of=tuple(place[self.prompt_of[row]] for row in rows),
            columns=columns,
            prompt_routes=tuple(self.prompt_routes[prompt] for prompt in prompt_rows) if self.prompt_routes else (),
            prompt_images=tuple(self.prompt_images[prompt] for prompt in prompt_rows) if self.prompt_images else (),
        )
        return chosen._recounted() if recount else chosen

    def _recounted(self) -> TokenBatch:
        trained = [float(part.sum()) > 0 for part in self.column_parts("mask")] if self.responses else []
        count = float(self.columns["mask"].sum())
        return replace(self, num_tokens=count, num_sequences=float(sum(trained)), num_computed_tokens=count)

    def only(self, rows: Sequence[int]) -> TokenBatch:
        """The same optimizer batch, of which only `rows` are computed: the loss keeps its denominators."""
        chosen = self.select(rows)
        return replace(chosen, num_computed_tokens=float(chosen.columns["mask"].sum()))


@dataclass(frozen=True)
class TokenTrace:
    """The tokens of one answer with the numbers that a step trained it by; one value per token in each."""

    draw: int  # of the task
    sample: int  # which answer of its group
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    sampler_logprobs: tuple[float, ...]
    trainer_logprobs: tuple[float, ...]  # before the step's first update
    advantages: tuple[float, ...]
    reference_logprobs: tuple[float, ...] = ()  # empty where the step did not compute them


@dataclass(frozen=True)
class UpdateReport:
    """The report of one optimizer step, or of one evaluation without a step. Metrics are already normalised."""

    metrics: Mapping[str, float]
    num_tokens: int = 0  # prompt and response tokens that went through the model


@dataclass(frozen=True)
class StepReport:
    """The report of one step of an algorithm: the numbers, and the samples behind them."""

    metrics: Mapping[str, float]  # without prefix: "loss", "reward", …
    timings_s: Mapping[str, float]  # stage -> seconds
    groups: tuple[Group, ...] = ()
    num_tokens: int = 0  # full sequences: prompt and response of every sample
    num_samples: int = 0
    num_trained_tokens: int | None = None  # of the samples that the updates computed; None: of all
    warnings: tuple[str, ...] = ()
    tokens: tuple[TokenTrace, ...] = ()  # of some answers, for looking at them
