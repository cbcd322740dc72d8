"""Checkpoints in the background and optimizer state in fewer bits, on a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor, nn

from posttrain.policy import host_memory
from posttrain.policy.checkpoint import files
from posttrain.policy.checkpoint.writer import CheckpointWriter
from posttrain.policy.optimizer.compact import CompactOptimizer
from posttrain.policy.optimizer.compact_adam import StateFormat, new_state, update_slice
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer
from posttrain.policy.runtime import enable_expandable_segments

CUDA = torch.device("cuda", 0)
ADAMW = ("torch.optim.AdamW", {"lr": 1e-2, "weight_decay": 0.1})


def build(form: StateFormat | None, **sizes: Any) -> tuple[nn.Module, MixedPrecisionOptimizer, CheckpointWriter]:
    model = tiny_model("llama", dtype=torch.bfloat16, **sizes).to(CUDA)
    optimizer: MixedPrecisionOptimizer
    if form is None:
        optimizer = MixedPrecisionOptimizer(model, *ADAMW, None)
    else:
        optimizer = CompactOptimizer(model, *ADAMW, None, form, 0)
    writer = CheckpointWriter(model, byte_tokenizer(), optimizer, CUDA)
    optimizer.before_change = writer.wait_until_copied
    return model, optimizer, writer


def update(model: nn.Module, optimizer: MixedPrecisionOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(CUDA, parameter.dtype)
    optimizer.collect_gradients()
    optimizer.step(1.0)


def everything(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """Copies: some of the state is in host memory already."""
    weights = {f"weight/{name}": p.detach().cpu() for name, p in model.named_parameters()}
    return {**weights, **{key: tensor.cpu().clone() for key, tensor in optimizer.state_tensors().items()}}


def assert_nearly_all_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Up to the last bit of fp32, which compilers round differently: it may tip a rounding by chance in rare places."""
    for key, tensor in ours.items():
        near = torch.isclose(tensor.float(), theirs[key].float(), rtol=1e-4, atol=1e-6)
        assert near.float().mean() > 0.999, f"{key}: {near.float().mean():.5f} are equal"


def test_expandable_segments_are_enabled() -> None:
    enable_expandable_segments()
    torch.cuda.empty_cache()  # an ordinary block that is free would be taken again
    # More than tests before this one may have left between tensors of theirs that live on.
    held = torch.empty(8 * 2**30, dtype=torch.uint8, device=CUDA)
    place = held.data_ptr()
    segments = [s for s in torch.cuda.memory_snapshot() if s["address"] <= place < s["address"] + s["total_size"]]
    assert [segment["is_expandable"] for segment in segments] == [True]


def test_host_memory_is_pinned() -> None:
    buffer = host_memory.allocate(8 * 2**20)
    assert host_memory.register(buffer)
    assert buffer.is_pinned()
    assert host_memory.pinned_like([torch.empty(1000)])[0].is_pinned()


@pytest.mark.parametrize("form", [None, StateFormat("int8", masters=False), StateFormat(offload=True)])
def test_files_hold_the_state_at_the_beginning_of_the_save(form: StateFormat | None, tmp_path: Path) -> None:
    model, optimizer, writer = build(form, hidden_size=512, intermediate_size=1024, head_dim=128)
    update(model, optimizer, 0)
    for step in range(3):  # the memory is used again
        then, folder = everything(model, optimizer), tmp_path / str(step)
        writer.begin(folder, optimizer=True)
        thread = threading.Thread(target=writer.write)
        thread.start()
        update(model, optimizer, step + 1)
        thread.join()
        again_model, again_optimizer, _ = build(form, hidden_size=512, intermediate_size=1024, head_dim=128)
        files.load(folder, again_model, byte_tokenizer(), again_optimizer)
        found = everything(again_model, again_optimizer)
        assert found.keys() == then.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, then[key]), key


def test_a_cuda_graph_can_be_captured_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    model, optimizer, writer = build(None, hidden_size=512, intermediate_size=1024, head_dim=128)
    update(model, optimizer, 0)
    x = torch.randn(64, 64, device=CUDA)
    x @ x
    torch.cuda.synchronize()
    for number in range(3):
        writer.begin(tmp_path / str(number), optimizer=True)
        thread = threading.Thread(target=writer.write)
        thread.start()
        while thread.is_alive():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x @ x
            graph.replay()
        thread.join()
        torch.testing.assert_close(y, x @ x)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("masters", [True, False])
def test_state_in_host_memory_gives_the_numbers_of_state_on_the_device(
    moments: Any, masters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.policy.optimizer.compact_adam._SLICE", 20_000)  # many slices under way at a time
    results = []
    for offload in (False, True):
        model, optimizer, _ = (
            build(StateFormat(moments, masters, offload), hidden_size=256, intermediate_size=512, head_dim=64)
            if not StateFormat(moments, masters, offload).is_plain
            else build(None, hidden_size=256, intermediate_size=512, head_dim=64)
        )
        for step in range(5):
            update(model, optimizer, step)
        results.append(everything(model, optimizer))
    assert results[0].keys() == results[1].keys()
    if moments == "float32" and masters:  # torch's own against ours
        for key, tensor in results[0].items():
            torch.testing.assert_close(
                results[1][key], tensor, rtol=1e-2 if tensor.dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )
    else:
        for key, tensor in results[0].items():
            assert torch.equal(results[1][key], tensor), key


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("masters", [True, False])
def test_the_kernel_is_the_update(moments: Any, masters: bool) -> None:
    form = StateFormat(moments, masters)
    if form.is_plain:
        pytest.skip("torch's own optimizer")
    ours, our_optimizer, _ = build(form, hidden_size=256, intermediate_size=512, head_dim=64)
    plain, plain_optimizer, _ = build(form, hidden_size=256, intermediate_size=512, head_dim=64)
    assert isinstance(plain_optimizer, CompactOptimizer)
    plain_optimizer.optimizer._compute = update_slice
    for step in range(3):
        update(ours, our_optimizer, step)
        update(plain, plain_optimizer, step)
    assert isinstance(our_optimizer, CompactOptimizer)
    assert our_optimizer.optimizer._compute is not update_slice
    assert_nearly_all_equal(everything(ours, our_optimizer), everything(plain, plain_optimizer))


def _requested_bytes() -> int:
    """Not what is allocated: that may be a whole block of which a part would do."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def test_state_takes_the_documented_memory_on_the_device() -> None:
    weight = torch.zeros(1024, 4096, dtype=torch.bfloat16, device=CUDA)
    before = _requested_bytes()
    state = new_state(weight, StateFormat("int8", masters=False))
    assert _requested_bytes() - before == pytest.approx((2 + 8 / 256) * weight.numel(), rel=0.01)
    assert all(tensor.is_cuda for tensor in state.values())
