"""Single faults in good manifests: each is an error of the right rule at the right path. Good manifests have none."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_profiles import CRDS, EKS, GKE, make_profile, make_request

from posttrain.apps.launch.admin_objects import render_setup
from posttrain.apps.launch.lint import cel_rules, core_schemas
from posttrain.apps.launch.lint.check import RULES, check_manifests
from posttrain.apps.launch.lint.custom_schemas import CustomSchemas
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.apps.launch.workloads import render_run

DELETE = object()
RULE_FILES = Path(cel_rules.__file__).parent / "rules"
Objects = list[dict[str, Any]]
_PART = re.compile(r"\['([^']+)'\]|\[(\d+)\]|([^.\[\]]+)")

POD = "spec.template.spec"
BOX = f"{POD}.containers[0]"
SET_JOB = "spec.replicatedJobs[0].template.spec"
TASK = "spec.tasks[1].template.spec"
POOL = "spec.template.spec"
GPU = "['nvidia.com/gpu']"
OVERCOMMIT = 'actions: "enqueue, allocate"\ntiers:\n- plugins:\n  - name: overcommit\n'
EFA = "['vpc.amazonaws.com/efa']"

# scene, kind, path that is changed, new value, rule, path of the finding ("" if it is the changed path)
MUTANTS: list[tuple[str, str, str, Any, str, str]] = [
    # pods
    ("job", "Job", f"{POD}.containers", [], "pod-containers", ""),
    ("volcano", "Job", "spec.tasks[1].template.spec", None, "pod-containers", f"{TASK}.containers"),
    ("job", "Job", f"{POD}.restartPolicy", "Always", "restart-policy", ""),
    ("job", "Job", f"{BOX}.resources.requests.memory", "lots", "quantity", ""),
    ("job", "Job", f"{BOX}.resources.requests.cpu", "200", "quantity", ""),
    ("job", "Job", f"{BOX}.env[0].value", 7, "env-text", ""),
    ("job", "Job", f"{BOX}.env[0]", {"name": "HF_TOKEN", "value": "hf_secret1234"}, "literal-secret",
        f"{BOX}.env[0].value"),
    ("job", "Job", f"{BOX}.args", ["--token", "hf_" + "a1" * 20], "literal-secret", ""),
    ("job", "Job", "spec.template.metadata.labels['karpenter.sh/capacity-type']", "spot", "node-label-on-pod", ""),
    ("job", "Job", "spec.template.metadata.labels.app", "a" * 64, "label-value", ""),
    ("gke-jobset", "JobSet", f"{SET_JOB}.template.spec.nodeSelector['cloud.google.com/gke-spot']", True,
        "label-selector", ""),
    (
        "gke-jobset", "JobSet", f"{SET_JOB}.template.spec.tolerations[0].key",
            "cloud.google.com/impending-node-termination",
        "impending-termination", "",
    ),
    ("job", "Job", f"{POD}.securityContext.runAsUser", 0, "root-user", f"{BOX}.securityContext.runAsUser"),
    ("job", "Job", f"{BOX}.volumeMounts[1].name", "shared", "volume-missing", ""),
    ("job", "Job", f"{POD}.volumes[3].name", "shm", "volume-twice", ""),
    ("job", "Job", f"{BOX}.volumeMounts[3].mountPath", "/shared", "volume-twice", f"{BOX}.volumeMounts[1].mountPath"),
    ("job", "Job", f"{BOX}.image", "<YOUR_ECR_REPO>/posttrain:latest", "image-tag", ""),
    ("gke-jobset", "JobSet", f"{SET_JOB}.template.spec.terminationGracePeriodSeconds", 600, "grace-period", ""),
    # devices
    ("job", "Job", f"{BOX}.resources.requests{GPU}", 4, "device-limits", ""),
    ("job", "Job", f"{BOX}.resources.limits{EFA}", DELETE, "device-limits", f"{BOX}.resources.requests{EFA}"),
    ("job", "Job", f"{BOX}.resources.requests.memory", "1900Gi", "device-count", ""),
    ("job", "Job", f"{BOX}.resources.requests{EFA}", 32, "device-count", ""),
    ("job", "Job", f"{BOX}.volumeMounts[2]", DELETE, "shm-missing", f"{BOX}.volumeMounts"),
    ("job", "Job", f"{POD}.volumes[2].emptyDir.medium", DELETE, "shm-missing", f"{BOX}.volumeMounts"),
    ("job", "Job", f"{POD}.volumes[2].emptyDir.sizeLimit", "2000Gi", "shm-size", ""),
    ("job", "Job", f"{BOX}.resources", {"limits": {"nvidia.com/gpu": 8}}, "efa-missing",
        f"{BOX}.resources.limits{EFA}"),
    ("job", "Job", f"{BOX}.securityContext.capabilities.add", DELETE, "ipc-lock", ""),
    (
        "gke-jobset", "JobSet", f"{SET_JOB}.template.metadata.annotations['networking.gke.io/interfaces']", DELETE,
        "rdma-interfaces", "",
    ),
    (
        "gke-jobset", "JobSet", f"{SET_JOB}.template.metadata.annotations['networking.gke.io/interfaces']",
        '[{"interfaceName": "eth0", "network": "default"}]', "rdma-interfaces", "",
    ),
    (
        "gke-jobset", "JobSet", f"{SET_JOB}.template.metadata.annotations['networking.gke.io/default-interface']",
            "eth99",
        "rdma-interfaces", "",
    ),
    # Job
    ("job", "Job", "spec.completionMode", "indexed", "completion-mode", ""),
    ("job", "Job", "spec.completions", DELETE, "indexed-completions", ""),
    ("job", "Job", "spec.parallelism", 1, "gang-parallelism", ""),
    ("job", "Job", "spec.completionMode", DELETE, "no-rank", ""),
    ("job", "Job", f"{POD}.restartPolicy", "OnFailure", "failure-policy-restart", ""),
    ("job", "Job", "spec.podReplacementPolicy", "TerminatingOrFailed", "failure-policy-restart", ""),
    ("job", "Job", "spec.podFailurePolicy.rules[0].onExitCodes.values", [0, 64], "failure-policy-rule", ""),
    ("job", "Job", "spec.podFailurePolicy.rules[0].onExitCodes.operator", "Equals", "failure-policy-rule", ""),
    ("job", "Job", "spec.podFailurePolicy.rules[0].onExitCodes.containerName", "trainer", "failure-policy-rule", ""),
    ("job", "Job", "spec.podFailurePolicy.rules[0].action", "Fail", "failure-policy-rule", ""),
    ("job", "Job", "spec.podFailurePolicy.rules[1].action", "FailIndex", "failure-policy-rule", ""),
    ("job", "Job", "spec.podFailurePolicy.rules[1].onPodConditions", DELETE, "failure-policy-rule",
     "spec.podFailurePolicy.rules[1]"),
    ("job", "Job", "spec.successPolicy.rules[0].succeededIndexes", "2", "needs-indexed", ""),
    ("job", "Job", "spec.maxFailedIndexes", 1, "needs-indexed", ""),
    ("job-once", "Job", "spec.successPolicy", DELETE, "workers-fail-job", ""),
    ("job", "Job", "metadata.name", "grpo-" + "x" * 60, "job-name", ""),
    ("job", "Job", f"{POD}.subdomain", DELETE, "headless-service", ""),
    ("job", "Job", f"{POD}.subdomain", "other", "headless-service", ""),
    ("job", "Service", "spec.clusterIP", "10.0.0.9", "headless-service", ""),
    ("job", "Service", "spec.selector", {"app": "other"}, "headless-service", "spec.selector.app"),
    # JobSet
    ("jobset", "JobSet", "spec.replicatedJobs[0].name", "n" * 60, "jobset-names", ""),
    ("jobset", "JobSet", "spec.failurePolicy.rules[0].action", "FailJob", "jobset-failure-policy", ""),
    ("jobset", "JobSet", "spec.failurePolicy.rules[1].name", "bad-input-or-no-progress", "jobset-failure-policy", ""),
    ("jobset", "JobSet", "spec.failurePolicy.rules[1].onJobFailureReasons[0]", "Preempted", "jobset-failure-policy",
        ""),
    ("jobset", "JobSet", "spec.failurePolicy.rules[0].onJobFailureMessagePatterns[0]", "code (6",
        "jobset-failure-policy", ""),
    ("jobset", "JobSet", "spec.failurePolicy.restartStrategy", "Restart", "jobset-failure-policy", ""),
    ("jobset", "JobSet", "spec.network.enableDNSHostnames", False, "jobset-dns", ""),
    ("jobset", "JobSet", f"{SET_JOB}.completions", DELETE, "indexed-completions", ""),
    # Volcano
    ("volcano", "Job", "spec.minAvailable", 3, "volcano-gang", ""),
    ("volcano", "Job", "spec.tasks", [], "volcano-tasks", ""),
    ("volcano", "Job", "spec.tasks[1].name", "head", "volcano-tasks", ""),
    ("volcano", "Job", "spec.tasks[1].name", "Worker_1", "volcano-tasks", ""),
    ("volcano", "Job", "spec.plugins", {"env": []}, "volcano-plugins", ""),
    ("volcano", "Job", "spec.plugins.torch", [], "volcano-plugins", ""),
    ("volcano", "Job", "spec.plugins.pytorch", ["--master=master"], "volcano-plugins", ""),
    ("volcano", "Job", "spec.policies[0].exitCode", 0, "volcano-policy", ""),
    ("volcano", "Job", "spec.policies[0].event", "PodFailed", "volcano-policy", "spec.policies[0].exitCode"),
    ("volcano", "Job", "spec.policies[2].event", "PodPreempted", "volcano-policy", ""),
    ("volcano", "Job", "spec.policies[2].action", "Restart", "volcano-policy", ""),
    ("volcano", "Job", "spec.policies[2]", {"action": "RestartJob"}, "volcano-policy", ""),
    ("volcano", "Job", "spec.policies[2]", {"events": ["*", "PodFailed"], "action": "RestartJob"}, "volcano-policy",
     "spec.policies[2].events"),
    ("volcano", "Job", "spec.policies[0]", {"event": "PodFailed", "action": "RestartJob"}, "volcano-policy-order",
     "spec.policies[1].exitCode"),
    ("volcano", "Job", "spec.schedulerName", "default-scheduler", "volcano-scheduler", ""),
    ("volcano", "Job", "spec.queue", "training-queue", "reference", ""),
    ("volcano", "ConfigMap", "data['volcano-scheduler.conf']", OVERCOMMIT, "volcano-deadlock", ""),
    ("volcano", "Queue", "spec.weight", 0, "volcano-queue", ""),
    # KubeRay
    ("rayjob", "RayJob", "metadata.name", "g" * 48, "ray-name", ""),
    ("raycluster", "RayCluster", "metadata.name", "1grpo", "ray-name", ""),
    ("rayjob", "RayJob", "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus", 8, "ray-start-params", ""),
    ("rayjob", "RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].resources", {"GPU": "8"}, "ray-start-params",
     "spec.rayClusterSpec.workerGroupSpecs[0].rayStartParams.num-gpus"),
    ("rayjob", "RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].minReplicas", 5, "ray-replicas", ""),
    ("rayjob", "RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].replicas", 5, "ray-replicas", ""),
    ("rayjob", "RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].groupName", "", "ray-groups", ""),
    (
        "raycluster", "RayCluster",
            "spec.headGroupSpec.template.metadata.annotations['ray.io/overwrite-container-cmd']", DELETE,
        "ray-command", "",
    ),
    ("raycluster", "RayCluster", "spec.headGroupSpec.template.spec.containers", "sidecar first", "ray-first-container",
     "spec.headGroupSpec.template.spec.containers[0]"),
    ("rayjob", "RayJob", "spec.rayClusterSpec", DELETE, "rayjob-cluster", ""),
    ("rayjob", "RayJob", "spec.shutdownAfterJobFinishes", False, "rayjob-settings", "spec.ttlSecondsAfterFinished"),
    ("rayjob", "RayJob", "spec.submissionMode", "HttpMode", "rayjob-settings", ""),
    ("rayjob", "RayJob", "spec.entrypoint", "", "rayjob-settings", ""),
    ("rayjob", "RayJob", "spec.activeDeadlineSeconds", 0, "rayjob-settings", ""),
    ("rayjob", "RayJob", "spec.submitterPodTemplate", {"spec": {"containers": []}}, "rayjob-settings", ""),
    ("rayjob-old", "RayJob", "spec.rayClusterSpec.authOptions", {"mode": "token"}, "ray-token",
        "spec.rayClusterSpec.rayVersion"),
    ("rayjob-kueue", "RayJob", "spec.rayClusterSpec.enableInTreeAutoscaling", True, "ray-kueue", ""),
    ("rayjob-kueue", "RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].groupName", "head", "ray-kueue", ""),
    # Karpenter
    ("setup", "NodePool", f"{POOL}.nodeClassRef.group", DELETE, "nodepool-class", ""),
    ("setup", "NodePool", f"{POOL}.nodeClassRef.apiVersion", "karpenter.k8s.aws/v1", "nodepool-class", ""),
    ("setup", "NodePool", f"{POOL}.nodeClassRef.name", "training-gpu-class", "reference", ""),
    ("setup", "NodePool", "spec.disruption.consolidationPolicy", "WhenUnderutilized", "nodepool-disruption", ""),
    ("setup", "NodePool", "spec.disruption.consolidateAfter", DELETE, "nodepool-disruption", ""),
    ("setup", "NodePool", f"{POOL}.disruption", {"consolidateAfter": "5m"}, "nodepool-disruption", ""),
    ("setup", "NodePool", f"{POOL}.requirements[0].operator", "Equals", "nodepool-requirements", ""),
    ("setup", "NodePool", f"{POOL}.requirements[0].values", [], "nodepool-requirements", ""),
    ("setup", "NodePool", f"{POOL}.requirements[0].values[0]", "Spot", "nodepool-requirements", ""),
    ("setup", "NodePool", f"{POOL}.requirements[2].key", "kubernetes.io/hostname", "nodepool-requirements", ""),
    ("setup", "NodePool", f"{POOL}.taints[0].effect", "NoScheduling", "nodepool-taints", f"{POOL}.taints[0]"),
    ("setup", "NodePool", f"spec.limits{GPU}", "many", "nodepool-limits", ""),
    ("rayjob-kueue", "NodePool", f"spec.limits{GPU}", 8, "quota-too-small", ""),
    ("setup", "EC2NodeClass", "spec.role", DELETE, "nodeclass-required", ""),
    ("setup", "EC2NodeClass", "spec.instanceProfile", "profile", "nodeclass-required", "spec.role"),
    ("setup", "EC2NodeClass", "spec.subnetSelectorTerms", [], "nodeclass-required", ""),
    # Kueue
    ("setup", "ClusterQueue", "spec.cohort", "all", "kueue-renamed", ""),
    ("setup", "ClusterQueue", "apiVersion", "kueue.x-k8s.io/v1alpha1", "kueue-version", ""),
    ("setup", "ClusterQueue", "spec.namespaceSelector", DELETE, "kueue-namespaces", ""),
    ("setup", "ClusterQueue", "spec.resourceGroups[0].flavors[0].resources[2]", DELETE, "kueue-resources",
     "spec.resourceGroups[0].flavors[0].resources"),
    ("setup", "ClusterQueue", "spec.resourceGroups[0].flavors[0].resources[0].nominalQuota", "lots",
        "kueue-resources", ""),
    ("setup", "ClusterQueue", "spec.resourceGroups[0].flavors[0].name", "h200", "reference", ""),
    ("setup", "LocalQueue", "spec.clusterQueue", DELETE, "kueue-queue", ""),
    ("setup", "LocalQueue", "spec.clusterQueue", "other", "reference", ""),
    ("setup", "ResourceFlavor", "spec.nodeLabels", DELETE, "kueue-flavor", ""),
    ("setup", "ResourceFlavor", "spec.topologyName", "racks", "reference", ""),
    ("setup", "Topology", "spec.levels[0].nodeLabel", "kubernetes.io/hostname", "kueue-topology", ""),
    ("rayjob-kueue", "RayJob", "metadata.labels['kueue.x-k8s.io/queue-name']", "other", "reference", ""),
    ("rayjob-kueue", "LocalQueue", "metadata.namespace", "other", "namespace",
        "metadata.labels['kueue.x-k8s.io/queue-name']"),
    ("rayjob-kueue", "ClusterQueue", "spec.resourceGroups[0].flavors[0].resources[2].nominalQuota", 8,
        "quota-too-small",
     "metadata.labels['kueue.x-k8s.io/queue-name']"),
    # storage and files
    ("setup", "StorageClass", "parameters.perUnitStorageThroughput", "1200", "storage-throughput", ""),
    ("setup", "StorageClass", "parameters.perUnitStorageThroughput", 250, "storage-parameters", ""),
    ("setup", "StorageClass", "parameters.subnetId", DELETE, "storage-parameters", ""),
    ("setup", "PersistentVolumeClaim", "spec.accessModes", ["ReadWriteOnce"], "storage-access", ""),
    ("setup", "PersistentVolumeClaim", "spec.resources.requests.storage", "1000Gi", "storage-size", ""),
    ("setup", "PersistentVolumeClaim", "spec.storageClassName", "gp3", "reference", ""),
    ("rayjob-kueue", "PersistentVolumeClaim", "metadata.name", "lustre", "reference",
     "spec.rayClusterSpec.headGroupSpec.template.spec.volumes[1].persistentVolumeClaim.claimName"),
    ("gke-setup", "PersistentVolume", "spec.csi.volumeHandle", "instance", "storage-volume", ""),
    ("gke-setup", "PersistentVolume", "spec.csi.volumeAttributes.ip", DELETE, "storage-volume", ""),
    ("job", "ConfigMap", "metadata.name", "other", "reference", f"{POD}.volumes[0].configMap.name"),
    ("job", "ConfigMap", "data", {"other.yaml": ""}, "reference", f"{POD}.volumes[0].configMap.items[0].key"),
    ("job", "ConfigMap", "data['config.yaml']", "key: hf_" + "a1" * 20, "literal-secret", ""),
    ("job", "ConfigMap", "data['big.txt']", "x" * 2**20, "config-size", "data"),
    ("job", "Job", f"{POD}.volumes[4].secret", DELETE, "control-secret", f"{BOX}.volumeMounts"),
    ("volcano", "Job", f"{TASK}.containers[0].volumeMounts[4].mountPath", "/etc/other", "control-secret",
        f"{TASK}.containers[0].volumeMounts"),
    ("job", "NetworkPolicy", "spec.podSelector.matchLabels['posttrain.dev/run']", "other", "network-policy", ""),
    ("rayjob", "NetworkPolicy", "spec.ingress[0]", DELETE, "network-policy", "spec.ingress"),
    ("job", "NetworkPolicy", "spec.ingress[0].ports", [{"port": 6379}], "network-policy", "spec.ingress"),
    ("job", "Service", "metadata.name", DELETE, "object", ""),
    ("job", "Job", "apiVersion", DELETE, "object", ""),
]  # fmt: skip


ZONES = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [
    {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a", "b"]}]}]}}  # fmt: skip

# The same for what works and is unwise.
UNWISE: list[tuple[str, str, str, Any, str, str]] = [
    (
        "setup",
        "ClusterQueue",
        "spec.resourceGroups[0]",
        {
            "coveredResources": ["nvidia.com/gpu"],
            "flavors": [{"name": "posttrain", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": 64}]}],
        },
        "kueue-coverage",
        "spec.resourceGroups",
    ),
    ("job", "Job", f"{BOX}.env[1].name", "POSTTRAIN_RUN", "env-twice", ""),
    ("job", "Job", f"{BOX}.resources.limits.cpu", DELETE, "no-limits", f"{BOX}.resources.limits"),
    ("job", "Job", f"{BOX}.command", ["bash", "-c", "posttrain node"], "shell-as-first-process", ""),
    ("job", "Job", f"{BOX}.args", ["pip install posttrain"], "installs-at-start", ""),
    ("job", "Job", f"{BOX}.image", "posttrain:latest", "image-tag", ""),
    ("job", "Job", f"{BOX}.securityContext.privileged", True, "privileged", ""),
    ("job", "Job", f"{POD}.hostNetwork", True, "privileged", ""),
    ("job", "Job", f"{POD}.volumes[5]", {"name": "left", "emptyDir": {}}, "volume-unused", f"{POD}.volumes[5].name"),
    ("job", "Job", f"{POD}.terminationGracePeriodSeconds", 300, "grace-period", ""),
    (
        "job",
        "Job",
        f"{POD}.tolerations[0]",
        {"operator": "Exists"},
        "impending-termination",
        f"{POD}.tolerations[0].operator",
    ),
    ("job", "Job", "spec.podFailurePolicy", DELETE, "interruptions-count", ""),
    ("job", "Service", "spec.publishNotReadyAddresses", DELETE, "headless-service", ""),
    ("job-any-zone", "Job", f"{POD}.affinity.nodeAffinity", ZONES, "several-zones", ""),
    ("one-gpu", "Job", f"{POD}.affinity", DELETE, "gang-spread", ""),
    ("volcano", "Job", "spec.minAvailable", 1, "volcano-gang", ""),
    ("volcano", "Job", "spec.maxRetry", 3, "volcano-retries", ""),
    ("volcano", "Job", "evictions", DELETE, "volcano-no-restart", "spec.policies"),
    ("volcano", "Queue", "metadata.namespace", "training", "volcano-queue", ""),
    ("raycluster", "RayCluster", "apiVersion", "ray.io/v1alpha1", "ray-version", ""),
    ("setup", "NodePool", "spec.limits", DELETE, "nodepool-limits", ""),
    ("setup", "NodePool", f"{POOL}.requirements[2].values", ["us-east-2a", "us-east-2b"], "nodepool-zones", ""),
    ("setup", "NodePool", f"{POOL}.expireAfter", DELETE, "nodepool-expiry", ""),
    ("setup", "NodePool", f"{POOL}.requirements[1].values", ["p5.48xlarge"], "nodepool-one-type", ""),
    ("setup", "NodePool", "spec.disruption.consolidationPolicy", "Balanced", "nodepool-disruption", ""),
    ("setup", "EC2NodeClass", "spec.metadataOptions.httpPutResponseHopLimit", 1, "nodeclass-metadata", ""),
    ("setup", "EC2NodeClass", "spec.instanceStorePolicy", DELETE, "nodeclass-disk", "spec.blockDeviceMappings"),
    ("setup", "ClusterQueue", "apiVersion", "kueue.x-k8s.io/v1beta1", "kueue-version", ""),
    ("eks-static", "PersistentVolume", "spec.mountOptions", DELETE, "storage-flock", ""),
]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Objects]:
    folder = tmp_path_factory.mktemp("profiles")
    found: dict[str, Objects] = {}
    for kind in ("job", "jobset", "rayjob", "raycluster"):
        found[kind] = render_run(make_request(folder, EKS, f"scheduler.kind={kind}"))
    volcano = ("scheduler.kind=volcano",)
    found["volcano"] = [
        *render_setup(make_profile(folder, EKS, *volcano)),
        *render_run(make_request(folder, EKS, *volcano)),
    ]
    kueue = ("scheduler.kind=rayjob", "scheduler.kueue_queue=train")
    found["rayjob-kueue"] = [
        *render_setup(make_profile(folder, EKS, *kueue)),
        *render_run(make_request(folder, EKS, *kueue)),
    ]
    topology = "scheduler.topology=[topology.kubernetes.io/zone,kubernetes.io/hostname]"
    found["setup"] = render_setup(make_profile(folder, EKS, *kueue, topology))
    found["gke-jobset"] = render_run(make_request(folder, GKE))
    static = ("storage.file_system=project/us-central1-b/data", "storage.address=10.0.0.2", "storage.export_name=data")
    found["gke-setup"] = render_setup(make_profile(folder, GKE, *static))
    existing = ("storage.file_system=fs-01", "storage.address=fs-01.fsx", "storage.export_name=abc")
    found["eks-static"] = render_setup(make_profile(folder, EKS, *existing))
    found["job-any-zone"] = render_run(make_request(folder, EKS, "scheduler.kind=job", "nodes.zone=null"))
    found["one-gpu"] = render_run(make_request(folder, EKS, "scheduler.kind=job", run=("cluster.gpus_per_node=1",)))
    found["job-once"] = copy.deepcopy(found["job"])
    put(one_of(found["job-once"], "Job"), "spec.backoffLimit", 0)
    found["rayjob-old"] = render_run(make_request(folder, EKS, "scheduler.kind=rayjob", "image.ray_version=2.50.1"))
    return found


def one_of(objects: Objects, kind: str) -> dict[str, Any]:
    return [body for body in objects if body["kind"] == kind][-1]


def put(body: dict[str, Any], path: str, value: Any) -> None:
    if path == "evictions":
        for policies in (body["spec"]["policies"], *(task["policies"] for task in body["spec"]["tasks"])):
            policies[:] = [policy for policy in policies if policy.get("event") != "PodEvicted"]
        return
    keys = [text or int(index) if index else (text or name) for text, index, name in _PART.findall(path)]
    for key in keys[:-1]:
        body = body[key]
    if value is DELETE:
        body.pop(keys[-1], None) if isinstance(body, dict) else body.pop(keys[-1])  # type: ignore[arg-type]
    elif value == "sidecar first":
        body[keys[-1]].insert(0, {"name": "logs", "image": "fluent/fluent-bit:4.0"})
    elif isinstance(body, list) and keys[-1] == len(body):
        body.append(value)
    else:
        body[keys[-1]] = value


def lint(objects: Objects, schemas: CustomSchemas | None = None) -> Any:
    return check_manifests(
        [Manifest("mutant.yaml", number, body) for number, body in enumerate(objects, start=1)], schemas
    )


@pytest.mark.parametrize(
    ("scene", "kind", "path", "value", "rule", "found_at"),
    MUTANTS,
    ids=[f"{m[4]}-{m[1]}-{number}" for number, m in enumerate(MUTANTS)],
)
def test_a_single_fault_is_an_error_at_its_path(
    scenes: dict[str, Objects], scene: str, kind: str, path: str, value: Any, rule: str, found_at: str
) -> None:
    mutant = copy.deepcopy(scenes[scene])
    put(one_of(mutant, kind), path, value)
    errors = lint(mutant).errors
    assert (rule, found_at or path) in [(finding.rule, finding.path) for finding in errors], (
        "\n".join(map(str, errors)) or "no errors"
    )


@pytest.mark.parametrize(
    ("scene", "kind", "path", "value", "rule", "found_at"), UNWISE, ids=[f"{m[4]}-{m[1]}" for m in UNWISE]
)
def test_what_is_unwise_is_a_warning_at_its_path(
    scenes: dict[str, Objects], scene: str, kind: str, path: str, value: Any, rule: str, found_at: str
) -> None:
    mutant = copy.deepcopy(scenes[scene])
    put(one_of(mutant, kind), path, value)
    warnings = [finding for finding in lint(mutant).findings if finding.level == "warning"]
    assert (rule, found_at or path) in [(finding.rule, finding.path) for finding in warnings]


def test_an_object_that_stands_twice_is_an_error(scenes: dict[str, Objects]) -> None:
    errors = lint([*scenes["job"], copy.deepcopy(scenes["job"][1])]).errors
    assert [(finding.rule, finding.path) for finding in errors] == [("twice", "metadata.name")]


def test_good_manifests_have_no_errors(scenes: dict[str, Objects]) -> None:
    schemas = CustomSchemas(CRDS) if CRDS.is_dir() else None
    for name, objects in scenes.items():
        assert lint(objects, schemas).errors == [], name


ODD = [None, 3, -1, "x", "", [], {}, True, [3], ["x"], {"a": 1}, [None], [{}], 1.5]


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_in(inner, (*path, key))


@pytest.mark.parametrize("scene", ["job", "jobset", "volcano", "rayjob-kueue", "setup", "gke-jobset", "gke-setup"])
def test_values_of_any_type_at_any_place_do_not_crash_the_lint(
    scenes: dict[str, Objects], scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_schemas, "is_available", lambda: False)  # the rules alone: schemas would name most of it
    draw = random.Random(scene)
    places = [(index, path) for index, body in enumerate(scenes[scene]) for path in paths_in(body) if path]
    for index, path in draw.sample(places, 60):
        mutant = copy.deepcopy(scenes[scene])
        inner = mutant[index]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = draw.choice(ODD)
        lint(mutant)


def test_every_rule_is_broken_by_a_test() -> None:
    elsewhere = {"schema", "crd-schema", "crd-cel", "helm-lint", "twice"}  # test_lint_schemas.py, test_render.py, above
    elsewhere |= set(yaml.safe_load((RULE_FILES / "15-api-server.yaml").read_text()))  # test_lint_api_server.py
    assert {mutant[4] for mutant in [*MUTANTS, *UNWISE]} | elsewhere == set(RULES)
    assert len(MUTANTS) >= 60


def test_expressions_name_what_exists() -> None:
    """A name that is misspelt would make a check silent."""
    manifest = Manifest("m", 1, {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": [{}]}})
    scopes = [scope for _, scope in cel_rules.scopes_of(manifest)]
    known = {name for scope in scopes for name in scope.facts} | {"is_job", "is_head", "map", "list", "int"}
    for check in cel_rules.load_rules()[1]:
        at_a_place = cel_rules.Expressions(check, scopes[0], scopes[0].item, None)
        expressions = [check.wrong, check.show or "value", *(check.let or {}).values()]
        for text in [*expressions, *cel_rules.EXPRESSION.findall(check.message + check.remedy)]:
            _, names, functions = cel_rules.compile_expression(text)
            bound = re.findall(r"[.](?:exists|all|filter|map)\((\w+),", text)
            assert set(names) <= {*known, *at_a_place.names, *bound}, (check.rule, text)
            of_cel = {"contains", "startsWith", "endsWith", "size", "type", "int", "double"}
            assert {name for name in functions if name.isidentifier()} <= {*at_a_place.functions, *of_cel}, text
