"""The driver of continuous batching by itself: order of launches and reads, cancelled and continued requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_decode_ahead import KEY, SAMPLING, TOKENIZER, ahead, make_tasks
from torch import nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.driver import Driver, NewToken, Request
from posttrain.engines.native.forward import SingleBackend
from posttrain.engines.native.graphs import DecodeGraphs
from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.sampler import Drawn, TokenSampler
from posttrain.engines.native.scheduler import Admission, PromptGroup, Sample, Scheduler
from posttrain.engines.native.stopping import StopRules
from posttrain.types import Sampling, Task


@pytest.fixture(params=["ahead", "in step"])
def engine(request: pytest.FixtureRequest, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> NativeEngine:
    if request.param == "ahead":
        return ahead(model, monkeypatch, max_batch_size=8)
    return NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, max_batch_size=8))


def requests_of(engine: NativeEngine, begun: Sequence[Request] = ()) -> list[Request]:
    """Two samples for each task; those of `begun` keep the tokens that they have."""
    stop = StopRules.of(engine.forward.base, TOKENIZER, SAMPLING)
    sampler = TokenSampler(SAMPLING, engine.vocab_size)
    requests = []
    for at, task in enumerate(make_tasks()):
        group = PromptGroup(task, SAMPLING.max_new_tokens)
        samples = [Sample(group, index, sequence_key(KEY.seed, KEY.step, task.draw, index)) for index in range(2)]
        if begun:
            for new, old in zip(samples, begun[at].samples, strict=True):
                new.token_ids, new.logprobs = list(old.token_ids), list(old.logprobs)
            samples = [new for new, old in zip(samples, begun[at].samples, strict=True) if old.finish_reason is None]
        if samples:
            requests.append(Request(group, samples, sampler, stop))
    return requests


def driver_of(
    engine: NativeEngine, requests: Sequence[Request], *, later: Sequence[Request] = (), **options: Any
) -> Driver:
    """With memory for `later` as well."""
    with torch.no_grad():
        groups = [request.group for request in (*requests, *later)]
        workspace = engine._workspace_for([*requests, *later], 64)
    workspace.begin(groups, 2)
    scheduler = Scheduler(workspace.num_pages, 4, engine.settings.max_batch_size)
    decoding = SingleBackend(engine.forward, workspace.decode)
    graphs = None if workspace.graphs is None else {"": workspace.graphs}
    driver = Driver(engine.forward, workspace.cache, scheduler, decoding, 64, graphs=graphs, **options)
    for request in requests:
        driver.add(request)
    return driver


@torch.no_grad()
def finish(driver: Driver) -> list[NewToken]:
    tokens = []
    while driver.unfinished:
        for update in driver.step():
            assert isinstance(update, NewToken)
            tokens.append(update)
    assert driver.scheduler.pages.num_free == driver.scheduler.pages.num_pages
    assert driver.scheduler._groups == []
    return tokens


def expected_tokens(model: nn.Module) -> dict[tuple[str, int], list[int]]:
    tasks = make_tasks()
    completions = NativeEngine(model, TOKENIZER).generate(tasks, 2, SAMPLING, KEY)
    return {
        (task.id, index): list(completion.token_ids)
        for task, group in zip(tasks, completions, strict=True)
        for index, completion in enumerate(group)
    }


def tokens_of(requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    return {(sample.group.task.id, sample.index): sample.token_ids for r in requests for sample in r.samples}


def test_updates_are_the_tokens_of_generate(engine: NativeEngine, model: nn.Module) -> None:
    found: dict[tuple[str, int], list[int]] = {}
    for update in finish(driver_of(engine, requests_of(engine))):
        found.setdefault((update.sample.group.task.id, update.sample.index), []).append(update.token_id)
    assert found == expected_tokens(model)


def test_with_graphs_a_step_is_launched_before_the_previous_one_is_read(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Drawn] = []
    num_launched_at_read: dict[int, int] = {}
    step, read = DecodeGraphs.step, Drawn.read

    def launching(self: DecodeGraphs, *args: Any) -> Drawn:
        launched.append(step(self, *args))
        return launched[-1]

    def reading(self: Drawn) -> Any:
        num_launched_at_read[id(self)] = len(launched)
        return read(self)

    monkeypatch.setattr(DecodeGraphs, "step", launching)
    monkeypatch.setattr(Drawn, "read", reading)
    engine = ahead(model, monkeypatch, max_batch_size=8)
    finish(driver_of(engine, requests_of(engine)))
    assert len(launched) > 20
    for number, drawn in enumerate(launched[:-1], start=1):
        assert num_launched_at_read[id(drawn)] == number + 1
    assert num_launched_at_read[id(launched[-1])] == len(launched)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 9])
def test_cancelled_requests_leave_the_others_unchanged(engine: NativeEngine, model: nn.Module, num_steps: int) -> None:
    requests = requests_of(engine)
    driver = driver_of(engine, requests)
    with torch.no_grad():
        for _ in range(num_steps):
            driver.step()
    cancelled = requests[1] if requests[1].unfinished else next(r for r in requests if r.unfinished)
    kept = [len(sample.token_ids) for sample in cancelled.samples]
    driver.cancel(cancelled)
    finish(driver)
    assert [len(sample.token_ids) for sample in cancelled.samples] == kept, "tokens in flight are discarded"
    others = [request for request in requests if request is not cancelled]
    expected = expected_tokens(model)
    assert tokens_of(others) == {key: expected[key] for key in tokens_of(others)}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 15])
def test_unfinished_samples_continue_in_another_driver(engine: NativeEngine, model: nn.Module, num_steps: int) -> None:
    first = requests_of(engine)
    driver = driver_of(engine, first)
    with torch.no_grad():
        for _ in range(num_steps):
            driver.step()
    later = requests_of(engine, begun=first)
    assert later
    finish(driver_of(engine, later))
    assert tokens_of(first) | tokens_of(later) == expected_tokens(model)


def prefills_of(driver: Driver, arrivals: Sequence[Sequence[Request]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples started by each step; `arrivals[n]` are added before step n."""
    started = [0] * len(arrivals)
    admit = Scheduler.admit

    def counting(self: Scheduler, *args: Any, **limits: Any) -> Admission:
        admission = admit(self, *args, **limits)
        started[step] += len(admission.samples)
        return admission

    monkeypatch.setattr(Scheduler, "admit", counting)
    with torch.no_grad():
        for step, requests in enumerate(arrivals):  # noqa: B007  (read by `counting`)
            for request in requests:
                driver.add(request)
            driver.step()
    return started


