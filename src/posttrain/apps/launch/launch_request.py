"""A run's config and a cluster profile, checked against each other: the input of all manifests.

The image contains the code. The config is stored in a ConfigMap: resolved YAML, and the small local files that it
names, under `/etc/posttrain`. Larger files must be on the shared file system. No secrets are sent: a credential in the
config is rejected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from posttrain.apps.launch.instances import Fabric, Instance, fabric_of, find_instance
from posttrain.config import LoadedConfig
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.named_files import Named, settings_with_files
from posttrain.errors import InputError

CONFIG_FOLDER = "/etc/posttrain"
MAX_CONFIG_BYTES = 900 * 1024  # etcd takes 1 MiB; the rest is for names and encoding
MAX_NAME = 40  # RayJob allows 47; the names of pods are longer than that of the run
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_REFERENCE = re.compile(r"(?<!\\)\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")


@dataclass(frozen=True)
class LaunchRequest:
    name: str
    kind: str
    profile: ClusterProfile
    instance: Instance
    num_nodes: int
    gpus_per_node: int  # 0: ranks are processes on CPUs
    config_text: str
    files: Mapping[str, bytes]  # path below CONFIG_FOLDER -> content

    @property
    def fabric(self) -> Fabric:
        return fabric_of(self.instance, self.num_nodes)

    @property
    def warnings(self) -> list[str]:
        found = []
        idle = self.instance.gpus - self.gpus_per_node
        if idle:
            found.append(
                f"cluster.gpus_per_node = {self.gpus_per_node}: the other {idle} GPUs of each machine are paid "
                "for, and not used"
            )
        if self.num_nodes > 1 and self.instance.provider == "gcp" and not self.instance.rdma:
            found.append(f"{self.instance.name}: its fabric is not set up here, and machines talk over TCP")
        return found

    @property
    def grace_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL: the provider's notice period, or enough for a step and a save."""
        if self.profile.nodes.grace_s is not None:
            return self.profile.nodes.grace_s
        if self.profile.nodes.capacity == "on_demand" and self.profile.cluster.kind != "slurm":
            return 600
        return {"gke": 15, "eks": 110, "slurm": 110}.get(self.profile.cluster.kind, 30)


def request_run(
    loaded: LoadedConfig[Any], profile: ClusterProfile, name: str | None = None, config_folder: str = CONFIG_FOLDER
) -> LaunchRequest:
    """`config_folder` is where the config and its files will be; empty: in the driver's working directory."""
    config, instance = loaded.config, find_instance(profile.nodes, profile.cluster.kind)
    mount = PurePosixPath(profile.storage.mount)
    _check_on_mount("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir, mount)
    if config.logger.log_dir is not None:
        _check_on_mount("logger.log_dir", config.logger.log_dir, mount)
    if instance.gpus and config.cluster.gpus_per_node > instance.gpus:
        raise InputError(
            f"cluster.gpus_per_node = {config.cluster.gpus_per_node}: {instance.name or 'a machine of the profile'} "
            f"has {instance.gpus} GPUs; set cluster.gpus_per_node={instance.gpus} and more nodes, or another "
            "nodes.instance_type"
        )
    if profile.image.seccomp != "Unconfined" and profile.cluster.kind not in ("local", "slurm"):
        _check_sandbox(config.model_dump(by_alias=True).get("env"), "env")
    text, files = _config_and_files(loaded, profile, config_folder)
    return LaunchRequest(
        name=_name_of(name, loaded.kind, config.checkpointing.checkpoint_dir),
        kind=loaded.kind,
        profile=profile,
        instance=instance,
        num_nodes=config.cluster.num_nodes,
        gpus_per_node=config.cluster.gpus_per_node if instance.gpus else 0,
        config_text=text,
        files=files,
    )


def _check_sandbox(value: object, key: str) -> None:
    if isinstance(value, dict):
        if value.get("type") == "code" and value.get("sandbox") in (None, "strict"):
            raise InputError(
                f"{key}.sandbox = 'strict' makes user namespaces, which the system call filter of the pods refuses: "
                f"set image.seccomp: Unconfined in the profile, or {key}.sandbox=best_effort (docs/sandbox.md)"
            )
        for name, inner in value.items():
            _check_sandbox(inner, f"{key}.{name}")


def _check_on_mount(key: str, folder: str, mount: PurePosixPath) -> None:
    if not PurePosixPath(os.path.normpath(folder)).is_relative_to(mount):
        raise InputError(
            f"{key} = {folder!r} is outside the shared file system at {mount} (storage.mount): it would be lost with "
            f"the pod; set {key}={mount}/{PurePosixPath(folder).name or 'run'}"
        )


def _name_of(name: str | None, kind: str, checkpoint_dir: str) -> str:
    if name is None:
        words = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(checkpoint_dir).name.lower()).strip("-")
        return (words if words.startswith(kind) else f"{kind}-{words}")[:MAX_NAME].rstrip("-")
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise InputError(
            f"--name {name!r}: lower-case letters, digits and '-' are accepted, a letter first, at most "
            f"{MAX_NAME} characters"
        )
    return name


