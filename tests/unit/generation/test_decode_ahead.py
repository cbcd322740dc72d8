"""The loop that is one step ahead of the host, on a CPU: recordings are replaced by something that computes again.

What a real recording adds, addresses that stay the same, is tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import LOGPROB_ROUNDING, VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor, nn

import posttrain.generation.native.call as call_module
import posttrain.generation.native.graphs as graphs_module
import posttrain.generation.native.recording as recording_module
from posttrain.generation.native import NativeEngine, NativeSettings
from posttrain.generation.native.attention import PagedDecode
from posttrain.generation.native.kv_cache import GIB, LayerShape, PagedKvCache
from posttrain.generation.native.prefixes import SharedPrefixes
from posttrain.generation.native.recording import Recorder, RecordingError, batch_sizes
from posttrain.generation.native.scheduler import PromptGroup
from posttrain.generation.native.session import GenerationSession
from posttrain.generation.native.session_values import SessionRequest, TokenEvent
from posttrain.types import Completion, NoiseKey, Sampling, Task

TOKENIZER = byte_tokenizer()
KEY = NoiseKey(seed=3, step=5)
# Some answers stop early, others do not.
SAMPLING = Sampling(24, temperature=1.3, stop_token_ids=tuple(range(0, VOCAB_SIZE, 40)))
PAGE_BYTES = 4 * 2 * 2 * 2 * 8 * 4 * 2  # as in test_native_engine.py


class SimulatedRecorder(Recorder):
    """Computes again instead of replaying, into the tensor that the first time returned."""

    def run(self, name: Hashable, compute: Callable[[], Tensor], changes: Tensor | None = None) -> Tensor:
        result = compute()
        kept: dict[Hashable, Tensor] = self.__dict__.setdefault("kept", {})
        return kept.setdefault(name, torch.empty_like(result)).copy_(result)


class FailingRecorder(Recorder):
    def run(self, name: Hashable, compute: Callable[[], Tensor], changes: Tensor | None = None) -> Tensor:
        raise RecordingError("a layer waits for the device")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama")


def make_tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (3, 16, 9, 30, 1)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def ahead(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, recorder: type[Recorder] = SimulatedRecorder, **settings: Any
) -> NativeEngine:
    monkeypatch.setattr(graphs_module, "Recorder", recorder)
    engine = NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, **settings))
    engine._keeps_workspace = engine._may_record = True
    return engine


def assert_same(left: list[list[Completion]], right: list[list[Completion]]) -> None:
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=LOGPROB_ROUNDING)


@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_one_step_ahead_samples_what_step_by_step_samples(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY)
    reasons = {completion.finish_reason for group in expected for completion in group}
    assert reasons == {"stop", "length"}
    engine = ahead(model, monkeypatch, max_batch_size=batch)
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)


@pytest.mark.parametrize("num_pages", [15, 22, 31])
def test_whoever_makes_room_goes_on_where_it_was(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY)
    engine = ahead(model, monkeypatch, kv_cache_gib=num_pages * PAGE_BYTES / GIB)
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)
    assert engine.num_preemptions > 0


def test_the_workspace_stays_for_the_next_call_until_it_is_released(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ahead(model, monkeypatch, max_batch_size=8)
    first = engine.generate(make_tasks(), 4, SAMPLING, KEY)
    workspace = engine._workspace
    assert workspace is not None
    assert engine.num_held_bytes == workspace.cache.num_bytes > 0
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), first)
    assert_same(engine.generate(make_tasks()[:2], 4, SAMPLING, KEY), first[:2])
    assert engine._workspace is workspace
    engine.release()
    assert engine.num_held_bytes == 0
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), first)
    assert engine._workspace is not workspace


def test_a_longer_call_gets_a_larger_workspace(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead(model, monkeypatch, max_batch_size=8)
    engine.generate(make_tasks()[:1], 1, Sampling(2), KEY)
    small = engine._workspace
    long = Sampling(40, ignore_eos=True)
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, long, KEY)
    assert_same(engine.generate(make_tasks(), 4, long, KEY), expected)
    assert engine._workspace is not small


def test_a_model_that_cannot_be_recorded_is_sampled_step_by_step(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 2, SAMPLING, KEY)
    engine = ahead(model, monkeypatch, FailingRecorder)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert_same(engine.generate(make_tasks(), 2, SAMPLING, KEY), expected)
    assert_same(engine.generate(make_tasks(), 2, SAMPLING, KEY), expected)  # and does not try again


def test_a_kept_workspace_knows_nothing_of_the_call_before(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recordings, as for sharded models: the samples of each call are numbered from 0 on, in other pages."""
    engine = ahead(model, monkeypatch)
    engine._may_record = False
    long = Sampling(24, ignore_eos=True)
    engine.generate(make_tasks(), 3, long, KEY)
    workspace = engine._workspace
    for tasks in (make_tasks()[::-1], make_tasks()[2:]):
        expected = NativeEngine(model, TOKENIZER).generate(tasks, 2, long, KEY)
        assert_same(engine.generate(tasks, 2, long, KEY), expected)
    assert engine._workspace is workspace


