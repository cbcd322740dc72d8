"""Cluster profiles and runs for tests of `posttrain.apps.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from posttrain.apps.launch.launch_request import LaunchRequest, request_run
from posttrain.config import load_config
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.loader import load_standalone

IMAGE = "registry.example.com/posttrain@sha256:" + "0" * 64
EKS: dict[str, Any] = {
    "cluster": {"kind": "eks", "namespace": "training", "name": "prod"},
    "image": {"name": IMAGE},
    "nodes": {"instance_type": "p5en.48xlarge", "capacity": "spot", "zone": "us-east-2a"},
    "scheduler": {"kind": "jobset"},
    "storage": {"claim": "fsx-pvc", "mount": "/shared", "subnet": "subnet-01", "security_group": "sg-01"},
    "secrets": {"HF_TOKEN": {"secret": "hf", "key": "token"}},
}
GKE: dict[str, Any] = {
    **EKS,
    "cluster": {"kind": "gke", "namespace": "training", "name": "prod"},
    "nodes": {"instance_type": "a4-highgpu-8g", "capacity": "spot", "zone": "us-central1-b"},
    "storage": {"claim": "lustre", "mount": "/shared", "size_gib": 36000},
}
SCHEDULERS = ("job", "jobset", "volcano", "rayjob", "raycluster")
CRDS = Path(__file__).parents[2] / "shared" / "crds"


def write_profile(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def make_profile(folder: Path, values: dict[str, Any], *overrides: str) -> ClusterProfile:
    return load_standalone(ClusterProfile, write_profile(folder, values), overrides)


def make_request(
    folder: Path, values: dict[str, Any], *overrides: str, nodes: int = 2, run: tuple[str, ...] = ()
) -> LaunchRequest:
    settings = [f"cluster.num_nodes={nodes}", "cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=/shared/math"]
    loaded = load_config("grpo", None, [*settings, *run])
    return request_run(loaded, make_profile(folder, values, *overrides))
