"""Models on devices of their own: the numbers of colocated ones, for groups that are sent when they are whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ScriptedRollouts
from float64 import approx
from tiny_runs import LORA, grpo, save_data, save_model, save_reward_model
from tiny_vision import image_ref, make_chat, make_task, save_vision_model

from posttrain.algorithms.batches import rollout_batch
from posttrain.config import load_config
from posttrain.data.packing import MicroBatching
from posttrain.environments.reward_model import RewardModelScorer, reward_model_environment
from posttrain.environments.router import ScoringRouter
from posttrain.environments.settings import read_settings
from posttrain.errors import StopRequested
from posttrain.models.loading import DTYPES
from posttrain.orchestration import sharded
from posttrain.orchestration.ahead import CallsAhead, PlacedReward, ReferenceAhead
from posttrain.orchestration.failures import WorkerDiedError
from posttrain.orchestration.rank import Rank, build_rank
from posttrain.orchestration.sharded import ShardedEngine, ShardedTrainer
from posttrain.orchestration.workers import LocalWorker, WorkerGroup
from posttrain.policy.parallel.mesh import Mesh
from posttrain.policy.trainer import RankSetup
from posttrain.recipes.grpo import GrpoRecipe
from posttrain.rollouts.dynamic_sampling import DynamicSampling, StreamAndSurplus
from posttrain.types import (
    Completion,
    Group,
    NoiseKey,
    OpenGroup,
    Rollout,
    Sampling,
    Score,
    Task,
    TokenBatch,
    completions_of,
)

BATCHING = MicroBatching(max_tokens=40)
SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)


class WithBeside(LocalWorker):
    """A rank in this process with a worker group beside it, in this process too."""

    def __init__(self, rank: Any, own: WorkerGroup) -> None:
        super().__init__(rank)
        self.own = own

    def beside(self, name: str) -> WorkerGroup | None:
        return self.own if name == "reference" else None


@pytest.fixture
def loaded_in_float64(in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DTYPES, "float32", torch.float64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ahead") / "model")


def groups_of_answers() -> list[OpenGroup]:
    random = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 30, (count,), generator=random).tolist())

    return [
        OpenGroup(
            Task(id=str(draw), draw=draw, prompt=f"{draw} + 1 = ?", prompt_ids=ids(5 + draw), messages=said(draw)),
            1,
            tuple(Completion(ids(length), (0.0,) * length, f"{draw}{length}", "stop") for length in (3, 7, 2, 5)),
        )
        for draw in range(3)
    ]


def said(draw: int) -> Any:
    return ({"role": "user", "content": f"{draw} + 1 = ?"},)


def batch_of(groups: list[OpenGroup], left_out: int = -1) -> TokenBatch:
    rows = [
        (at, answer.token_ids)
        for at, group in enumerate(groups)
        for place, answer in enumerate(group.answers)
        if (at, place) != (1, left_out)
    ]
    mask = torch.ones(sum(len(ids) for _, ids in rows))
    prompts = [group.task.prompt_ids for group in groups]
    images = [group.task.images for group in groups]
    return TokenBatch.build(prompts, [ids for _, ids in rows], [at for at, _ in rows], {"mask": mask}, images)


@pytest.mark.invariant
@pytest.mark.usefixtures("loaded_in_float64")
@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_a_placed_reference_has_the_numbers_of_a_colocated_one(
    adapters: list[str], model: Path, tmp_path: Path
) -> None:
    words = [*grpo(model, save_data(tmp_path / "data"), tmp_path)[1:], *adapters]
    setup = RankSetup(load_config("grpo", None, words).config.policy, seed=0, needs_reference=True)
    colocated = ShardedTrainer(LocalWorker(build_rank(setup)), BATCHING, BATCHING, seed=0)
    own = LocalWorker(build_rank(setup.for_reference()))
    rank = build_rank(replace(setup, needs_reference=False))
    placed = ShardedTrainer(WithBeside(rank, own), BATCHING, BATCHING, seed=0)
    groups = groups_of_answers()
    for num_ahead, left_out in ((2, -1), (2, 2), (0, -1)):  # a row that is not scored is left out
        for group in [*groups[:num_ahead], *groups[:1]]:
            placed.begin_reference(group)
        batch = batch_of(groups, left_out)
        expected = colocated.reference_logprobs(batch)
        assert expected.dtype == torch.float64
        assert placed.reference_logprobs(batch).tolist() == approx(expected.tolist())
    if not adapters:  # other names of the same parameters
        assert placed.reference_fingerprint() == colocated.reference_fingerprint()


@pytest.mark.invariant
@pytest.mark.usefixtures("loaded_in_float64")
def test_a_placed_reference_sees_the_images_of_groups_that_were_sent_ahead(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path / "model")
    words = grpo(folder, save_data(tmp_path / "data"), tmp_path)[1:]
    setup = RankSetup(load_config("grpo", None, words).config.policy, seed=0, needs_reference=True)
    colocated = ShardedTrainer(LocalWorker(build_rank(setup)), BATCHING, BATCHING, seed=0)
    own = LocalWorker(build_rank(setup.for_reference()))
    group = WithBeside(colocated.group.workers[0].rank, own)  # type: ignore[attr-defined]
    placed = ShardedTrainer(group, BATCHING, BATCHING, seed=0)
    chat, answers = make_chat(folder), groups_of_answers()[0].answers
    # The same tokens, for images of one size.
    groups = [OpenGroup(make_task(chat, draw, [image_ref(8, 8, draw)], "?"), 1, answers) for draw in range(2)]
    assert groups[0].task.prompt_ids == groups[1].task.prompt_ids
    for group in groups:
        placed.begin_reference(group)
    expected = colocated.reference_logprobs(batch_of(groups))
    first, second = expected.chunk(2)
    assert (first - second).abs().max() > 1e-6
    assert placed.reference_logprobs(batch_of(groups)).tolist() == approx(expected.tolist())


@pytest.fixture
def scorer(model: Path, tmp_path: Path) -> RewardModelScorer:
    folder = save_reward_model(model, tmp_path / "reward")
    block = {"type": "reward_model", "model_name": str(folder), "device": "cpu", "precision": "float32"}
    return reward_model_environment(read_settings({"rm": block}, tmp_path)["rm"].rewards[""])


@pytest.mark.invariant
@pytest.mark.usefixtures("loaded_in_float64")
def test_a_placed_reward_model_has_the_scores_of_a_colocated_one(scorer: RewardModelScorer) -> None:
    rows = [(group.task, answer) for group in groups_of_answers() for answer in group.answers]
    tasks, answers = [task for task, _ in rows], [a for _, a in rows if isinstance(a, Completion)]
    placed = PlacedReward(LocalWorker(scorer))
    placed.begin(tasks[4], answers[4:8])
    finished: list[int] = []
    found = placed.score(tasks, answers, finished.append)
    expected = [score.reward for score in scorer.score(tasks, answers)]
    assert len({score.reward for score in found}) > 6
    assert [score.reward for score in found] == approx(expected)
    assert finished == [4, 4, 4]


class Recorded:
    """A worker whose calls end when they are told to."""

    mesh, in_process, unit, num_nodes = Mesh(), False, "reward_rm", 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Future[Any]]] = []
        self.whole: list[OpenGroup] = []

    @property
    def workers(self) -> list[Recorded]:
        return [self]

    engines = property(lambda self: self)

    def beside(self, name: str) -> None:
        return None

    def submit(self, operation: Callable[..., Any], *args: Any) -> Future[Any]:
        self.calls.append((operation.__name__, args, Future()))
        return self.calls[-1][-1]

    def take_whole_groups(self) -> Future[list[OpenGroup]]:
        done: Future[list[OpenGroup]] = Future()
        done.set_result([self.whole.pop()] if self.whole else [])
        return done

    def request_stop(self) -> None: ...

    def close(self) -> None: ...


def test_answers_that_a_dead_reward_worker_had_are_unscored_and_others_keep_their_scores() -> None:
    worker, groups = Recorded(), groups_of_answers()[:2]
    placed = PlacedReward(worker)
    for group in groups:
        placed.begin(group.task, [answer for answer in group.answers if isinstance(answer, Completion)])
    worker.calls[0][-1].set_exception(WorkerDiedError("gone"))
    worker.calls[1][-1].set_result(["a", "b", "c", "d"])
    rows = [(group.task, answer) for group in groups for answer in group.answers]
    found = placed.score([task for task, _ in rows], [a for _, a in rows if isinstance(a, Completion)])
    assert len(worker.calls) == 2, "what was begun is not asked for again"
    assert [score.reward for score in found[:4]] == [None] * 4
    assert "reward_rm 0 died during scoring" in (found[0].error or "")
    assert found[4:] == ["a", "b", "c", "d"]


def test_a_request_to_stop_ends_the_wait_for_workers_that_do_not_answer() -> None:
    worker, group = Recorded(), groups_of_answers()[0]
    placed = PlacedReward(worker)
    threading.Timer(0.05, ScoringRouter({"rm": placed}).interrupt).start()
    answer_late = threading.Timer(5.0, lambda: worker.calls[0][-1].set_result(["late"] * 4))
    answer_late.start()
    with pytest.raises(StopRequested):
        placed.score([group.task] * 4, [answer for answer in group.answers if isinstance(answer, Completion)])
    answer_late.cancel()

    def stop() -> None:
        raise StopRequested

    ahead = ReferenceAhead(worker, BATCHING, stop)
    ahead.begin(group)
    with pytest.raises(StopRequested):
        ahead.take(batch_of([group]))


def test_groups_may_be_begun_while_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (first, *later) = Recorded(), groups_of_answers()
    ahead = ReferenceAhead(worker, BATCHING, lambda: None)
    ahead.begin(later[0])
    threads: list[threading.Thread] = []
    is_known = CallsAhead.__contains__

    def begin_another(self: CallsAhead, key: Hashable) -> bool:
        if not threads:
            threads.append(threading.Thread(target=ahead.begin, args=[later[1]]))
            threads[0].start()
            threads[0].join(0.1)
        return is_known(self, key)

    monkeypatch.setattr(CallsAhead, "__contains__", begin_another)
    assert ahead.take(batch_of([first])) == [None] * 4
    threads[0].join()
    assert len(worker.calls) == 2


def test_a_whole_group_is_told_while_others_are_sampled() -> None:
    worker, group = Recorded(), groups_of_answers()[0]
    worker.whole = [group]
    told: list[OpenGroup] = []

    def note(found: OpenGroup) -> None:
        told.append(found)
        name, _, call = worker.calls[0]
        assert name == Rank.generate.__name__
        assert not call.done()
        threading.Timer(0.05, call.set_result, [[list(group.answers)]]).start()

    engine = ShardedEngine(worker).telling(note)
    assert engine.generate([group.task], 4, SAMPLING, NoiseKey(0, 1)) == [list(group.answers)]
    assert told == [group]


def test_a_group_that_a_worker_tells_of_late_is_not_lost() -> None:
    group, late = groups_of_answers()[0], Future[list[OpenGroup]]()

    class Slow(Recorded):
        num_asked = 0

        def take_whole_groups(self) -> Future[list[OpenGroup]]:
            self.num_asked += 1
            if self.num_asked == 1:
                threading.Timer(2.5 * sharded._LOOK_PERIOD_S, late.set_result, [[group]]).start()
                return late
            if self.num_asked == 3:
                self.calls[0][-1].set_result([[list(group.answers)]])
            return super().take_whole_groups()

    told: list[OpenGroup] = []
    ShardedEngine(Slow()).telling(told.append).generate([group.task], 4, SAMPLING, NoiseKey(0, 1))
    assert told == [group]


def test_turns_of_a_conversation_are_not_told_of() -> None:
    words = ["env={talk: {type: math, turns: calculator}, math: {type: math}}", "grpo.max_rollout_turns=2"]
    recipe = GrpoRecipe(load_config("grpo", None, ["data={env_name: talk}", *words]).config)
    told: list[OpenGroup] = []
    engine = recipe._telling(ShardedEngine(Recorded()), told.append)
    assert isinstance(engine, ShardedEngine)
    assert engine.when_whole is not None
    whole = groups_of_answers()[0]
    for name in ("math", "talk"):
        engine.when_whole(replace(whole, task=replace(whole.task, environment=name)))
    assert [group.task.environment for group in told] == ["math"]


def test_a_surplus_has_the_same_bits_after_a_resume(model: Path, tmp_path: Path) -> None:
    """Packed together, or with other groups of the step, its rows would be rounded differently."""
    words = grpo(model, save_data(tmp_path / "data"), tmp_path)[1:]
    setup = RankSetup(load_config("grpo", None, words).config.policy, seed=0, needs_reference=True)
    own = LocalWorker(build_rank(setup.for_reference()))
    groups = [
        Group(group.task, tuple(Rollout(a, Score(float(i))) for i, a in enumerate(completions)))
        for group, completions in zip(groups_of_answers(), completions_of(groups_of_answers()), strict=True)
    ]

    def run(num_begun: int, position: StreamAndSurplus) -> tuple[ShardedTrainer, DynamicSampling]:
        trainer = ShardedTrainer(WithBeside(None, own), MicroBatching(200), MicroBatching(200), seed=0)
        for group in groups[:num_begun]:
            trainer.begin_reference(OpenGroup(group.task, 1, tuple(one.completion for one in group.rollouts)))
        stream: Any = position.stream
        return trainer, DynamicSampling(stream, position, 3, 1, when_earlier=trainer.begin_reference)

    def scored(trainer: ShardedTrainer, source: DynamicSampling, num_groups: int) -> list[float]:
        batch = rollout_batch(source.take(num_groups, 1).groups, overlong_filtering=False)
        return trainer.reference_logprobs(batch).tolist()  # type: ignore[no-any-return]

    position = StreamAndSurplus(ScriptedRollouts(groups))
    whole = run(3, position)
    scored(*whole, 1)
    saved = position.state_dict()
    expected = scored(*whole, 2)
    position.load_state_dict(saved)
    assert scored(*run(0, position), 2) == expected


def test_the_engine_tells_every_group_once_when_its_last_answer_is_finished(model: Path, tmp_path: Path) -> None:
    words = grpo(model, save_data(tmp_path / "data"), tmp_path)[1:]
    setup = RankSetup(load_config("grpo", None, words).config.policy, seed=0, needs_reference=False)
    rank = build_rank(replace(setup, tells_whole_groups=True))
    tasks = [group.task for group in groups_of_answers()]
    sampled = rank.generate(tasks, 3, SAMPLING, NoiseKey(0, 1))
    told = {group.task.id: list(group.answers) for group in rank.take_whole_groups()}
    assert [told[task.id] for task in tasks] == sampled
    assert rank.take_whole_groups() == []