def test_who_shares_a_prompt_is_forgotten_with_the_recordings(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SharedPrefixes.begin

    def sharing(self: SharedPrefixes, groups: Any, num_samples: int) -> None:
        begin(self, groups, num_samples)
        self.decode.shared = "tiles"

    monkeypatch.setattr(SharedPrefixes, "begin", sharing)
    engine = ahead(model, monkeypatch, FailingRecorder)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        engine.generate(make_tasks(), 2, SAMPLING, KEY)
    assert engine._workspace is not None
    assert isinstance(engine._workspace.decode, PagedDecode)
    assert engine._workspace.decode.shared is None


def test_plans_of_shared_prompts_have_room_for_the_padding_of_a_step(model: nn.Module) -> None:
    rows: list[int] = []
    kernel = SimpleNamespace(
        DecodeShape=lambda *sizes: sizes,
        shared_prefix_pays=lambda *args: True,
        samples_per_tile=lambda *args: 4,
        PrefixTiles=SimpleNamespace(empty=lambda max_rows, samples, **where: rows.append(max_rows)),
    )
    cache = PagedKvCache({0: LayerShape(2, 8, 8, torch.float32)}, 4, 4, torch.device("cpu"))
    decode = PagedDecode(cache, max_rows=100, max_pages_per_row=2, num_heads=4)
    decode.kernel = kernel
    SharedPrefixes(decode).begin([PromptGroup(make_tasks()[3], 4)], 4)
    assert rows == [104] * 3


def test_another_adapter_and_weights_in_another_place_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[Hashable] = set()

    class NamingRecorder(SimulatedRecorder):
        def run(self, name: Hashable, compute: Callable[[], Tensor], changes: Tensor | None = None) -> Tensor:
            names.add(name)
            return super().run(name, compute, changes)

    adapted: Any = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    engine = ahead(adapted, monkeypatch, NamingRecorder)

    def num_recorded() -> int:
        engine.generate(make_tasks()[:2], 2, SAMPLING, KEY)
        return len(names)

    first = num_recorded()
    assert num_recorded() == first
    with adapted.disable_adapter():
        assert num_recorded() == 2 * first
    assert num_recorded() == 2 * first
    moved = next(adapted.parameters())
    prefill = call_module.prefill

    def joining(forward: Any, cache: Any, jobs: Any, max_tokens: int) -> None:
        """As the first pass through layers whose weights are to lie side by side."""
        if jobs and moved.data_ptr() == before:
            moved.data = moved.data.clone()
        prefill(forward, cache, jobs, max_tokens)

    before = moved.data_ptr()
    monkeypatch.setattr(call_module, "prefill", joining)
    assert num_recorded() == 3 * first
    assert num_recorded() == 3 * first, "named after where the weights were when it was recorded"


def test_recordings_that_nobody_asks_for_any_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Hashable] = []

    def record(self: Recorder, compute: Callable[[], Tensor], changes: Tensor | None) -> Any:
        recorded.append(int(compute()))
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), result=compute())

    monkeypatch.setattr(Recorder, "_record", record)
    monkeypatch.setattr(recording_module, "_MAX_RECORDINGS", 3)
    recorder = Recorder(torch.device("cpu"))
    for name in (1, 2, 3, 1, 4, 1, 3, 2):
        assert int(recorder.run(name, lambda name=name: torch.tensor(name))) == name  # type: ignore[misc]
    assert recorded == [1, 2, 3, 4, 2], "2 went for 4, and was asked for again; 1 and 3 stayed"


def test_each_task_may_have_a_limit_of_its_own(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(24, ignore_eos=True)
    whole = NativeEngine(model, TOKENIZER).generate(make_tasks(), 2, sampling, KEY)
    limits = [1, 24, 5, 30, 2]
    for engine in (NativeEngine(model, TOKENIZER), ahead(model, monkeypatch, max_batch_size=4)):
        limited = engine.generate(make_tasks(), 2, sampling, KEY, limits=limits)
        for group, all_of_it, limit in zip(limited, whole, limits, strict=True):
            for short, long in zip(group, all_of_it, strict=True):
                assert short.token_ids == long.token_ids[:limit]


def session_tokens(session: GenerationSession, tasks: list[Task], samplings: list[Sampling]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for task, sampling in zip(tasks, samplings, strict=True):
        session.add(SessionRequest(task.id, task.prompt_ids, sampling, seed=task.draw))
    while session.unfinished:
        for event in session.step():
            assert isinstance(event, TokenEvent)
            tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens


def test_a_session_replays_steps_up_to_the_logits(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [
        SAMPLING,
        Sampling(9, temperature=0.0, ignore_eos=True),
        Sampling(20, top_k=5),
        Sampling(3, top_p=0.7, temperature=0.8),
        Sampling(30, ignore_eos=True),
    ]
    settings = NativeSettings(page_size=4, max_batch_size=3, max_total_tokens=80)
    expected = session_tokens(GenerationSession(NativeEngine(model, TOKENIZER, settings)), make_tasks(), samplings)
    monkeypatch.setattr(graphs_module, "Recorder", SimulatedRecorder)
    session = GenerationSession(NativeEngine(model, TOKENIZER, settings))
    session._decoding.may_record = True
    assert session_tokens(session, make_tasks(), samplings) == expected
    session.add(SessionRequest("lost", make_tasks()[1].prompt_ids, SAMPLING, seed=9))
    session.step()
    session.reset()  # the next requests get the numbers of those that were thrown away
    assert session_tokens(session, make_tasks(), samplings) == expected


def test_sizes_cover_every_batch_and_grow_in_fine_steps_where_rows_cost() -> None:
    for most in (1, 7, 8, 20, 256, 500, 512, 1024):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= most
        assert all(size % 8 == 0 for size in sizes)
    large = batch_sizes(1024)
    assert max(b - a for a, b in pairwise(large)) <= 64
