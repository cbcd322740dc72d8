"""A session one step ahead of the host, on a CPU with simulated graphs: what differs from a session in step with it.

`test_native_session.py` runs in both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_decode_ahead import SAMPLING, TOKENIZER, SimulatedGraphs, make_tasks, simulate_graphs
from test_native_session import Answers, adapted_model
from test_native_session import run as run_requests
from tiny_models import LOGPROB_ROUNDING, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.cuda_graph_cache import GraphCaptureError
from posttrain.engines.native.graphs import DecodeGraphs
from posttrain.engines.native.sampler import Drawn
from posttrain.engines.native.session import GenerationSession, SessionRequest, TokenEvent
from posttrain.types import Sampling

SETTINGS = NativeSettings(page_size=4, max_batch_size=4, max_total_tokens=80)
PLAIN = [SAMPLING, Sampling(9, temperature=0.0, ignore_eos=True), Sampling(20), Sampling(30, temperature=0.4)]
NARROW = [Sampling(20, top_k=5), Sampling(3, top_p=0.7, temperature=0.8), Sampling(25, top_p=0.9)]
run = partial(run_requests, every=2)


class KeepingKeys(SimulatedGraphs):
    keys: set[Hashable]

    def run(self, key: Hashable, compute: Callable[[], Tensor], *options: Any, **more: Any) -> Tensor:
        self.keys.add(key)
        return super().run(key, compute, *options, **more)


def session_of(model: nn.Module, **options: Any) -> GenerationSession:
    return GenerationSession(NativeEngine(model, TOKENIZER, SETTINGS), **options)


def requests(samplings: Sequence[Sampling], **options: Any) -> list[SessionRequest]:
    prompts = [task.prompt_ids for task in make_tasks()]
    return [
        SessionRequest(f"r{index}", prompts[index % len(prompts)], sampling, seed=index, **options)
        for index, sampling in enumerate(samplings)
    ]


def assert_same(left: Answers, right: Answers) -> None:
    assert left.keys() == right.keys()
    for key, events in left.items():
        for a, b in zip(events, right[key], strict=True):
            assert (a.token_id, a.finish_reason) == (b.token_id, b.finish_reason)
            assert a.logprob == pytest.approx(b.logprob, abs=LOGPROB_ROUNDING)
            assert [token for token, _ in a.candidates] == [token for token, _ in b.candidates]


@pytest.mark.parametrize(
    ("samplings", "kinds"),
    [(PLAIN, {"tokens"}), (NARROW, {"logits"}), (PLAIN + NARROW, {"tokens", "logits"})],
    ids=["plain", "narrow", "mixed"],
)
def test_rows_of_any_temperature_are_drawn_in_one_graph(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, samplings: list[Sampling], kinds: set[str]
) -> None:
    wanted = requests(samplings, num_samples=2)
    expected = run(session_of(model), wanted)
    KeepingKeys.keys = set()
    simulate_graphs(monkeypatch, KeepingKeys)
    session = session_of(model)
    assert_same(run(session, wanted), expected)
    found: Any = KeepingKeys.keys
    assert {"logits" if vocab_size is None else "tokens" for _, vocab_size, *_ in found} == kinds
    assert len(found) == len(kinds), "one graph of each kind for a batch of up to 8 rows"


def test_rows_are_forgotten_by_a_reset(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next requests get the admission numbers of those that were dropped."""
    wanted = requests(PLAIN + NARROW, num_samples=2)
    expected = run(session_of(model), wanted)
    simulate_graphs(monkeypatch)
    session = session_of(model)
    for request in reversed(wanted):
        session.add(request)
    for _ in range(3):
        session.step()
    assert set(session.reset()) == {request.id for request in wanted}
    assert not session.unfinished
    assert_same(run(session, wanted), expected)