@pytest.fixture
def wide(model: nn.Module) -> NativeEngine:
    return NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, max_batch_size=64))


def single(engine: NativeEngine, number: int) -> Request:
    sampling = Sampling(60, ignore_eos=True)
    group = PromptGroup(Task(number, f"t{number}", "", (3 + number, 4, 5)), sampling.max_new_tokens)
    stop = StopRules.of(engine.forward.base, TOKENIZER, sampling)
    return Request(group, [Sample(group, 0, number)], TokenSampler(sampling, engine.vocab_size), stop)


def test_prompts_that_arrive_one_by_one_are_prefilled_together(
    wide: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    period = 5  # four decode steps and a prefill
    requests = [single(wide, number) for number in range(2 * period + 1)]
    driver = driver_of(wide, [], later=requests, steps_between_prefills=4)
    started = prefills_of(driver, [[request] for request in requests], monkeypatch)
    assert started == [1, *[0] * (period - 1), period, *[0] * (period - 1), period]


def test_enough_prompts_are_prefilled_after_one_step(wide: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the batch."""
    first, *many = (single(wide, number) for number in range(9))
    driver = driver_of(wide, [first], later=many, steps_between_prefills=4)
    assert prefills_of(driver, [[], many, []], monkeypatch) == [1, 0, 8]


def test_a_backlog_is_prefilled_after_each_step(wide: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [single(wide, number) for number in range(6)]
    driver = driver_of(wide, requests, steps_between_prefills=4, max_admitted_tokens=6)  # two prompts
    assert prefills_of(driver, [[]] * 6, monkeypatch) == [2, 0, 2, 0, 2, 0]
