"""The pod of a run: one per machine, the same under every scheduler. `posttrain node` is its PID 1; no shell is
started.

The environment variables and paths are a contract with `posttrain node` (docs/decisions/0040).
"""

from __future__ import annotations

import base64
import secrets

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE
from posttrain.apps.launch.launch_request import CONFIG_FILE, CONFIG_FOLDER, LaunchRequest
from posttrain.files.json_files import JsonObject

Object = JsonObject  # of Kubernetes

CONTAINER = "posttrain"
RUN_LABEL = "posttrain.dev/run"
RAY_PORT = 6379
DASHBOARD_PORT = 8265
CONTROL_PORT = 6390
CONTROL_FOLDER = "/etc/posttrain-control"
SECRET_KEY = "secret"  # in the Secret of the run, and the file below CONTROL_FOLDER
USER = 1000
NODE_COMMAND = ["posttrain", "node"]
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
# Of KubeRay's operator: it submits a RayJob at the dashboard.
_OPERATOR_LABELS = {"app.kubernetes.io/component": "kuberay-operator"}


# Pods write to the claim, /tmp (HOME, Ray, caches of kernels) and /dev/shm only.
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def object_of(version: str, kind: str, name: str, namespace: str | None = None, **parts: object) -> Object:
    """An object with its parts, such as `spec`. Without a namespace it belongs to the cluster."""
    metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


def object_of_run(request: LaunchRequest, version: str, kind: str, name: str, **parts: object) -> Object:
    made = object_of(version, kind, name, request.profile.cluster.namespace, **parts)
    made["metadata"]["labels"] = labels_of(request)
    return made


def labels_of(request: LaunchRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "posttrain", "app.kubernetes.io/managed-by": "posttrain", RUN_LABEL: request.name}


def config_map(request: LaunchRequest) -> Object:
    """Resolved config and the files that it names. Keys have no folders; the volume's items put them back."""
    texts, binary = {"config.yaml": request.config_text}, {}
    for key, content in zip(_file_keys(request).values(), request.files.values(), strict=True):
        try:
            texts[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    files: Object = {"data": texts, "binaryData": binary} if binary else {"data": texts}
    return object_of_run(request, "v1", "ConfigMap", f"{request.name}-config", immutable=True, **files)


def network_policy(request: LaunchRequest) -> Object:
    """Only pods of the run reach its pods, and KubeRay's operator the dashboard. What pods may reach is not limited."""
    own = {"podSelector": {"matchLabels": {RUN_LABEL: request.name}}}
    ingress: list[Object] = [{"from": [own]}]
    if request.profile.scheduler.kind in ("rayjob", "raycluster"):
        space = {NAMESPACE_LABEL: request.profile.scheduler.operator_namespace}
        operator = {"namespaceSelector": {"matchLabels": space}, "podSelector": {"matchLabels": _OPERATOR_LABELS}}
        ingress.append({"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]})
    spec = {**own, "policyTypes": ["Ingress"], "ingress": ingress}
    return object_of_run(request, "networking.k8s.io/v1", "NetworkPolicy", control_name(request.name), spec=spec)


def control_name(run: str) -> str:
    """Of the Secret and of the NetworkPolicy. Volcano makes a policy with the name of the job, and removes it."""
    return f"{run}-control"


def control_secret(request: LaunchRequest) -> Object:
    """Without its value, which `with_new_value` adds on the way to the cluster: manifests are printed and kept."""
    return object_of_run(request, "v1", "Secret", control_name(request.name), type="Opaque")


def with_new_value(body: Object) -> Object:
    return {**body, "stringData": {SECRET_KEY: new_secret()}} if body["kind"] == "Secret" else body


def new_secret() -> str:
    return secrets.token_hex(32)


def control_secret_command(request: LaunchRequest) -> str:
    """For a person who creates the rendered manifests."""
    name, namespace = control_name(request.name), request.profile.cluster.namespace
    return (
        f"# The pods of {request.name} prove this secret to each other. No manifest has it: create it first.\n"
        f"openssl rand -hex 32 | kubectl create secret generic {name} --namespace {namespace} "
        f"--from-file={SECRET_KEY}=/dev/stdin\n"
    )


def pod_template(
    request: LaunchRequest, *, head_host: str | None, role: str | None = None, rank_offset: int = 0
) -> Object:
    """`role` is given where the scheduler does not number pods; `rank_offset` is added to the number that it gives."""
    profile = request.profile
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace_s,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "nodeSelector": node_selector(request),
        "tolerations": tolerations(request),
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                            "fsGroupChangePolicy": "OnRootMismatch",
                            "seccompProfile": {"type": profile.image.seccomp}},
        "containers": [_container(request, head_host, role, rank_offset)],
        "volumes": _volumes(request),
    }  # fmt: skip
    if profile.image.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": profile.image.pull_secret}]
    if profile.scheduler.priority_class is not None:
        spec["priorityClassName"] = profile.scheduler.priority_class
    if profile.pods.service_account is not None:
        spec["serviceAccountName"] = profile.pods.service_account
    if profile.pods.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if request.num_nodes > 1:
        spec["affinity"] = _one_pod_per_machine(request)
    annotations = {"karpenter.sh/do-not-disrupt": "true"} if profile.cluster.kind == "eks" else {}
    if profile.scheduler.topology:
        annotations["kueue.x-k8s.io/podset-preferred-topology"] = profile.scheduler.topology[0]
    metadata: Object = {"labels": {**profile.pods.labels, **labels_of(request)}}
    if annotations := {**profile.pods.annotations, **annotations, **request.fabric.annotations}:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {key: value for key, value in spec.items() if value not in ({}, [])}}


