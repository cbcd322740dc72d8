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
from functools import partial

from posttrain.apps.launch.launch_request import LaunchRequest
from posttrain.apps.launch.manifest_files import TEMPLATES
from posttrain.apps.launch.pod_template import CONTAINER, Object, config_map, metadata_of, pod_template, render_for
from posttrain.errors import ExitCode, InputError
from posttrain.files.text_templates import render_text

MAX_RESTARTS = 20  # of failures that are not interruptions; `posttrain node` ends a run that makes no progress earlier
MAX_COUNTED_EVICTIONS = 1000  # Volcano counts evictions
KEEP_FINISHED_S = 7 * 24 * 3600
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_TOKENS_SINCE = (2, 52)  # of Ray


def render_run(request: LaunchRequest) -> list[Object]:
    """The objects of one run, in the order in which they are created. The Secret of the run is not among them: it
    belongs into no file (`control_secret`).
    """
    profile, scheduler = request.profile, request.profile.scheduler
    if profile.log_image is not None and profile.cluster.kind == "eks" and profile.nodes.zone is None:
        raise InputError("log_image on EKS needs nodes.zone: CloudWatch logging requires a region")
    *others, workload = render_for(
        request,
        f"{scheduler.kind}.yaml",
        scheduler=scheduler,
        metadata=partial(metadata_of, request),
        pod=partial(pod_template, request),
        exit_codes=_exit_codes,
        codes={code.name: int(code) for code in ExitCode},
        suspended={"suspend": True} if scheduler.kueue_queue is not None else {},  # Kueue admits and starts them
        has_tokens=tuple(map(int, re.findall(r"\d+", profile.image.ray_version)[:2])) >= _TOKENS_SINCE,
        fluent_bit=render_text(TEMPLATES / "fluent-bit.conf", kind=profile.cluster.kind, zone=profile.nodes.zone or ""),
        limits={"restarts": MAX_RESTARTS, "evictions": MAX_COUNTED_EVICTIONS, "keep_s": KEEP_FINISHED_S},
    )
    if scheduler.kueue_queue is not None:
        workload["metadata"]["labels"][KUEUE_QUEUE] = scheduler.kueue_queue
    return [config_map(request), *others, workload]


def _exit_codes(*names: str) -> Object:
    return {"containerName": CONTAINER, "operator": "In", "values": [int(ExitCode[name]) for name in names]}


def chart_values(request: LaunchRequest) -> Object:
    """Values for the Helm chart charts/posttrain-ray, read from the RayCluster: the chart renders the same."""
    if request.profile.scheduler.kind != "raycluster":
        raise InputError(
            f"scheduler.kind = {request.profile.scheduler.kind!r}: the chart is a long-lived Ray cluster; "
            "set raycluster in the profile"
        )
    config, *others, cluster = render_run(request)
    labels = {name: value for name, value in cluster["metadata"]["labels"].items() if name != KUEUE_QUEUE}
    (values,) = render_for(
        request,
        "chart_values.yaml",
        cluster=cluster,
        config=config,
        labels=labels,
        log_config=others[-1]["data"]["fluent-bit.conf"] if request.profile.log_image is not None else "",
        extra=lambda volumes: [volume for volume in volumes if volume["name"].startswith("extra-")],
    )
    return values
