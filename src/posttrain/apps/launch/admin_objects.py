"""What an administrator creates once for a cluster profile: machines, queues, storage. Rendered by `launch setup`.

Karpenter buys AWS machines. Node pools of GKE are not Kubernetes objects: `gke_node_pool` has the settings of the
command.
"""

from __future__ import annotations

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE, RDMA_NETWORKS, Instance, find_instance
from posttrain.apps.launch.pod_template import Object, object_of
from posttrain.apps.launch.storage_sizes import FSX, LUSTRE, is_fsx_size, is_lustre_size, lustre_step_gib
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.errors import InputError

KUEUE_VERSION = "kueue.x-k8s.io/v1beta2"
_GKE_NETWORKING = "networking.gke.io/v1"
_LONGEST_NAME = 8  # of a Lustre file system


def render_setup(profile: ClusterProfile) -> list[Object]:
    """In the order in which the objects are to be created."""
    instance = find_instance(profile.nodes, profile.cluster.kind)
    # Where the profile gives it the role of a provider; otherwise it exists, or is the administrator's to create.
    account = object_of("v1", "ServiceAccount", profile.pods.service_account or "", profile.cluster.namespace)
    account["metadata"]["annotations"] = annotations = dict(profile.pods.service_account_annotations)
    return [
        object_of("v1", "Namespace", profile.cluster.namespace),
        *_storage(profile),
        *([account] if annotations else []),
        *(_karpenter(profile, instance) if profile.cluster.kind == "eks" else []),
        *(_gke_networks() if instance.rdma else []),
        *(_kueue(profile, instance) if profile.scheduler.kueue_queue is not None else []),
        *(_volcano(profile, instance) if profile.scheduler.kind == "volcano" else []),
    ]


# -- machines ----------------------------------------------------------------------------------------------------------


def _karpenter(profile: ClusterProfile, instance: Instance) -> list[Object]:
    nodes, pool = profile.nodes, profile.nodes.pool
    if profile.cluster.name is None:
        raise InputError(
            "cluster.name is missing: `setup` finds subnets and security groups by the tag karpenter.sh/discovery: NAME"
        )
    discovered = [{"tags": {"karpenter.sh/discovery": profile.cluster.name}}]
    machines = {
        "amiSelectorTerms": [{"alias": "al2023@latest"}],
        "role": nodes.role or f"KarpenterNodeRole-{profile.cluster.name}",
        "subnetSelectorTerms": discovered,
        "securityGroupSelectorTerms": discovered,
        "instanceStorePolicy": "RAID0",  # the root volume alone leaves 17Gi for images
        "metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 2},  # pods poll for Spot notices
    }
    capacity = nodes.capacity.replace("_", "-")
    requirements = [
        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": [capacity]},
        {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": [instance.name]},
    ]
    if nodes.zone is not None:
        requirements.append({"key": "topology.kubernetes.io/zone", "operator": "In", "values": [nodes.zone]})
    taints = [{"key": GPU_RESOURCE, "effect": "NoSchedule"}]
    if nodes.capacity == "spot":
        taints.append({"key": "karpenter.sh/capacity-type", "value": "spot", "effect": "NoSchedule"})
    node = {
        "expireAfter": "Never",  # 720h is the default, and ends a run
        "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": pool},
        "requirements": requirements,
        "taints": taints,
    }
    bought = {
        "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "5m"},
        "limits": {GPU_RESOURCE: instance.gpus * nodes.max_nodes},
        "template": {"spec": node},
    }
    return [
        object_of("karpenter.k8s.aws/v1", "EC2NodeClass", pool, spec=machines),
        object_of("karpenter.sh/v1", "NodePool", pool, spec=bought),
    ]