def node_selector(request: LaunchRequest) -> dict[str, str]:
    nodes, kind = request.profile.nodes, request.profile.cluster.kind
    labels = dict(nodes.selector)
    if nodes.instance_type is not None:
        labels["node.kubernetes.io/instance-type"] = nodes.instance_type
    if kind == "gke":
        labels["cloud.google.com/gke-accelerator"] = request.instance.accelerator
        if nodes.capacity == "spot":
            labels["cloud.google.com/gke-spot"] = "true"
    elif kind == "eks":
        labels["karpenter.sh/capacity-type"] = nodes.capacity.replace("_", "-")
    if nodes.zone is not None:
        labels["topology.kubernetes.io/zone"] = nodes.zone
    return labels


def tolerations(request: LaunchRequest) -> list[Object]:
    """Taints of GPU and Spot nodes. Never that of a node which is about to end."""
    found: list[Object] = []
    if request.gpus_per_node:
        found.append({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if request.profile.nodes.capacity == "spot":
        key = {"gke": "cloud.google.com/gke-spot", "eks": "karpenter.sh/capacity-type"}.get(
            request.profile.cluster.kind
        )
        value = "true" if request.profile.cluster.kind == "gke" else "spot"
        if key is not None:
            found.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    return found + [own.model_dump(exclude_none=True) for own in request.profile.pods.tolerations]


def resources_of(request: LaunchRequest) -> Object:
    instance = request.instance
    devices: Object = {GPU_RESOURCE: request.gpus_per_node} if request.gpus_per_node else {}
    if instance.efa and request.num_nodes > 1:
        devices[EFA_RESOURCE] = instance.efa
    amounts = {"cpu": str(instance.cpu_request), "memory": f"{instance.memory_request_gib}Gi", **devices}
    return {"requests": amounts, "limits": dict(amounts)}


def _container(request: LaunchRequest, head_host: str | None, role: str | None, rank_offset: int) -> Object:
    storage = request.profile.storage
    mounts: list[Object] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "storage", "mountPath": storage.mount},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "control", "mountPath": CONTROL_FOLDER, "readOnly": True},
    ]
    mounts += [
        {"name": f"extra-{number}", "mountPath": volume.mount, **({"readOnly": True} if volume.read_only else {})}
        for number, volume in enumerate(request.profile.pods.volumes)
    ]
    capabilities: Object = {"drop": ["ALL"]}
    mounts += [{"name": _volume_name(path), "mountPath": path, "readOnly": True} for path in request.fabric.host_paths]
    if request.num_nodes > 1 and (request.instance.efa or request.instance.rdma):
        capabilities["add"] = ["IPC_LOCK"]  # memory of RDMA is pinned
    return {
        "name": CONTAINER,
        "image": request.profile.image.name,
        "command": list(NODE_COMMAND),
        "env": environment(request, head_host=head_host, role=role, rank_offset=rank_offset),
        "ports": [{"name": "ray", "containerPort": RAY_PORT}, {"name": "control", "containerPort": CONTROL_PORT}],
        "resources": resources_of(request),
        "securityContext": {**CONTAINER_SECURITY, "capabilities": capabilities},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def environment(request: LaunchRequest, *, head_host: str | None, role: str | None, rank_offset: int) -> list[Object]:
    profile, instance = request.profile, request.instance
    notice = {"eks": "aws", "gke": "gce", "local": "aws"}.get(profile.cluster.kind, "none")
    own = {
        "POSTTRAIN_RUN": request.name,
        "POSTTRAIN_KIND": request.kind,
        "POSTTRAIN_CONFIG": CONFIG_FILE,
        "POSTTRAIN_SCHEDULER": profile.scheduler.kind,
        "POSTTRAIN_NUM_NODES": str(request.num_nodes),
        "POSTTRAIN_GPUS_PER_NODE": str(request.gpus_per_node),
        "POSTTRAIN_EFA_DEVICES": str(instance.efa if request.num_nodes > 1 else 0),
        "POSTTRAIN_SHM_GIB": str(instance.shm_gib),
        "POSTTRAIN_MOUNT": profile.storage.mount,
        "POSTTRAIN_RAY_PORT": str(RAY_PORT),
        "POSTTRAIN_CONTROL_PORT": str(CONTROL_PORT),
        "POSTTRAIN_CONTROL_SECRET_FILE": f"{CONTROL_FOLDER}/{SECRET_KEY}",
        "POSTTRAIN_GRACE_S": str(request.grace_s),
        "POSTTRAIN_NOTICE": notice if profile.nodes.capacity == "spot" else "none",
        **({"POSTTRAIN_HEAD_HOST": head_host} if head_host is not None else {}),
        **({"POSTTRAIN_ROLE": role} if role is not None else {}),
        **({"POSTTRAIN_RANK_OFFSET": str(rank_offset)} if rank_offset else {}),
    }
    usual = {"HF_HOME": f"{profile.storage.mount}/hf-home", "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    plain = {**own, **usual, **request.fabric.env, **profile.env}
    references = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": reference.secret, "key": reference.key}}}
        for name, reference in profile.secrets.items()
    ]
    return [*({"name": name, "value": value} for name, value in plain.items()), *references]


def _volumes(request: LaunchRequest) -> list[Object]:
    items = [{"key": "config.yaml", "path": "config.yaml"}]
    items += [{"key": key, "path": path} for path, key in _file_keys(request).items()]
    secret = {"secretName": control_name(request.name), "defaultMode": 0o440}
    volumes: list[Object] = [
        {"name": "config", "configMap": {"name": f"{request.name}-config", "items": items}},
        {"name": "storage", "persistentVolumeClaim": {"claimName": request.profile.storage.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{request.instance.shm_gib}Gi"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "control", "secret": {**secret, "items": [{"key": SECRET_KEY, "path": SECRET_KEY}]}},
    ]
    for number, extra in enumerate(request.profile.pods.volumes):
        source: Object = {"persistentVolumeClaim": {"claimName": extra.claim}} if extra.claim is not None else {}
        source |= {"configMap": {"name": extra.config_map}} if extra.config_map is not None else {}
        source |= {"secret": {"secretName": extra.secret, "defaultMode": 0o440}} if extra.secret is not None else {}
        source |= {"hostPath": {"path": extra.host_path}} if extra.host_path is not None else {}
        volumes.append({"name": f"extra-{number}", **source})
    volumes += [
        {"name": _volume_name(path), "hostPath": {"path": host, "type": "Directory"}}
        for path, host in request.fabric.host_paths.items()
    ]
    return volumes


def _file_keys(request: LaunchRequest) -> dict[str, str]:
    return {path: f"file-{number}" for number, path in enumerate(request.files)}


def _volume_name(path: str) -> str:
    return f"host-{path.rpartition('/')[2]}"


def _one_pod_per_machine(request: LaunchRequest) -> Object:
    selector = {"labelSelector": {"matchLabels": {RUN_LABEL: request.name}}}
    affinity: Object = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{**selector, "topologyKey": "kubernetes.io/hostname"}]
        }
    }
    if (
        request.profile.nodes.zone is None and request.gpus_per_node
    ):  # the fabric does not cross zones: follow the first pod
        affinity["podAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {**selector, "topologyKey": "topology.kubernetes.io/zone"}
            ]
        }
    return affinity
