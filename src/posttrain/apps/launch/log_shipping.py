"""Adds a Fluent Bit sidecar to each Ray container of a RayCluster, which ships Ray's logs to the provider's log
service.
"""

from __future__ import annotations

from posttrain.apps.launch.launch_request import LaunchRequest
from posttrain.apps.launch.pod_template import Object, labels_of
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.errors import InputError

LOG_FOLDER = "/tmp/ray"
_OUTPUTS = {
    "gke": "[OUTPUT]\n    Name stackdriver\n    Match *\n    Resource gce_instance\n",
    "eks": "[OUTPUT]\n    Name cloudwatch_logs\n    Match *\n    Region {region}\n    Log_Group_Name /posttrain\n"
    "    Log_Stream_Prefix ${HOSTNAME}-\n    Auto_Create_Group On\n",
    "kubernetes": "[OUTPUT]\n    Name stdout\n    Match *\n",
}


def fluent_bit_config(profile: ClusterProfile) -> str:
    kind, zone = profile.cluster.kind, profile.nodes.zone
    if kind == "eks" and zone is None:
        raise InputError("log_image on EKS needs nodes.zone: CloudWatch wants the region")
    output = _OUTPUTS[kind].replace("{region}", (zone or "")[:-1])
    inputs = (
        "[INPUT]\n    Name tail\n    Path /tmp/ray/session_latest/logs/*\n    Exclude_Path *debug_state*\n    Tag ray\n"
    )
    return f"[SERVICE]\n    Flush 5\n{inputs}{output}"


def with_log_shipping(request: LaunchRequest, cluster: Object) -> list[Object]:
    """The cluster with the second container in every pod, and its ConfigMap; the cluster alone if no image is given."""
    image = request.profile.log_image
    if image is None:
        return [cluster]
    name = f"{request.name}-logs"
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        spec = group["template"]["spec"]
        spec["containers"].append(
            {
                "name": "fluent-bit",
                "image": image,
                "resources": {
                    "requests": {"cpu": "500m", "memory": "512Mi"},
                    "limits": {"cpu": "1", "memory": "512Mi"},
                },
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "log-config", "mountPath": "/fluent-bit/etc", "readOnly": True},
                    {"name": "scratch", "mountPath": "/tmp", "readOnly": True},
                ],
            }
        )
        spec["volumes"].append({"name": "log-config", "configMap": {"name": name}})
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": request.profile.cluster.namespace, "labels": labels_of(request)},
        "data": {"fluent-bit.conf": fluent_bit_config(request.profile)},
    }
    return [config, cluster]
