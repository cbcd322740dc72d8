"""A session on a GPU: each request as alone, settings and adapters side by side, one step ahead of the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import nn

import posttrain.engines.native.graphs as graphs_module
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.session import FailureEvent, GenerationSession, SessionRequest, TokenEvent
from posttrain.types import NoiseKey, Sampling, Task

TOKENIZER = byte_tokenizer()
SETTINGS = NativeSettings(page_size=4, max_batch_size=6, max_prefill_tokens=32, max_total_tokens=64, kv_cache_gib=0.01)
NAMES = ("", "one", "two")
Answers = dict[tuple[str, int], list[TokenEvent]]
Activate = Callable[[str], None]


def requests() -> list[SessionRequest]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(18):
        length = 1 + int(torch.randint(0, 20, (1,), generator=generator))
        prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        sampling = Sampling(
            4 + index, temperature=(0.0, 0.7, 1.0)[index % 3], top_p=(1.0, 0.9)[index % 2], ignore_eos=True
        )
        found.append(
            SessionRequest(f"r{index}", tuple(prompt), sampling, seed=index, num_samples=1 + index % 2,
                           adapter=NAMES[(index // 3) % 3])
        )  # fmt: skip
    return found


def plain(wanted: Sequence[SessionRequest]) -> list[SessionRequest]:
    return [replace(one, sampling=replace(one.sampling, top_p=1.0)) for one in wanted]


def with_stops_and_logprobs(wanted: Sequence[SessionRequest]) -> list[SessionRequest]:
    stops = tuple(range(0, VOCAB_SIZE, 30))
    return [
        replace(
            one,
            sampling=replace(one.sampling, ignore_eos=False, stop_token_ids=stops, top_k=(0, 0, 5)[index % 3]),
            num_top_logprobs=(0, 0, 1, 4)[index % 4],
        )
        for index, one in enumerate(wanted)
    ]


def adapted_model(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Activate]:
    """Adapters are on the model before the engine sees it."""
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model: Any = get_peft_model(tiny_model("llama"), config, adapter_name="one")
    model.add_adapter("two", config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model = model.to("cuda", dtype).eval()

    def activate(name: str) -> None:
        if name:
            model.base_model.enable_adapter_layers()
            model.base_model.set_adapter(name)
        else:
            model.base_model.disable_adapter_layers()

    return model, activate


def run(session: GenerationSession, arriving: Sequence[SessionRequest]) -> Answers:
    answers: Answers = defaultdict(list)
    waiting = list(arriving)
    while waiting or session.unfinished:
        if waiting:
            session.add(waiting.pop(0))
        for event in session.step():
            assert isinstance(event, TokenEvent)
            answers[event.request_id, event.sample].append(event)
    assert session.counts.pages_in_use == 0
    return answers


def tokens(answers: Answers) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: tuple(event.token_id for event in events) for key, events in answers.items()}


def without_graphs(session: GenerationSession) -> GenerationSession:
    session._graphs = session.driver.graphs = None
    return session


def test_session_equals_the_engine_alone() -> None:
    """fp32, so that the order of a sum changes no draw."""
    model, activate = adapted_model()
    engine = NativeEngine(model, TOKENIZER, SETTINGS)
    expected: dict[tuple[str, int], tuple[int, ...]] = {}
    for name in NAMES:
        activate(name)
        for request in (request for request in requests() if request.adapter == name):
            task = Task(0, request.id, "", request.prompt_ids)
            [found] = engine.generate([task], request.num_samples, request.sampling, NoiseKey(request.seed, 0))
            expected |= {(request.id, index): completion.token_ids for index, completion in enumerate(found)}
        engine.release()  # its graphs were captured with this adapter
    session = GenerationSession(engine, activate)
    assert tokens(run(session, requests())) == expected


@pytest.mark.parametrize("kind", [plain, list, with_stops_and_logprobs], ids=["plain", "top-p", "stops and logprobs"])
@pytest.mark.parametrize("keeps_prefixes", [False, True], ids=["", "prefixes"])
def test_session_with_graphs_equals_one_without(
    kind: Callable[[Sequence[SessionRequest]], list[SessionRequest]], keeps_prefixes: bool
) -> None:
    model, activate = adapted_model()
    engine = NativeEngine(model, TOKENIZER, SETTINGS)
    wanted = [replace(one, prompt_ids=(9, 8, 7, 6, 5, *one.prompt_ids)) for one in kind(requests())]
    expected = run(without_graphs(GenerationSession(engine, activate)), wanted)
    session = GenerationSession(engine, activate, keeps_prefixes=keeps_prefixes)
    for _ in range(2):  # the second time, with all graphs captured and prefixes known
        answers = run(session, wanted)
        assert tokens(answers) == tokens(expected)
        for key, events in answers.items():
            for a, b in zip(events, expected[key], strict=True):
                assert a.finish_reason == b.finish_reason
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
                assert [token for token, _ in a.candidates] == [token for token, _ in b.candidates]
    assert session.driver.graphs is not None, "no capture failed"
    assert (session.counts.num_reused_tokens > 0) == keeps_prefixes


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Operations of torch that wait for the device raise. Waiting for an event is allowed."""
    mode = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [plain, with_stops_and_logprobs], ids=["plain", "stops and logprobs"])