# -- what travels ------------------------------------------------------------------------------------------------------


def _config_and_files(
    loaded: LoadedConfig[Any], profile: ClusterProfile, config_folder: str
) -> tuple[str, dict[str, bytes]]:
    text, found = loaded.to_yaml_and_credentials()
    if credentials := [name for name in found if name in text]:  # not references to secrets
        raise InputError(
            f"the config contains {len(credentials)} credential{'s' if len(credentials) > 1 else ''}, which would be "
            "readable in the cluster: put each into a Secret, name it in the profile (secrets: {NAME: {secret: …, key: "
            "…}}), and write ${oc.env:NAME} in the config"
        )
    for variable in _REFERENCE.findall(text):
        if variable in os.environ and profile.cluster.kind == "slurm":
            continue  # sbatch passes the environment on
        if variable not in profile.secrets and variable not in profile.env:
            raise InputError(
                f"the config reads the environment variable {variable}, and the pods would not have it: add it to the "
                f"profile, secrets: {{{variable}: {{secret: NAME, key: KEY}}}} or env: {{{variable}: …}}"
            )
    files: dict[str, bytes] = {}
    new_names: dict[tuple[str, str], str] = {}
    for number, named in enumerate(_local_files(loaded, profile)):
        folder = f"files/{number}"
        for path, inner in zip(named.files, named.names, strict=True):
            files[f"{folder}/{inner or path.name}"] = (
                path.read_bytes() if path.stat().st_size <= MAX_CONFIG_BYTES else b""
            )
            _check_size(named, path, files, text, profile)
        new = PurePosixPath(config_folder, folder, named.files[0].name if named.names == ("",) else "")
        new_names[named.key, named.text] = f"{new}:{named.part}" if named.part else str(new)
    values = _renamed(yaml.safe_load(text), "", new_names)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), files


def _local_files(loaded: LoadedConfig[Any], profile: ClusterProfile) -> list[Named]:
    """What the config names on this machine. A path below the mount is taken to be on the shared file system."""
    found = []
    for named in settings_with_files(loaded.config.model_dump(by_alias=True)):
        on_mount = PurePosixPath(named.text).is_relative_to(profile.storage.mount)
        if on_mount or named.key.startswith(("checkpointing.", "logger.")):
            continue
        if named.part and not os.path.isfile(os.path.expanduser(named.text.rpartition(":")[0])):
            if named.files[0].is_relative_to(Path.cwd()):
                raise InputError(
                    f"{named.key} = {named.text!r}: the module is a file here, {named.files[0]}, and not in the image; "
                    f"write it as {os.path.relpath(named.files[0])}:{named.part}, then it travels with the config"
                )
            continue  # an installed package: in the image, or the run reports that it is missing
        found.append(named)
    return found


def _check_size(named: Named, path: Path, files: Mapping[str, bytes], text: str, profile: ClusterProfile) -> None:
    size = path.stat().st_size
    total = len(text.encode()) + sum(map(len, files.values()))
    if max(size, total) > MAX_CONFIG_BYTES:
        raise InputError(
            f"{named.key} = {named.text!r}: {path} has {size / 1024:,.0f} KiB; config and files together may have "
            f"{MAX_CONFIG_BYTES // 1024} KiB. Copy it to the shared file system and set "
            f"{named.key}={profile.storage.mount}/…, or name a dataset or model of the hub"
        )


def _renamed(value: object, key: str, names: Mapping[tuple[str, str], str]) -> Any:
    if isinstance(value, dict):
        return {name: _renamed(inner, f"{key}.{name}" if key else str(name), names) for name, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, key, names) for inner in value]
    return names.get((key, value), value) if isinstance(value, str) else value
