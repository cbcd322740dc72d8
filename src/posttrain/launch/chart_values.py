"""Values for the Helm chart charts/posttrain-ray, read from the RayCluster that is rendered here: the chart makes the same."""

from __future__ import annotations

from posttrain.errors import InputError
from posttrain.launch.launch_request import LaunchRequest
from posttrain.launch.pod_template import Object
from posttrain.launch.workloads import KUEUE_QUEUE, OVERWRITE_COMMAND, render_run


def chart_values(request: LaunchRequest) -> Object:
    if request.profile.scheduler.kind != "raycluster":
        raise InputError(
            f"scheduler.kind = {request.profile.scheduler.kind!r}: the chart is a long-lived Ray cluster; "
            "set raycluster in the profile"
        )
    objects = render_run(request)
    cluster, config, profile = objects[-1], objects[0], request.profile
    spec, head = cluster["spec"], cluster["spec"]["headGroupSpec"]["template"]
    pod, container = head["spec"], head["spec"]["containers"][0]
    log_config = objects[1]["data"]["fluent-bit.conf"] if profile.log_image is not None else ""
    return {
        "name": request.name,
        "labels": {name: value for name, value in cluster["metadata"]["labels"].items() if name != KUEUE_QUEUE},
        "podLabels": head["metadata"]["labels"],
        "podAnnotations": {
            name: value for name, value in head["metadata"]["annotations"].items() if name != OVERWRITE_COMMAND
        },
        "kueueQueue": profile.scheduler.kueue_queue or "",
        "image": container["image"],
        "pullSecret": profile.image.pull_secret or "",
        "rayVersion": spec["rayVersion"],
        "command": container["command"],
        "workers": request.num_nodes - 1,
        "gpusPerNode": request.gpus_per_node,
        "resources": container["resources"],
        "addCapabilities": container["securityContext"]["capabilities"].get("add", []),
        "user": pod["securityContext"]["runAsUser"],
        "gracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "priorityClass": profile.scheduler.priority_class or "",
        "nodeSelector": pod.get("nodeSelector", {}),
        "tolerations": pod.get("tolerations", []),
        "affinity": pod.get("affinity", {}),
        "env": {
            entry["name"]: entry["value"]
            for entry in container["env"]
            if "value" in entry and entry["name"] != "POSTTRAIN_ROLE"
        },
        "secretEnv": {name: {"secret": ref.secret, "key": ref.key} for name, ref in profile.secrets.items()},
        "storage": {"claim": profile.storage.claim, "mount": profile.storage.mount},
        "shmSize": f"{request.instance.shm_gib}Gi",
        "config": {
            "data": config["data"],
            "binaryData": config.get("binaryData", {}),
            "items": pod["volumes"][0]["configMap"]["items"],
        },
        "hostPaths": dict(request.fabric.host_paths),
        "logs": {"image": profile.log_image or "", "config": log_config},
    }
