"""The driver one step ahead of the host, on a CPU: CUDA graphs are simulated by computing again.

What a captured graph adds, fixed addresses, is tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import LOGPROB_ROUNDING, VOCAB_SIZE, byte_tokenizer, tiny_model
from torch import Tensor, nn

import posttrain.engines.native.cuda_graph_cache as cache_module
import posttrain.engines.native.driver as driver_module
import posttrain.engines.native.graphs as graphs_module
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.attention import PagedDecode
from posttrain.engines.native.cuda_graph_cache import CudaGraphCache, GraphCaptureError, batch_sizes
from posttrain.engines.native.graphs import SharedPrefixes
from posttrain.engines.native.kv_cache import GIB, LayerShape, PagedKvCache
from posttrain.engines.native.scheduler import PromptGroup
from posttrain.engines.native.session import GenerationSession
from posttrain.types import Completion, NoiseKey, Sampling, Task

TOKENIZER = byte_tokenizer()
KEY = NoiseKey(seed=3, step=5)
# Some answers stop early, others do not.
SAMPLING = Sampling(24, temperature=1.3, stop_token_ids=tuple(range(0, VOCAB_SIZE, 40)))
# A page of 4 tokens of the tiny model: 2 layers, keys and values, 2 heads of 8, fp32, the dense copy as well.
PAGE_BYTES = 4 * 2 * 2 * 2 * 8 * 4 * 2


class SimulatedGraphs(CudaGraphCache):
    """Computes again instead of replaying, into the tensor that the first time returned, after a warm-up."""

    def run(
        self, key: Hashable, compute: Callable[[], Tensor], changes: Tensor | None = None, in_warm_up: Any = None
    ) -> Tensor:
        kept: dict[Hashable, Tensor] = self.__dict__.setdefault("kept", {})
        if key not in kept and changes is not None:
            before = changes.clone()
            if in_warm_up is not None:
                in_warm_up()
            compute()
            changes.copy_(before)
        result = compute()
        return kept.setdefault(key, torch.empty_like(result)).copy_(result)


class FailingGraphs(CudaGraphCache):
    def run(self, key: Hashable, compute: Callable[[], Tensor], *options: Any, **more: Any) -> Tensor:
        raise GraphCaptureError("a layer synchronises with the device")


def make_tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (3, 16, 9, 30, 1)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def ahead(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, graphs: type[CudaGraphCache] = SimulatedGraphs, **settings: Any
) -> NativeEngine:
    monkeypatch.setattr(graphs_module, "CudaGraphCache", graphs)
    engine = NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, **settings))
    engine._keeps_workspace = engine._use_graphs = True
    return engine


def simulate_graphs(monkeypatch: pytest.MonkeyPatch, graphs: type[CudaGraphCache] = SimulatedGraphs) -> None:
    """Sessions that are made from now on decode as on a GPU."""
    monkeypatch.setattr(graphs_module, "CudaGraphCache", graphs)
    allocate = GenerationSession._allocate

    def allocating(self: GenerationSession) -> None:
        allocate(self)
        self._graphs = self._new_graphs()

    monkeypatch.setattr(GenerationSession, "_allocate", allocating)


def assert_same(left: list[list[Completion]], right: list[list[Completion]]) -> None:
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=LOGPROB_ROUNDING)


@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_running_ahead_equals_running_in_step(model: nn.Module, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY)
    reasons = {completion.finish_reason for group in expected for completion in group}
    assert reasons == {"stop", "length"}
    engine = ahead(model, monkeypatch, max_batch_size=batch)
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "falcon-h1"])
def test_states_of_recurrent_layers_advance_once_a_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the warm-up of a graph, and not in rows for padding. With few pages samples are preempted and start
    again, and prompts of more tokens than a row are computed in parts."""
    model = tiny_model(family)
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY)
    engine = ahead(model, monkeypatch, max_batch_size=7, max_prefill_tokens=8)
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)
    page_bytes = 4 * sum(shape.bytes_per_token for shape in engine.forward.shapes().layers.values())
    for few in (
        ahead(model, monkeypatch, kv_cache_gib=40 * page_bytes / GIB),
        NativeEngine(model, TOKENIZER, NativeSettings(page_size=4, kv_cache_gib=80 * page_bytes / GIB)),
    ):
        assert_same(few.generate(make_tasks(), 4, SAMPLING, KEY), expected)
        assert few.num_preemptions > 0


@pytest.mark.parametrize("num_pages", [15, 22, 31])
def test_preempted_samples_continue_where_they_were(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, SAMPLING, KEY)
    engine = ahead(model, monkeypatch, kv_cache_gib=num_pages * PAGE_BYTES / GIB)
    assert_same(engine.generate(make_tasks(), 4, SAMPLING, KEY), expected)
    assert engine.num_preemptions > 0


