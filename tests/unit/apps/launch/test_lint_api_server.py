"""What an API server refuses is refused in its words; manifests in the style of public projects pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from launch_profiles import EKS, make_profile, make_request

from posttrain.apps.launch.admin_objects import render_setup
from posttrain.apps.launch.lint.check import check_manifests
from posttrain.apps.launch.lint.reading import keys_of, pods_of
from posttrain.apps.launch.manifest_files import Manifest, read_text
from posttrain.apps.launch.pod_template import control_secret
from posttrain.apps.launch.workloads import render_run

POD = "spec.template.spec"
BOX = f"{POD}.containers[0]"
ENV = f"{BOX}.env[0]"
MOUNT = f"{BOX}.volumeMounts[0]"
VOLUME = f"{POD}.volumes[0]"
NEW = f"{POD}.volumes[9]"
TOLERATION = f"{POD}.tolerations[0]"
NODE = f"{POD}.affinity.nodeAffinity"
NEEDED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
EXPRESSION = {"key": "zone", "operator": "In", "values": ["a"]}
RULE = "spec.podFailurePolicy.rules[0]"
SUCCESS = "spec.successPolicy.rules[0]"


def node_affinity(**changes: Any) -> dict[str, Any]:
    return {NEEDED: {"nodeSelectorTerms": [{"matchExpressions": [{**EXPRESSION, **changes}]}]}}


# kind of the rendered object, path that is changed, new value, a word of the finding, its path where it is another
MUTANTS: list[tuple[str, str, Any, str, str]] = [
    ("Job", ENV, {"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
     "may not be specified when `value` is not empty", f"{ENV}.valueFrom"),
    ("Job", ENV, {"name": "A", "valueFrom": {}}, "must specify one of", f"{ENV}.valueFrom"),
    ("Job", ENV, {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"},
     "secretKeyRef": {"name": "s", "key": "k"}}}, "must specify one of", f"{ENV}.valueFrom"),
    ("Job", ENV, {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.replicas"}}}, "no field that pods",
     f"{ENV}.valueFrom.fieldRef.fieldPath"),
    ("Job", ENV, {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": ""}}}, "needs the key",
     f"{ENV}.valueFrom.secretKeyRef"),
    ("Job", ENV, {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "a/b"}}}, "needs the key",
     f"{ENV}.valueFrom.configMapKeyRef"),
    ("Job", f"{ENV}.name", "A=B", "name without", ""),
    ("Job", f"{ENV}.name", "", "name without", ""),
    ("Job", f"{BOX}.envFrom", [{"configMapRef": {"name": "a"}, "secretRef": {"name": "b"}}],
     "must name a ConfigMap or a Secret", f"{BOX}.envFrom[0]"),
    ("Job", f"{BOX}.envFrom", [{"prefix": "A_"}], "must name a ConfigMap or a Secret", f"{BOX}.envFrom[0]"),
    ("Job", TOLERATION, {"key": "a", "operator": "Exists", "value": "b"}, "value must be empty", f"{TOLERATION}.value"),
    ("Job", TOLERATION, {"key": "a", "operator": "In"}, "must be Equal or Exists", f"{TOLERATION}.operator"),
    ("Job", TOLERATION, {"operator": "Equal", "value": "b"}, "operator must be Exists when key is empty",
     f"{TOLERATION}.key"),
    ("Job", TOLERATION, {"key": "a", "operator": "Exists", "effect": "NoScheduling"}, "must be one of NoSchedule",
     f"{TOLERATION}.effect"),
    ("Job", TOLERATION, {"key": "a", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5},
     "needs effect NoExecute", f"{TOLERATION}.tolerationSeconds"),
    ("Job", f"{BOX}.imagePullPolicy", "always", "must be one of Always", ""),
    ("Job", f"{BOX}.terminationMessagePolicy", "Logs", "must be one of File", ""),
    ("Job", f"{BOX}.ports[0].protocol", "HTTP", "must be one of TCP", ""),
    ("Job", f"{BOX}.ports[0].containerPort", 70000, "between 1 and 65535", ""),
    ("Job", f"{BOX}.ports[0].containerPort", 0, "between 1 and 65535", ""),
    ("Job", f"{BOX}.ports[0].hostPort", -1, "between 1 and 65535", ""),
    ("Job", f"{BOX}.ports[0].name", "ray-head-and-workers", "longer than 15", ""),
    ("Job", f"{BOX}.ports[0].name", "6379", "longer than 15", ""),
    ("Job", f"{BOX}.ports[0].name", "ray--gcs", "longer than 15", ""),
    ("Job", f"{BOX}.ports[1].name", "ray", "stands twice", ""),
    ("Job", f"{BOX}.name", "Post_Train", "no DNS name", ""),
    ("Job", f"{BOX}.name", "p" * 64, "no DNS name", ""),
    ("Job", f"{POD}.initContainers", [{"name": "posttrain", "image": "busybox:1"}], "a container has this name",
     f"{POD}.initContainers[0].name"),
    ("Job", f"{VOLUME}.name", "Config", "no DNS name", ""),
    ("Job", f"{POD}.subdomain", "a.b", "no DNS name", ""),
    ("Job", f"{POD}.hostname", "A", "no DNS name", ""),
    ("Job", f"{POD}.serviceAccountName", "Trainer_1", "no DNS name", ""),
    ("Job", f"{POD}.priorityClassName", "High!", "no DNS name", ""),
    ("Job", "metadata.namespace", "a.b", "no DNS name", ""),
    ("Job", "metadata.labels['a b']", "c", "not a valid key of a label", "metadata.labels.a b"),
    ("Job", "metadata.annotations['/a']", "c", "not a valid key of a label", ""),
    ("Job", "spec.template.metadata.labels['x/y/z']", "c", "not a valid key of a label", ""),
    ("Job", f"{POD}.nodeSelector['-zone']", "c", "not a valid key of a label", f"{POD}.nodeSelector.-zone"),
    ("Job", f"{POD}.dnsPolicy", "Cluster", "must be one of ClusterFirst", ""),
    ("Job", f"{POD}.dnsPolicy", "None", "at least one DNS nameserver", f"{POD}.dnsConfig.nameservers"),
    ("Job", f"{POD}.preemptionPolicy", "Always", "must be one of Never", ""),
    ("Job", f"{POD}.securityContext.fsGroupChangePolicy", "Never", "must be one of OnRootMismatch", ""),
    ("Job", f"{POD}.securityContext.fsGroup", -1, "between 0 and 2147483647", ""),
    ("Job", f"{POD}.securityContext.runAsUser", -5, "between 0 and 2147483647", ""),
    ("Job", f"{POD}.securityContext.seccompProfile.type", "Default", "must be one of Localhost", ""),
    ("Job", f"{POD}.securityContext.seccompProfile.type", "Localhost", "must be set with type: Localhost",
     f"{POD}.securityContext.seccompProfile.localhostProfile"),
    ("Job", f"{POD}.securityContext.seccompProfile.localhostProfile", "a.json", "must be set with type: Localhost", ""),
    ("Job", f"{BOX}.securityContext.privileged", True, "cannot be false when privileged",
     f"{BOX}.securityContext.allowPrivilegeEscalation"),
    ("Job", f"{BOX}.securityContext.capabilities.add", ["IPC_LOCK", "CAP_SYS_ADMIN"], "cannot be false with CAP_SYS",
     f"{BOX}.securityContext.allowPrivilegeEscalation"),
    ("Job", f"{BOX}.securityContext.runAsGroup", 2**31, "between 0 and", ""),
    ("Job", f"{BOX}.securityContext.appArmorProfile", {"type": "docker"}, "must be one of Localhost",
     f"{BOX}.securityContext.appArmorProfile.type"),
    ("Job", f"{POD}.share", "both", "together with hostPID", f"{POD}.shareProcessNamespace"),
    ("Job", f"{POD}.hostport", "other", "must match containerPort", f"{BOX}.ports[0].hostPort"),
    ("Job", f"{MOUNT}.mountPropagation", "Bidirectional", "needs a privileged container", ""),
    ("Job", f"{BOX}.resources.limits.gpu", 8, "must be a standard resource", ""),
    ("Job", f"{BOX}.resources.limits.storage", "5Gi", "must be a standard resource", ""),
    ("Job", f"{BOX}.resources.limits['example.com/nic']", "1500m", "must be an integer", ""),
    ("Job", f"{BOX}.resources", {"limits": {"hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "4Mi"}},
     "HugePages require cpu or memory", f"{BOX}.resources.limits.hugepages-2Mi"),
    ("Job", NEW, {"name": "a", "emptyDir": {}, "hostPath": {"path": "/a"}}, "more than 1 volume type", ""),
    ("Job", NEW, {"name": "a", "emptyDir": {"medium": "RAM"}}, "must be one of Memory", f"{NEW}.emptyDir.medium"),
    ("Job", NEW, {"name": "a", "hostPath": {"path": "/a", "type": "Dir"}}, "must be one of Directory",
     f"{NEW}.hostPath.type"),
    ("Job", NEW, {"name": "a", "hostPath": {"path": "/a/../b"}}, "must not contain '..'", f"{NEW}.hostPath.path"),
    ("Job", NEW, {"name": "a", "hostPath": {"path": ""}}, "is required", f"{NEW}.hostPath.path"),
    ("Job", NEW, {"name": "a", "persistentVolumeClaim": {"claimName": ""}}, "is required",
     f"{NEW}.persistentVolumeClaim.claimName"),
    ("Job", NEW, {"name": "a", "configMap": {"items": []}}, "is required", f"{NEW}.configMap.name"),
    ("Job", NEW, {"name": "a", "secret": {}}, "is required", f"{NEW}.secret.secretName"),
    ("Job", NEW, {"name": "a", "nfs": {"server": "", "path": "/a"}}, "is required", f"{NEW}.nfs.server"),
    ("Job", NEW, {"name": "a", "nfs": {"server": "b", "path": "a"}}, "must be an absolute path", f"{NEW}.nfs.path"),
    ("Job", f"{VOLUME}.configMap.defaultMode", 777, "between 0 and 511", ""),
    ("Job", f"{VOLUME}.configMap.items[0].path", "/config.yaml", "must be a relative path", ""),
    ("Job", f"{VOLUME}.configMap.items[0].path", "../config.yaml", "must be a relative path", ""),
    ("Job", f"{MOUNT}.mountPath", "", "is required", ""),
    ("Job", f"{MOUNT}.subPath", "/a", "must be a relative path", ""),
    ("Job", f"{MOUNT}.subPath", "a/../..", "must be a relative path", ""),
    ("Job", f"{BOX}.volumeMounts[0]", {"name": "config", "mountPath": "/c", "subPath": "a", "subPathExpr": "$(A)"},
     "mutually exclusive", f"{BOX}.volumeMounts[0].subPathExpr"),
    ("Job", f"{BOX}.livenessProbe", {"periodSeconds": 5}, "must specify one handler", ""),
    ("Job", f"{BOX}.readinessProbe", {"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}, "must specify one handler",
     ""),
    ("Job", f"{BOX}.livenessProbe", {"tcpSocket": {"port": 1}, "successThreshold": 2}, "must be 1",
     f"{BOX}.livenessProbe.successThreshold"),
    ("Job", f"{BOX}.startupProbe", {"tcpSocket": {"port": 1}, "periodSeconds": -1}, "between 0 and",
     f"{BOX}.startupProbe.periodSeconds"),
    ("Job", f"{BOX}.lifecycle", {"preStop": {}}, "must specify one handler", f"{BOX}.lifecycle.preStop"),
    ("Job", f"{POD}.initContainers", [{"name": "a", "image": "b:1", "livenessProbe": {"tcpSocket": {"port": 1}}}],
     "init containers", f"{POD}.initContainers[0].livenessProbe"),
    ("Job", NODE, node_affinity(operator="Equals"), "must be one of In",
     f"{NODE}.{NEEDED}.nodeSelectorTerms[0].matchExpressions[0].operator"),
    ("Job", NODE, node_affinity(values=[]), "at least one value",
     f"{NODE}.{NEEDED}.nodeSelectorTerms[0].matchExpressions[0].values"),
    ("Job", NODE, node_affinity(operator="Exists"), "no values",
     f"{NODE}.{NEEDED}.nodeSelectorTerms[0].matchExpressions[0].values"),
    ("Job", NODE, node_affinity(operator="Gt", values=["1", "2"]), "one value",
     f"{NODE}.{NEEDED}.nodeSelectorTerms[0].matchExpressions[0].values"),
    ("Job", NODE, {NEEDED: {"nodeSelectorTerms": []}}, "at least one node selector term",
     f"{NODE}.{NEEDED}.nodeSelectorTerms"),
    ("Job", NODE, {PREFERRED: [{"weight": 0, "preference": {"matchExpressions": [EXPRESSION]}}]}, "between 1 and 100",
     f"{NODE}.{PREFERRED}[0].weight"),
    ("Job", f"{POD}.affinity.podAntiAffinity.{NEEDED}[0].topologyKey", "", "can not be empty", ""),
    ("Job", f"{POD}.affinity.podAffinity", {PREFERRED: [{"weight": 5, "podAffinityTerm": {"topologyKey": ""}}]},
     "can not be empty", f"{POD}.affinity.podAffinity.{PREFERRED}[0].podAffinityTerm.topologyKey"),
    ("Job", f"{POD}.topologySpreadConstraints", [{"maxSkew": 0, "topologyKey": "z", "whenUnsatisfiable":
     "DoNotSchedule"}], "between 1 and", f"{POD}.topologySpreadConstraints[0].maxSkew"),
    ("Job", f"{POD}.topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "Fail"}],
     "must be one of DoNotSchedule", f"{POD}.topologySpreadConstraints[0].whenUnsatisfiable"),
    ("Job", f"{POD}.activeDeadlineSeconds", 0, "between 1 and", ""),
    ("Job", "spec.backoffLimit", -1, "between 0 and", ""),
    ("Job", "spec.ttlSecondsAfterFinished", -1, "between 0 and", ""),
    ("Job", "spec.selector", {"matchLabels": {"a": "b"}}, "is made by Kubernetes", ""),
    ("Job", "spec.podReplacementPolicy", "Never", "must be one of Terminating", ""),
    ("Job", f"{RULE}.onExitCodes.values", [65, 64], "must be ordered", f"{RULE}.onExitCodes.values[1]"),
    ("Job", f"{RULE}.onExitCodes.values", [64, 64], "must be ordered and unique", f"{RULE}.onExitCodes.values[1]"),
    ("Job", "spec.podFailurePolicy.rules", [{"action": "Ignore", "onPodConditions": [{"type": "A"}]}] * 21,
     "at most 20", ""),
    ("Job", RULE, {"action": "Ignore", "onPodConditions": [{"type": "A", "status": "Yes"}]}, "True, False",
     f"{RULE}.onPodConditions[0].status"),
    ("Job", RULE, {"action": "Ignore", "onPodConditions": [{"type": "", "status": "True"}]}, "is required",
     f"{RULE}.onPodConditions[0].type"),
    ("Job", "spec.successPolicy.rules", [], "at least one rule", ""),
    ("Job", SUCCESS, {}, "needs succeededIndexes or succeededCount", ""),
    ("Job", f"{SUCCESS}.succeededCount", 5, "at most completions", ""),
    ("Job", f"{SUCCESS}.succeededIndexes", "0..1", 'like "0,2-3"', ""),
    ("Service", "spec.ports", [{"port": 0}], "between 1 and 65535", "spec.ports[0].port"),
    ("Service", "spec.ports", [{"port": 1}, {"port": 2, "name": "b"}], "several ports", "spec.ports[0].name"),
    ("Service", "spec.ports", [{"port": 1, "name": "b"}, {"port": 2, "name": "b"}], "stands twice",
     "spec.ports[1].name"),
    ("Service", "spec.ports", [{"port": 1, "nodePort": 30000}], "when type is ClusterIP", "spec.ports[0].nodePort"),
    ("Service", "spec.type", "Headless", "must be one of ClusterIP", ""),
    ("Service", "spec.type", "LoadBalancer", "may not be None", "spec.clusterIP"),
    ("Service", "spec.type", "ExternalName", "is required", "spec.externalName"),
    ("Service", "spec.sessionAffinity", "IP", "must be one of ClientIP", ""),
    ("Service", "metadata.name", "a.b", "no DNS name", ""),
    ("ConfigMap", "data['a/b']", "x", "must be letters", ""),
    ("ConfigMap", "metadata.name", "My_Config", "no DNS name", ""),
    ("ConfigMap", "binaryData", {"config.yaml": "eA=="}, "stands in data too", "binaryData['config.yaml']"),
    ("Secret", "data", {"secret": "plain text"}, "is not base64", "data.secret"),
    ("NetworkPolicy", "spec.policyTypes", ["In"], "must be one of Ingress", "spec.policyTypes[0]"),
    ("NetworkPolicy", "spec.ingress[0].ports", [{"port": 1, "protocol": "tcp"}], "must be one of TCP",
     "spec.ingress[0].ports[0].protocol"),
    ("PersistentVolumeClaim", "spec.accessModes", ["RWX"], "must be one of ReadWriteOnce", "spec.accessModes[0]"),
    ("PersistentVolumeClaim", "spec.accessModes", [], "at least 1 access mode", ""),
    ("PersistentVolumeClaim", "spec.accessModes", ["ReadWriteMany", "ReadWriteOncePod"], "stands alone", ""),
    ("PersistentVolumeClaim", "spec.resources.requests.storage", "0", "must be above 0", ""),
    ("PersistentVolumeClaim", "spec.volumeMode", "File", "must be one of Filesystem", ""),
    ("Deployment", "spec.template.metadata.labels", {"app": "b"}, "does not match labels",
     "spec.selector.matchLabels.app"),
    ("Deployment", f"{POD}.restartPolicy", "Never", "must be Always", ""),
    ("Deployment", "spec.replicas", -1, "between 0 and", ""),
    ("StorageClass", "reclaimPolicy", "Keep", "must be one of Delete", ""),
    ("StorageClass", "volumeBindingMode", "Late", "must be one of Immediate", ""),
    ("Job", ENV, {"name": "A", "valueFrom": {"fieldRef": {"apiVersion": "v2", "fieldPath": "metadata.name"}}},
     "must be one of v1", f"{ENV}.valueFrom.fieldRef.apiVersion"),
    ("Job", ENV, {"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.gpus"}}}, "no resource that",
     f"{ENV}.valueFrom.resourceFieldRef.resource"),
    ("Job", TOLERATION, {"key": "a b", "operator": "Exists"}, "not a valid key of a taint", f"{TOLERATION}.key"),
    ("Job", f"{MOUNT}.mountPropagation", "Both", "must be one of None", ""),
    ("Job", f"{BOX}.readinessProbe", {"httpGet": {"port": 80, "scheme": "http"}}, "must be one of HTTP",
     f"{BOX}.readinessProbe.httpGet.scheme"),
    ("Job", f"{BOX}.readinessProbe", {"tcpSocket": {"port": 0}}, "between 1 and 65535",
     f"{BOX}.readinessProbe.tcpSocket.port"),
    ("Job", f"{BOX}.securityContext.procMount", "unmasked", "must be one of Default", ""),
    ("Job", f"{BOX}.ports", [{"containerPort": 80, "hostPort": 80}, {"containerPort": 80, "hostPort": 80}],
     "two ports of the pod", f"{BOX}.ports[1].hostPort"),
    ("Job", f"{POD}.containers", [{"name": name, "image": "b:1", "ports": [{"containerPort": 80, "hostPort": 80}]}
     for name in ("a", "b")], "two ports of the pod", f"{POD}.containers[1].ports[0].hostPort"),
    ("Job", f"{POD}.hostAliases", [{"ip": "10.0.0", "hostnames": ["a"]}], "no IP address", f"{POD}.hostAliases[0].ip"),
    ("Job", f"{POD}.affinity.podAntiAffinity.{NEEDED}[0].labelSelector", {"matchExpressions": [{"key": "a",
     "operator": "Exists", "values": ["b"]}]}, "Exists and DoesNotExist none",
     f"{POD}.affinity.podAntiAffinity.{NEEDED}[0].labelSelector.matchExpressions[0].values"),
    ("Job", f"{POD}.topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable":
     "DoNotSchedule"}] * 2, "stands twice", f"{POD}.topologySpreadConstraints[1].topologyKey"),
    ("Job", f"{POD}.topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "z", "minDomains": 2,
     "whenUnsatisfiable": "ScheduleAnyway"}], "needs whenUns", f"{POD}.topologySpreadConstraints[0].minDomains"),
    ("Job", f"{POD}.schedulingGates", [{"name": "a.b/c"}] * 2, "stands twice", f"{POD}.schedulingGates[1].name"),
    ("Job", f"{POD}.readinessGates", [{"conditionType": "a b"}], "name of a condition",
     f"{POD}.readinessGates[0].conditionType"),
    ("Job", f"{POD}.securityContext.sysctls", [{"name": "Net core", "value": "1"}], "name of a sysctl",
     f"{POD}.securityContext.sysctls[0].name"),
    ("Job", f"{POD}.users", "both", "shares no hostNetwork", f"{POD}.hostUsers"),
    ("Service", "spec.ports", [{"port": 1, "name": "a"}, {"port": 1, "name": "b"}], "stands twice",
     "spec.ports[1].port"),
    ("Service", "spec.clusterIP", "none", "None or an IP address", ""),
    ("Service", "spec.externalTrafficPolicy", "Local", "NodePort or LoadBalancer", ""),
    ("PersistentVolume", "spec.hostPath", {"path": "/a"}, "one volume type", "spec"),
    ("PersistentVolume", "spec.nfs", None, "one volume type", "spec"),
    ("NetworkPolicy", "spec.ingress[0].ports", [{"port": 80, "endPort": 79}], "is not below",
     "spec.ingress[0].ports[0].endPort"),
    ("NetworkPolicy", "spec.ingress[0].ports", [{"port": "http", "endPort": 90}], "needs a number as port",
     "spec.ingress[0].ports[0].endPort"),
    ("NetworkPolicy", "spec.ingress[0].from", [{}], "must have ipBlock", "spec.ingress[0].from[0]"),
    ("NetworkPolicy", "spec.ingress[0].from", [{"ipBlock": {"cidr": "10.0.0.0/16"}, "podSelector": {}}], "excludes pod",
     "spec.ingress[0].from[0].ipBlock"),
    ("NetworkPolicy", "spec.ingress[0].from", [{"ipBlock": {"cidr": "10.0.0.0/40"}}], "no network like",
     "spec.ingress[0].from[0].ipBlock.cidr"),
    ("NetworkPolicy", "spec.ingress[0].from", [{"ipBlock": {"cidr": "10.0.0.0"}}], "no network like",
     "spec.ingress[0].from[0].ipBlock.cidr"),
    ("NetworkPolicy", "spec.ingress[0].from", [{"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.1.0.0/24"]}}],
     "smaller part", "spec.ingress[0].from[0].ipBlock.except[0]"),
    ("Deployment", "spec.strategy", {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}, "with type Recreate",
     "spec.strategy.rollingUpdate"),
    ("Deployment", "spec.strategy", {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}, "when maxSurge is 0",
     "spec.strategy.rollingUpdate.maxUnavailable"),
    ("CronJob", "spec.schedule", "every day", "five fields", ""),
    ("CronJob", "spec.schedule", "TZ=UTC 0 0 * * *", "five fields", ""),
    ("CronJob", "spec.concurrencyPolicy", "allow", "must be one of Allow", ""),
    ("ClusterRoleBinding", "subjects[0].namespace", "", "for a ServiceAccount", ""),
    ("PodDisruptionBudget", "spec.maxUnavailable", 1, "cannot be both set", "spec.minAvailable"),
    ("PriorityClass", "value", 2_000_000_000, "between -2147483648 and 1000000000", ""),
    ("PriorityClass", "metadata.name", "system-run", "those of Kubernetes", ""),
]  # fmt: skip

PAIRS = {  # two changes at once
    "share": {"shareProcessNamespace": True, "hostPID": True},
    "hostport": {"hostNetwork": True},
    "users": {"hostUsers": False, "hostNetwork": True},
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("profiles")
    rendered = [*render_setup(make_profile(folder, EKS)), *render_run(make_request(folder, EKS, "scheduler.kind=job"))]
    ports = [{"containerPort": 80, "hostPort": 80, "hostIP": address} for address in ("10.0.0.1", "10.0.0.2")]
    box = {"name": "a", "image": "b:1", "ports": ports}
    template = {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [box]}}
    spec = {"selector": {"matchLabels": {"app": "a"}}, "template": template}
    server = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": spec}
    rbac, account = "rbac.authorization.k8s.io", {"kind": "ServiceAccount", "name": "a", "namespace": "b"}
    own = {"metadata": {"name": "a"}}
    others = [
        {"apiVersion": "v1", "kind": "PersistentVolume", **own, "spec": {"capacity": {"storage": "1Gi"},
         "accessModes": ["ReadWriteMany"], "nfs": {"server": "a", "path": "/"}}},
        {"apiVersion": "batch/v1", "kind": "CronJob", **own, "spec": {"schedule": " 0  3 * * * ",
         "jobTemplate": {"spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [box]}}}}}},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", **own, "subjects": [account],
         "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "a"}},
        {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", **own,
         "subjects": [{"kind": "ServiceAccount", "name": "a"}],
         "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "a"}},
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **own, "spec": {"minAvailable": 1, "selector": {}}},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", **own, "value": 1_000_000_000},
    ]  # fmt: skip
    return {body["kind"]: body for body in [*rendered, control_secret(make_request(folder, EKS)), server, *others]}


def test_what_the_mutants_are_made_of_passes(objects: dict[str, dict[str, Any]]) -> None:
    errors = check_manifests([Manifest("sound.yaml", 1, body) for body in objects.values()]).errors
    assert errors == [], "\n".join(map(str, errors))


def put(body: dict[str, Any], path: str, value: Any) -> None:
    *folders, last = keys_of(path)
    inner: Any = body
    for key in folders:
        inner = inner[key]
    if pair := PAIRS.get(str(last)):
        inner.update(pair)
        inner["containers"][0]["ports"][0]["hostPort"] = 9
    elif isinstance(inner, list) and isinstance(last, int) and last >= len(inner):
        inner.append(value)
    else:
        inner[last] = value


@pytest.mark.parametrize(
    ("kind", "path", "value", "word", "found_at"), MUTANTS, ids=[f"{i}-{m[0]}-{m[1]}" for i, m in enumerate(MUTANTS)]
)
def test_what_an_api_server_refuses_is_an_error_in_its_words(
    objects: dict[str, dict[str, Any]], kind: str, path: str, value: Any, word: str, found_at: str
) -> None:
    mutant = copy.deepcopy(objects[kind])
    mutant["metadata"].setdefault("annotations", {})
    put(mutant, path, value)
    number = len(mutant["spec"]["template"]["spec"]["volumes"]) - 1 if kind == "Job" else 0
    expected = (found_at or path).replace(NEW, f"{POD}.volumes[{number}]")
    errors = check_manifests([Manifest("mutant.yaml", 1, mutant)]).errors
    said = [error for error in errors if error.path == expected and word in error.message]
    assert said, "\n".join(map(str, errors)) or "no errors"


def test_there_are_a_hundred_mutants() -> None:
    assert len(MUTANTS) >= 100


PUBLIC = Path(__file__).parent / "public_style_manifests.yaml"


@pytest.mark.parametrize(
    "text", PUBLIC.read_text(encoding="utf-8").split("\n# == ")[1:], ids=lambda t: t.split("\n")[0]
)
def test_manifests_in_the_style_of_public_projects_pass(text: str) -> None:
    errors = check_manifests(read_text(f"# {text}", "public.yaml")).errors
    assert errors == [], "\n".join(map(str, errors))


def test_there_are_twenty_of_them() -> None:
    assert PUBLIC.read_text(encoding="utf-8").count("\n# == ") >= 20


@pytest.mark.parametrize(
    ("kind", "level"), [("rayjob", None), ("raycluster", None), ("volcano", "warning"), ("jobset", "warning")]
)
def test_without_shared_memory_kuberay_mounts_it_and_others_are_warned(
    tmp_path: Path, kind: str, level: str | None
) -> None:
    manifest = Manifest("m", 1, render_run(make_request(tmp_path, EKS, f"scheduler.kind={kind}"))[-1])
    found = pods_of(manifest)
    assert found
    for pods in found:
        for _, box in pods.containers("containers"):
            box["volumeMounts"] = [mount for mount in box["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
            box["env"] = [entry for entry in box["env"] if not entry["name"].startswith("POSTTRAIN_")]
    findings = check_manifests([manifest]).findings
    assert {f.level for f in findings if f.rule == "shm-missing"} == ({level} if level else set())
