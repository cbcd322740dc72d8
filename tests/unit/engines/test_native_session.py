"""A session samples what the engine samples, for many different requests that come and go, in constant memory.

In step with the host, and one step ahead of it as on a GPU: CUDA graphs are simulated by computing again.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_decode_ahead import simulate_graphs
from tiny_models import LOGPROB_ROUNDING, VOCAB_SIZE, byte_tokenizer, randomise, tiny_model
from torch import nn

import posttrain.engines.native.driver as driver_module
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.scheduler import Prefill
from posttrain.engines.native.session import Event, FailureEvent, GenerationSession, SessionRequest, TokenEvent
from posttrain.errors import InputError
from posttrain.types import NoiseKey, Sampling, Task

TOKENIZER = byte_tokenizer()
SETTINGS = NativeSettings(page_size=4, max_batch_size=6, max_prefill_tokens=32, max_total_tokens=48)
# A page of 4 tokens of the tiny model takes 4 KiB here: 2 layers, keys and values, 2 heads of 8, fp32, and the dense
# copy.
PAGE_GIB = 4 * 2 * 2 * 2 * 8 * 4 * 2 / 2**30

Answers = dict[tuple[str, int], list[TokenEvent]]


@pytest.fixture(params=["in step", "ahead"], autouse=True)
def is_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "ahead":
        simulate_graphs(monkeypatch)
    return bool(request.param == "ahead")


def session_of(model: nn.Module, *, keeps_prefixes: bool = False, **settings: Any) -> GenerationSession:
    engine = NativeEngine(model, TOKENIZER, SETTINGS.model_copy(update=settings))
    return GenerationSession(engine, keeps_prefixes=keeps_prefixes)


def requests(count: int, seed: int = 0) -> list[SessionRequest]:
    """Different lengths, settings, seeds and numbers of samples."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20)))
        sampling = Sampling(
            rng.randrange(1, 24),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 0, 5]),
            ignore_eos=rng.random() < 0.5,
        )
        found.append(
            SessionRequest(f"r{index}", prompt, sampling, seed=rng.randrange(2**40), num_samples=rng.randrange(1, 4))
        )
    return found


def run(session: GenerationSession, arriving: Sequence[SessionRequest], every: int = 1) -> Answers:
    """One request arrives before every step or every few, until all are done."""
    answers: Answers = defaultdict(list)
    waiting, steps = list(arriving), 0
    while waiting or session.unfinished:
        if waiting and steps % every == 0:
            session.add(waiting.pop(0))
        for event in session.step():
            assert isinstance(event, TokenEvent), event
            answers[event.request_id, event.sample].append(event)
        steps += 1
        assert steps < 5000, "the session does not come to an end"
    assert_empty(session)
    return answers


def assert_empty(session: GenerationSession) -> None:
    assert (session.unfinished, session.counts.num_active, session.counts.num_waiting) == (False, 0, 0)
    assert session.counts.pages_in_use == 0
    driver = session.driver
    assert (session._requests, driver._requests, driver.scheduler._groups) == ({}, {}, []), "nothing accumulates"


def tokens(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: [event.token_id for event in events] for key, events in answers.items()}


def engine_answers(
    model: nn.Module, request: SessionRequest
) -> dict[tuple[str, int], tuple[list[int], list[float], str]]:
    engine = NativeEngine(model, TOKENIZER, SETTINGS)
    [completions] = engine.generate(
        [Task(0, request.id, "", request.prompt_ids)], request.num_samples, request.sampling, NoiseKey(request.seed, 0)
    )
    return {
        (request.id, index): (list(c.token_ids), list(c.logprobs), c.finish_reason)
        for index, c in enumerate(completions)
    }


@pytest.mark.parametrize("every", [1, 3])
def test_requests_under_load_equal_the_engine_alone(model: nn.Module, every: int) -> None:
    wanted = requests(24)
    answers = run(session_of(model), wanted, every)
    assert len(answers) == sum(request.num_samples for request in wanted)
    for request in wanted:
        for key, (ids, logprobs, reason) in engine_answers(model, request).items():
            assert [event.token_id for event in answers[key]] == ids
            assert [event.logprob for event in answers[key]] == pytest.approx(logprobs, abs=LOGPROB_ROUNDING)
            assert answers[key][-1].finish_reason == reason
            assert all(event.finish_reason is None for event in answers[key][:-1])


