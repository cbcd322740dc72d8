"""Mixed agents: every token that trains is one that the engine has sampled, with its log-probability, and none is lost.

POSTTRAIN_CAPTURE_REQUESTS=10000 asks for more requests than the tests need, and prints the counts.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_agents import Recorded, rows_of, source

from posttrain.types import Completion, Group, NoiseKey, Sampling, Task

NUM_REQUESTS = int(os.environ.get("POSTTRAIN_CAPTURE_REQUESTS", "150"))

MIXED = """
import random

def talk(endpoint, messages, turns, **fields):
    for turn in range(turns):
        messages = [*messages, ask(endpoint, messages, **fields), user(f"more {turn}")]
    return messages

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

def solve(task, endpoint):
    start = [{"role": "system", "content": f"{random.randrange(3)}"}, *task.messages]
    for _ in range(2):
        kind = random.choice(["talk", "rewrites", "compacts", "parallel", "repeats", "tools"])
        if kind == "talk":
            talk(endpoint, start, 4)
        elif kind == "rewrites":
            said = talk(endpoint, start, 2)
            talk(endpoint, [*said[:-3], {"role": "assistant", "content": "else"}, user("so")], 2)
            ask(endpoint, said[:4])
        elif kind == "compacts":
            said = talk(endpoint, start, 2)
            talk(endpoint, [user("summary " + str(len(said))), said[2], user("go on")], 2)
        elif kind == "parallel":
            threads = [threading.Thread(target=talk, args=(endpoint, [*start, user(n)], 2)) for n in "ab"]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        elif kind == "repeats":
            [ask(endpoint, start) for _ in range(3)]
        else:
            said = [*start, ask(endpoint, start, tools=[TOOL])]
            said.append({"role": "tool", "tool_call_id": "x", "content": "4"})
            talk(endpoint, said, 2, tools=[TOOL], stop=["z"], max_tokens=5)
    return 1.0
"""


class Listed(Recorded):
    """Keeps every answer, also of equal requests."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[tuple[int, ...], list[Completion]] = defaultdict(list)

    def generate(
        self, tasks: Sequence[Task], num_samples: int, sampling: Sampling, key: NoiseKey, progress: Any = None
    ) -> list[list[Completion]]:
        found = super().generate(tasks, num_samples, sampling, key, progress)
        for task, (answer,) in zip(tasks, found, strict=True):
            self.answers[(*task.prompt_ids, *answer.token_ids)].append(answer)
        return found


def differing_tokens(groups: Sequence[Group], answers: dict[tuple[int, ...], list[Completion]]) -> int:
    """Trained tokens that no answer of the engine has at this place, or with another log-probability; and sampled
    tokens that do not train."""
    left = {ids: list(found) for ids, found in answers.items()}
    num_wrong = 0
    for row in rows_of(groups):
        ids, begin, place = (*row.prompt_ids, *row.token_ids), len(row.prompt_ids), 0
        while place < len(row.token_ids):
            if not row.trained[place]:
                place += 1
                continue
            logprobs = row.logprobs
            for end in range(begin + place + 1, len(ids) + 1):
                known = left.get(ids[:end], [])
                length = end - begin - place
                same = [one for one in known if len(one.token_ids) == length]
                if match := [one for one in same if one.logprobs == logprobs[place : place + length]]:
                    known.remove(match[0])
                    place += length
                    break
            else:
                num_wrong += 1
                place += 1
    return num_wrong + sum(len(one.token_ids) for known in left.values() for one in known)


@pytest.mark.full
def test_no_token_differs_in_requests_of_mixed_agents(tmp_path: Path) -> None:
    num_requests = num_tokens = num_branches = num_wrong = step = 0
    with ExitStack() as cleanup:
        agents = source(tmp_path, MIXED, cleanup, num_samples=4, max_calls=16, num_workers=4)
        while num_requests < NUM_REQUESTS:
            step += 1
            agents.engine = engine = Listed()  # another model in each step would do as well
            groups = agents.take(5, step=step).groups
            assert all(rollout.score.reward == 1.0 for group in groups for rollout in group.rollouts), groups
            num_requests += sum(map(len, engine.answers.values()))
            num_tokens += sum(len(one.token_ids) for found in engine.answers.values() for one in found)
            num_branches += len(rows_of(groups))
            num_wrong += differing_tokens(groups, engine.answers)
    print(f"{num_requests:,} requests, {num_branches:,} branches, {num_tokens:,} tokens, {num_wrong} differ")
    assert num_wrong == 0
    assert num_branches > num_requests / 8


def test_a_difference_is_counted() -> None:
    from posttrain.types import Rollout, Score

    answer = Completion((5, 6), (-1.0, -2.0), "ab", "stop")
    task = Task(0, "t", "", (1,), "", "agent", (), {})

    def count(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> int:
        row = Completion(ids, logprobs, "", "stop", prompt_ids=(1,))
        return differing_tokens([Group(task, (Rollout(row, Score(1.0)),))], {(1, 5, 6): [answer]})

    assert count((5, 6), (-1.0, -2.0)) == 0
    assert count((5, 7), (-1.0, -2.0)) == 4  # two that train and were not sampled so, two that were lost
    assert count((5, 6), (-1.0, -2.5)) == 4
