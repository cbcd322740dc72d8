"""What is said when memory, network or a machine fails: errors in the words of torch, NCCL, gloo, Ray."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from test_workers import failed
from tiny_runs import grpo, run, save_data, save_model
from torch import distributed as dist

from posttrain.engines.native import NativeEngine
from posttrain.engines.vllm.process import VllmError
from posttrain.errors import HardwareError, OutOfGpuMemoryError
from posttrain.orchestration.failures import Where, WorkerDiedError, explain, first_cause
from posttrain.orchestration.workers import LocalWorker, gather

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 310.88 MiB is "
    "free. Including non-PyTorch memory, this process has 78.78 GiB memory in use. Of the allocated memory 77.01 GiB "
    "is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated."
)
WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)
ABORTED = "NCCL communicator was aborted on rank 3."
REMOTE_GONE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.27.3"
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:51022"
RENDEZVOUS = "The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 41235)."
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried 4096 bytes."
KILLED = (
    "The actor died unexpectedly before finishing this task. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The "
    "process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The "
    "worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
NODE_GONE = (
    "The actor died because its node has died. Node Id: 5f7d. the actor's node was terminated expectedly: SIGTERM"
)
RAY_MEMORY = "Task was killed due to the node running low on memory. Memory on the node was 120.1GB / 126.0GB (0.953)"


def said_of(error: Exception, operation: str = "update") -> str:
    known = explain(error, Where(1, 4, operation, 12.3))
    assert known is not None
    return str(known)


def test_out_of_gpu_memory_names_rank_stage_amounts_and_remedy() -> None:
    error = explain(torch.OutOfMemoryError(CUDA), Where(1, 4, "generate", 12.3))
    assert isinstance(error, OutOfGpuMemoryError)
    for fact in ("rank 1 of 4", "(generate), 12 s", "2.50 GiB", "79.10 GiB", "310.88 MiB", "gpu_memory_utilization"):
        assert fact in str(error)
    assert (error.stage, error.gpu_bytes) == ("generate", int(79.10 * 2**30))


SHARED = CUDA + " Process 11 has 40.00 GiB memory in use. Process 12 has 38.00 GiB memory in use."


@pytest.mark.parametrize(
    ("error", "operation", "words"),
    [
        (torch.OutOfMemoryError(CUDA), "update", "policy.dtensor_cfg.activation_checkpointing=true"),
        (torch.OutOfMemoryError(CUDA), "logprobs", "policy.logprob_batch_size"),
        (torch.OutOfMemoryError(CUDA), "evaluate", "policy.logprob_batch_size"),
        (torch.OutOfMemoryError(CUDA), "build", "policy.dtensor_cfg.lora_cfg.enabled=true"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "update", "ran out of GPU memory"),
        (torch.OutOfMemoryError(SHARED), "update", "nvidia-smi"),  # several processes
    ],
)
def test_the_remedy_for_gpu_memory_depends_on_stage_and_words(error: Exception, operation: str, words: str) -> None:
    assert words in said_of(error, operation)


@pytest.mark.parametrize("error", [RuntimeError(ALLOCATOR), MemoryError()])
def test_memory_of_the_machine_is_told_apart_from_that_of_the_gpu(error: Exception) -> None:
    known = explain(error, Where(0, 2, "save", 3.0))
    assert known is not None
    assert not isinstance(known, OutOfGpuMemoryError)
    assert str(known).startswith("rank 0 of 2 ran out of the machine's memory during saving (save)")
    assert "cluster.gpus_per_node" in str(known)


@pytest.mark.parametrize("error", [dist.DistBackendError(WATCHDOG), RuntimeError(WATCHDOG)])
def test_an_nccl_time_out_says_which_variables_raise_it(error: Exception) -> None:
    said = said_of(error)
    variables = ("NCCL_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "FI_PROVIDER=efa", "NCCL_SOCKET_IFNAME")
    for words in ("rank 1 of 4", "(update), 12 s", *variables):
        assert words in said


@pytest.mark.parametrize(
    "error",
    [RuntimeError(ABORTED), dist.DistBackendError(REMOTE_GONE), RuntimeError(GLOO)],
    ids=["abort", "nccl", "gloo"],
)
def test_a_lost_connection_is_not_called_a_time_out(error: Exception) -> None:
    said = said_of(error)
    assert "lost its connection to the other ranks" in said
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" not in said


def test_ranks_that_cannot_connect_at_the_start_have_their_own_message() -> None:
    said = said_of(dist.DistNetworkError(RENDEZVOUS), "build")
    assert "could not connect to the other ranks during start-up (build)" in said
    assert "(10.0.0.1, 41235)" in said
    assert "every node must reach every other" in said


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (KILLED, "dmesg"),
        (NODE_GONE, "its node left the cluster"),
        (RAY_MEMORY, "its machine ran out of memory"),
        ("System error: No module named 'posttrain'", "its node lacks posttrain, or has another version of it"),
    ],
    ids=["killed", "node", "memory", "module"],
)
def test_the_end_of_a_ranks_process_is_explained(text: str, cause: str) -> None:
    said = said_of(WorkerDiedError(text))
    assert said.startswith("rank 1 died during training (update), 12 s after the call: ")
    assert cause in said
    assert "The same command continues from what was saved" in said


def test_errors_of_other_kinds_stay_as_they_are() -> None:
    where = Where(0, 1, "update", 0.0)
    assert explain(ZeroDivisionError("division by zero"), where) is None
    assert explain(RuntimeError("shape mismatch"), where) is None
    assert explain(KeyError("NCCL"), where) is None


def test_the_rank_that_ran_out_of_memory_is_named_and_not_those_that_lost_it() -> None:
    pending = [failed(RuntimeError(GLOO)), failed(torch.OutOfMemoryError(CUDA)), failed(dist.DistBackendError(ABORTED))]
    with pytest.raises(OutOfGpuMemoryError, match=r"rank 1 of 3 ran out of GPU memory") as caught:
        gather("update", pending)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_rank_in_this_process_is_explained_too() -> None:
    with pytest.raises(HardwareError, match=r"rank 0 of 1 ran out of GPU memory during start-up"):
        LocalWorker.start(Mock(side_effect=torch.OutOfMemoryError(CUDA)))


def test_a_run_that_runs_out_of_memory_ends_with_the_planners_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(NativeEngine, "generate", Mock(side_effect=torch.OutOfMemoryError(CUDA)))
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    # Rows of drafts are most of what so small a model needs.
    no_drafts = "policy.generation.native_cfg.num_speculative_tokens=0"
    assert run([*grpo(model, data, tmp_path / "run", steps=1), no_drafts]) == 1
    shown = capsys.readouterr().err
    last = shown[shown.index("posttrain: error: ") :]
    assert last.startswith("posttrain: error: rank 0 of 1 ran out of GPU memory during sampling (generate)")
    assert "the planner counts, in GiB of 79.1: sampling" in last
    assert "try policy.generation.native_cfg.max_batch_size=128" in last
    assert "Traceback" in shown[: shown.index(last)], "where it happened is shown before"


@pytest.mark.parametrize("line", ["INFO vLLM is using nccl==2.27.5", "torch.OutOfMemoryError: CUDA out of memory."])
def test_an_error_that_is_in_words_already_stays_as_it_is(line: str) -> None:
    """The message of a vLLM that ended quotes its log, which says more than its end was due to."""
    ended = VllmError(f"vLLM (process 7) ended during `generate`, exit code 1. The end of its log:\n    {line}")
    assert explain(ended, Where(0, 2, "generate", 3.0)) is None
    lost = RuntimeError("Connection closed by peer")
    assert first_cause({0: lost, 1: ended}) == 1, "the other rank fails with it"
