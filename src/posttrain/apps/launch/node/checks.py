"""Checks of a machine before anything is started on it: a missing GPU is cheaper to detect before the model is
loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from posttrain.apps.launch.node.contract import NodeSettings
from posttrain.errors import InputError

_GIB = 2**30
_SMI_LIMIT_S = 60.0
_SHM_SHARE = 0.95  # a file system has slightly less than requested
_GPU = re.compile(r"nvidia\d+")


def check_machine(
    settings: NodeSettings, root: Path = Path("/"), list_gpus: Callable[[], str | None] | None = None
) -> None:
    """InputError with everything that is wrong. `root` and `list_gpus` are for tests."""
    wrong = [
        *_gpus(settings, root, list_gpus or _nvidia_smi),
        *_efa(settings, root),
        *_shared_memory(settings, root),
        *_file_system(settings, root),
    ]
    if wrong:
        raise InputError("this machine cannot run its part: " + "; ".join(wrong))


def _gpus(settings: NodeSettings, root: Path, list_gpus: Callable[[], str | None]) -> list[str]:
    wanted = settings.gpus_per_node
    if not wanted:
        return []
    found = len([name for name in _names(root / "dev") if _GPU.fullmatch(name)])
    where = "/dev/nvidia*"
    if found >= wanted and (listed := list_gpus()) is not None:  # one that has failed is still in /dev
        found, where = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)), "nvidia-smi -L"
    if found >= wanted:
        return []
    return [
        f"{found} GPUs ({where}), and {wanted} are needed (cluster.gpus_per_node): the container needs the limit "
        f"nvidia.com/gpu: {wanted} and the node NVIDIA's device plugin; a run without GPUs has policy.device=cpu"
    ]


def _nvidia_smi() -> str | None:
    """The output of `nvidia-smi -L`; None if it is not installed."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    try:
        return subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""  # a driver that hangs cannot be used


def _efa(settings: NodeSettings, root: Path) -> list[str]:
    found = len([name for name in _names(root / "dev/infiniband") if name.startswith("uverbs")])
    if found >= settings.efa_devices:
        return []
    return [
        f"{found} EFA devices (/dev/infiniband/uverbs*), and {settings.efa_devices} are needed: the container needs "
        f"the limit vpc.amazonaws.com/efa: {settings.efa_devices} and the node the EFA device plugin"
    ]


def _shared_memory(settings: NodeSettings, root: Path) -> list[str]:
    if not settings.shm_gib:
        return []
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError as error:
        return [f"/dev/shm: {error.strerror}"]
    size = status.f_blocks * status.f_frsize
    if size >= _SHM_SHARE * settings.shm_gib * _GIB:
        return []
    return [
        f"/dev/shm has {size / _GIB:.1f} GiB, and {settings.shm_gib} are needed: mount an emptyDir with medium: Memory "
        f"and sizeLimit: {settings.shm_gib}Gi there"
    ]


def _file_system(settings: NodeSettings, root: Path) -> list[str]:
    folder = root / str(settings.mount).lstrip("/")
    trial = folder / f".posttrain-{uuid4().hex}"
    try:
        trial.write_bytes(b"written")
        trial.unlink()
    except OSError as error:
        return [
            f"{settings.mount} (storage.mount) cannot be written: {error.strerror}; is the claim bound, and may user "
            f"{os.getuid()} write there?"
        ]
    return []


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
