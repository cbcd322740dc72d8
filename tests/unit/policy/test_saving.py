"""One rank's checkpoint: weight files for everybody, host copies, and saving in two halves during training."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.policy import host_memory
from posttrain.policy.checkpoint import background_copy, files
from posttrain.policy.checkpoint import writer as writer_module
from posttrain.policy.checkpoint.background_copy import HostCopy, StagingArea
from posttrain.policy.checkpoint.writer import CheckpointWriter
from posttrain.policy.optimizer.compact import CompactOptimizer
from posttrain.policy.optimizer.compact_adam import StateFormat
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer

CPU = torch.device("cpu")
ADAMW = ("torch.optim.AdamW", {"lr": 1e-2})


# -- weight files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "qwen3"])
@pytest.mark.parametrize("max_bytes", [10**9, 20_000], ids=["one file", "several"])
def test_transformers_loads_what_was_written(
    family: str, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAX_FILE_BYTES", max_bytes)
    model = tiny_model(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    writer = CheckpointWriter(model, byte_tokenizer(), None, CPU)
    writer.save(tmp_path / "ours", optimizer=False)
    folder = tmp_path / "ours" / files.WEIGHTS
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if max_bytes > 10**6:
        assert names == ["model.safetensors"]
    else:
        assert len(names) > 1
        assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(names)
        assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    ours = AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert ours.dtype == torch.bfloat16
    assert ours.config.to_dict().items() >= {"model_type": model.config.model_type}.items()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_unsaveable_generation_config_does_not_break_checkpointing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.temperature = 0.6  # without do_sample, as many models have it
    with pytest.raises(ValueError, match="do_sample"):
        model.save_pretrained(tmp_path / "theirs")
    CheckpointWriter(model, byte_tokenizer(), None, CPU).save(tmp_path / "ours", optimizer=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / files.WEIGHTS)
    assert (loaded.generation_config.temperature, loaded.generation_config.do_sample) == (0.6, None)


def test_families_stored_with_other_tensors_are_saved_by_transformers(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **heads))
    assert files.is_stored_otherwise(model, files.named_weights(model))
    CheckpointWriter(model, byte_tokenizer(), None, CPU).save(tmp_path, optimizer=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / files.WEIGHTS)
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


# -- host memory -------------------------------------------------------------------------------------------------------


def test_host_memory_has_the_requested_shapes() -> None:
    like = [torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(()), torch.empty(0, 4), torch.empty(7).to(torch.int8)]
    for view, tensor in zip(host_memory.pinned_like(like), like, strict=True):
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert not view.any()
        view.fill_(1)
        assert view.float().sum() == tensor.numel()


def test_tensors_are_copied_into_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_copy, "_SEGMENT_BYTES", 100)  # several pieces of memory
    tensors = {f"t{i}": torch.randn(i + 1, 5) for i in range(6)}
    area = StagingArea(pin=False)
    addresses = []
    for scale in (1.0, 2.0):
        places = area.views(tensors)
        copy = HostCopy(CPU)
        for key, tensor in tensors.items():
            copy.add(places[key], tensor * scale)
        copy.seal()
        copy.finish()
        copy.wait()
        assert all(torch.equal(places[key], tensor * scale) for key, tensor in tensors.items())
        addresses.append([place.data_ptr() for place in places.values()])
    assert addresses[0] == addresses[1]
    assert area.is_made_for(tensors)
    assert not area.is_made_for({**tensors, "another": torch.zeros(1)})
    assert StagingArea.num_bytes(tensors) == 4 * 5 * 21


def test_a_copy_that_never_arrives_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of the device nothing moves any more; those who wait must not wait for ever."""
    monkeypatch.setattr(background_copy, "_LONGEST_COPY_S", 0.05)
    copy = HostCopy(CPU)
    copy._mark = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="did not arrive in host memory"):
        copy.finish()
    copy.wait()


def test_memory_is_allocated_ahead_of_time() -> None:
    tensors = {"a": torch.zeros(1000)}
    area = StagingArea(pin=False)
    assert not area.prepare(tensors), "that happens in another thread"
    for _ in range(1000):
        if area.prepare(tensors):
            break
        threading.Event().wait(0.005)
    assert area.prepare(tensors)


def test_memory_is_reallocated_once_the_optimizer_has_state() -> None:
    area = StagingArea(pin=False)
    area.prepare({"a": torch.zeros(1000)})  # a first step without an update
    more = {"a": torch.zeros(1000), "state": torch.zeros(2000)}
    area.prepare(more)
    assert {key: view.shape for key, view in area.views(more).items()} == {"a": (1000,), "state": (2000,)}


def test_failed_allocation_is_raised_by_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "allocate", Mock(side_effect=OSError("Cannot allocate memory")))
    with pytest.raises(OSError, match="Cannot allocate"):
        StagingArea(pin=False).views({"a": torch.zeros(1000)})


# -- two halves --------------------------------------------------------------------------------------------------------


def build(kind: str) -> tuple[PreTrainedModel, MixedPrecisionOptimizer, CheckpointWriter]:
    model = tiny_model("llama-tied", dtype=torch.float32 if kind == "fp32" else torch.bfloat16)
    optimizer: MixedPrecisionOptimizer
    if kind == "int8":
        optimizer = CompactOptimizer(model, *ADAMW, None, StateFormat("int8", masters=False, offload=True), 0)
    else:
        optimizer = MixedPrecisionOptimizer(model, *ADAMW, None)
    writer = CheckpointWriter(model, byte_tokenizer(), optimizer, CPU)
    optimizer.before_change = writer.wait_until_copied
    return model, optimizer, writer


