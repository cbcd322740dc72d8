"""A discrete-event model of the steps of GRPO: rounds of sampling on engines, and training after them or beside them.

A round ends at a quota of groups (types.Quota), so its seconds follow from the lengths of answers and from the speed of
an engine, not from the training beside it. What a step waits for follows from the rounds. Independent of configs and
GPUs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from posttrain.types import Quota


@dataclass(frozen=True)
class EngineSpeed:
    max_rows: int  # answers decoded together
    prompt_tokens: int
    decode_s: Callable[[int, float], float]  # one token for so many rows, which have written so many on average
    prefill_s: Callable[[int], float]  # of so many tokens
    round_s: float = 0.0  # fixed cost of every round


@dataclass
class _Group:
    born: int
    left: list[int]  # tokens that its answers lack
    written: list[int]

    @property
    def is_whole(self) -> bool:
        return not any(self.left)


@dataclass
class SimulatedEngine:
    """One engine and its share of every round, as rollouts/rounds.py has it."""

    speed: EngineSpeed
    lengths: Iterator[Sequence[int]]  # of the answers of one group after another, without end
    num_groups: int  # that a step trains on
    in_flight: int
    max_age: int
    open: list[_Group] = field(default_factory=list)

    def sample(self, step: int, born: int) -> float:
        """Seconds of the round whose groups `step` trains on; new groups count as begun in step `born`."""
        for _ in range(self.in_flight - len(self.open)):
            lengths = list(next(self.lengths))
            self.open.append(_Group(born, lengths, [0] * len(lengths)))
        seconds = self.speed.round_s + self._decode(Quota(self.num_groups, step, self.max_age))
        whole = [group for group in self.open if group.is_whole][: self.num_groups]
        self.open = [group for group in self.open if not any(group is taken for taken in whole)]
        return seconds

    def _decode(self, quota: Quota) -> float:
        """Continuous batching: a finished answer's row goes to the next. The first token comes with the prompt."""
        speed, born = self.speed, [group.born for group in self.open]
        is_whole = [group.is_whole for group in self.open]
        is_over = quota.is_met(born, is_whole)
        waiting = deque(
            (place, at) for place, group in enumerate(self.open) for at, left in enumerate(group.left) if left
        )
        active: list[tuple[int, int, int]] = []  # (token at which it ends, group, answer)
        began: dict[tuple[int, int], int] = {}  # by group and answer: the token before its first one
        prefilled: set[int] = set()
        seconds, now, num_written = 0.0, 0, 0  # tokens that active answers had at the beginning, less when they began
        while not is_over:
            fed = 0
            while waiting and len(active) < speed.max_rows:
                place, at = waiting.popleft()
                group = self.open[place]
                fed += group.written[at] + (speed.prompt_tokens if place not in prefilled else 0)
                prefilled.add(place)
                began[place, at] = now - 1
                num_written += group.written[at] - (now - 1)
                heapq.heappush(active, (now - 1 + group.left[at], place, at))
            seconds += speed.prefill_s(fed) if fed else 0.0
            end = active[0][0]
            if end > now:
                mean = num_written / len(active) + (now + end - 1) / 2
                seconds += (end - now) * speed.decode_s(len(active), mean)
                now = end
            while active and active[0][0] == now:
                _, place, at = heapq.heappop(active)
                num_written -= self._advance(place, at, began.pop((place, at)), now)
                if self.open[place].is_whole:
                    is_whole[place] = True
                    is_over = is_over or quota.is_met(born, is_whole)
        for _, place, at in active:
            self._advance(place, at, began[place, at], now)
        return seconds

    def _advance(self, place: int, at: int, began: int, now: int) -> int:
        """Returns the answer's part of `num_written`."""
        group, before = self.open[place], self.open[place].written[at]
        group.left[at] -= now - began
        group.written[at] += now - began
        return before - began


@dataclass(frozen=True)
class Training:
    """Seconds of a step beside its round."""

    rewards_s: float
    train_s: float  # log-probabilities and updates
    handover_s: float  # of weights, to engines of their own


def step_seconds(rounds_s: Sequence[float], training: Sequence[Training], *, ahead: bool) -> list[float]:
    """Of each step, from the rounds of the steps. `ahead`: the next round runs from the rewards of a step to its end,
    where the handover waits for it; the first round has no step before it."""
    found = []
    for index, (round_s, parts) in enumerate(zip(rounds_s, training, strict=True)):
        before = round_s if index == 0 or not ahead else 0.0
        beside = rounds_s[index + 1] if ahead and index + 1 < len(rounds_s) else 0.0
        found.append(before + parts.rewards_s + max(parts.train_s, beside) + parts.handover_s)
    return found


def simulate(engines: Sequence[SimulatedEngine], training: Training, num_steps: int, *, ahead: bool) -> list[float]:
    """Seconds of steps 1 to `num_steps`. A step needs the rounds of all engines."""
    rounds_s = [
        max(engine.sample(step, max(step - ahead, 1)) for engine in engines) for step in range(1, num_steps + 1 + ahead)
    ]
    return step_seconds(rounds_s, [training] * len(rounds_s), ahead=ahead)[:num_steps]