def _gke_networks() -> list[Object]:
    """The networks that the annotation on the pods names, on the VPCs and subnets that the node pool has."""
    objects: list[Object] = []
    for name in RDMA_NETWORKS:
        vpc, mode = ("rdma", "RDMA") if name.startswith("rdma") else (name, "NetDevice")
        settings = {"vpc": vpc, "vpcSubnet": name, "deviceMode": mode}
        objects.append(object_of(_GKE_NETWORKING, "GKENetworkParamSet", name, spec=settings))
        reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": name}
        network = {"type": "Device", "parametersRef": reference}
        objects.append(object_of(_GKE_NETWORKING, "Network", name, spec=network))
    return objects


def gke_node_pool(profile: ClusterProfile) -> str | None:
    """The command for a node pool of GKE, one setting a line, and the file that it names."""
    if profile.cluster.kind != "gke":
        return None
    nodes, instance = profile.nodes, find_instance(profile.nodes, "gke")
    settings = [
        f"--cluster={profile.cluster.name or 'CLUSTER'}",
        f"--machine-type={instance.name}",
        f"--accelerator=type={instance.accelerator},count={instance.gpus},gpu-driver-version=latest",
        f"--node-locations={nodes.zone or 'ZONE'}",
        "--num-nodes=0 --enable-autoscaling --min-nodes=0",
        f"--max-nodes={nodes.max_nodes}",
        "--no-enable-autorepair",  # a repair would end the machine during a run
    ]
    if nodes.capacity == "spot":
        settings.append("--spot")
        settings.append("--node-taints=cloud.google.com/gke-spot=true:NoSchedule")
    if instance.rdma:
        for name in RDMA_NETWORKS:
            settings.append(
                f"--additional-node-network=network={'rdma' if name.startswith('rdma') else name},subnetwork={name}"
            )
    text = " \\\n  ".join([f"gcloud container node-pools create {nodes.pool}", *settings])
    if nodes.capacity == "spot" and (nodes.grace_s or 0) > 15:
        text += " \\\n  --system-config-from-file=node-system.yaml"
        text += (
            "\n\n# node-system.yaml (GKE 1.35.0-gke.1171000 or newer)\nkubeletConfig:\n"
            "  shutdownGracePeriodSeconds: 120\n  shutdownGracePeriodCriticalPodsSeconds: 15\n"
        )
    return text + "\n"


# -- queues ------------------------------------------------------------------------------------------------------------


def _quota(profile: ClusterProfile, instance: Instance) -> dict[str, int | str]:
    count = profile.nodes.max_nodes
    quota: dict[str, int | str] = {
        "cpu": instance.cpu_request * count,
        "memory": f"{instance.memory_request_gib * count}Gi",
        GPU_RESOURCE: instance.gpus * count,
    }
    if instance.efa:
        quota[EFA_RESOURCE] = instance.efa * count
    return quota


def _kueue(profile: ClusterProfile, instance: Instance) -> list[Object]:
    pool, quota = profile.nodes.pool, _quota(profile, instance)
    labels = dict(profile.nodes.selector)
    if instance.name:
        labels["node.kubernetes.io/instance-type"] = instance.name
    flavor: Object = {"nodeLabels": labels} if labels else {}
    objects: list[Object] = []
    if profile.scheduler.topology:
        levels = [{"nodeLabel": label} for label in profile.scheduler.topology]
        objects.append(object_of(KUEUE_VERSION, "Topology", pool, spec={"levels": levels}))
        flavor["topologyName"] = pool
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
    groups = [{"coveredResources": list(quota), "flavors": [{"name": pool, "resources": resources}]}]
    queue, namespace = profile.scheduler.kueue_queue or "", profile.cluster.namespace
    return [
        *objects,
        object_of(KUEUE_VERSION, "ResourceFlavor", pool, spec=flavor),
        object_of(KUEUE_VERSION, "ClusterQueue", pool, spec={"namespaceSelector": {}, "resourceGroups": groups}),
        object_of(KUEUE_VERSION, "LocalQueue", queue, namespace, spec={"clusterQueue": pool}),
    ]


