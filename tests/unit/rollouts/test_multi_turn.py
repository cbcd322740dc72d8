"""Conversations of several turns: their masks, their noise, their limits, and what becomes of failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model

from posttrain.algorithms.step_reports import rollout_metrics
from posttrain.data.chat import ChatFormat
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.environments.turns.interface import TurnItem
from posttrain.environments.turns.pool import TurnOutcome
from posttrain.reporting.rows import group_row
from posttrain.rollouts.multi_turn import MultiTurnRollouts
from posttrain.rollouts.turn_prompts import NextTurn
from posttrain.types import Completion, Group, Message, NoiseKey, Sampling, Score, Task

# -- rounds ------------------------------------------------------------------------------------------------------------


class Tasks:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def take(self, count: int) -> Sequence[Task]:
        return self.tasks[:count]


class Echo:
    """An environment in this process: `script` answers a step with (observation, reward, done) or an error."""

    names = frozenset({"talk"})

    def __init__(self, script: Callable[[int, str], Any]) -> None:
        self.script = script
        self.num_calls: list[int] = []
        self.ended: list[str] = []

    def tools(self, name: str) -> tuple[()]:
        return ()

    def ask(self, calls: Sequence[tuple[str, TurnItem]]) -> list[Score]:
        self.num_calls.append(len(calls))
        return [self._answer(item) for _, item in calls]

    def _answer(self, item: TurnItem) -> Score:
        if item.request == "reset":
            return TurnOutcome(None, state=b"0")
        if item.request == "end":
            self.ended.append(item.reason)
            return TurnOutcome(-1.0)
        turn = int(item.state) + 1
        said = self.script(turn, item.response)
        if isinstance(said, Score):
            return said
        observation, reward, done = said
        messages = ({"role": "", "content": observation},) if observation is not None else ()
        return TurnOutcome(reward, state=str(turn).encode(), observation=messages, done=done, counts={"steps": 1.0})


class Judge:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def score(self, tasks: Any, completions: Sequence[Completion], progress: Any = None) -> list[Score]:
        self.seen += [completion.text for completion in completions]
        return [Score(10.0, {"right": 10.0}) for _ in completions]

    def close(self) -> None: ...


BYTES = byte_tokenizer()
CHAT = ChatFormat(BYTES)


def engine(**settings: Any) -> NativeEngine:
    """A random model over the byte tokenizer, which now and then ends its turn."""
    model = tiny_model("llama", vocab_size=len(BYTES), eos_token_id=BYTES.eos_token_id)
    return NativeEngine(model, BYTES, NativeSettings(**{"page_size": 4, "max_total_tokens": 192, **settings}))


def tasks(count: int = 3, environment: str = "talk") -> list[Task]:
    made = []
    for draw in range(count):
        messages: list[Message] = [{"role": "user", "content": "ab" * (draw + 1)}]
        text, ids = CHAT.prompt(messages)
        made.append(Task(10 + draw, f"t:{draw}", text, tuple(ids), environment=environment, messages=tuple(messages)))
    return made


def rollouts(
    environment: Echo,
    generator: Any = None,
    *,
    max_turns: int = 4,
    max_total_tokens: int = 192,
    num_samples: int = 3,
    max_new_tokens: int = 8,
    stream: Sequence[Task] | None = None,
    judged: frozenset[str] = frozenset(),
) -> MultiTurnRollouts:
    return MultiTurnRollouts(
        Tasks(stream if stream is not None else tasks()),
        generator or engine(),
        Judge(),
        num_samples,
        # A stop that any text may hold, so that turns end without the model knowing how to end one.
        Sampling(max_new_tokens, temperature=1.0, stop_token_ids=tuple(range(0, 120, 3))),
        seed=5,
        turns=environment,  # type: ignore[arg-type]
        renderer=NextTurn(CHAT),
        max_turns=max_turns,
        max_total_tokens=max_total_tokens,
        judged=judged,
    )


def completions_of(groups: Sequence[Group]) -> list[Completion]:
    return [rollout.completion for group in groups for rollout in group.rollouts]


def going_on(turn: int, response: str) -> Any:
    return ("go on", None, False) if turn < 3 else (None, 1.0, True)


def test_mask_marks_exactly_the_models_tokens_and_their_logprobs_are_those_of_the_whole_sequence() -> None:
    source = rollouts(Echo(going_on), max_new_tokens=40)
    groups = source.take(3, step=1).groups
    reference = tiny_model("llama", attention="eager", vocab_size=len(BYTES), eos_token_id=BYTES.eos_token_id)
    for group in groups:
        for completion in completions_of([group]):
            trained = torch.tensor(completion.trained)
            with torch.no_grad():
                logits = reference(torch.tensor([[*group.task.prompt_ids, *completion.token_ids]])).logits[0]
            logprobs = logits[len(group.task.prompt_ids) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            found = torch.tensor(completion.logprobs)
            torch.testing.assert_close(found[trained], expected[trained], atol=2e-4, rtol=0.0)
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.trained)
            conversation = completion.conversation
            assert conversation is not None
            place = 0
            for utterance in conversation.utterances:
                piece = slice(place, place + utterance.num_tokens)
                is_model = utterance.role == "assistant"
                assert set(completion.trained[piece]) == {is_model}
                assert all((logprob == 0.0) is not is_model for logprob in completion.logprobs[piece])
                decoded = BYTES.decode(completion.token_ids[piece], skip_special_tokens=True)
                assert decoded == utterance.text if is_model else utterance.text in decoded
                place += utterance.num_tokens
            assert place == len(completion.token_ids)
            assert [u.role for u in conversation.utterances[:3]] == ["assistant", "tool", "assistant"]
    assert any(
        (completion.conversation and completion.conversation.num_turns) == 3 for completion in completions_of(groups)
    )


def test_each_turn_is_one_call_for_all_open_conversations_of_all_groups() -> None:
    calls: list[int] = []

    class Counting:
        def generate(self, tasks: Any, num_samples: int, *rest: Any) -> Any:
            calls.append(len(tasks) * num_samples)
            return inner.generate(tasks, num_samples, *rest)

    inner = engine()
    echo = Echo(going_on)
    rollouts(echo, Counting(), max_new_tokens=40).take(3, step=1)
    assert calls[0] == 9
    assert len(calls) == 3
    assert calls[1] <= 9
    assert echo.num_calls[0] == 3, "one reset for each task"


def test_a_conversation_computes_each_token_once() -> None:
    """The prompt, every observation, and the last token of each turn, which sampling does not compute."""
    source = rollouts(Echo(going_on), max_new_tokens=40)
    taken = source.take(1, step=1)
    utterances = [c.conversation.utterances for c in completions_of(taken.groups) if c.conversation]
    num_tokens = sum(len(group.task.prompt_ids) for group in taken.groups) + sum(
        1 + own.num_tokens for turns in utterances for own in turns if own.role != "assistant"
    )
    assert taken.metrics["prefill_tokens_computed"] == num_tokens
    assert taken.metrics["prefill_tokens_reused"] > num_tokens
    again = source.take(1, step=1)
    assert (again.groups, again.metrics) == (taken.groups, taken.metrics), "bit for bit"


def test_conversations_do_not_depend_on_the_other_tasks_nor_on_the_batch() -> None:
    everything = tasks(4)
    together = rollouts(Echo(going_on), stream=everything).take(4, step=2).groups
    for place in (2, 0, 3):
        source = rollouts(Echo(going_on), engine(max_batch_size=2), stream=[everything[place]])
        alone = source.take(1, step=2).groups
        assert [c.token_ids for c in completions_of(alone)] == [c.token_ids for c in completions_of([together[place]])]
    other_step = rollouts(Echo(going_on), stream=everything).take(4, step=3).groups
    assert [c.token_ids for c in completions_of(other_step)] != [c.token_ids for c in completions_of(together)]


def test_noise_continues_at_the_position_of_the_next_turn() -> None:
    """Asked for the second half of a completion as a later turn, the engine draws the very same second half."""
    generator = engine()
    task = tasks(1)[0]
    sampling = Sampling(12, temperature=1.0, ignore_eos=True)
    whole = generator.generate([task], 3, sampling, NoiseKey(1, 2))[0]
    for index, completion in enumerate(whole):
        half = replace(
            task, prompt_ids=(*task.prompt_ids, *completion.token_ids[:6]), first_sample=index, first_token=6
        )
        rest = generator.generate([half], 1, replace(sampling, max_new_tokens=6), NoiseKey(1, 2))[0][0]
        assert rest.token_ids == completion.token_ids[6:]


def test_two_turns_from_the_same_text_draw_different_noise() -> None:
    generator = engine()
    task = tasks(1)[0]
    sampling = Sampling(12, temperature=1.5, ignore_eos=True)
    first, later = (
        generator.generate([replace(task, first_token=start)], 1, sampling, NoiseKey(1, 2))[0][0] for start in (0, 12)
    )
    assert first.token_ids != later.token_ids


# -- limits and failures -----------------------------------------------------------------------------------------------


def test_turn_limit_ends_a_conversation_with_the_environments_end_reward() -> None:
    echo = Echo(lambda turn, response: ("more", 0.5, False))
    source = rollouts(echo, max_turns=2, max_new_tokens=40)
    groups = source.take(3, step=1).groups
    for rollout in [rollout for group in groups for rollout in group.rollouts]:
        conversation = rollout.completion.conversation
        assert conversation is not None
        if conversation.counts.get("out_of_turns"):
            assert conversation.num_turns == 2
            assert rollout.score.reward == 0.5 + 0.5 - 1.0
            assert conversation.rewards == (0.5, 0.5 - 1.0), "the end belongs to the last turn"
            assert conversation.utterances[-1].role == "assistant", "nobody reads a last observation"
    assert "turns" in echo.ended


def test_total_length_bounds_a_conversation_and_a_truncated_turn_ends_it() -> None:
    talkative = Echo(lambda turn, response: ("x" * 20, None, False))
    source = rollouts(talkative, engine(max_total_tokens=120), max_turns=50, max_total_tokens=120)
    for group in source.take(3, step=1).groups:
        task = group.task
        for completion in completions_of([group]):
            assert len(task.prompt_ids) + len(completion.token_ids) <= 120
            conversation = completion.conversation
            assert conversation is not None
            assert completion.finish_reason == "length"
            assert conversation.counts["out_of_tokens"] == 1
            assert all(u.num_tokens <= 8 for u in conversation.utterances if u.role == "assistant")
            assert completion.trained[-1], "it ends with the model's turn"


def test_failed_turn_leaves_only_its_rollout_unscored() -> None:
    def script(turn: int, response: str) -> Any:
        if len(response) % 2:
            return Score(None, error="timeout after 1 s")
        return going_on(turn, response)

    source = rollouts(Echo(script), max_new_tokens=40)
    groups = source.take(3, step=1).groups
    scores = [rollout.score for group in groups for rollout in group.rollouts]
    assert {score.error for score in scores} >= {None, "timeout after 1 s"}
    for score in scores:
        assert (score.reward is None) is (score.error is not None)


def test_failed_reset_is_unscored_and_not_sampled() -> None:
    class Refusing(Echo):
        def _answer(self, item: TurnItem) -> Score:
            if item.request == "reset" and item.task is not None and item.task.messages[0]["content"] == "ab":
                return Score(None, error="ValueError: no")
            return super()._answer(item)

    source = rollouts(
        Refusing(going_on), max_total_tokens=60, stream=[*tasks(2), replace(tasks(1)[0], prompt_ids=(5,) * 60)]
    )
    groups = source.take(3, step=1).groups
    assert [rollout.score.error for rollout in groups[0].rollouts] == ["ValueError: no"] * 3
    assert all(rollout.completion.token_ids == () for rollout in groups[0].rollouts)
    assert all("leaves no room in 60" in (rollout.score.error or "") for rollout in groups[2].rollouts)
    assert all(rollout.completion.token_ids for rollout in groups[1].rollouts)
    assert rollout_metrics(groups)["unscored"] >= 6
    assert group_row(groups[0])["completions"][0]["turns"] == []


def test_judges_reward_of_the_final_answer_is_added() -> None:
    class Answering(Echo):
        def _answer(self, item: TurnItem) -> Score:
            if item.request == "step":
                return TurnOutcome(0.25, done=True, answer=f"answer {item.response}")
            return super()._answer(item)

    judge = Judge()
    stream = [tasks(1)[0], tasks(2, environment="single")[1]]
    source = rollouts(Answering(going_on), stream=stream, judged=frozenset({"talk"}))
    source.environment = judge
    talked, single = source.take(2, step=1).groups
    assert all(completion.conversation is None for completion in completions_of([single])), "a single turn stays one"
    assert talked.rewards == [10.25] * 3
    assert {c.conversation.rewards for c in completions_of([talked]) if c.conversation} == {(0.25,)}
    assert talked.rollouts[0].score.parts == {"right": 10.0, "turns": 0.25, "answer": 10.0}
    assert single.rewards == [10.0] * 3
    assert judge.seen == [
        *[f"answer {c.conversation.utterances[0].text}" for c in completions_of([talked]) if c.conversation],
        *[c.text for c in completions_of([single])],
    ]
    unjudged = rollouts(Answering(going_on), stream=stream).take(2, step=1).groups[0]
    assert "env.talk has no judge" in (unjudged.rollouts[0].score.error or "")


def test_a_conversation_without_any_reward_is_unscored_not_zero() -> None:
    source = rollouts(Echo(lambda turn, response: (None, None, True)))
    assert [group.rewards for group in source.take(3, step=1).groups] == [[None] * 3] * 3


def test_lengths_and_counts_are_the_models_and_the_environments_own() -> None:
    source = rollouts(Echo(going_on), max_new_tokens=40)
    groups = source.take(3, step=1).groups
    metrics = rollout_metrics(groups)
    everything = completions_of(groups)
    own = [
        sum(u.num_tokens for u in c.conversation.utterances if u.role == "assistant")
        for c in everything
        if c.conversation
    ]
    assert metrics["mean_generation_length"] == pytest.approx(sum(own) / len(own))
    assert metrics["max_generation_length"] == max(own)
    assert metrics["environment_tokens"] == pytest.approx(sum(len(c.token_ids) for c in everything) / 9 - sum(own) / 9)
    assert metrics["turns"] == pytest.approx(sum(c.conversation.num_turns for c in everything if c.conversation) / 9)
    assert metrics["steps"] == metrics["turns"]
    row = group_row(groups[0])["completions"][0]
    assert [turn["role"] for turn in row["turns"][:2]] == ["assistant", "tool"]
    assert row["num_tokens"] == own[0]


def test_conversations_are_reproducible() -> None:
    random.seed()
    first, second = (rollouts(Echo(going_on)).take(3, step=4).groups for _ in range(2))
    assert first == second
    assert {c.versions for c in completions_of(first)} == {((0, 3),)}