@pytest.mark.parametrize("pages", [14, 20])
def test_preemption_changes_no_tokens(model: nn.Module, pages: int) -> None:
    wanted = requests(16, seed=1)
    small = session_of(model, kv_cache_gib=pages * PAGE_GIB)
    assert small.num_pages == pages
    assert tokens(run(small, wanted)) == tokens(run(session_of(model), wanted))
    assert small.counts.num_preemptions > 0


@pytest.mark.parametrize("is_ahead", ["in step"], indirect=True)
def test_dense_copies_never_take_more_than_the_pages(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(model, max_total_tokens=240, kv_cache_gib=80 * PAGE_GIB)
    used: list[str] = []
    decoding = session._decoding
    choose = decoding.decode_backend_for

    def watched(adapter: str, num_rows: int, longest: int) -> Any:
        decode = choose(adapter, num_rows, longest)
        used.append(type(decode).__name__)
        return decode

    monkeypatch.setattr(decoding, "decode_backend_for", watched)
    limit = session.num_pages * 4
    # Two that run all the time, and a long one that comes and goes: dense, from the pages, and dense again.
    wanted = [SessionRequest(f"short{n}", (5 + n, 6), Sampling(50, 0.0, ignore_eos=True), seed=n) for n in range(2)]
    wanted.append(SessionRequest("long", (7,) * 150, Sampling(10, 0.0, ignore_eos=True), seed=9))
    arriving = list(wanted)
    answers: Answers = defaultdict(list)
    for step in itertools.count():
        if arriving and step % 8 == 0:
            session.add(arriving.pop(0))
        for event in session.step():
            assert isinstance(event, TokenEvent)
            answers[event.request_id, event.sample].append(event)
        assert sum(copy.num_rows * copy.row_length for copy in decoding.copies.values()) <= limit
        if not arriving and not session.unfinished:
            break
    assert [name for name, _ in itertools.groupby(used)] == ["DenseDecode", "PagedDecode", "DenseDecode"]
    assert decoding.copies == {}
    roomy = session_of(model, max_total_tokens=240)
    assert tokens(answers) == tokens(run(roomy, wanted)), "the decode backend changes nothing"


def test_cancelled_requests_do_not_disturb_others(model: nn.Module) -> None:
    wanted = requests(20, seed=3)
    expected = tokens(run(session_of(model), wanted))
    session, rng = session_of(model), random.Random(0)
    for request in wanted:
        session.add(request)
    session.cancel("unknown")
    cancelled: set[str] = set()
    answers: Answers = defaultdict(list)
    while session.unfinished:
        for event in session.step():
            assert isinstance(event, TokenEvent)
            assert event.request_id not in cancelled
            answers[event.request_id, event.sample].append(event)
        if rng.random() < 0.3:
            name = f"r{rng.randrange(20)}"
            if name in session._requests:
                cancelled.add(name)
                session.cancel(name)
    assert_empty(session)
    assert 3 < len(cancelled) < 18
    for key, ids in expected.items():
        if key[0] not in cancelled:
            assert [event.token_id for event in answers[key]] == ids


def test_arrivals_do_not_hold_up_active_requests(model: nn.Module) -> None:
    session = session_of(model)
    session.add(SessionRequest("first", (5, 6), Sampling(20, ignore_eos=True), seed=0))
    received = 0
    for step in range(30):
        session.add(SessionRequest(f"late{step}", (7,) * 30, Sampling(1, ignore_eos=True), seed=0))
        received += sum(event.request_id == "first" for event in session.step())
    assert received >= 14, "at least every other step decodes"


def test_top_logprobs_are_those_of_the_sampler(model: nn.Module) -> None:
    prompt = (5, 6, 7)
    hot = Sampling(3, temperature=0.5, ignore_eos=True)
    session = session_of(model)
    session.add(SessionRequest("a", prompt, hot, seed=1, num_top_logprobs=4))
    session.add(SessionRequest("b", prompt, replace(hot, temperature=1.0), seed=2, num_top_logprobs=0))
    session.add(SessionRequest("c", prompt, hot, seed=1))
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    while session.unfinished:
        for event in session.step():
            assert isinstance(event, TokenEvent)
            events[event.request_id].append(event)
    reference = tiny_model("llama", attention="eager")
    ids = [*prompt, *(event.token_id for event in events["a"])]
    with torch.no_grad():
        logprobs = (reference(torch.tensor([ids])).logits[0] / hot.temperature).log_softmax(dim=-1)
    for place, event in enumerate(events["a"]):
        row = logprobs[len(prompt) - 1 + place]
        assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-4)
        best = row.topk(4)
        assert [token for token, _ in event.candidates] == best.indices.tolist()
        assert [value for _, value in event.candidates] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(event.candidates == () for event in events["b"] + events["c"])