def _volcano(profile: ClusterProfile, instance: Instance) -> list[Object]:
    spec = {"weight": 1, "reclaimable": False, "capability": _quota(profile, instance)}
    name = profile.scheduler.queue or profile.nodes.pool
    return [object_of("scheduling.volcano.sh/v1beta1", "Queue", name, spec=spec)]


# -- storage -----------------------------------------------------------------------------------------------------------


def _storage(profile: ClusterProfile) -> list[Object]:
    """A claim on a new file system, or on an existing one. On other platforms than EKS and GKE the administrator
    creates the claim.
    """
    if profile.cluster.kind not in ("eks", "gke"):
        return []
    storage, on_aws = profile.storage, profile.cluster.kind == "eks"
    spec: Object = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "" if storage.file_system else storage.claim,
        "resources": {"requests": {"storage": f"{storage.size_gib}Gi"}},
    }
    claim = object_of("v1", "PersistentVolumeClaim", storage.claim, profile.cluster.namespace, spec=spec)
    if storage.file_system is not None:
        spec["volumeName"] = storage.claim
        return [_static_volume(profile, on_aws), claim]
    _check_size(profile, on_aws)
    return [_storage_class(profile, on_aws), claim]


def _check_size(profile: ClusterProfile, on_aws: bool) -> None:
    size, tier = profile.storage.size_gib, profile.storage.throughput
    if on_aws and not is_fsx_size(size):
        raise InputError(f"storage.size_gib = {size}: FSx has 1200, or multiples of 2400")
    if not on_aws and not is_lustre_size(size, tier):
        raise InputError(
            f"storage.size_gib = {size}: Managed Lustre of {tier} MB/s per TiB (storage.throughput) has multiples of "
            f"{lustre_step_gib(tier)}; 1000 has the smallest, {lustre_step_gib(1000)}"
        )


def _storage_class(profile: ClusterProfile, on_aws: bool) -> Object:
    storage = profile.storage
    if on_aws:
        if storage.subnet is None or storage.security_group is None:
            raise InputError(
                "a new FSx file system needs storage.subnet and storage.security_group; or name one in "
                "storage.file_system"
            )
        parameters = {
            "subnetId": storage.subnet,
            "securityGroupIds": storage.security_group,
            "deploymentType": "PERSISTENT_2",
            "perUnitStorageThroughput": str(storage.throughput),
            "fileSystemTypeVersion": "2.15",
        }
    else:
        name = "".join(character for character in storage.claim if character.isalnum())[:_LONGEST_NAME]
        parameters = {"perUnitStorageThroughput": str(storage.throughput), "filesystem": name}
    settings: Object = {
        "provisioner": FSX if on_aws else LUSTRE,
        "parameters": parameters,
        "reclaimPolicy": "Retain",  # checkpoints outlive the claim
        "volumeBindingMode": "Immediate",
        **({"mountOptions": ["flock"]} if on_aws else {}),
    }
    return object_of("storage.k8s.io/v1", "StorageClass", storage.claim, **settings)


def _static_volume(profile: ClusterProfile, on_aws: bool) -> Object:
    storage = profile.storage
    assert storage.address is not None
    assert storage.export_name is not None
    if on_aws:
        attributes = {"dnsname": storage.address, "mountname": storage.export_name}
    else:
        attributes = {"ip": storage.address, "filesystem": storage.export_name}
    driver = FSX if on_aws else LUSTRE
    spec = {
        "capacity": {"storage": f"{storage.size_gib}Gi"},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        **({"mountOptions": ["flock"]} if on_aws else {}),
        "claimRef": {"namespace": profile.cluster.namespace, "name": storage.claim},
        "csi": {"driver": driver, "volumeHandle": storage.file_system, "volumeAttributes": attributes},
    }
    return object_of("v1", "PersistentVolume", storage.claim, spec=spec)