def update(model: nn.Module, optimizer: MixedPrecisionOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.collect_gradients()
    optimizer.step(None)
    optimizer.end_step()


def everything(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    weights = {f"weight/{name}": p.detach().clone() for name, p in model.named_parameters()}
    return {**weights, **{key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}}


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_files_hold_the_state_at_the_beginning_of_the_save(kind: str, tmp_path: Path) -> None:
    model, optimizer, writer = build(kind)
    update(model, optimizer, 0)
    at_once, then = tmp_path / "at_once", everything(model, optimizer)
    writer.save(at_once, optimizer=True)
    assert writer.obstacle(optimizer=True) == ""
    writer.begin(tmp_path / "later", optimizer=True)
    thread = threading.Thread(target=writer.write)
    thread.start()
    update(model, optimizer, 1)
    thread.join()
    moved = everything(model, optimizer)
    assert all(not torch.equal(moved[key], then[key]) for key in then if key.endswith(("weight", "exp_avg")))

    for folder in (at_once, tmp_path / "later"):
        again_model, again_optimizer, _ = build(kind)
        files.load(folder, again_model, byte_tokenizer(), again_optimizer)
        found = everything(again_model, again_optimizer)
        assert found.keys() == then.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, then[key]), key
    names = {path.relative_to(at_once) for path in at_once.rglob("*")}
    assert {path.relative_to(tmp_path / "later") for path in (tmp_path / "later").rglob("*")} == names


def test_background_thread_does_not_read_tensors_from_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for its state, a sharded model gives up the whole parameters that somebody may be sampling with."""
    model, optimizer, writer = build("bf16")
    update(model, optimizer, 0)
    writer.begin(tmp_path, optimizer=True)

    for name in ("state_dict", "named_parameters", "parameters"):
        monkeypatch.setattr(model, name, Mock(side_effect=AssertionError("asked for the model's tensors")))
    writer.write()
    assert (tmp_path / files.WEIGHTS / "model.safetensors").exists()


def test_an_update_waits_for_the_copy_and_reports_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, writer = build("bf16")
    update(model, optimizer, 0)
    before = everything(model, optimizer)
    may_copy, is_waiting, finish, wait = threading.Event(), threading.Event(), HostCopy.finish, HostCopy.wait

    def wait_visibly(copy: HostCopy) -> None:
        is_waiting.set()
        wait(copy)

    monkeypatch.setattr(HostCopy, "finish", lambda copy: may_copy.wait(60) and finish(copy))
    monkeypatch.setattr(HostCopy, "wait", wait_visibly)
    writer.begin(tmp_path, optimizer=True)
    threading.Thread(target=writer.write).start()
    updating = threading.Thread(target=update, args=(model, optimizer, 1))
    updating.start()
    assert is_waiting.wait(60)
    updating.join(0.1)
    assert updating.is_alive()
    assert all(torch.equal(tensor, before[key]) for key, tensor in everything(model, optimizer).items())
    may_copy.set()
    updating.join(60)
    assert not updating.is_alive()
    assert not torch.equal(everything(model, optimizer)["weight/model.norm.weight"], before["weight/model.norm.weight"])
    assert writer.take_waited_s() >= 0.1
    assert writer.take_waited_s() == 0


def test_what_a_copy_used_is_not_freed_by_the_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory is given back by a call to CUDA, which would spoil a graph that another thread records."""
    freed_by: list[str] = []

    class Watched(HostCopy):
        def __del__(self) -> None:
            freed_by.append(threading.current_thread().name)

    monkeypatch.setattr(writer_module, "HostCopy", Watched)
    _, _, writer = build("plain")
    for number in range(2):
        writer.begin(tmp_path / str(number), optimizer=False)
        thread = threading.Thread(target=writer.write, name="writes")
        thread.start()
        thread.join()
    assert freed_by == ["MainThread"]


def test_an_error_while_writing_does_not_keep_updates_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, writer = build("bf16")
    update(model, optimizer, 0)
    monkeypatch.setattr(files, "write", Mock(side_effect=OSError("no space left on device")))
    writer.begin(tmp_path, optimizer=True)
    with pytest.raises(OSError, match="no space"):
        writer.write()
    update(model, optimizer, 1)
    writer.begin(tmp_path, optimizer=True)  # and another save can be begun


def test_too_little_memory_is_an_obstacle_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, writer = build("bf16")
    update(model, optimizer, 0)
    monkeypatch.setattr("posttrain.policy.checkpoint.writer.available_bytes", lambda: 1000)
    assert "GiB of host memory, of which 0.0 are free" in writer.obstacle(optimizer=True)
    monkeypatch.undo()
    while not writer.prepare(optimizer=True):
        pass
    monkeypatch.setattr("posttrain.policy.checkpoint.writer.available_bytes", lambda: 1000)
    assert writer.obstacle(optimizer=True) == "", "what has been taken is there"


def test_adapters_are_saved_without_the_model_under_them(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_model("llama")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    nn.init.ones_(next(p for name, p in model.named_parameters() if "lora_B" in name))
    writer = CheckpointWriter(model, byte_tokenizer(), None, CPU)
    assert StagingArea.num_bytes(writer._to_stage(writer._contents(optimizer=False))) < 10_000
    writer.begin(tmp_path, optimizer=False)
    writer.write()
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / files.WEIGHTS)
    for (name, a), (_, b) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
