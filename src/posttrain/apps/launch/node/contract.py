"""A pod's environment variables (decision 40), read strictly, and its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from posttrain.apps.launch.node.session import MIN_SECRET_CHARACTERS
from posttrain.errors import InputError, reason_of

SCHEDULERS = ("job", "jobset", "volcano", "rayjob", "raycluster", "slurm")
NOTICES = ("aws", "gce", "none")
_INDEX = {
    "job": "JOB_COMPLETION_INDEX",
    "jobset": "JOB_COMPLETION_INDEX",
    "volcano": "VC_TASK_INDEX",
    "slurm": "SLURM_PROCID",
}
RAY_COMMAND = "KUBERAY_GEN_RAY_START_CMD"


@dataclass(frozen=True)
class NodeSettings:
    run: str
    kind: str
    config: Path
    scheduler: str
    rank: int | None  # None: a worker of KubeRay, which the head numbers
    num_nodes: int
    gpus_per_node: int  # 0: the config asks for CPUs
    efa_devices: int
    shm_gib: int
    mount: Path
    head_host: str
    ray_port: int
    control_port: int
    grace_s: float  # from SIGTERM to SIGKILL
    notice: str
    ray_command: str  # KubeRay's; empty elsewhere
    checkpoint_dir: Path
    secret: bytes = field(repr=False)  # of the run; proved on the control connections

    @property
    def is_kuberay(self) -> bool:
        return self.scheduler in ("rayjob", "raycluster")


def read_settings(environment: Mapping[str, str]) -> NodeSettings:
    """InputError names the variable that is missing or wrong."""
    read = _Variables(environment)
    scheduler = read.choice("POSTTRAIN_SCHEDULER", SCHEDULERS)
    config = Path(read.text("POSTTRAIN_CONFIG"))
    values = _config(config)
    on_cpu = _value(values, "policy", "device") == "cpu"
    is_kuberay = scheduler in ("rayjob", "raycluster")
    rank = _rank(read, scheduler)
    num_nodes = read.number("POSTTRAIN_NUM_NODES", least=1)
    if rank is not None and rank >= num_nodes:
        raise InputError(
            f"this pod is rank {rank}, and POSTTRAIN_NUM_NODES is {num_nodes}: ranks are 0 to {num_nodes - 1}"
        )
    return NodeSettings(
        run=read.text("POSTTRAIN_RUN"),
        kind=read.text("POSTTRAIN_KIND"),
        config=config,
        scheduler=scheduler,
        rank=rank,
        num_nodes=num_nodes,
        gpus_per_node=0 if on_cpu else read.number("POSTTRAIN_GPUS_PER_NODE"),
        efa_devices=read.number("POSTTRAIN_EFA_DEVICES"),
        shm_gib=read.number("POSTTRAIN_SHM_GIB"),
        mount=Path(read.text("POSTTRAIN_MOUNT")),
        head_host="127.0.0.1" if rank == 0 else read.text("FQ_RAY_IP" if is_kuberay else "POSTTRAIN_HEAD_HOST"),
        ray_port=read.number("POSTTRAIN_RAY_PORT", least=1),
        control_port=read.number("POSTTRAIN_CONTROL_PORT", least=1),
        grace_s=float(read.number("POSTTRAIN_GRACE_S", least=1)),
        notice=read.choice("POSTTRAIN_NOTICE", NOTICES),
        ray_command=read.text(RAY_COMMAND) if is_kuberay else "",
        checkpoint_dir=Path(str(_value(values, "checkpointing", "checkpoint_dir") or "results")),
        secret=_secret(Path(read.text("POSTTRAIN_CONTROL_SECRET_FILE"))),
    )


def _rank(read: _Variables, scheduler: str) -> int | None:
    if scheduler in _INDEX:
        return read.number(_INDEX[scheduler]) + read.number("POSTTRAIN_RANK_OFFSET", default="0")
    return 0 if read.choice("POSTTRAIN_ROLE", ("head", "worker")) == "head" else None


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InputError(f"POSTTRAIN_CONTROL_SECRET_FILE={path} cannot be read: {reason_of(error)}") from error
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise InputError(
            f"POSTTRAIN_CONTROL_SECRET_FILE={path} has {len(secret)} characters, and at least {MIN_SECRET_CHARACTERS} "
            "are needed: the output of `openssl rand -hex 32`"
        )
    return secret


def _config(path: Path) -> object:
    """Reads device and folder from the config; the driver validates it."""
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"POSTTRAIN_CONFIG={path} cannot be read: {error}") from error


def _value(values: object, section: str, key: str) -> object:
    inner = values.get(section) if isinstance(values, dict) else None
    return inner.get(key) if isinstance(inner, dict) else None


class _Variables:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str, default: str | None = None) -> str:
        value = self._environment.get(name) or default
        if value is None:
            raise InputError(
                f"the environment variable {name} is missing: `posttrain node` is the command of pods that "
                "`posttrain launch render` writes"
            )
        return value

    def number(self, name: str, *, least: int = 0, default: str | None = None) -> int:
        value = self.text(name, default)
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise InputError(f"{name}={value!r}: a whole number of at least {least} is accepted")
        return int(value)

    def choice(self, name: str, accepted: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in accepted:
            raise InputError(f"{name}={value!r}: {', '.join(accepted)} are accepted")
        return value
