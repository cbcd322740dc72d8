"""What a run needs of a cluster before it is created: namespace, claim, operators, queues, secrets, permissions. Reads
only. Objects that this user may not read are reported as unknown, never as missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from posttrain.apps.launch.instances import EFA_RESOURCE, GPU_RESOURCE
from posttrain.apps.launch.pod_template import Object
from posttrain.apps.launch.run_checkpoints import pod_spec, shared_mount
from posttrain.apps.launch.runs import Check, plural_of

Get = Callable[[str], Any]  # a path of the API server; None: it does not exist; PermissionError: forbidden
May = Callable[[str, str, str, str], bool]  # verb, API group, resource, namespace

_INSTALL = {
    "jobset.x-k8s.io": "install JobSet 0.12 (kubectl apply --server-side -f its release's manifests.yaml), or set "
    "scheduler.kind: job, which needs nothing",
    "batch.volcano.sh": "install Volcano 1.15 (Helm chart volcano), or set scheduler.kind: jobset or job",
    "ray.io": "install KubeRay 1.7 (Helm chart kuberay-operator), or set scheduler.kind: jobset or job",
    "kueue.x-k8s.io": "install Kueue 0.19, or leave scheduler.kueue_queue out",
}
_SETUP = "`posttrain launch setup --on PROFILE --to admin/` writes it for an administrator"


def examine_cluster(objects: Sequence[Object], get: Get, may: May) -> list[Check]:
    workload = objects[-1]
    namespace = workload["metadata"]["namespace"]
    space = f"/api/v1/namespaces/{namespace}"
    spec = pod_spec(workload)
    checks: list[Check] = []

    def needs(what: str, path: str, remedy: str) -> None:
        """A thing that must exist."""
        try:
            checks.append(Check(what, "" if get(path) is not None else f"{what} does not exist: {remedy}"))
        except PermissionError as error:
            checks.append(Check(what, unknown=str(error)))

    needs(f"namespace {namespace}", space, f"kubectl create namespace {namespace}; {_SETUP}")
    group = workload["apiVersion"].rpartition("/")[0]
    remedy = _INSTALL.get(group, "the cluster is older than this API")
    needs(f"API {workload['apiVersion']}", f"/apis/{workload['apiVersion']}", remedy)
    if group == "ray.io":
        policy = next(body for body in objects if body["kind"] == "NetworkPolicy")
        (space_of,) = policy["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"].values()
        remedy = "scheduler.operator_namespace names that of KubeRay's operator, which submits the run"
        needs(f"namespace {space_of}", f"/api/v1/namespaces/{space_of}", remedy)
    if checks[0].problem or checks[1].problem:
        return checks  # the rest would only repeat it
    _, claim = shared_mount(workload)
    needs(f"claim {claim}", f"{space}/persistentvolumeclaims/{claim}", f"{_SETUP}, or set storage.claim to another")
    for one in spec.get("imagePullSecrets", []):
        remedy = f"kubectl create secret docker-registry {one['name']} -n {namespace} …"
        needs(f"secret {one['name']}", f"{space}/secrets/{one['name']}", remedy)
    for one in spec["containers"][0].get("env", []):
        if (reference := one.get("valueFrom", {}).get("secretKeyRef")) is not None:
            name, key = reference["name"], reference["key"]
            remedy = f"kubectl create secret generic {name} -n {namespace} --from-literal={key}=…"
            needs(f"secret {name}", f"{space}/secrets/{name}", remedy)
    if (name := spec.get("priorityClassName")) is not None:
        path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}"
        needs(f"priority class {name}", path, "create it, or leave scheduler.priority_class out")
    if (queue := workload["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")) is not None:
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues/{queue}"
        needs(f"LocalQueue {queue}", path, f"{_INSTALL['kueue.x-k8s.io']}; {_SETUP}")
    if (queue := workload["spec"].get("queue")) is not None:
        path = f"/apis/scheduling.volcano.sh/v1beta1/queues/{queue}"
        needs(f"Volcano queue {queue}", path, f"{_SETUP}, or set scheduler.queue to another")
    if group == "batch.volcano.sh":
        checks.append(_deadlock(get))
    checks += _examine_permissions(objects, namespace, may)
    checks.append(_examine_machines(spec, get))
    return checks


def _deadlock(get: Get) -> Check:
    """Volcano creates no pods for a gang that exceeds the existing machines, and Karpenter adds machines only for
    existing pods.
    """
    what = "Volcano under Karpenter"
    try:
        if get("/apis/karpenter.sh/v1") is None:
            return Check(what)
        found = get("/api/v1/namespaces/volcano-system/configmaps/volcano-scheduler-configmap")
    except PermissionError as error:
        return Check(what, unknown=str(error))
    if found is None:
        return Check(what, unknown="no ConfigMap volcano-system/volcano-scheduler-configmap")
    for text in (found.get("data") or {}).values():
        settings = yaml.safe_load(text) or {}
        actions = re.split(r"[,\s]+", str(settings.get("actions", "")))
        plugins = {plugin.get("name") for tier in settings.get("tiers") or [] for plugin in tier.get("plugins") or []}
        if "enqueue" in actions and "overcommit" in plugins:
            return Check(
                what,
                "Volcano's scheduler has the action enqueue with the plugin overcommit: a gang waits for machines that "
                "Karpenter never buys. Take enqueue out of actions in volcano-system/volcano-scheduler-configmap",
            )
    return Check(what)


def _examine_permissions(objects: Sequence[Object], namespace: str, may: May) -> list[Check]:
    wanted = [("create", body["apiVersion"].rpartition("/")[0], plural_of(body["kind"])) for body in objects]
    wanted += [("list", "", "pods"), ("get", "", "pods/log"), ("delete", wanted[-1][1], wanted[-1][2])]
    checks = []
    for verb, group, resource in dict.fromkeys(wanted):
        named = f"{resource}.{group}" if group else resource
        remedy = f"kubectl create role posttrain -n {namespace} --verb={verb} --resource={named}, bound to you"
        problem = f"you may not {verb} {named} in namespace {namespace}: an administrator grants it ({remedy})"
        checks.append(Check(f"permission to {verb} {named}", "" if may(verb, group, resource, namespace) else problem))
    return checks


def _examine_machines(spec: Object, get: Get) -> Check:
    """Existing machines must have the resources that pods request. No machines are fine if they are provisioned on
    demand.
    """
    what = "machines"
    limits = spec["containers"][0].get("resources", {}).get("limits", {})
    selector = spec.get("nodeSelector", {})
    try:
        nodes = (get("/api/v1/nodes") or {}).get("items", [])
    except PermissionError as error:
        return Check(what, unknown=str(error))
    fitting = [
        node["status"].get("allocatable", {})
        for node in nodes
        if all((node["metadata"].get("labels") or {}).get(key) == value for key, value in selector.items())
    ]
    for resource, plugin in ((GPU_RESOURCE, "the NVIDIA device plugin"), (EFA_RESOURCE, "the EFA device plugin")):
        if fitting and all(int(one.get(resource, 0)) < int(limits.get(resource, 0)) for one in fitting):
            return Check(
                what,
                f"{len(fitting)} machines have the labels of the run, and none offers {resource}: {limits[resource]}; "
                f"is {plugin} installed?",
            )
    return Check(f"machines: {len(fitting)} with the labels of the run")
