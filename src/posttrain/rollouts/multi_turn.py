"""Multi-turn rollouts: model and environment alternate until one of them, or a limit, ends the conversation.

In each turn all open conversations of all groups are sampled in one call, then stepped in one call. In rounds,
conversations at different turns are batched together, and are carried over between turns. A conversation is one
completion: its tokens are everything after the first prompt, and its mask separates the model's tokens from the
environment's. Sampling noise is keyed by the position of a token in that completion, so it neither repeats in a later
turn nor depends on the other conversations.

The rewards of the turns are added up. If the environment returns a final answer, the judge of its block under `env:`
scores it together with all rollouts, and the score is added. A conversation whose environment failed is unscored, with
the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from posttrain.data.chat import attached
from posttrain.data.errors import DataError
from posttrain.data.reward_values import NEEDED, is_reward, total
from posttrain.data.tool_calls import AnyCall, parse_tool_calls
from posttrain.environments.turns.interface import EndReason, Request, TurnItem, TurnTask
from posttrain.environments.turns.pool import TurnOutcome, TurnRouter
from posttrain.roles import RoundEngine
from posttrain.rollouts.fresh import FreshRollouts, UnscoredRollout
from posttrain.rollouts.turn_prompts import Exchange, NextTurn
from posttrain.types import (
    Completion,
    Conversation,
    FinishReason,
    NoiseKey,
    OpenGroup,
    Quota,
    Score,
    Task,
    Unfinished,
    Utterance,
    completions_of,
)


@dataclass(eq=False)
class Dialogue:
    """The open conversation of one sample."""

    task: Task
    sample: int
    born: int  # the step in which it began; keys the noise of sampling and environment
    state: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    utterances: list[Utterance] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)  # one for each of the model's turns, 0 where it has none
    parts: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=lambda: Counter(out_of_turns=0, out_of_tokens=0))
    finish_reason: FinishReason = "stop"
    answer: str | None = None
    failure: Score | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)  # as in `Completion`
    is_finished: bool = False
    routed_experts: Tensor | None = None  # of the last turn, whose prompt is all that was before

    def __post_init__(self) -> None:
        self.parts, self.counts = Counter(self.parts), Counter(self.counts)  # a checkpoint holds plain maps

    @property
    def num_turns(self) -> int:
        """The model's turns."""
        return sum(utterance.role == "assistant" for utterance in self.utterances)

    @property
    def num_sampled(self) -> int:
        return sum(self.mask)

    def add_turn(self, turn: Completion, version: int) -> None:
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.token_ids), version))
        self._add(turn.token_ids, turn.logprobs, "assistant", turn.text, is_model=True)
        self.finish_reason, self.routed_experts = turn.finish_reason, turn.routed_experts

    def add_observation(self, exchange: Exchange, token_ids: Sequence[int], default_role: str) -> None:
        self.exchanges.append(exchange)
        role = exchange.messages[0]["role"] or default_role
        text = "\n".join(message["content"] for message in exchange.messages)
        self._add(token_ids, [0.0] * len(token_ids), role, text, is_model=False)

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], role: str, text: str, *, is_model: bool) -> None:
        self.token_ids += ids
        self.logprobs += logprobs
        self.mask += [is_model] * len(ids)
        self.utterances.append(Utterance(role, text, len(ids)))

    def credit(self, outcome: TurnOutcome) -> None:
        self.turn_rewards += [0.0] * (self.num_turns - len(self.turn_rewards))
        if outcome.reward is not None:
            self.rewards.append(outcome.reward)
            self.turn_rewards[-1] += outcome.reward
        for name, value in outcome.parts.items():
            self.parts[name] += value  # type: ignore[assignment]
        for name, value in outcome.counts.items():
            self.counts[name] += value  # type: ignore[assignment]

    def next_task(self) -> Task:
        """The request for the next turn: all tokens so far, and the key of its noise."""
        ids = (*self.task.prompt_ids, *self.token_ids)
        return replace(self.task, prompt_ids=ids, first_sample=self.sample, first_token=len(self.token_ids))

    def score(self) -> Score:
        if self.failure is not None:
            return self.failure
        if not self.rewards and self.answer is None:
            return Score(None, error="the environment ended the conversation without a reward or an answer to judge")
        reward = total(self.rewards)
        if not is_reward(reward):
            return Score(None, error=f"the rewards of the turns add up to {reward}: {NEEDED}")
        return Score(reward, parts=dict(self.parts))

    def unscored(self, renderer: NextTurn, *, has_judge: bool) -> UnscoredRollout:
        completion = Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=renderer.decode(self.token_ids),
            finish_reason=self.finish_reason,
            mask=() if all(self.mask) else tuple(self.mask),
            conversation=Conversation(tuple(self.utterances), dict(self.counts), tuple(self.turn_rewards)),
            versions=tuple(self.versions),
            routed_experts=self.routed_experts,
        )
        score = self.score()
        if self.answer is None or not score.scored:
            return UnscoredRollout(completion, None, score)
        if not has_judge:
            name = self.task.environment
            problem = f"env.{name} has no judge for the final answer: set its `type` or `function`"
            return UnscoredRollout(completion, None, Score(None, error=problem))
        return UnscoredRollout(completion, replace(completion, text=self.answer), score)


