"""Job, JobSet, Volcano Job, RayJob and RayCluster of a run: the same pods, started and restarted by another controller.

| scheduler | restarts | how an interruption (exit 85, a disrupted pod) becomes a new attempt of the whole gang |
|---|---|---|
| job | one index | every pod ends with 85 by `posttrain node`, which is ignored, and every index is created again |
| jobset | the set | the Job fails by podFailurePolicy, and the JobSet restarts it without counting |
| volcano | the job | PodEvicted and PodFailed restart the job; they count, so maxRetry is high |
| rayjob | a new cluster | backoffLimit; exit codes are not visible, so a bad config is retried as well |

64 (bad input) and 65 (no progress) end the run, but for rayjob. A raycluster is long-lived: jobs are submitted to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from posttrain.apps.launch.launch_request import LaunchRequest
from posttrain.apps.launch.pod_template import (
    CONTAINER,
    CONTAINER_SECURITY,
    DASHBOARD_PORT,
    NODE_COMMAND,
    RUN_LABEL,
    Object,
    config_map,
    network_policy,
    object_of_run,
    pod_template,
)
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.errors import ExitCode, InputError

MAX_RESTARTS = 20  # of failures that are not interruptions; `posttrain node` ends a run that makes no progress earlier
MAX_COUNTED_EVICTIONS = 1000  # Volcano counts evictions
KEEP_FINISHED_S = 7 * 24 * 3600
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
OVERWRITE_COMMAND = "ray.io/overwrite-container-cmd"  # otherwise KubeRay wraps the command in a shell
REPLICATED_JOB = "node"
_TOKENS_SINCE = (2, 52)  # of Ray
_LOG_OUTPUTS = {
    "gke": "[OUTPUT]\n    Name stackdriver\n    Match *\n    Resource gce_instance\n",
    "eks": "[OUTPUT]\n    Name cloudwatch_logs\n    Match *\n    Region {region}\n    Log_Group_Name /posttrain\n"
    "    Log_Stream_Prefix ${HOSTNAME}-\n    Auto_Create_Group On\n",
    "kubernetes": "[OUTPUT]\n    Name stdout\n    Match *\n",
}


def render_run(request: LaunchRequest) -> list[Object]:
    """The objects of one run, in the order in which they are created. The Secret of the run is not among them: it
    belongs into no file (`control_secret`).
    """
    return [config_map(request), network_policy(request), *_RENDERERS[request.profile.scheduler.kind](request)]


def _workload(request: LaunchRequest, version: str, kind: str, spec: Object) -> Object:
    made = object_of_run(request, version, kind, request.name, spec=spec)
    if request.profile.scheduler.kueue_queue is not None:
        made["metadata"]["labels"][KUEUE_QUEUE] = request.profile.scheduler.kueue_queue
    return made


def _suspended(request: LaunchRequest) -> Object:
    """Kueue admits suspended objects and starts them."""
    return {"suspend": True} if request.profile.scheduler.kueue_queue is not None else {}


def _indexed_job(request: LaunchRequest, head_host: str, failure_rules: list[Object]) -> Object:
    return {
        "completionMode": "Indexed",
        "completions": request.num_nodes,
        "parallelism": request.num_nodes,
        "backoffLimit": 0 if request.profile.scheduler.kind == "jobset" else MAX_RESTARTS,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": failure_rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0", "succeededCount": 1}]},
        "template": pod_template(request, head_host=head_host),
    }


def _exit_codes(*codes: int) -> Object:
    return {"containerName": CONTAINER, "operator": "In", "values": [int(code) for code in codes]}


_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


# -- the schedulers ----------------------------------------------------------------------------------------------------


def _job(request: LaunchRequest) -> list[Object]:
    job = _indexed_job(
        request,
        f"{request.name}-0.{request.name}",
        [
            {"action": "FailJob", "onExitCodes": _exit_codes(ExitCode.BAD_INPUT, ExitCode.NO_PROGRESS)},
            {"action": "Ignore", "onPodConditions": _DISRUPTED},
            {"action": "Ignore", "onExitCodes": _exit_codes(ExitCode.SAVED)},
        ],
    )
    pod = job["template"]["spec"]
    pod["subdomain"] = request.name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods look for rank 0 before it is ready
        "selector": {RUN_LABEL: request.name},
        "ports": [{"name": port["name"], "port": port["containerPort"]} for port in pod["containers"][0]["ports"]],
    }
    spec = {**_suspended(request), "ttlSecondsAfterFinished": KEEP_FINISHED_S, **job}
    return [
        object_of_run(request, "v1", "Service", request.name, spec=service),
        _workload(request, "batch/v1", "Job", spec),
    ]


def _jobset(request: LaunchRequest) -> list[Object]:
    job = _indexed_job(
        request,
        f"{request.name}-{REPLICATED_JOB}-0-0.{request.name}",
        [
            {"action": "FailJob", "onExitCodes": _exit_codes(ExitCode.BAD_INPUT, ExitCode.NO_PROGRESS)},
            {"action": "FailJob", "onPodConditions": _DISRUPTED},
            {"action": "FailJob", "onExitCodes": _exit_codes(ExitCode.SAVED)},
        ],
    )
    failure_policy = {
        "maxRestarts": MAX_RESTARTS,
        "restartStrategy": "BlockingRecreate",  # no pod of the next attempt while one of this is alive
        "rules": [
            {
                "name": "bad-input-or-no-progress",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": ["exit code 6[45] "],
            },
            {
                "name": "interrupted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }
    spec = {
        **_suspended(request),
        "ttlSecondsAfterFinished": KEEP_FINISHED_S,
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        "failurePolicy": failure_policy,
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
    }
    return [_workload(request, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)]


def _volcano(request: LaunchRequest) -> list[Object]:
    """Rank 0 is a separate task: its end is the end of the run."""
    head_host = f"{request.name}-head-0.{request.name}"
    ends = [{"exitCode": int(code), "action": "AbortJob"} for code in (ExitCode.BAD_INPUT, ExitCode.NO_PROGRESS)]
    restarts = [{"event": event, "action": "RestartJob"} for event in ("PodEvicted", "PodFailed")]

    def task(name: str, replicas: int, policies: list[Object], rank_offset: int) -> Object:
        template = pod_template(request, head_host=head_host, rank_offset=rank_offset)
        return {"name": name, "replicas": replicas, "policies": policies, "template": template}

    done = {"event": "TaskCompleted", "action": "CompleteJob"}
    tasks = [task("head", 1, [*ends, *restarts, done], 0)]
    if request.num_nodes > 1:
        tasks.append(task("worker", request.num_nodes - 1, [*ends, *restarts], 1))
    spec: Object = {
        "schedulerName": "volcano",
        "queue": request.profile.scheduler.queue or request.profile.nodes.pool,
        "minAvailable": request.num_nodes,
        "maxRetry": MAX_COUNTED_EVICTIONS,
        "ttlSecondsAfterFinished": KEEP_FINISHED_S,
        "plugins": {"svc": ["--publish-not-ready-addresses=true"], "env": []},
        "policies": [*ends, *restarts],
        "tasks": tasks,
    }
    if request.profile.scheduler.priority_class is not None:
        spec["priorityClassName"] = request.profile.scheduler.priority_class
    return [_workload(request, "batch.volcano.sh/v1alpha1", "Job", spec)]


def ray_cluster_spec(request: LaunchRequest) -> Object:
    """Head and workers are machines of the same type; the head is rank 0."""

    def template(role: str) -> Object:
        made = pod_template(request, head_host=None, role=role)  # KubeRay passes it to workers in FQ_RAY_IP
        made["metadata"].setdefault("annotations", {})[OVERWRITE_COMMAND] = "true"
        container = made["spec"]["containers"][0]
        if role == "head":
            container["ports"].append({"name": "dashboard", "containerPort": DASHBOARD_PORT})
        return made

    workers = []
    if request.num_nodes > 1:
        count = request.num_nodes - 1
        workers = [
            {
                "groupName": "worker",
                "replicas": count,
                "minReplicas": count,
                "maxReplicas": count,
                "rayStartParams": {"num-gpus": str(request.gpus_per_node)},
                "template": template("worker"),
            }
        ]
    head = {
        "rayStartParams": {"num-gpus": str(request.gpus_per_node), "dashboard-host": "0.0.0.0"},
        "template": template("head"),
    }
    version = request.profile.image.ray_version
    # The operator draws a token, and puts it into the environment of Ray's containers; older ones ignore the field.
    has_tokens = tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= _TOKENS_SINCE
    return {
        "rayVersion": version,
        **({"authOptions": {"mode": "token"}} if has_tokens else {}),
        "enableInTreeAutoscaling": False,
        "headGroupSpec": head,
        "workerGroupSpecs": workers,
    }


def _rayjob(request: LaunchRequest) -> list[Object]:
    spec: Object = {
        **_suspended(request),
        "entrypoint": " ".join([*NODE_COMMAND, "driver"]),
        "submissionMode": "HTTPMode",  # no separate pod for submission
        "backoffLimit": MAX_RESTARTS,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": ray_cluster_spec(request),
    }
    return [_workload(request, "ray.io/v1", "RayJob", spec)]


def _raycluster(request: LaunchRequest) -> list[Object]:
    spec = {**_suspended(request), **ray_cluster_spec(request)}
    return _with_log_shipping(request, _workload(request, "ray.io/v1", "RayCluster", spec))


def _fluent_bit_config(profile: ClusterProfile) -> str:
    kind, zone = profile.cluster.kind, profile.nodes.zone
    if kind == "eks" and zone is None:
        raise InputError("log_image on EKS needs nodes.zone: CloudWatch logging requires a region")
    output = _LOG_OUTPUTS[kind].replace("{region}", (zone or "")[:-1])
    inputs = (
        "[INPUT]\n    Name tail\n    Path /tmp/ray/session_latest/logs/*\n    Exclude_Path *debug_state*\n    Tag ray\n"
    )
    return f"[SERVICE]\n    Flush 5\n{inputs}{output}"


def _with_log_shipping(request: LaunchRequest, cluster: Object) -> list[Object]:
    """A Fluent Bit sidecar in every pod, which ships Ray's logs to the provider's log service, and its ConfigMap; the
    cluster alone if no image is given."""
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
                "securityContext": CONTAINER_SECURITY,
                "volumeMounts": [
                    {"name": "log-config", "mountPath": "/fluent-bit/etc", "readOnly": True},
                    {"name": "scratch", "mountPath": "/tmp", "readOnly": True},
                ],
            }
        )
        spec["volumes"].append({"name": "log-config", "configMap": {"name": name}})
    config = object_of_run(
        request, "v1", "ConfigMap", name, data={"fluent-bit.conf": _fluent_bit_config(request.profile)}
    )
    return [config, cluster]


_RENDERERS: dict[str, Callable[[LaunchRequest], list[Object]]] = {
    "job": _job,
    "jobset": _jobset,
    "volcano": _volcano,
    "rayjob": _rayjob,
    "raycluster": _raycluster,
}


def chart_values(request: LaunchRequest) -> Object:
    """Values for the Helm chart charts/posttrain-ray, read from the RayCluster: the chart renders the same."""
    if request.profile.scheduler.kind != "raycluster":
        raise InputError(
            f"scheduler.kind = {request.profile.scheduler.kind!r}: the chart is a long-lived Ray cluster; "
            "set raycluster in the profile"
        )
    objects = render_run(request)
    cluster, config, profile = objects[-1], objects[0], request.profile
    spec, head = cluster["spec"], cluster["spec"]["headGroupSpec"]["template"]
    pod, container = head["spec"], head["spec"]["containers"][0]
    log_config = objects[-2]["data"]["fluent-bit.conf"] if profile.log_image is not None else ""
    return {
        "name": request.name,
        "labels": {name: value for name, value in cluster["metadata"]["labels"].items() if name != KUEUE_QUEUE},
        "podLabels": head["metadata"]["labels"],
        "podAnnotations": {
            name: value for name, value in head["metadata"]["annotations"].items() if name != OVERWRITE_COMMAND
        },
        "kueueQueue": profile.scheduler.kueue_queue or "",
        "operatorNamespace": profile.scheduler.operator_namespace,
        "image": container["image"],
        "pullSecret": profile.image.pull_secret or "",
        "rayVersion": spec["rayVersion"],
        "rayToken": "authOptions" in spec,
        "command": container["command"],
        "workers": request.num_nodes - 1,
        "gpusPerNode": request.gpus_per_node,
        "resources": container["resources"],
        "addCapabilities": container["securityContext"]["capabilities"].get("add", []),
        "user": pod["securityContext"]["runAsUser"],
        "seccompProfile": pod["securityContext"]["seccompProfile"]["type"],
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
        "controlSecret": "",
        "secretEnv": {name: {"secret": ref.secret, "key": ref.key} for name, ref in profile.secrets.items()},
        "storage": {"claim": profile.storage.claim, "mount": profile.storage.mount},
        "shmSize": f"{request.instance.shm_gib}Gi",
        "config": {
            "data": config["data"],
            "binaryData": config.get("binaryData", {}),
            "items": pod["volumes"][0]["configMap"]["items"],
        },
        "hostPaths": dict(request.fabric.host_paths),
        "serviceAccount": profile.pods.service_account or "",
        "hostNetwork": profile.pods.host_network,
        "extraVolumes": [volume for volume in pod["volumes"] if volume["name"].startswith("extra-")],
        "extraVolumeMounts": [mount for mount in container["volumeMounts"] if mount["name"].startswith("extra-")],
        "logs": {"image": profile.log_image or "", "config": log_config},
    }
