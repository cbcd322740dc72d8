"""What an administrator creates once for a cluster profile: machines, queues, storage. Rendered by `launch setup`.

Karpenter buys AWS machines. Node pools of GKE are not Kubernetes objects: `gke_node_pool` has the settings of the
command.
"""

from __future__ import annotations

import shlex

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE, RDMA_NETWORKS, find_instance
from posttrain.apps.launch.manifest_files import TEMPLATES, render_objects
from posttrain.apps.launch.quantities import FSX, LUSTRE, is_fsx_size, is_lustre_size, lustre_step_gib
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.files.text_templates import render_text


def render_setup(profile: ClusterProfile) -> list[JsonObject]:
    """In the order in which the objects are to be created. On other platforms than EKS and GKE the administrator
    creates the claim; the service account is created where the profile gives it the role of a provider.
    """
    instance, count = find_instance(profile.nodes, profile.cluster.kind), profile.nodes.max_nodes
    if profile.cluster.kind in ("eks", "gke") and profile.storage.file_system is None:
        _check_storage(profile, profile.cluster.kind == "eks")
    if profile.cluster.kind == "eks" and profile.cluster.name is None:
        raise InputError(
            "cluster.name is missing: `setup` finds subnets and security groups by the tag karpenter.sh/discovery: NAME"
        )
    labels, quota = dict(profile.nodes.selector), {GPU_RESOURCE: instance.gpus * count}
    if instance.name:
        labels["node.kubernetes.io/instance-type"] = instance.name
    if instance.efa:
        quota[EFA_RESOURCE] = instance.efa * count
    return render_objects(
        "setup.yaml",
        profile=profile,
        instance=instance,
        node_labels=labels,
        quota={"cpu": instance.cpu_request * count, "memory": f"{instance.memory_request_gib * count}Gi", **quota},
        csi=FSX if profile.cluster.kind == "eks" else LUSTRE,
        networks=RDMA_NETWORKS if instance.rdma else (),
    )


def _check_storage(profile: ClusterProfile, on_aws: bool) -> None:
    size, tier = profile.storage.size_gib, profile.storage.throughput
    if on_aws and not is_fsx_size(size):
        raise InputError(f"storage.size_gib = {size}: FSx has 1200, or multiples of 2400")
    if on_aws and (profile.storage.subnet is None or profile.storage.security_group is None):
        raise InputError(
            "a new FSx file system needs storage.subnet and storage.security_group; or name one in storage.file_system"
        )
    if not on_aws and not is_lustre_size(size, tier):
        raise InputError(
            f"storage.size_gib = {size}: Managed Lustre of {tier} MB/s per TiB (storage.throughput) has multiples of "
            f"{lustre_step_gib(tier)}; 1000 has the smallest, {lustre_step_gib(1000)}"
        )


def gke_node_pool(profile: ClusterProfile) -> str | None:
    """The command for a node pool of GKE, one setting a line, and the file that it names."""
    if profile.cluster.kind != "gke":
        return None
    instance = find_instance(profile.nodes, "gke")
    networks = RDMA_NETWORKS if instance.rdma else ()
    template = TEMPLATES / "node_pool.sh"
    return render_text(template, profile=profile, instance=instance, networks=networks, quote=shlex.quote)
