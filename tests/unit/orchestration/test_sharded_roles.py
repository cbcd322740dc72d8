"""`Trainer` and `Engine` over N ranks: everything goes to exactly one rank and comes back in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.packing import MicroBatching
from posttrain.errors import InputError, StopRequested
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.sharded import ShardedEngine, ShardedTrainer
from posttrain.orchestration.workers import LocalWorker
from posttrain.policy.parallel.mesh import Mesh
from posttrain.types import Completion, NoiseKey, PrefillTokens, Sampling, Task, TokenBatch


@dataclass
class FakeWorker:
    rank: Any
    calls: list[tuple[str, tuple[Any, ...]]]

    def submit(self, operation: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append((operation.__name__, args))
        done: Future[Any] = Future()
        done.set_result(getattr(self.rank, operation.__name__)(*args, **kwargs))
        return done


class Ranks:
    """A `WorkerGroup` of fakes that note how they were called."""

    def __init__(self, ranks: Sequence[Any], mesh: Mesh | None = None) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.workers = [FakeWorker(rank, self.log) for rank in ranks]
        self.mesh = mesh or Mesh(dp=len(ranks))
        self.in_process, self.unit = False, "rank"

    @property
    def calls(self) -> list[tuple[str, list[tuple[Any, ...]]]]:
        """Operations in order, each with the arguments by rank."""
        size = len(self.workers)
        chunks = [self.log[start : start + size] for start in range(0, len(self.log), size)]
        assert all(len({name for name, _ in chunk}) == 1 for chunk in chunks), "ranks run the same operations"
        return [(chunk[0][0], [args for _, args in chunk]) for chunk in chunks]

    def beside(self, name: str) -> None:
        return None

    def close(self) -> None: ...


@dataclass(frozen=True)
class Objective:
    keeps_groups_whole: bool = False


class FakeRank:
    """The log-probability of a token is its id; metrics count what was seen."""

    def logprobs(self, parts: Sequence[TokenBatch | None]) -> list[Any]:
        return [None if part is None else torch.cat(part.responses).float() for part in parts]

    def update(self, parts: Sequence[TokenBatch | None], objective: Any, seed: int, progress: Any) -> dict[str, float]:
        return {**self.evaluate(parts, objective, progress), "grad_norm": 7.0, "update_skipped": 0.0, "lr": 0.5}

    def evaluate(self, parts: Sequence[TokenBatch | None], objective: Any, progress: Any = None) -> dict[str, float]:
        if progress is not None:
            progress(len(parts))
        seen = [part for part in parts if part is not None]
        tokens = [float(token) for part in seen for token in torch.cat(part.responses)]
        if not tokens:
            return {}
        return {
            "loss": sum(tokens) / seen[0].num_tokens,
            "ratio_min": min(tokens),
            "ratio_max": max(tokens),
        }

    def generate(self, tasks: Any, num_samples: int, sampling: Any, key: Any, progress: Any) -> list[list[Completion]]:
        if progress is not None:
            progress(len(tasks) * num_samples)
        return [[Completion((task.draw, s), (0.0, 0.0), "", "stop") for s in range(num_samples)] for task in tasks]

    def keep_prefixes(self, wanted: bool) -> PrefillTokens:
        return PrefillTokens(5, 3)

    def end_step(self) -> str:
        return "ended"

    def save(self, folder: Path, optimizer: bool) -> None:
        Path(folder, "policy").mkdir(exist_ok=True)

    def load(self, folder: Path) -> None:
        pass


def batch_of(lengths: Sequence[int], per_prompt: int) -> TokenBatch:
    """Responses of the given lengths whose tokens are all different, `per_prompt` to a prompt."""
    tokens = iter(range(1, 10_000))
    responses = [[next(tokens) for _ in range(length)] for length in lengths]
    prompt_of = [row // per_prompt for row in range(len(lengths))]
    return TokenBatch.build(
        prompts=[[0] * (2 + prompt % 3) for prompt in range(prompt_of[-1] + 1)],
        responses=responses,
        prompt_of=prompt_of,
        columns={"mask": torch.ones(sum(lengths))},
    )


def policy_over(num_ranks: int, batching: MicroBatching, **settings: Any) -> tuple[ShardedTrainer, Ranks]:
    ranks = Ranks([FakeRank() for _ in range(num_ranks)])
    return ShardedTrainer(ranks, batching, batching, seed=3, **settings), ranks


lengths_of_responses = st.lists(st.integers(1, 9), min_size=1, max_size=14)
micro_batchings = st.one_of(
    st.integers(1, 5).map(lambda count: MicroBatching(num_responses=count)),
    st.integers(4, 40).map(lambda tokens: MicroBatching(max_tokens=tokens)),
)


@given(lengths_of_responses, st.integers(1, 4), st.integers(1, 5), micro_batchings)
def test_log_probabilities_come_back_in_the_order_of_the_batch(
    lengths: list[int], per_prompt: int, num_ranks: int, batching: MicroBatching
) -> None:
    batch = batch_of(lengths, per_prompt)
    policy, _ = policy_over(num_ranks, batching)
    assert policy.logprobs(batch).tolist() == torch.cat(batch.responses).tolist()


@given(lengths_of_responses, st.integers(1, 4), st.integers(1, 5), micro_batchings, st.booleans())
def test_an_update_gives_each_response_to_one_rank_and_all_ranks_equally_many_micro_batches(
    lengths: list[int], per_prompt: int, num_ranks: int, batching: MicroBatching, whole: bool
) -> None:
    batch = batch_of(lengths, per_prompt)
    policy, ranks = policy_over(num_ranks, batching)
    report = policy.update(batch, Objective(keeps_groups_whole=whole))
    ((_, arguments),) = ranks.calls
    shards = [args[0] for args in arguments]
    assert len({len(parts) for parts in shards}) == 1, "otherwise a collective would wait for ever"
    parts = [part for shard in shards for part in shard if part is not None]
    sent = sorted(tuple(response.tolist()) for part in parts for response in part.responses)
    assert sent == sorted(tuple(response.tolist()) for response in batch.responses)
    assert all(part.num_tokens == batch.num_tokens for part in parts), "denominators are those of the whole batch"
    if whole:
        for part in parts:
            members = [part.prompt_of.count(prompt) for prompt in range(len(part.prompts))]
            originals = [min(per_prompt, len(lengths) - first) for first in range(0, len(lengths), per_prompt)]
            assert all(count in originals for count in members)
            assert sum(members) == len(part.responses)
    tokens = [float(token) for token in torch.cat(batch.responses)]
    assert report.metrics["loss"] == pytest.approx(sum(tokens) / batch.num_tokens)
    assert (report.metrics["ratio_min"], report.metrics["ratio_max"]) == (min(tokens), max(tokens))
    assert (report.metrics["grad_norm"], report.metrics["lr"]) == (7.0, 0.5), "equal on every rank, and not added up"


def test_without_updates_an_evaluation_reports_the_same_sums() -> None:
    batch = batch_of([2, 5, 3, 1, 4], per_prompt=1)
    reports = [policy_over(n, MicroBatching(num_responses=2))[0].evaluate(batch, Objective()) for n in (1, 2, 4)]
    for report in reports:
        assert report.metrics == pytest.approx(reports[0].metrics)
        assert "grad_norm" not in report.metrics


def test_every_rank_gets_the_same_seed_and_every_update_another_one() -> None:
    policy, ranks = policy_over(2, MicroBatching(num_responses=1))
    for _ in range(3):
        policy.update(batch_of([2, 2], per_prompt=1), Objective())
    seeds = [{args[2] for args in arguments} for _, arguments in ranks.calls]
    assert all(len(of_one_update) == 1 for of_one_update in seeds)
    assert len(set().union(*seeds)) == 3
    assert policy.num_updates == 3
    resumed, ranks = policy_over(1, MicroBatching())
    resumed.num_updates = 2
    resumed.update(batch_of([2], per_prompt=1), Objective())
    assert {ranks.calls[0][1][0][2]} == seeds[2], "a resumed run drops out the same neurons"


def test_tokens_are_counted_once_per_prompt() -> None:
    batch = batch_of([3, 3, 3, 3], per_prompt=4)
    policy, _ = policy_over(1, MicroBatching(num_responses=4))
    assert policy.update(batch, Objective()).num_tokens == 2 + 4 * 3
    alone, _ = policy_over(1, MicroBatching(num_responses=1))
    assert alone.update(batch, Objective()).num_tokens == 4 * (2 + 3), "a prompt that is not shared is computed again"


def test_saving_loading_and_the_end_of_a_step_reach_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With absolute folders: ranks may run in another working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "somewhere"
    folder.mkdir()
    policy, ranks = policy_over(3, MicroBatching())
    policy.end_step()
    policy.save(Path("somewhere"), optimizer=True)
    policy.load(Path("somewhere"))
    assert ranks.calls == [("end_step", [()] * 3), ("save", [(folder, True)] * 3), ("load", [(folder,)] * 3)]


def test_ranks_that_write_to_another_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRank, "save", lambda self, folder, optimizer: None)
    policy, _ = policy_over(2, MicroBatching())
    with pytest.raises(InputError, match=r"checkpointing\.checkpoint_dir"):
        policy.save(tmp_path, optimizer=True)


@pytest.mark.parametrize("in_process", [True, False], ids=["in this process", "elsewhere"])
@pytest.mark.parametrize("method", ["update", "evaluate"])
def test_progress_counts_every_micro_batch_wherever_the_ranks_are(method: str, in_process: bool) -> None:
    totals: list[int] = []
    done: list[int] = []

    @contextmanager
    def show(label: str, total: int) -> Iterator[Any]:
        totals.append(total)
        yield done.append

    policy, ranks = policy_over(1, MicroBatching(num_responses=2), show_progress=show)
    ranks.in_process = in_process
    getattr(policy, method)(batch_of([1] * 6, per_prompt=1), Objective())
    assert totals == [3]
    assert sum(done) == 3
    if not in_process:
        ((_, arguments),) = ranks.calls
        assert done.append not in arguments[0], "a callback cannot travel to another process"


# -- sampling ----------------------------------------------------------------------------------------------------------


def tasks_of(count: int) -> list[Task]:
    return [Task(draw=draw, id=f"t:{draw}", prompt="", prompt_ids=(1,)) for draw in range(count)]


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 3))
def test_completions_come_back_in_the_order_of_the_tasks(num_tasks: int, num_ranks: int, num_samples: int) -> None:
    ranks = Ranks([FakeRank() for _ in range(num_ranks)])
    counted: list[int] = []
    generator = ShardedEngine(ranks)
    groups = generator.generate(
        tasks_of(num_tasks), num_samples, Sampling(max_new_tokens=1), NoiseKey(0, 0), counted.append
    )
    expected = [[(draw, sample) for sample in range(num_samples)] for draw in range(num_tasks)]
    assert [[completion.token_ids for completion in group] for group in groups] == expected
    assert sum(counted) == num_tasks * num_samples


def test_whole_groups_go_to_one_rank_and_the_ranks_share_them_evenly() -> None:
    ranks = Ranks([FakeRank() for _ in range(3)])
    ShardedEngine(ranks).generate(tasks_of(7), 2, Sampling(max_new_tokens=1), NoiseKey(0, 0))
    ((_, arguments),) = ranks.calls
    assert sorted(len(args[0]) for args in arguments) == [2, 2, 3]
    assert sorted(task.draw for args in arguments for task in args[0]) == list(range(7))


def test_later_turns_go_to_the_rank_of_their_first_one_while_prefixes_are_kept() -> None:
    ranks = Ranks([FakeRank() for _ in range(3)])
    engine = ShardedEngine(ranks)

    def draws(tasks: Sequence[Task], num_samples: int = 1) -> list[list[tuple[int, int]]]:
        groups = engine.generate(tasks, num_samples, Sampling(max_new_tokens=1), NoiseKey(0, 0))
        assert [completions[0].token_ids[0] for completions in groups] == [task.draw for task in tasks]
        return [[(task.draw, task.first_sample) for task in args[0]] for args in ranks.calls[-1][1]]

    later = [replace(task, first_sample=sample, first_token=9) for task in tasks_of(5)[1:] for sample in range(2)]
    spread = draws(later)
    assert engine.keep_prefixes(True) == PrefillTokens(15, 9)
    assert draws(tasks_of(5), 2) == [[(0, 0), (3, 0)], [(1, 0), (4, 0)], [(2, 0)]]
    assert draws(later) == [[(3, 0), (3, 1)], [(1, 0), (1, 1), (4, 0), (4, 1)], [(2, 0), (2, 1)]]
    engine.keep_prefixes(True)
    draws(tasks_of(2), 2)
    assert draws(later) == spread, "one rank had nothing to do"
    assert [draws(later[first:])[0] for first in (3, 6)] == [spread[0][1:], spread[0][2:]]
    assert draws(later[4:5])[1] == [(3, 0)], "a single conversation too"
    engine.keep_prefixes(False)
    assert draws(later) == spread

    # Conversations that begin one after another, a sample each, go where the fewest are.
    engine.keep_prefixes(True)
    one_by_one = [replace(tasks_of(1)[0], first_sample=sample) for sample in range(6)]
    for begun in range(3, 7):
        shares = draws(one_by_one[:begun])
    assert [len(share) for share in shares] == [2, 2, 2]


def test_tensor_parallel_ranks_get_the_same_data_and_count_once() -> None:
    ranks = Ranks([FakeRank() for _ in range(4)], Mesh(dp=2, tp=2))
    batch = batch_of([2, 5, 3, 1, 4], per_prompt=1)
    trainer = ShardedTrainer(ranks, MicroBatching(num_responses=2), MicroBatching(num_responses=2), seed=3)
    assert trainer.logprobs(batch).tolist() == torch.cat(batch.responses).tolist()
    alone = policy_over(2, MicroBatching(num_responses=2))[0]
    assert trainer.update(batch, Objective()).metrics == alone.update(batch, Objective()).metrics
    (_, arguments), *_ = ranks.calls
    first_parts = [parts[0][0] for parts in arguments]
    assert first_parts[0] is first_parts[1] is not first_parts[2] is first_parts[3]
    groups = ShardedEngine(ranks).generate(tasks_of(5), 1, Sampling(max_new_tokens=1), NoiseKey(0, 0))
    assert [group[0].token_ids[0] for group in groups] == list(range(5))


def test_the_local_worker_calls_its_rank_directly() -> None:
    worker: Any = FakeRank()
    local = LocalWorker(worker)
    assert local.mesh.size == 1
    assert local.submit(Rank.end_step).result() == "ended"
    local.close()


class StopsAt:
    """`StopPoints` that ask for a stop at the given check."""

    def __init__(self, check: int) -> None:
        self.num_left = check

    def check(self) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise StopRequested

    commit = check


def test_a_pass_without_gradients_can_be_left_in_between() -> None:
    trainer, ranks = policy_over(2, MicroBatching(num_responses=1), stop=StopsAt(3))
    with pytest.raises(StopRequested):
        trainer.logprobs(batch_of([2] * 32, per_prompt=1))
    parts = [len(by_rank[0][0]) for _, by_rank in ranks.calls]
    assert parts == [2, 2], "16 micro-batches on each rank, in eighths"


def test_an_update_that_is_stopped_has_not_begun() -> None:
    trainer, ranks = policy_over(1, MicroBatching(num_responses=1), stop=StopsAt(1))
    with pytest.raises(StopRequested):
        trainer.update(batch_of([2, 2], per_prompt=1), Objective())
    assert not ranks.calls
    assert trainer.num_updates == 0