@pytest.mark.parametrize("keeps_prefixes", [False, True], ids=["", "prefixes"])
def test_no_step_synchronises_with_the_device(
    no_sync: None,
    dtype: torch.dtype,
    kind: Callable[[Sequence[SessionRequest]], list[SessionRequest]],
    keeps_prefixes: bool,
) -> None:
    model, activate = adapted_model(dtype)
    session = GenerationSession(NativeEngine(model, TOKENIZER, SETTINGS), activate, keeps_prefixes=keeps_prefixes)
    expected = run(session, kind(requests()))  # captures graphs and compiles kernels, which synchronises
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    answers = run(session, kind(requests()))
    torch.cuda.set_sync_debug_mode("default")
    if dtype == torch.float32:
        assert tokens(answers) == tokens(expected)


def test_a_busy_session_launches_before_it_reads() -> None:
    """A step returns the tokens of the previous one while the device is still busy with what came after those."""
    num_activations = [0]
    model, activate = adapted_model()

    def counting(name: str) -> None:
        num_activations[0] += 1
        activate(name)

    session = GenerationSession(NativeEngine(model, TOKENIZER, SETTINGS), counting)

    def added(name: str) -> None:
        for adapter in NAMES[:2]:
            sampling = Sampling(50, temperature=0.8, ignore_eos=True)
            session.add(SessionRequest(f"{name} {adapter}", (5, 6, 7), sampling, seed=1, adapter=adapter))

    def steps_while_busy(num_steps: int = 5, *, may_wait: bool = False) -> list[int]:
        """Numbers of tokens that the steps return, each launched behind half a second of other work."""
        counts = []
        for _ in range(num_steps):
            torch.cuda._sleep(10**9)
            done = torch.cuda.Event()
            done.record()
            counts.append(len(session.step()))
            assert may_wait or not done.query(), "the step waited for the device"
            torch.cuda.synchronize()
        return counts

    added("warm-up")
    steps_while_busy(3, may_wait=True)  # compiles kernels, captures graphs and allocates memory
    while session.unfinished:
        session.step()
    added("first")
    for _ in range(4):
        session.step()
    assert all(sample.in_flight == 1 for sample in session.driver.scheduler.active)
    before = num_activations[0]
    assert steps_while_busy() == [2] * 5, "all steps decode: the token of each adapter's sample"
    assert num_activations[0] == before, "an adapter is activated to capture a graph, not to replay it"
    added("second")
    assert steps_while_busy() == [2, 4, 4, 4, 4], "the first step computes the prompts beside the other samples"


def test_nan_fails_its_requests_and_the_session_goes_on() -> None:
    model: Any = tiny_model("llama", tie_word_embeddings=False).cuda()
    session = GenerationSession(NativeEngine(model, TOKENIZER, SETTINGS), keeps_prefixes=True)
    wanted = [replace(one, adapter="") for one in requests()[:4]]
    expected = run(session, wanted)
    weight = model.get_output_embeddings().weight
    whole = weight.detach().clone()
    for request in wanted:
        session.add(request)
    for _ in range(3):
        session.step()
    with torch.no_grad():
        weight.fill_(float("nan"))
    failed = []
    while session.unfinished:
        failed += [event.request_id for event in session.step() if isinstance(event, FailureEvent)]
    assert sorted(failed) == sorted({request.id for request in wanted} & set(failed))
    assert failed
    with torch.no_grad():
        weight.copy_(whole)
    assert tokens(run(session, wanted)) == tokens(expected)


def test_a_cancelled_request_leaves_the_others_unchanged() -> None:
    model = tiny_model("llama").cuda()
    session = GenerationSession(NativeEngine(model, TOKENIZER, SETTINGS), keeps_prefixes=True)
    wanted = [replace(one, adapter="") for one in requests()]
    expected = tokens(run(session, wanted))
    answers: Answers = defaultdict(list)
    cancelled: set[str] = set()
    for request in wanted:
        session.add(request)
    for step in range(10**6):
        if not session.unfinished:
            break
        for event in session.step():
            assert isinstance(event, TokenEvent)
            assert event.request_id not in cancelled
            answers[event.request_id, event.sample].append(event)
        if step % 5 == 4 and (active := session.driver.scheduler.active):
            cancelled.add(active[0].group.task.id)
            session.cancel(active[0].group.task.id)
    found = tokens(answers)
    assert 2 < len(cancelled) < 16
    for key, ids in expected.items():
        if key[0] not in cancelled:
            assert found[key] == ids
    assert session.counts.pages_in_use == 0


@pytest.mark.parametrize("num_captured", [0, 2])
def test_failed_capture_loses_no_token(monkeypatch: pytest.MonkeyPatch, num_captured: int) -> None:
    """As by a layer that synchronises with the device."""
    model, activate = adapted_model()
    engine = NativeEngine(model, TOKENIZER, SETTINGS)
    wanted = plain(requests())
    expected = tokens(run(without_graphs(GenerationSession(engine, activate)), wanted))
    draw_plain, num_draws = graphs_module.draw_plain, [0]

    def synchronising(logits: torch.Tensor, *args: Any) -> Any:
        num_draws[0] += 1
        if torch.cuda.is_current_stream_capturing() and num_draws[0] > 2 * num_captured:
            float(logits.sum())
        return draw_plain(logits, *args)

    monkeypatch.setattr(graphs_module, "draw_plain", synchronising)
    session = GenerationSession(engine, activate)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert tokens(run(session, wanted)) == expected
    assert session.driver.graphs is None