def test_workspace_is_kept_until_released(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_longer_call_gets_larger_workspace(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead(model, monkeypatch, max_batch_size=8)
    engine.generate(make_tasks()[:1], 1, Sampling(2), KEY)
    small = engine._workspace
    long = Sampling(40, ignore_eos=True)
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, long, KEY)
    assert_same(engine.generate(make_tasks(), 4, long, KEY), expected)
    assert engine._workspace is not small


def test_model_that_cannot_be_captured_is_sampled_without_graphs(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = NativeEngine(model, TOKENIZER).generate(make_tasks(), 2, SAMPLING, KEY)
    engine = ahead(model, monkeypatch, FailingGraphs)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert_same(engine.generate(make_tasks(), 2, SAMPLING, KEY), expected)
    assert_same(engine.generate(make_tasks(), 2, SAMPLING, KEY), expected)  # and does not try again


def test_kept_workspace_does_not_leak_the_previous_call(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs, as for sharded models: the samples of each call are numbered from 0 on, in other pages."""
    engine = ahead(model, monkeypatch)
    engine._use_graphs = False
    long = Sampling(24, ignore_eos=True)
    engine.generate(make_tasks(), 3, long, KEY)
    workspace = engine._workspace
    for tasks in (make_tasks()[::-1], make_tasks()[2:]):
        expected = NativeEngine(model, TOKENIZER).generate(tasks, 2, long, KEY)
        assert_same(engine.generate(tasks, 2, long, KEY), expected)
    assert engine._workspace is workspace


def test_failed_capture_stops_prefix_sharing(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SharedPrefixes.begin

    def sharing(self: SharedPrefixes, groups: Any, num_samples: int) -> None:
        begin(self, groups, num_samples)
        self.decode.shared = "tiles"

    monkeypatch.setattr(SharedPrefixes, "begin", sharing)
    engine = ahead(model, monkeypatch, FailingGraphs)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        engine.generate(make_tasks(), 2, SAMPLING, KEY)
    assert engine._workspace is not None
    assert isinstance(engine._workspace.decode, PagedDecode)
    assert engine._workspace.decode.shared is None


def test_prefix_tiles_have_room_for_padding_rows(model: nn.Module) -> None:
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


def test_adapter_switch_and_moved_weights_capture_new_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: set[Hashable] = set()

    class KeepingKeys(SimulatedGraphs):
        def run(self, key: Hashable, compute: Callable[[], Tensor], *options: Any, **more: Any) -> Tensor:
            keys.add(key)
            return super().run(key, compute, *options, **more)

    adapted: Any = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    engine = ahead(adapted, monkeypatch, KeepingKeys)

    def num_captured() -> int:
        engine.generate(make_tasks()[:2], 2, SAMPLING, KEY)
        return len(keys)

    first = num_captured()
    assert num_captured() == first
    with adapted.disable_adapter():
        assert num_captured() == 2 * first
    assert num_captured() == 2 * first
    moved = next(adapted.parameters())
    prefill = driver_module.prefill

    def joining(forward: Any, cache: Any, jobs: Any, max_tokens: int) -> None:
        """As the first pass through layers whose weights are joined."""
        if jobs and moved.data_ptr() == before:
            moved.data = moved.data.clone()
        prefill(forward, cache, jobs, max_tokens)

    before = moved.data_ptr()
    monkeypatch.setattr(driver_module, "prefill", joining)
    assert num_captured() == 3 * first
    assert num_captured() == 3 * first, "the key contains the addresses at capture"


def test_least_recently_used_graph_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Hashable] = []

    def capture(self: CudaGraphCache, compute: Callable[[], Tensor], *_: Any) -> Any:
        captured.append(int(compute()))
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), result=compute())

    monkeypatch.setattr(CudaGraphCache, "_capture", capture)
    monkeypatch.setattr(cache_module, "_MAX_GRAPHS", 3)
    graphs = CudaGraphCache(torch.device("cpu"))
    for key in (1, 2, 3, 1, 4, 1, 3, 2):
        assert int(graphs.run(key, lambda key=key: torch.tensor(key))) == key  # type: ignore[misc]
    assert captured == [1, 2, 3, 4, 2], "2 was evicted for 4 and captured again; 1 and 3 stayed"


def test_each_task_may_have_its_own_limit(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(24, ignore_eos=True)
    whole = NativeEngine(model, TOKENIZER).generate(make_tasks(), 2, sampling, KEY)
    limits = [1, 24, 5, 30, 2]
    tasks = [replace(task, max_new_tokens=limit) for task, limit in zip(make_tasks(), limits, strict=True)]
    for engine in (NativeEngine(model, TOKENIZER), ahead(model, monkeypatch, max_batch_size=4)):
        limited = engine.generate(tasks, 2, sampling, KEY)
        for group, all_of_it, limit in zip(limited, whole, limits, strict=True):
            for short, long in zip(group, all_of_it, strict=True):
                assert short.token_ids == long.token_ids[:limit]


def test_progress_of_completions_of_one_token(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    engine = ahead(model, monkeypatch, max_batch_size=4)
    found = engine.generate(make_tasks(), 4, Sampling(1), KEY, received.append)
    assert_same(found, NativeEngine(model, TOKENIZER).generate(make_tasks(), 4, Sampling(1), KEY))
    assert sum(received) == 20
    assert len(received) >= 5, "one call per batch, not one at the end"


def test_batch_sizes_cover_every_batch_in_fine_steps() -> None:
    for most in (1, 7, 8, 20, 256, 500, 512, 1024):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= most
        assert all(size % 8 == 0 for size in sizes)
    large = batch_sizes(1024)
    assert max(b - a for a, b in pairwise(large)) <= 80
