"""What every `Trainer` does, here and on two Ray actors; and what the engine that shares its weights does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import grpo, save_data, save_model

from posttrain.config import load_config
from posttrain.data.packing import MicroBatching
from posttrain.orchestration.failures import WorkerDiedError
from posttrain.orchestration.rank import build_rank
from posttrain.orchestration.sharded import ShardedEngine, ShardedTrainer
from posttrain.orchestration.workers import LocalWorker, RankLayout, WorkerGroup, start_workers
from posttrain.policy.objectives import NegativeLogLikelihood
from posttrain.policy.trainer import RankSetup
from posttrain.roles import Engine, Trainer
from posttrain.types import NoiseKey, Sampling, Task, TokenBatch

LOSS = NegativeLogLikelihood()
BATCHING = MicroBatching(num_responses=2)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    folder = tmp_path_factory.mktemp("trainer")
    model, data = save_model(folder / "model"), save_data(folder / "data")
    loaded = load_config("grpo", None, grpo(model, data, folder)[1:])
    return RankSetup(loaded.config.policy, seed=0, needs_reference=True)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def group(request: pytest.FixtureRequest, setup: RankSetup) -> Iterator[WorkerGroup]:
    if request.param == "local":
        yield LocalWorker(build_rank(setup))
        return
    workers = start_workers(partial(build_rank, setup), RankLayout(1, 2, device="cpu", num_threads=1), "ray")
    yield workers
    workers.close()


@pytest.fixture
def trainer(group: WorkerGroup) -> Trainer:
    return ShardedTrainer(group, BATCHING, BATCHING, seed=0)


@pytest.fixture
def engine(group: WorkerGroup) -> Engine:
    return ShardedEngine(group)


def make_batch(num_responses: int = 5) -> TokenBatch:
    random = torch.Generator().manual_seed(num_responses)
    lengths = [3 + number % 4 for number in range(num_responses)]
    return TokenBatch.build(
        prompts=[torch.randint(3, 30, (4,), generator=random).tolist() for _ in lengths],
        responses=[torch.randint(3, 30, (length,), generator=random).tolist() for length in lengths],
        prompt_of=list(range(num_responses)),
        columns={"mask": torch.ones(sum(lengths))},
    )


@pytest.mark.invariant
def test_log_probabilities_are_one_number_per_response_token(trainer: Trainer) -> None:
    batch = make_batch()
    found = trainer.logprobs(batch)
    assert found.shape == (sum(batch.response_lengths),)
    assert bool((found < 0).all())
    assert torch.equal(trainer.logprobs(batch), found), "asking changes nothing"
    alone = trainer.logprobs(batch.select([2]))
    start = sum(batch.response_lengths[:2])
    torch.testing.assert_close(found[start : start + len(alone)], alone)


def test_updates_lower_the_loss_and_count(trainer: Trainer) -> None:
    batch = make_batch()
    before = trainer.num_updates
    losses = [trainer.update(batch, LOSS).metrics["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    assert trainer.num_updates == before + 4


def test_an_update_without_rows_is_one_with_gradient_0(trainer: Trainer) -> None:
    """Momentum and weight decay act; no rank waits for another."""
    batch = make_batch()
    trainer.update(batch, LOSS)
    before, number = trainer.logprobs(batch), trainer.num_updates
    report = trainer.update(batch.only([]), LOSS)
    assert (report.metrics["loss"], report.metrics["grad_norm"]) == (0.0, 0.0)
    assert (report.num_tokens, trainer.num_updates) == (0, number + 1)
    assert not torch.equal(trainer.logprobs(batch), before)


def test_an_update_reports_the_loss_before_it_and_the_gradient_norm(trainer: Trainer) -> None:
    batch = make_batch()
    expected = trainer.evaluate(batch, LOSS).metrics["loss"]
    report = trainer.update(batch, LOSS)
    assert report.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert report.metrics["grad_norm"] > 0
    assert report.num_tokens > 0


def test_the_loss_is_that_of_the_log_probabilities(trainer: Trainer) -> None:
    batch = make_batch()
    expected = -float(trainer.logprobs(batch).mean())
    assert trainer.evaluate(batch, LOSS).metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluating_changes_no_weight(trainer: Trainer) -> None:
    batch = make_batch()
    before = trainer.logprobs(batch)
    trainer.evaluate(batch, LOSS)
    assert torch.equal(trainer.logprobs(batch), before)


def test_the_reference_stays_what_it_was(trainer: Trainer) -> None:
    batch = make_batch()
    before, fingerprint = trainer.reference_logprobs(batch), trainer.reference_fingerprint()
    trainer.update(batch, LOSS)
    assert torch.equal(trainer.reference_logprobs(batch), before)
    assert trainer.reference_fingerprint() == fingerprint
    assert not torch.equal(trainer.logprobs(batch), before)


def test_a_loaded_checkpoint_continues_as_if_nothing_had_happened(trainer: Trainer, tmp_path: Path) -> None:
    batch = make_batch()
    trainer.update(batch, LOSS)
    trainer.end_step()
    number = trainer.num_updates
    trainer.save(tmp_path, optimizer=True)
    after = [trainer.update(batch, LOSS).metrics, trainer.logprobs(batch)]
    trainer.load(tmp_path)
    trainer.num_updates = number
    again = [trainer.update(batch, LOSS).metrics, trainer.logprobs(batch)]
    assert after[0] == again[0]
    assert torch.equal(after[1], again[1])


def test_a_background_save_holds_the_state_at_its_beginning(trainer: Trainer, tmp_path: Path) -> None:
    batch = make_batch()
    trainer.update(batch, LOSS)
    now, later = tmp_path / "now", tmp_path / "later"
    for folder in (now, later):
        folder.mkdir()
    trainer.save(now, optimizer=True)
    assert trainer.save_obstacle(optimizer=True) == ""
    while not trainer.prepare_save(optimizer=True):
        pass
    write = trainer.begin_save(later, optimizer=True)
    write(lambda: False)
    trainer.update(batch, LOSS)
    assert trainer.take_save_wait_s() >= 0
    files = {str(path.relative_to(now)) for path in now.rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(later)) for path in later.rglob("*") if path.is_file()}
    name = "policy/weights/model/model.safetensors"
    assert (now / name).read_bytes() == (later / name).read_bytes()


def test_the_engine_samples_with_the_weights_of_the_last_update(trainer: Trainer, engine: Engine) -> None:
    tasks = [Task(draw, f"t:{draw}", "", (5, 6, 7 + draw)) for draw in range(3)]
    sampling, key = Sampling(6, temperature=1.0, ignore_eos=True), NoiseKey(0, 0)
    trainer.update(make_batch(), LOSS)
    groups = engine.generate(tasks, 2, sampling, key)
    assert [len(group) for group in groups] == [2, 2, 2]
    batch = TokenBatch.build(
        prompts=[task.prompt_ids for task in tasks],
        responses=[completion.token_ids for group in groups for completion in group],
        prompt_of=[0, 0, 1, 1, 2, 2],
        columns={"mask": torch.ones(36)},
    )
    sampled = torch.tensor([value for group in groups for completion in group for value in completion.logprobs])
    torch.testing.assert_close(trainer.logprobs(batch), sampled, rtol=1e-4, atol=1e-4)
    engine.release()
    assert engine.generate(tasks, 2, sampling, key) == groups, "what was released is allocated again"


@pytest.mark.ray
def test_a_dead_actor_is_named(setup: RankSetup) -> None:
    import ray

    workers = start_workers(partial(build_rank, setup), RankLayout(1, 2, device="cpu", num_threads=1), "ray")
    try:
        ray.kill(workers.workers[1].actor)
        trainer = ShardedTrainer(workers, BATCHING, BATCHING, seed=0)
        with pytest.raises(WorkerDiedError, match=r"rank 1 died during reference_fingerprint"):
            trainer.reference_fingerprint()
    finally:
        workers.close()
