"""Weights for an engine over CUDA IPC and through pinned memory, and runs with an engine of their own."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ray import local_ray
from tiny_models import tiny_model
from tiny_runs import assert_resumes, command, grpo, results_of, run, same_up_to_rounding, save_data, save_model
from torch import nn

from posttrain.engines import weights
from posttrain.engines.weights import Handover, WeightReceiver, WeightSender, checksum
from posttrain.policy.runtime import enable_expandable_segments

NUM_HANDOVERS = 20
DEADLINE_S = 120.0
ENGINE = ["cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"]


@torch.no_grad()
def changed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter))
    return model


def checksums(model: nn.Module) -> list[int]:
    return [int(checksum(tensor)) for tensor in model.state_dict().values()]


def used_bytes() -> int:
    """By all processes on the GPU."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_weights_arrive_through_pinned_memory_with_the_same_bits(tmp_path: Path) -> None:
    trained, sampled = tiny_model().cuda(), tiny_model().cuda()
    sender, receiver = WeightSender(trained), WeightReceiver(sampled)
    for _ in range(3):
        changed(trained)
        assert receiver.receive([sender.send(Handover(tmp_path.name, tmp_path, on_one_machine=True))])
        assert checksums(sampled) == checksums(trained)
        sender.wait_until_copied()
    sender.remove_file()


def large_model() -> nn.Module:
    """Some 50 MB, so that a copy of it that was not freed shows."""
    return tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, vocab_size=8192).cuda().bfloat16()


def receive_weights(pipe: Connection) -> None:
    """The engine's process: answers with checksums of what it has, and the memory that it holds."""
    enable_expandable_segments()
    receiver = WeightReceiver(large_model())
    pipe.send("ready")
    while pipe.poll(DEADLINE_S):
        asked = pipe.recv()
        if asked is None:
            return
        sent, lot = asked
        why = receiver.open_buckets([sent]) if lot is not None else ""
        is_whole = not why and receiver.receive([sent], lot)
        pipe.send((why, is_whole, checksums(receiver.model) if is_whole else [], torch.cuda.memory_allocated()))


@pytest.fixture
def engine() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_weights, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == "ready"
    yield ours
    ours.send(None)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def ask(engine: Connection, sent: Any, lot: int | None) -> tuple[str, bool, list[int], int]:
    engine.send((sent, lot))
    assert engine.poll(DEADLINE_S), "the engine does not answer"
    answer: tuple[str, bool, list[int], int] = engine.recv()
    return answer


def test_another_process_gets_the_same_bits_over_cuda_ipc_and_memory_stays_flat(
    engine: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, written in the background, has them too. Buckets are shared from a process with expandable segments."""
    monkeypatch.setattr(weights, "BUCKET_BYTES", 16 << 20)
    enable_expandable_segments()
    trained = large_model()
    sender, to = WeightSender(trained), Handover(tmp_path.name, tmp_path, on_one_machine=True)
    held: list[tuple[int, int, int]] = []
    for number in range(NUM_HANDOVERS):
        changed(trained)
        sent = sender.send(to)
        assert len(sent.lots) > 2, sent.why_no_bucket
        for lot in range(len(sent.lots)):
            sender.fill(lot)
            why, is_whole, found, engine_bytes = ask(engine, sent, lot)
            assert not why
            assert is_whole == (lot == len(sent.lots) - 1)
        expected = checksums(trained)
        assert found == expected
        sender.wait_until_copied()
        changed(trained)  # the file keeps what was sent
        if number % 5 == 0:
            _, is_whole, found, _ = ask(engine, sent, None)
            assert is_whole
            assert found == expected, "an engine that is started anew"
        held.append((torch.cuda.memory_allocated(), engine_bytes, used_bytes()))
    sender.remove_file()
    assert held[2][:2] == held[-1][:2], "bytes of tensors on both sides"
    assert abs(held[2][2] - held[-1][2]) < 32 << 20, "of the whole GPU"


# -- whole runs --------------------------------------------------------------------------------------------------------


def assert_same_curves(folder: Path, expected: Path) -> None:
    for ours, theirs in zip(results_of(folder), results_of(expected), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/reward"):
            if key in theirs:
                assert ours[key] == same_up_to_rounding(theirs[key]), f"{key} at step {theirs['step']}"


@pytest.fixture
def two_places_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray counts two GPUs, and leaves it to the actors which one they use: each takes the first."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    with local_ray(num_gpus=2):
        yield


def test_an_engine_in_a_process_of_its_own_makes_the_curves_of_a_colocated_one(
    two_places_on_one_gpu: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")

    def arguments(name: str) -> list[str]:
        half = "policy.generation.native_cfg.gpu_memory_utilization=0.4"
        return [*grpo(model, data, tmp_path / name, steps=4), "policy.device=cuda", half]

    assert run([*arguments("colocated"), "cluster.launcher=local"]) == 0
    assert run([*arguments("dedicated"), *ENGINE]) == 0
    assert "not over CUDA IPC" not in capfd.readouterr().err
    assert_same_curves(tmp_path / "dedicated", tmp_path / "colocated")
    ahead = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=1"]
    assert run([*arguments("ahead"), *ENGINE, *ahead]) == 0


def test_a_run_that_samples_ahead_resumes_with_the_same_bits(two_places_on_one_gpu: None, tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "model", hidden_size=256), save_data(tmp_path / "data")
    whole = tmp_path / "whole"

    def arguments(folder: Path) -> list[str]:
        words = ["policy.device=cuda", "policy.precision=bfloat16", "policy.deterministic=true", *ENGINE]
        words += ["policy.generation.native_cfg.gpu_memory_utilization=0.4", "grpo.async_grpo.enabled=true"]
        return [*grpo(model, data, folder, steps=4), *words]

    assert run(arguments(whole)) == 0
    assert max(row.get("train/trajectory_age_max", 0) for row in results_of(whole)) == 1
    assert_resumes(arguments, whole, tmp_path / "resumed", 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpu_that_only_samples_makes_the_curves_of_one(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    for name, words in (("one", []), ("two", ENGINE)):
        arguments = [*grpo(model, data, tmp_path / name, steps=4), "policy.device=cuda", *words]
        ended = subprocess.run(command(arguments), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert "not over CUDA IPC" not in ended.stderr
    assert_same_curves(tmp_path / "two", tmp_path / "one")