def test_adapters_side_by_side_equal_each_alone() -> None:
    """Requests of three variants of one model run together; each gets what its variant gives alone."""
    adapted, activate = adapted_model("q_proj", "v_proj", "down_proj", "lm_head")
    session = GenerationSession(NativeEngine(adapted, TOKENIZER, SETTINGS), activate, keeps_prefixes=True)
    names = ["", "one", "two"]
    wanted = [replace(request, adapter=names[i % 3]) for i, request in enumerate(requests(18, seed=4))]
    # All begin alike: keys and values of one adapter are of no use to another.
    wanted = [replace(request, prompt_ids=(9, 8, 7, 6, *request.prompt_ids)) for request in wanted]
    answers = tokens(run(session, wanted))
    differs = 0
    for request in wanted:
        activate(request.adapter)
        expected = engine_answers(adapted, request)
        assert {key: answers[key] for key in expected} == {key: ids for key, (ids, _, _) in expected.items()}
        activate("two" if request.adapter != "two" else "one")
        differs += any(ids != answers[key] for key, (ids, _, _) in engine_answers(adapted, request).items())
    assert differs > 12, "the variants must differ for this to mean anything"


def adapted_model(*targets: str) -> tuple[Any, Callable[[str], None]]:
    """A model with the adapters `one` and `two`, and a function that activates one of them, or none."""
    config = LoraConfig(r=4, lora_alpha=16, target_modules=list(targets))
    adapted: Any = get_peft_model(tiny_model("llama"), config, adapter_name="one")
    adapted.add_adapter("two", config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def activate(name: str) -> None:
        if name:
            adapted.base_model.enable_adapter_layers()
            adapted.base_model.set_adapter(name)
        else:
            adapted.base_model.disable_adapter_layers()

    return adapted, activate


@pytest.mark.parametrize("num_pages", [200, 22])
def test_answers_are_the_same_when_prompts_begin_with_known_pages(model: nn.Module, num_pages: int) -> None:
    """Prompts that begin alike and conversations that continue; also with pages that are taken and preempted."""
    session = session_of(model, keeps_prefixes=True, kv_cache_gib=num_pages * PAGE_GIB)
    begin = tuple(range(10, 21))
    first = [replace(one, prompt_ids=(*begin, *one.prompt_ids)[:24]) for one in requests(16, seed=6)]
    answers = tokens(run(session, first, every=2))
    further = [
        replace(one, id=f"then {one.id}", prompt_ids=(*one.prompt_ids, *answers[one.id, 0])[:40], num_samples=2)
        for one in first
    ]
    further = [replace(one, sampling=replace(one.sampling, max_new_tokens=8)) for one in further]
    before = session.counts.num_reused_tokens
    answers |= tokens(run(session, further, every=2))
    assert before > 0
    assert session.counts.num_reused_tokens - before > 80
    assert (session.counts.num_preemptions > 0) == (num_pages == 22)
    for one in [*first, *further]:
        expected = engine_answers(model, one)
        assert {key: answers[key] for key in expected} == {key: ids for key, (ids, _, _) in expected.items()}


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h", "lfm2"])
@pytest.mark.parametrize("max_batch_size", [6, 2])
def test_prompts_that_begin_alike_go_on_from_kept_states(family: str, max_batch_size: int) -> None:
    """The state is kept where prompts were seen to part, and where answers end; also with few slots for states."""
    recurrent = tiny_model(family, dtype=torch.float64)
    session = session_of(recurrent, keeps_prefixes=True, max_batch_size=max_batch_size)
    begin = tuple(range(10, 21))
    first = [replace(one, prompt_ids=(*begin, *one.prompt_ids)[:24], num_samples=1) for one in requests(8, seed=6)]
    answers = tokens(run(session, first, every=2))
    before = session.counts.num_reused_tokens
    assert before >= 5 * 8, "two pages, from the third prompt on"
    further = [
        replace(one, id=f"then {one.id}", prompt_ids=(*one.prompt_ids, *answers[one.id, 0], 5)[:40], num_samples=2)
        for one in first
    ]
    again = [replace(one, id=f"again {one.id}") for one in further]
    for asked in (further, again):
        asked = [replace(one, sampling=replace(one.sampling, max_new_tokens=8)) for one in asked]
        answers |= tokens(run(session, asked, every=2))
        for one in asked:
            expected = engine_answers(recurrent, one)
            assert {key: answers[key] for key in expected} == {key: ids for key, (ids, _, _) in expected.items()}
    assert session.counts.num_reused_tokens - before > 100
    scheduler = session.driver.scheduler
    assert scheduler.states is not None
    assert scheduler.states.num_free == session._cache.states.num_slots, "no slot is lost"  # type: ignore[union-attr]


def test_new_weights_reuse_nothing() -> None:
    model = tiny_model("llama")
    session = session_of(model, keeps_prefixes=True)
    asked = requests(4, seed=8)
    before = tokens(run(session, asked))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    session.forget_prefixes()
    after = tokens(run(session, asked))
    assert before != after
    for one in asked:
        expected = engine_answers(model, one)
        assert {key: after[key] for key in expected} == {key: ids for key, (ids, _, _) in expected.items()}


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_nan_logits_fail_the_request_and_not_the_session(keeps_prefixes: bool) -> None:
    broken = tiny_model("llama")
    session = session_of(broken, keeps_prefixes=keeps_prefixes)
    session.add(SessionRequest("fine", (5, 6), Sampling(4, ignore_eos=True), seed=0))
    assert all(isinstance(event, TokenEvent) for event in session.step())
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(float("nan"))
    session.add(SessionRequest("lost", (5, 6), Sampling(4), seed=0, num_samples=3))
    events = [event for _ in range(5) for event in session.step()]
    assert {event.request_id for event in events if isinstance(event, FailureEvent)} == {"fine", "lost"}
    assert len([event for event in events if isinstance(event, FailureEvent)]) == 2
    assert_empty(session)
    randomise(broken, 0)
    session.add(SessionRequest("again", (5, 6), Sampling(2, ignore_eos=True), seed=0))
    assert all(isinstance(event, TokenEvent) for event in session.step())


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_nan_is_cleared_from_the_cache_with_its_request(keeps_prefixes: bool, is_ahead: bool) -> None:
    """In the pages of a prompt, then in the pages and the dense copy of one that runs beside another."""
    model: Any = tiny_model("llama", tie_word_embeddings=False)
    embeddings = model.get_input_embeddings().weight
    whole = embeddings.detach().clone()
    session = session_of(model, keeps_prefixes=keeps_prefixes)

    def request(name: str, prompt: tuple[int, ...], new: int) -> SessionRequest:
        return SessionRequest(name, prompt, Sampling(new, 0.0, ignore_eos=True), seed=0)

    def step_with_damage_to(token: int) -> list[str]:
        with torch.no_grad():
            embeddings[token] = float("nan")
        events = session.step()
        with torch.no_grad():
            embeddings.copy_(whole)
        events += session.step() if is_ahead else []
        return [event.request_id for event in events if isinstance(event, FailureEvent)]

    session.add(request("lost", (5,) * 30, 18))
    assert step_with_damage_to(5) == ["lost"]
    # Short rows beside long ones: their masks cover most of the row.
    wanted = [request("stays", (6,) * 20, 24), request("short", (8,), 8)]
    assert run(session, wanted)

    session.add(wanted[0])
    session.add(request("lost too", (7, 9) * 12, 18))
    for _ in range(3):
        assert all(isinstance(event, TokenEvent) for event in session.step())
    active = session.driver.scheduler.active
    last = {sample.group.task.id: sample.token_ids[-1] for sample in active if sample.token_ids}
    for drawn in session.driver._in_flight:
        tokens_in_flight = drawn.values[0].long().tolist()
        last |= {sample.group.task.id: token for sample, token in zip(drawn.samples, tokens_in_flight, strict=True)}
    assert last["stays"] != last["lost too"]
    assert step_with_damage_to(last["lost too"]) == ["lost too"]
    assert run(session, [wanted[1]])


def test_a_page_of_a_failed_request_is_not_reused_after_its_other_holder_is_cancelled(
    model: nn.Module, is_ahead: bool
) -> None:
    session = session_of(model, keeps_prefixes=True)
    session.driver.max_prompt_rows = 0  # the prompt is computed before the next token of the other holder
    prompt = tuple(range(10, 21))
    holder, lost, again = (SessionRequest(name, prompt, Sampling(12, 0.0, ignore_eos=True), 0) for name in "abc")
    session.add(holder)
    for _ in range(5):
        session.step()  # the next one may prefill
    page = session.driver.scheduler.active[0].pages[0]
    for values in session._cache.values.values():
        values[page] = float("nan")
    session.add(lost)
    events = [*session.step(), *(session.step() if is_ahead else [])]
    failures = [event for event in events if isinstance(event, FailureEvent)]
    assert failures == [FailureEvent("b", "the model's output is NaN: its weights are damaged")]
    session.cancel("a")  # before its next token shows that it is damaged, too
    if is_ahead:
        assert session.unfinished, "that token is in flight"
        assert session.step() == []
    assert_empty(session)
    assert tokens(run(session, [again]))["c", 0] == engine_answers(model, again)["c", 0][0]


def test_reset_returns_lost_requests_and_leaves_a_working_session(model: nn.Module) -> None:
    session = session_of(model)
    wanted = requests(8, seed=5)
    for request in wanted:
        session.add(request)
    for _ in range(3):
        session.step()
    running = set(session._requests)
    assert set(session.reset()) == running
    assert_empty(session)
    assert tokens(run(session, wanted)) == tokens(run(session_of(model), wanted))


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [((), 1, "at least 1"), ((5,) * 48, 1, "at most 48"), ((5,), 48, "at most 48"), ((VOCAB_SIZE,), 1, "vocabulary")],
)
def test_impossible_requests_are_refused(model: nn.Module, prompt: tuple[int, ...], new: int, words: str) -> None:
    session = session_of(model)
    with pytest.raises(InputError, match=words):
        session.add(SessionRequest("r", prompt, Sampling(new), seed=0))
    assert_empty(session)