def test_candidates_arrive_with_their_tokens(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(PLAIN + NARROW)
    wanted = [replace(one, num_top_logprobs=(0, 1, 3, 20)[index % 4]) for index, one in enumerate(wanted)]
    expected = run(session_of(model), wanted)
    simulate_graphs(monkeypatch)
    answers = run(session_of(model), wanted)
    assert_same(answers, expected)
    assert [len(answers[f"r{index}", 0][0].candidates) for index in (1, 2, 3)] == [1, 3, 20]


def of_adapters(wanted: Sequence[SessionRequest]) -> list[SessionRequest]:
    return [replace(one, adapter=("", "one", "two")[index % 3]) for index, one in enumerate(wanted)]


def test_adapters_keep_their_rows_while_others_step(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, activate = adapted_model("q_proj", "v_proj", "down_proj")
    wanted = of_adapters(requests(PLAIN + NARROW + PLAIN))
    expected = run(session_of(adapted, activate=activate), wanted)
    simulate_graphs(monkeypatch)
    session = session_of(adapted, activate=activate)
    assert_same(run(session, wanted, every=3), expected)
    assert session._graphs is not None
    assert set(session._graphs) == {"", "one", "two"}


def test_all_adapters_are_launched_before_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_graphs(monkeypatch)
    adapted, activate = adapted_model("q_proj", "v_proj", "down_proj")
    session = session_of(adapted, activate=activate)
    for request in of_adapters(requests([Sampling(30, ignore_eos=True)] * 3)):
        session.add(request)
    while session.counts.num_waiting or not session.step():
        session.step()
    happened: list[str] = []
    step, read = DecodeGraphs.step, Drawn.read

    def launching(self: DecodeGraphs, *args: Any) -> Drawn:
        happened.append("launch")
        return step(self, *args)

    def reading(self: Drawn) -> Any:
        happened.append("read")
        return read(self)

    monkeypatch.setattr(DecodeGraphs, "step", launching)
    monkeypatch.setattr(Drawn, "read", reading)
    num_read = [len(sample.token_ids) for sample in session.driver.scheduler.active]
    for count in range(1, 6):
        events = session.step()
        assert len(events) == 3
        assert happened == [*["launch"] * 3, *["read"] * 3] * count
        for before, sample in zip(num_read, session.driver.scheduler.active, strict=True):
            assert (len(sample.token_ids), sample.in_flight) == (before + count, 1)


@pytest.mark.parametrize("num_captured", [0, 5, 6, 13])
def test_failed_capture_loses_no_token(monkeypatch: pytest.MonkeyPatch, num_captured: int) -> None:
    """At any point, also after some of the adapters have been launched."""
    adapted, activate = adapted_model("q_proj", "v_proj", "down_proj")
    wanted = of_adapters(requests(PLAIN + NARROW))
    expected = run(session_of(adapted, activate=activate), wanted)
    num_runs = [0]

    class FailingLater(SimulatedGraphs):
        def run(self, key: Hashable, compute: Callable[[], Tensor], *options: Any, **more: Any) -> Tensor:
            num_runs[0] += 1
            if num_runs[0] > num_captured:
                raise GraphCaptureError("a layer synchronises with the device")
            return super().run(key, compute, *options, **more)

    simulate_graphs(monkeypatch, FailingLater)
    session = session_of(adapted, activate=activate)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert_same(run(session, wanted), expected)
    assert num_runs == [num_captured + 1]
    session.reset()
    assert_same(run(session, wanted), expected)  # and does not try again


def test_a_cancelled_request_frees_its_pages_at_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_graphs(monkeypatch)
    session = session_of(model, keeps_prefixes=True)
    first, other = requests([Sampling(20, ignore_eos=True)] * 2, num_samples=2)
    expected = run(session, [first, other])
    session.add(first)
    for _ in range(4):
        session.step()
    session.cancel(first.id)
    assert (session.counts.num_active, session.counts.pages_in_use) == (0, 0)
    assert session.unfinished, "its last tokens are in flight"
    session.add(replace(other, id=first.id))  # the same name: tokens in flight are not its own
    answers = run(session, [])
    assert [event.token_id for event in answers[first.id, 0]] == [event.token_id for event in expected[other.id, 0]]
    session.add(first)
    session.step()
    session.cancel(first.id)
    assert session.step() == []
    assert not session.unfinished


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("length", range(5, 14))
def test_cached_pages_of_an_answer_hold_its_tokens(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, length: int, is_ahead: bool
) -> None:
    """Of answers that end by limit and by stop token. Ahead, the step in flight writes the last token's keys."""
    prompt = make_tasks()[2].prompt_ids
    whole = session_of(model)
    [tokens] = run(whole, [SessionRequest("a", prompt, Sampling(length, 0.0, ignore_eos=True), 0)]).values()
    answer = [event.token_id for event in tokens]
    stops = Sampling(40, 0.0, stop_token_ids=(answer[-1],))
    expected = run(whole, [SessionRequest("b", (*prompt, *answer, 7), Sampling(6, 0.0, ignore_eos=True), 0)])
    if is_ahead:
        simulate_graphs(monkeypatch)
    for sampling in (Sampling(length, 0.0, ignore_eos=True), stops):
        session = session_of(model, keeps_prefixes=True)
        run(session, [SessionRequest("a", prompt, sampling, 0)])
        again = run(session, [SessionRequest("b", (*prompt, *answer, 7), Sampling(6, 0.0, ignore_eos=True), 0)])
        assert_same(again, expected)
        num_known = len(prompt) + length - 2  # at least: the host may not have read the last tokens
        if sampling is not stops or answer.index(answer[-1]) == length - 1:
            assert session.counts.num_reused_tokens >= num_known // 4 * 4


def test_preempted_samples_continue_where_they_were(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests([replace(one, max_new_tokens=24, ignore_eos=True) for one in PLAIN + NARROW])
    expected = run(session_of(model), wanted)
    simulate_graphs(monkeypatch)
    page_gib = 4 * 2 * 2 * 2 * 8 * 4 * 2 / 2**30
    small = SETTINGS.model_copy(update={"kv_cache_gib": 22 * page_gib, "max_total_tokens": 60})
    session = GenerationSession(NativeEngine(model, TOKENIZER, small), keeps_prefixes=True)
    assert_same(run(session, wanted), expected)
    assert session.counts.num_preemptions > 0


def test_one_clearing_for_all_tokens_that_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged model fails all of its requests at once, and clearing costs a pass over the cache."""
    broken = tiny_model("llama")
    simulate_graphs(monkeypatch)
    session = session_of(broken, keeps_prefixes=True)
    for request in requests([Sampling(20, ignore_eos=True)] * 2, num_samples=2):
        session.add(request)
    while session.counts.num_waiting:
        session.step()
    session.step()
    cleared: list[int] = []
    clear = session._cache.clear_pages
    monkeypatch.setattr(session._cache, "clear_pages", lambda pages: (cleared.append(len(pages)), clear(pages)))
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(float("nan"))
    failed = {event.request_id for _ in range(4) for event in session.step() if not isinstance(event, TokenEvent)}
    assert failed == {"r0", "r1"}
    assert not session.unfinished
    assert len(cleared) == 2, "the failure, and the step that was in flight"
