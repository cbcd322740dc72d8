"""Rollouts of several turns: the model and an environment take turns until one of them, or a limit, ends the conversation.

In each turn all open conversations of all groups are sampled in one call, then stepped in one call. A conversation is one
completion: its tokens are everything after the first prompt, and its mask separates the model's from the environment's.
Sampling noise is keyed by the position of a token in that completion, so it neither repeats in a later turn nor depends on
the other conversations.

The rewards of the turns are added up. A final answer that the environment returns is scored together with all rollouts, by
the judge of its block under `env:`, and added as well. A conversation whose environment failed is unscored, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from posttrain.environments.turns.interface import EndReason, TurnItem, TurnTask
from posttrain.environments.turns.pool import TurnOutcome, TurnRouter
from posttrain.reward_values import NEEDED, is_reward, total
from posttrain.rollouts.fresh import FreshRollouts, UnscoredRollout
from posttrain.rollouts.next_turn import Exchange, NextTurn
from posttrain.types import Completion, Conversation, FinishReason, NoiseKey, Score, Task, Utterance


@dataclass(eq=False)
class Dialogue:
    """The open conversation of one sample."""

    task: Task
    sample: int
    state: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    utterances: list[Utterance] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=lambda: Counter(out_of_turns=0, out_of_tokens=0))
    finish_reason: FinishReason = "stop"
    answer: str | None = None
    failure: Score | None = None

    def add_turn(self, turn: Completion) -> None:
        self._add(turn.token_ids, turn.logprobs, "assistant", turn.text, is_model=True)
        self.finish_reason = turn.finish_reason

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
        if outcome.reward is not None:
            self.rewards.append(outcome.reward)
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

    def unscored(
        self, renderer: NextTurn, versions: tuple[tuple[int, int], ...], *, has_judge: bool
    ) -> UnscoredRollout:
        completion = Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=renderer.decode(self.token_ids),
            finish_reason=self.finish_reason,
            mask=() if all(self.mask) else tuple(self.mask),
            conversation=Conversation(tuple(self.utterances), dict(self.counts)),
            versions=versions,
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
    max_turns: int = field(kw_only=True)  # of the model, in one conversation
    max_total_tokens: int = field(kw_only=True)  # of first prompt and conversation
    judged: frozenset[str] = field(kw_only=True)  # environments with a judge for the final answer

    def sample(self, tasks: Sequence[Task], step: int) -> list[list[UnscoredRollout]]:
        key = NoiseKey(self.seed, step)
        dialogues = [
            [Dialogue(task, sample) for sample in range(self.num_samples)]
            if task.environment in self.turns.names
            else []
            for task in tasks
        ]
        self._reset([group for group in dialogues if group], key)
        sampled = [place for place, group in enumerate(dialogues) if not group or group[0].failure is None]
        single: dict[int, list[Completion]] = {}
        first = self._generate(self.label, [tasks[place] for place in sampled], self.num_samples, key)
        for place, group in zip(sampled, first, strict=True):
            single[place] = group
            for dialogue, turn in zip(dialogues[place], group, strict=False):
                dialogue.add_turn(turn)
        self._converse([d for group in dialogues for d in group if d.failure is None], key)
        return [
            [self._unscored(dialogue, step) for dialogue in group]
            if group
            else [UnscoredRollout.of(c) for c in single[place]]
            for place, group in enumerate(dialogues)
        ]

    def _unscored(self, dialogue: Dialogue, step: int) -> UnscoredRollout:
        has_judge = dialogue.task.environment in self.judged
        return dialogue.unscored(self.renderer, self.versions(step), has_judge=has_judge)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _reset(self, groups: Sequence[list[Dialogue]], key: NoiseKey) -> None:
        """One state for all samples of a task."""
        calls = [(group[0].task.environment, _reset_item(group[0].task, key)) for group in groups]
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
                    dialogue.failure = outcome

    def _converse(self, active: list[Dialogue], key: NoiseKey) -> None:
        """Environment and model take turns until no conversation is open. The model has had its first turn."""
        for turn in range(1, self.max_turns + 1):
            limits = [
                (dialogue, self._continue(dialogue, exchange, turn))
                for dialogue, exchange in self._step(active, turn, key)
            ]
            active = [dialogue for dialogue, reason in limits if reason is None]
            self._end([(dialogue, reason) for dialogue, reason in limits if reason is not None], key)
            if not active:
                return
            turns = self._generate(f"{self.label}, turn {turn + 1}", [d.next_task() for d in active], 1, key)
            for dialogue, (answer,) in zip(active, turns, strict=True):
                dialogue.add_turn(answer)

    def _step(self, active: Sequence[Dialogue], turn: int, key: NoiseKey) -> list[tuple[Dialogue, Exchange]]:
        """Let the environments answer. Returns the conversations that go on, with what the model reads next."""
        calls = [
            (d.task.environment, TurnItem("step", _noise_key(d, turn, key), None, d.state, d.utterances[-1].text))
            for d in active
        ]
        unfinished = []
        for dialogue, outcome in zip(active, self.turns.ask(calls), strict=True):
            if not isinstance(outcome, TurnOutcome):
                dialogue.failure = outcome
                continue
            dialogue.credit(outcome)
            if outcome.done:
                dialogue.answer = outcome.answer
                continue
            dialogue.state = outcome.state
            unfinished.append((dialogue, Exchange(outcome.observation)))
        return unfinished

    def _continue(self, dialogue: Dialogue, exchange: Exchange, turn: int) -> EndReason | None:
        """Append the observation, or return the limit that forbids it."""
        if dialogue.finish_reason == "length":  # the turn was cut off
            return "tokens"
        if turn == self.max_turns:
            return "turns"
        sampled = dialogue.token_ids[len(dialogue.token_ids) - dialogue.utterances[-1].num_tokens :]
        ids = self.renderer.ids(dialogue.task.messages, [*dialogue.exchanges, exchange], sampled)
        if len(dialogue.task.prompt_ids) + len(dialogue.token_ids) + len(ids) >= self.max_total_tokens:
            dialogue.finish_reason = "length"
            return "tokens"
        dialogue.add_observation(exchange, ids, self.renderer.role)
        return None

    def _end(self, stopped: Sequence[tuple[Dialogue, EndReason]], key: NoiseKey) -> None:
        """A limit ends conversations that their environments would continue: their rewards so far."""
        calls = [
            (d.task.environment, TurnItem("end", _noise_key(d, 0, key), None, d.state, reason=reason))
            for d, reason in stopped
        ]
        for (dialogue, reason), outcome in zip(stopped, self.turns.ask(calls), strict=True):
            dialogue.counts[f"out_of_{reason}"] += 1
            if isinstance(outcome, TurnOutcome):
                dialogue.credit(outcome)
            else:
                dialogue.failure = outcome


def _reset_item(task: Task, key: NoiseKey) -> TurnItem:
    about = TurnTask(task.prompt, [dict(message) for message in task.messages], task.reference, dict(task.metadata))
    return TurnItem("reset", f"{key.seed}\0{key.step}\0{task.draw}", about)


def _noise_key(dialogue: Dialogue, turn: int, key: NoiseKey) -> str:
    """Randomness in an environment is keyed as well, so that a resumed run repeats it."""
    return f"{key.seed}\0{key.step}\0{dialogue.task.draw}\0{dialogue.sample}\0{turn}"