# -- prompts as rows of a decode step ----------------------------------------------------------------------------------


def count_prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Appends the number of tokens of every prefill outside of decode steps."""
    counts: list[int] = []
    prefill = driver_module.prefill

    def counting(forward: Any, cache: Any, jobs: Sequence[Prefill], max_tokens: int) -> None:
        counts.append(sum(len(job.token_ids) for job in jobs))
        prefill(forward, cache, jobs, max_tokens)

    monkeypatch.setattr(driver_module, "prefill", counting)
    return counts


def drawn_by(events: Sequence[Event], request_id: str, sample: int = 0) -> list[int]:
    drawn = [event for event in events if isinstance(event, TokenEvent)]
    return [event.token_id for event in drawn if (event.request_id, event.sample) == (request_id, sample)]


@pytest.mark.parametrize("is_ahead", ["ahead"], indirect=True)
@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_decode_steps_compute_short_prompts(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, keeps_prefixes: bool
) -> None:
    """Requests that arrive one by one beside others get the answers that each gets alone."""
    rng = random.Random(1)
    start = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(9))
    wanted = [
        SessionRequest(
            f"r{n}", start + tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(1 + n)),
            Sampling(6 + n, rng.choice([0.0, 0.8]), top_p=0.9 if n == 4 else 1.0), seed=n,
            num_top_logprobs=2 if n == 5 else 0,
        )
        for n in range(9)
    ]  # fmt: skip
    session = session_of(model, keeps_prefixes=keeps_prefixes)
    counts = count_prefilled(monkeypatch)
    events = []
    for request in wanted:
        session.add(request)
        events += session.step()
    while session.unfinished:
        events += session.step()
    assert counts == []
    assert_empty(session)
    assert (session.counts.num_reused_tokens > 0) == keeps_prefixes
    for request in wanted:
        assert drawn_by(events, request.id) == engine_answers(model, request)[request.id, 0][0]


@pytest.mark.parametrize("is_ahead", ["ahead"], indirect=True)
def test_longer_prompts_and_several_samples_are_prefilled(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(model)
    session.driver.max_prompt_rows = 10
    counts = count_prefilled(monkeypatch)
    wanted = [
        SessionRequest("short", (5, 6, 7), Sampling(20, 0.0, ignore_eos=True), 0),
        SessionRequest("long", tuple(range(10, 21)), Sampling(8, 0.0), 0),
        SessionRequest("two", (8, 9), Sampling(8, 1.0), 0, num_samples=2),
    ]
    events = []
    for request in wanted:
        session.add(request)
        for _ in range(6):
            events += session.step()
    while session.unfinished:
        events += session.step()
    assert counts == [11, 2]
    for request in wanted:
        for (name, index), (answer, *_) in engine_answers(model, request).items():
            assert drawn_by(events, name, index) == answer


@pytest.mark.parametrize("is_ahead", ["ahead"], indirect=True)
def test_answers_of_one_token_leave_nothing_behind(model: nn.Module) -> None:
    session = session_of(model)
    session.driver.max_prompt_rows = 0
    for number in range(5):
        run(session, [SessionRequest(f"r{number}", (5, 6, 7), Sampling(1), seed=number)])
    assert session._graphs is not None
    assert session._graphs[""]._fresh._drawn == []
