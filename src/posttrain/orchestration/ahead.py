"""Calls on worker groups beside the ranks, begun as soon as a group of answers is whole, while others are sampled.

What a call computes depends on its group alone, whole and in sample order: not on when it was begun, on which worker it
ran, or what else was under way. So a resumed run computes the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from posttrain.data.packing import MicroBatching, plan_micro_batches
from posttrain.environments.reward_model import RewardModelScorer
from posttrain.errors import StopRequested
from posttrain.orchestration.failures import WorkerDiedError
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.workers import WorkerGroup, gather
from posttrain.roles import Progress
from posttrain.types import Completion, ImageRef, OpenGroup, Score, Task, TokenBatch

_LOOK_PERIOD_S = 0.5  # for a request to stop, while a result is waited for
Ids = tuple[int, ...]
Prompt = tuple[Ids, tuple[ImageRef, ...]]  # different images have the same tokens


@dataclass
class CallsAhead:
    """By key, calls that have been begun and not taken. Any thread may begin one."""

    group: WorkerGroup
    check: Callable[[], None]  # raises StopRequested if the result is not wanted any more
    _calls: dict[Hashable, Future[Any]] = field(default_factory=dict)
    _old: set[Hashable] = field(default_factory=set)  # known at the last `forget`
    _num_begun: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, key: Hashable, operation: Callable[..., object], *args: object) -> None:
        with self._lock:
            if key not in self._calls:
                worker = self.group.workers[self._num_begun % len(self.group.workers)]
                self._num_begun += 1
                self._calls[key] = worker.submit(operation, *args)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._calls

    def take(self, key: Hashable, operation: str) -> Any:
        """The result, which is kept no longer."""
        with self._lock:
            call = self._calls.pop(key)
        while not call.done():  # a replacement may wait long for a machine; a hang ends with the member's own deadline
            self.check()
            wait([call], timeout=_LOOK_PERIOD_S)
        return gather(operation, [call], self.group.unit)[0]

    def forget(self) -> None:
        """Drop what nobody has taken since the last call, such as groups that were not trained on."""
        with self._lock:
            for key in self._old & self._calls.keys():
                del self._calls[key]
            self._old = set(self._calls)


@dataclass
class PlacedReward:
    """`roles.Environment` of a reward model on devices of its own. Whole groups go to one worker."""

    group: WorkerGroup

    def __post_init__(self) -> None:
        self._calls = CallsAhead(self.group, self._check)
        self._is_interrupted = False

    def _check(self) -> None:
        if self._is_interrupted:
            raise StopRequested

    def interrupt(self) -> None:
        """Callable from any thread: a running `score` ends with StopRequested within half a second."""
        self._is_interrupted = True

    def begin(self, task: Task, completions: Sequence[Completion]) -> None:
        """Score the answers to a task. `score` finds the result."""
        sent = [replace(completion, routed_experts=None) for completion in completions]
        self._calls.begin(_key(task, completions), RewardModelScorer.score, [task] * len(sent), sent)

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        rows = list(zip(tasks, completions, strict=True))
        parts = [list(part) for _, part in groupby(rows, key=lambda row: (row[0].id, row[0].draw))]
        groups = [(part[0][0], [completion for _, completion in part]) for part in parts]
        for task, answers in groups:
            self.begin(task, answers)
        scores: list[Score] = []
        for task, answers in groups:
            if (key := _key(task, answers)) not in self._calls:  # the same task and answers twice in one call
                self.begin(task, answers)
            try:
                scores += self._calls.take(key, RewardModelScorer.score.__name__)
            except WorkerDiedError as error:  # whenever it was replaced, too: these answers may be the cause
                scores += [Score(None, error=str(error))] * len(answers)
            if progress is not None:
                progress(len(answers))
        self._calls.forget()
        return scores

    def close(self) -> None:
        """The workers end with the run."""


def _key(task: Task, answers: Sequence[Completion]) -> Hashable:
    said = [answer.conversation.utterances if answer.conversation is not None else () for answer in answers]
    turns = tuple(tuple((turn.role, turn.text) for turn in utterances) for utterances in said)
    return task.id, task.draw, tuple(answer.text for answer in answers), turns


@dataclass
class ReferenceAhead:
    """Log-probabilities of single-turn groups under a reference on devices of its own."""

    group: WorkerGroup
    batching: MicroBatching
    check: Callable[[], None]

    def __post_init__(self) -> None:
        self._calls = CallsAhead(self.group, self.check)
        self._begun: dict[Prompt, dict[tuple[Ids, ...], list[int]]] = {}  # -> responses of a group -> their order
        self._lock = threading.Lock()  # groups are begun while others are sampled, in another thread

    def begin(self, group: OpenGroup) -> None:
        answers = [answer for answer in group.answers if isinstance(answer, Completion) and not answer.error]
        if not answers or any(answer.branches or answer.prompt_ids or not answer.token_ids for answer in answers):
            return
        prompt = tuple(group.task.prompt_ids), group.task.images
        responses = tuple(answer.token_ids for answer in answers)
        batch = TokenBatch.build([prompt[0]], responses, [0] * len(responses), images=[prompt[1]])
        [plan] = plan_micro_batches(batch, self.batching)
        with self._lock:
            if (prompt, responses) not in self._calls:
                self._calls.begin((prompt, responses), Rank.reference_logprobs, [batch.select(rows) for rows in plan])
                self._begun.setdefault(prompt, {})[responses] = [row for rows in plan for row in rows]

    def take(self, batch: TokenBatch) -> list[Tensor | None]:
        """By row, what is known of it. Of a group that was begun, rows may be missing: those that were not scored."""
        found: list[Tensor | None] = [None] * len(batch.responses)
        for index, prompt_ids in enumerate(batch.prompts):
            prompt = tuple(prompt_ids.tolist()), batch.prompt_images[index] if batch.prompt_images else ()
            rows = [row for row, at in enumerate(batch.prompt_of) if at == index]
            wanted = [tuple(batch.responses[row].tolist()) for row in rows]
            with self._lock:
                known = [group for group in self._begun.get(prompt, {}) if set(wanted) <= set(group)]
                if not known:
                    continue
                # The group itself, should another one have its answers and more.
                group = min(known, key=lambda group: (len(group) != len(wanted), group))
                order = self._begun[prompt].pop(group)
            parts: list[Tensor] = self._calls.take((prompt, group), Rank.reference_logprobs.__name__)
            pieces = torch.cat(parts).split([len(group[place]) for place in order])
            values = dict(zip((group[place] for place in order), pieces, strict=True))
            for row, response in zip(rows, wanted, strict=True):
                found[row] = values[response]
        with self._lock:
            self._calls.forget()
            for prompt, groups in self._begun.items():
                self._begun[prompt] = {
                    group: order for group, order in groups.items() if (prompt, group) in self._calls
                }
            self._begun = {prompt: groups for prompt, groups in self._begun.items() if groups}
        return found