@dataclass
class MultiTurnRollouts(FreshRollouts):
    """Like `FreshRollouts`; tasks of an environment in `turns` become conversations, all others stay single turns."""

    turns: TurnRouter = field(kw_only=True)
    renderer: NextTurn = field(kw_only=True)
    max_turns: int = field(kw_only=True)  # the model's turns per conversation
    max_total_tokens: int = field(kw_only=True)  # first prompt and conversation together
    judged: frozenset[str] = field(kw_only=True)  # environments with a judge for the final answer

    def sample(self, tasks: Sequence[Task], step: int) -> list[list[UnscoredRollout]]:
        key, ((_, version),) = NoiseKey(self.seed, step), self.versions(step)
        groups, turn = self.begin(tasks, step), 1

        def generate(requests: Sequence[OpenGroup]) -> list[list[Completion]]:
            label = self.label if turn == 1 else f"{self.label}, turn {turn}"
            num_samples = len(requests[0].answers)  # the same for all requests, as all are at the same turn
            return self._generate(label, [request.task for request in requests], num_samples, key)

        with self._kept_prefixes(self.engine):
            while not all(group.is_whole for group in groups):
                groups = self._take_turn(groups, generate, version)
                turn += 1
        return [self.unscored(group) for group in groups]

    def begin(self, tasks: Sequence[Task], step: int) -> list[OpenGroup]:
        groups = [
            OpenGroup(task, step, tuple(Dialogue(task, sample, step) for sample in range(self.num_samples)))
            if task.environment in self.turns.names
            else group
            for task, group in zip(tasks, super().begin(tasks, step), strict=True)
        ]
        self._reset([dialogues for group in groups if (dialogues := _dialogues(group))])
        return groups

    def advance(self, groups: Sequence[OpenGroup], quota: Quota, engine: RoundEngine, version: int) -> list[OpenGroup]:
        """Run turns until `quota` is met. Single-turn answers are sampled to their end."""

        def sample(requests: Sequence[OpenGroup]) -> list[list[Completion]]:
            with self.show_progress(self.label, sum(len(request.answers) for request in requests)) as progress:
                sampled = engine.sample_round(requests, self.sampling, self.seed, None, progress)
            return completions_of(sampled)

        groups = list(groups)
        born = [group.born for group in groups]
        with self._kept_prefixes(engine):
            while not quota.is_met(born, [group.is_whole for group in groups]):
                groups = self._take_turn(groups, sample, version)
        return groups

    def unscored(self, group: OpenGroup) -> list[UnscoredRollout]:
        if not (dialogues := _dialogues(group)):
            return super().unscored(group)
        has_judge = group.task.environment in self.judged
        return [dialogue.unscored(self.renderer, has_judge=has_judge) for dialogue in dialogues]

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _reset(self, groups: Sequence[list[Dialogue]]) -> None:
        """One state for all samples of a task."""
        calls = []
        for first in (group[0] for group in groups):
            task, messages = first.task, [dict(message) for message in first.task.messages]
            about = TurnTask(task.prompt, messages, task.reference, dict(task.metadata))
            calls.append((task.environment, TurnItem("reset", f"{self.seed}\0{first.born}\0{task.draw}", task=about)))
        for group, outcome in zip(groups, self.turns.ask(calls), strict=True):
            length = len(group[0].task.prompt_ids)
            if length >= self.max_total_tokens:
                problem = (
                    f"the prompt with its tools has {length} tokens, which leaves no room in {self.max_total_tokens} "
                    "(policy.max_total_sequence_length; in an evaluation generation.vllm_cfg.max_model_len)"
                )
                outcome = Score(None, error=problem)
            for dialogue in group:
                if isinstance(outcome, TurnOutcome):
                    dialogue.state = outcome.state
                else:
                    dialogue.failure, dialogue.is_finished = outcome, True

    def _take_turn(
        self,
        groups: Sequence[OpenGroup],
        sample: Callable[[Sequence[OpenGroup]], list[list[Completion]]],
        version: int,
    ) -> list[OpenGroup]:
        """One turn of the model in every open conversation, then one step of the environments."""
        requests: list[OpenGroup] = []
        speakers: list[list[Dialogue]] = []  # conversations by request; empty for a single-turn task
        for group in groups:
            if group.is_whole:
                continue
            talking = [dialogue for dialogue in _dialogues(group) if not dialogue.is_finished]
            if talking and talking[0].utterances:
                requests += [OpenGroup(dialogue.next_task(), group.born, (Unfinished(),)) for dialogue in talking]
                speakers += [[dialogue] for dialogue in talking]
            else:
                requests.append(replace(group, answers=(Unfinished(),) * len(group.answers)))
                speakers.append(talking)
        single: dict[int, tuple[Completion, ...]] = {}  # by draw
        for request, dialogues, turns in zip(requests, speakers, sample(requests), strict=True):
            if not dialogues:
                single[request.task.draw] = tuple(replace(turn, versions=((0, version),)) for turn in turns)
            for dialogue, turn in zip(dialogues, turns, strict=bool(dialogues)):
                dialogue.add_turn(turn, version)
        self._reply([dialogue for dialogues in speakers for dialogue in dialogues])
        return [replace(group, answers=single.get(group.task.draw, group.answers)) for group in groups]

    def _reply(self, active: Sequence[Dialogue]) -> None:
        """Step the environments and finish the conversations that end."""
        limits = [(dialogue, self._continue(dialogue, exchange)) for dialogue, exchange in self._step(active)]
        self._end([(dialogue, reason) for dialogue, reason in limits if reason is not None])
        going_on = {id(dialogue) for dialogue, reason in limits if reason is None and dialogue.failure is None}
        for dialogue in active:
            dialogue.is_finished = id(dialogue) not in going_on

    def _step(self, active: Sequence[Dialogue]) -> list[tuple[Dialogue, Exchange]]:
        """Step the environments. Returns the conversations that continue, with their next observation."""
        read = [self._read_calls(dialogue) for dialogue in active]
        calls = [
            self._call("step", d, d.num_turns, d.utterances[-1].text, own) for d, own in zip(active, read, strict=True)
        ]
        unfinished = []
        for dialogue, own, outcome in zip(active, read, self.turns.ask(calls), strict=True):
            if not isinstance(outcome, TurnOutcome):
                dialogue.failure = outcome
                continue
            dialogue.credit(outcome)
            if outcome.done:
                dialogue.answer = outcome.answer
                continue
            dialogue.state = outcome.state
            own = own if self.turns.tools(dialogue.task.environment) else ()
            unfinished.append((dialogue, self.renderer.exchange(own, outcome.observation)))
        return unfinished

    def _read_calls(self, dialogue: Dialogue) -> tuple[AnyCall, ...]:
        """Those of the last turn, in the format of the chat template, or in the one of `parse_tool_calls`."""
        num_sampled, tools = dialogue.utterances[-1].num_tokens, self.turns.tools(dialogue.task.environment)
        ids = (*dialogue.task.prompt_ids, *dialogue.token_ids)
        answer = self.renderer.read(ids[: len(ids) - num_sampled], ids[len(ids) - num_sampled :], tools)
        return answer.calls or tuple(parse_tool_calls(answer.content))

    def _continue(self, dialogue: Dialogue, exchange: Exchange) -> EndReason | None:
        """Append the observation, or return the limit that it would exceed."""
        if dialogue.finish_reason == "length":  # the turn was cut off
            return "tokens"
        if dialogue.num_turns == self.max_turns:
            return "turns"
        sampled = dialogue.token_ids[len(dialogue.token_ids) - dialogue.utterances[-1].num_tokens :]
        prompt = attached(dialogue.task.messages, dialogue.task.images)
        try:
            ids = self.renderer.ids(prompt, [*dialogue.exchanges, exchange], sampled)
        except DataError as error:  # the observation contains the token that stands for an image
            dialogue.failure = Score(None, error=f"the observation cannot be a turn: {error}")
            return None
        if len(dialogue.task.prompt_ids) + len(dialogue.token_ids) + len(ids) >= self.max_total_tokens:
            dialogue.finish_reason = "length"
            return "tokens"
        dialogue.add_observation(exchange, ids, self.renderer.role)
        return None

    def _end(self, stopped: Sequence[tuple[Dialogue, EndReason]]) -> None:
        """Rewards so far of conversations that a limit ends before their environments do."""
        calls = [self._call("end", dialogue, 0, reason=reason) for dialogue, reason in stopped]
        for (dialogue, reason), outcome in zip(stopped, self.turns.ask(calls), strict=True):
            dialogue.counts[f"out_of_{reason}"] += 1
            if isinstance(outcome, TurnOutcome):
                dialogue.credit(outcome)
            else:
                dialogue.failure = outcome

    def _call(
        self,
        request: Request,
        dialogue: Dialogue,
        turn: int,
        response: str = "",
        calls: tuple[AnyCall, ...] | None = None,
        reason: EndReason = "turns",
    ) -> tuple[str, TurnItem]:
        """The environment's randomness is keyed, so a resumed run repeats it."""
        conversation = f"{self.seed}\0{dialogue.born}\0{dialogue.task.draw}\0{dialogue.sample}"
        key = f"{conversation}\0{turn}"
        return dialogue.task.environment, TurnItem(
            request, key, None, dialogue.state, response, calls, reason, conversation
        )


def _dialogues(group: OpenGroup) -> list[Dialogue]:
    return [answer for answer in group.answers if isinstance(answer, Dialogue)]
