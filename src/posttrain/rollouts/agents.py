"""Rollouts of agents that run their own loop: they ask the model over HTTP and return a reward or an answer.

The agents run in worker processes (`environments/agents/`), the endpoint answers them (`agent_endpoint.py`), and this
thread samples: batch after batch of their requests, with the engine and the weights of the step, until all agents have
ended. An agent that raises, exits, hangs or never asks leaves its rollout unscored, with the reason.

All agents of a step end before it trains. A resumed run repeats none that had ended before the kill, and answers the
others from the journal as far as they ask the same (`call_journal.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from statistics import fmean

from posttrain.algorithms.step_reports import StageClock
from posttrain.config import EnvironmentConfig
from posttrain.data.chat import ChatFormat
from posttrain.environments.agents.pool import AgentOutcome, AgentPool
from posttrain.environments.agents.runner import AgentItem
from posttrain.environments.settings import read_agents, read_settings, read_turns
from posttrain.environments.turns.interface import TurnTask
from posttrain.environments.turns.pool import TurnRouter
from posttrain.errors import InputError
from posttrain.files.digests import digest, hash_files
from posttrain.rollouts.agent_endpoint import MAX_CONNECTIONS, AgentEndpoint, AgentSession, task_of_call
from posttrain.rollouts.call_journal import CallJournal
from posttrain.rollouts.call_tree import Call, PromptWriter
from posttrain.rollouts.dynamic_sampling import WAITING, WORKING
from posttrain.rollouts.fresh import FreshRollouts, UnscoredRollout
from posttrain.rollouts.multi_turn import MultiTurnRollouts
from posttrain.rollouts.turn_prompts import ToolPrompts
from posttrain.types import Completion, Conversation, Group, NoiseKey, Sampling, Score, Task, Utterance


@dataclass
class AgentRollouts(FreshRollouts):
    """Tasks of an environment in `pools` are given to its agent, all others to `others`."""

    others: FreshRollouts = field(kw_only=True)
    pools: Mapping[str, AgentPool] = field(kw_only=True)  # by environment
    endpoint: AgentEndpoint = field(kw_only=True)
    judged: frozenset[str] = field(kw_only=True)  # environments with a judge for the final answer
    journal: CallJournal | None = field(kw_only=True, default=None)
    _times_s: dict[str, float] = field(default_factory=dict, init=False)  # of a rollout, on average

    def roll_out(self, tasks: Sequence[Task], step: int, clock: StageClock) -> list[Group]:
        groups = super().roll_out(tasks, step, clock)
        clock.add(self._times_s)
        return groups

    def sample(self, tasks: Sequence[Task], step: int) -> list[list[UnscoredRollout]]:
        own = [task for task in tasks if task.environment in self.pools]
        rest = [task for task in tasks if task.environment not in self.pools]
        self.others.show_progress = self.show_progress
        sampled = iter(self.others.sample(rest, step) if rest else ())
        sessions = [self.endpoint.open(task, sample) for task in own for sample in range(self.num_samples)]
        results = iter(self._run(sessions, step))
        for name, count in self.others.metrics.items() if rest else ():
            self.metrics[name] = self.metrics.get(name, 0.0) + count
        return [
            [next(results) for _ in range(self.num_samples)] if task.environment in self.pools else next(sampled)
            for task in tasks
        ]

    # -- agents --------------------------------------------------------------------------------------------------------

    def _run(self, sessions: Sequence[AgentSession], step: int) -> list[UnscoredRollout]:
        self.endpoint.sampling, self.endpoint.journal = self.sampling, self.journal
        if self.journal is not None:
            self.journal.begin(step, self.sampling)
            for session in sessions:
                session.score = self.journal.ended(session.rollout, session.task, session.tree, session.counts)
        try:
            with self._kept_prefixes(self.engine):
                # The batches of the journal are sampled again, for the cached prefixes that later ones continue: with
                # others, their last bits would differ.
                tasks = {session.rollout: session.task for session in sessions}
                for batch in self.journal.batches(tasks) if self.journal is not None else ():
                    self._generate_calls(((tasks[rollout], rollout[1], call) for rollout, call in batch), step)
                ran = [session for session in sessions if session.score is None]
                self._answer_agents(ran, step)
                self._times_s = {}
                if ran:
                    self._times_s[WAITING] = fmean(session.clock.waited_s for session in ran)
                    self._times_s[WORKING] = fmean(session.clock.own_s for session in ran)
        finally:
            for session in sessions:
                self.endpoint.end(session)
        return [self._unscored(session, step) for session in sessions]

    def _answer_agents(self, sessions: Sequence[AgentSession], step: int) -> None:
        """Run the agents of these rollouts, and answer their requests until all have ended."""
        by_name: dict[str, list[AgentSession]] = {}
        for session in sessions:
            by_name.setdefault(session.task.environment, []).append(session)

        def run(name: str, own: Sequence[AgentSession]) -> None:
            def ended(place: int, score: Score) -> None:
                one = own[place]
                self.endpoint.end(one)
                if self.journal is not None:
                    self.journal.end(one.rollout, one.task, one.tree, one.counts, score)

            clocks = [session.clock for session in own]
            scores = self.pools[name].run([self._item(session, step) for session in own], clocks, ended)
            for session, score in zip(own, scores, strict=True):
                session.score = score

        def num_running() -> int:
            """Agents that run, or start."""
            num_left = {name: sum(not session.is_over for session in own) for name, own in by_name.items()}
            return sum(min(self.pools[name].num_workers, count) for name, count in num_left.items())

        with ThreadPoolExecutor(max(len(by_name), 1), "agents") as threads:
            running = [threads.submit(run, name, own) for name, own in by_name.items()]
            try:
                with self.show_progress(self.label, len(sessions)) as progress:
                    num_over = 0
                    while not all(future.done() for future in running):
                        batch = self.endpoint.next_batch(num_running)
                        calls = ((one.session.task, one.session.sample, one.call) for one in batch)
                        answers = self._generate_calls(calls, step)
                        self.endpoint.reply(list(zip(batch, answers, strict=True)))
                        before, num_over = num_over, sum(session.is_over for session in sessions)
                        progress(num_over - before)
            except BaseException:
                for name in by_name:
                    self.pools[name].interrupt()
                raise
            for future in running:
                future.result(timeout=0)

    def _generate_calls(self, calls: Iterable[tuple[Task, int, Call]], step: int) -> list[Completion]:
        """Of (task, sample, call). One call of the engine for all that stop at the same texts."""
        by_sampling: dict[Sampling, dict[int, Task]] = {}
        for place, (task, sample, call) in enumerate(calls):
            shared = replace(call.sampling, max_new_tokens=self.sampling.max_new_tokens)
            by_sampling.setdefault(shared, {})[place] = task_of_call(task, sample, call)
        answers: dict[int, Completion] = {}
        for sampling, tasks in by_sampling.items():
            sampled = self.engine.generate(list(tasks.values()), 1, sampling, NoiseKey(self.seed, step))
            answers.update(zip(tasks, (samples[0] for samples in sampled), strict=True))
        return [answers[place] for place in sorted(answers)]

    def _item(self, session: AgentSession, step: int) -> AgentItem:
        task = session.task
        if task.images:
            raise InputError(f"task {task.id!r} has images, which are not given to agents")
        about = TurnTask(task.prompt, [dict(message) for message in task.messages], task.reference, dict(task.metadata))
        noise_key = f"{self.seed}\0{step}\0{task.draw}\0{session.sample}"
        return AgentItem(about, self.endpoint.address(session), noise_key)

    # -- results -------------------------------------------------------------------------------------------------------

    def _unscored(self, session: AgentSession, step: int) -> UnscoredRollout:
        score, name = session.score, session.task.environment
        assert score is not None, "all agents have ended"
        answer, problem = score.answer if isinstance(score, AgentOutcome) else None, score.error
        completion = self._completion(session, step, answer)
        if problem is None and not session.tree.calls:
            problem = "the agent never asked the model"
        elif answer is not None and name not in self.judged:
            problem = f"env.{name} has no judge for the agent's answer: set its `type` or `function`"
        if answer is not None and problem is None:
            return UnscoredRollout(completion, replace(completion, text=answer, conversation=None), None)
        reward = score.reward if problem is None else None
        return UnscoredRollout(completion, None, Score(reward, score.parts, problem, score.traceback))

    def _completion(self, session: AgentSession, step: int, returned: str | None) -> Completion:
        """All that the rollout sampled: the longest branch, and the others."""
        rows = [replace(row, versions=self.versions(step)) for row in session.tree.branches()]
        said: list[Utterance] = []
        for call in session.tree.calls:  # of all branches, as they were answered
            said += [call.said, Utterance("assistant", call.answer.text, len(call.answer.token_ids))]
        talk = Conversation(tuple(said), {**session.counts, "branches": len(rows)}, answer=returned)
        first, *others = rows or [Completion((), (), "", "stop", versions=self.versions(step))]
        return replace(first, branches=tuple(others), conversation=talk)


TurnTaking = Callable[[FreshRollouts], FreshRollouts]  # of a single-turn source one with conversations


def build_conversations(
    environments: Mapping[str, EnvironmentConfig],
    chat: ChatFormat,
    *,
    model: str,
    max_turns: int,
    max_total_tokens: int,
    warn: Callable[[str], None],
    cleanup: ExitStack,
    when_stopped: Callable[[Callable[[], None]], None] = lambda listener: None,
    journals: tuple[Path, str] | None = None,
) -> TurnTaking:
    """Environments with turns, and agents; the source itself if there are none in use.

    `journals`: the folder for those of agents, and the identity of the run.
    """
    turns, agents = read_turns(environments, Path.cwd()), read_agents(environments, Path.cwd())
    if not turns and not agents:
        return lambda fresh: fresh
    writer, judged = PromptWriter(chat), frozenset(read_settings(environments, Path.cwd()))
    if writer.next_turn.caution is not None:
        warn(writer.next_turn.caution)
    router = TurnRouter(turns)
    pools = {name: AgentPool(settings) for name, settings in agents.items()}
    processes: list[TurnRouter | AgentPool] = [router, *pools.values()]
    for each in processes:
        cleanup.callback(each.close)
        when_stopped(each.interrupt)
    limits = {"max_calls": max_turns, "max_total_tokens": max_total_tokens}
    num_connections = 256 + MAX_CONNECTIONS * sum(pool.num_workers for pool in pools.values())
    num_connections = min(num_connections, getrlimit(RLIMIT_NOFILE)[0] // 2)
    endpoint = AgentEndpoint(writer, model, **limits, max_connections=num_connections) if agents else None
    if endpoint is not None:
        cleanup.callback(endpoint.close)

    def over(fresh: FreshRollouts) -> FreshRollouts:
        shared = {each.name: getattr(fresh, each.name) for each in fields(FreshRollouts) if each.init}
        if turns:
            shared["stream"] = ToolPrompts(fresh.stream, chat, router.names, router.tools)
            fresh = MultiTurnRollouts(
                **shared,
                turns=router,
                renderer=writer.next_turn,
                max_turns=max_turns,
                max_total_tokens=max_total_tokens,
                judged=judged,
            )
        if endpoint is None:
            return fresh
        journal = None
        if journals is not None:
            code = hash_files([path for pool in pools.values() for path in pool.code_files])
            journal = CallJournal(journals[0] / f"{fresh.label}.jsonl", digest([journals[1], code]), warn)
            cleanup.callback(journal.close)
        return AgentRollouts(**shared, others=fresh, pools=pools, endpoint=endpoint, judged=judged, journal=journal)

    return over
