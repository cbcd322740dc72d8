"""Classifies errors of ranks (out of memory, lost connection, dead process) and suggests what to do.

Errors are recognised by type and by the messages of torch, NCCL, gloo and Ray. Other errors stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist

from posttrain.errors import HardwareError, InputError, OutOfGpuMemoryError, RankLostError
from posttrain.orchestration.deadlines import NCCL_TIMEOUT_VARIABLE, OPERATIONS


class WorkerDiedError(RankLostError):
    """The process of a rank has ended."""


class WorkerTimeoutError(RankLostError):
    """A rank has not answered before the deadline of an operation."""


@dataclass(frozen=True)
class Where:
    rank: int
    num_ranks: int
    operation: str
    waited_s: float
    unit: str = "rank"

    @property
    def stage(self) -> str:
        words = OPERATIONS.get(self.operation, {}).get("stage")
        return f"{words} ({self.operation})" if words else self.operation

    @property
    def prefix(self) -> str:
        return f"{self.unit} {self.rank} of {self.num_ranks}"

    @property
    def when(self) -> str:
        return f"during {self.stage}, {self.waited_s:.0f} s after the call"


_GPU_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure.*out of memory"
)
_RAY_MEMORY = re.compile(r"low on memory")  # of its memory monitor; for other exits Ray guesses at the OOM killer
_NETWORK = re.compile(
    r"NCCL|ProcessGroup|gloo|client socket has timed out|Connection (closed|reset|refused) by peer|Socket Timeout"
    r"|clients joined|Broken pipe",
    re.IGNORECASE,
)
_NODE_LOST = re.compile(
    r"node (has |was )?(died|dead|removed|lost|terminated|preempted|drained)|node failure", re.IGNORECASE
)
# torch's message: "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 310.88 MiB is free."
_AMOUNT = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
_TRIED = re.compile(rf"[Tt]ried to allocate {_AMOUNT}")
_CAPACITY = re.compile(rf"total capacity of {_AMOUNT} of which {_AMOUNT} is free")
_OTHERS = re.compile(rf"Process \d+ has {_AMOUNT} memory in use")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def first_cause(errors: Mapping[int, BaseException]) -> int | None:
    """The rank that caused the failure; the others often fail in a collective as a consequence."""
    return min(errors, key=lambda rank: _order(errors[rank]), default=None)


def _order(error: BaseException) -> int:
    if isinstance(error, InputError):
        return 0
    if isinstance(error, WorkerDiedError):
        return 1
    return 3 if _is_network(error) else 2


def explain(error: BaseException, where: Where) -> HardwareError | None:
    """The explanation of the error; None if it is of another kind."""
    text = str(error).strip()
    if isinstance(error, WorkerDiedError):
        return _died(text, where)
    if isinstance(error, HardwareError):  # in words already; it may quote a log
        return None
    if isinstance(error, torch.OutOfMemoryError) or _GPU_MEMORY.search(text):
        return _out_of_gpu_memory(text, where)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError | OSError) and "allocate memory" in text):
        return HardwareError(
            f"{where.prefix} ran out of the machine's memory {where.when}: {_first_line(text) or 'no details'}. "
            f"{_HOST_REMEDY}"
        )
    return _network(text, where) if _is_network(error) else None


# -- memory ------------------------------------------------------------------------------------------------------------

_HOST_REMEDY = (
    "Start fewer ranks on this machine (cluster.gpus_per_node), give it or its container more memory, keep the "
    "optimizer's state on the GPU (policy.optimizer.offload_states=false), or save without a background copy "
    "(checkpointing.async_save=false)"
)


def _out_of_gpu_memory(text: str, where: Where) -> OutOfGpuMemoryError:
    facts, capacity = [], 0
    if tried := _TRIED.search(text):
        facts.append(f"{tried[1]} {tried[2]} more were asked for")
    if found := _CAPACITY.search(text):
        capacity = int(float(found[1]) * _UNITS[found[2]])
        facts.append(f"the GPU has {found[1]} {found[2]}, {found[3]} {found[4]} of it free")
    others = _OTHERS.findall(text)
    if len(others) > 1:
        facts.append("several processes use this GPU, `nvidia-smi` lists them")
    details = "; ".join(facts) or _first_line(text)
    remedy = OPERATIONS.get(where.operation, {}).get("gpu_remedy", "`posttrain plan` shows what needs how much")
    message = f"{where.prefix} ran out of GPU memory {where.when}: {details}. {remedy}"
    return OutOfGpuMemoryError(message, where.operation, capacity)


# -- ranks that lost each other ----------------------------------------------------------------------------------------


def _is_network(error: BaseException) -> bool:
    if isinstance(error, HardwareError):
        return False
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError | OSError) and _NETWORK.search(str(error)) is not None


def _network(text: str, where: Where) -> RankLostError:
    timed_out = re.search(r"tim(ed|e)[ -]?out", text, re.IGNORECASE) is not None
    if where.operation == "build":
        happened = "could not connect to the other ranks"
    else:
        happened = "waited too long for the other ranks" if timed_out else "lost its connection to the other ranks"
    remedies = [
        "another rank may have failed first: its error is in a training run's logs/rank_N.log",
        "every node must reach every other on all ports; on AWS with EFA the security group needs a rule in both "
        "directions that names the group itself, and FI_PROVIDER=efa",
        "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) names the network interface, NCCL_DEBUG=INFO prints what NCCL "
        "chose",
    ]
    if timed_out:
        remedies.append(
            f"if a step is only slow, set {NCCL_TIMEOUT_VARIABLE} and TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC to more "
            "seconds, such as 7200, on every node before `ray start`"
        )
    listed = "".join(f"\n  - {remedy}" for remedy in remedies)
    return RankLostError(f"{where.prefix} {happened} {where.when}: {_first_line(text)}{listed}")


# -- processes that ended ----------------------------------------------------------------------------------------------


def _died(text: str, where: Where) -> WorkerDiedError:
    if missing := re.search(r"No module named '[\w.]+'", text):
        cause = (
            f"its node lacks posttrain, or has another version of it ({missing[0]}): install the same one on every node"
        )
    elif _NODE_LOST.search(text):
        cause = "its node left the cluster (stopped, preempted or out of reach). `ray status` lists the nodes"
    elif _RAY_MEMORY.search(text):
        cause = f"its machine ran out of memory. {_HOST_REMEDY}"
    else:
        cause = (
            f"{_first_line(text)[:120]}; the kernel may have ended it for lack of memory (`dmesg`), or NCCL after a "
            f"time-out ({NCCL_TIMEOUT_VARIABLE}); its last lines are in a training run's "
            f"logs/{where.unit}_{where.rank}.log, and in Ray's log folder, session_latest/logs, of its node"
        )
    resume = "" if where.operation == "build" else ". The same command continues from what was saved"
    return WorkerDiedError(f"{where.unit} {where.rank} died {where.when}: {cause}{resume}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
