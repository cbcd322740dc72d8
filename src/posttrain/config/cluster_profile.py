"""The schema of a cluster profile: which cluster, image, machines, scheduler and storage a run is launched with.

How many machines and GPUs a run has is in its own config (`cluster:`). Secrets are named, never written.
"""

from __future__ import annotations

import os
import re
from datetime import date
from pathlib import PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    matching,
    setting,
)
from posttrain.files.redaction import is_secret_key, redact

Variable = Annotated[
    str,
    matching(r"[A-Za-z_][A-Za-z0-9_]*", "cannot name an environment variable"),
    matching(r"(?!POSTTRAIN_).*", "is set by the launcher itself"),
]

Label = Annotated[
    str, matching(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "lower-case letters, digits and '-' are accepted, at most 63")
]
Subdomain = Annotated[
    str,
    matching(
        r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
        "lower-case letters, digits, '-' and '.' are accepted, as in every name of Kubernetes",
    ),
]
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[
    str,
    matching(
        rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}",
        "is no label of Kubernetes; expected letters, digits, '-', '_' and '.', at most 63, such as team or "
        "example.com/team",
    ),
]
LabelValue = Annotated[
    str,
    matching(
        rf"({_NAME})?",
        "is no value of a label of Kubernetes; expected letters, digits, '-', '_' and '.', at most 63",
    ),
]
Word = Annotated[str, matching(r"[!-~]+", "one word is expected, without spaces and line breaks")]
SlurmTime = Annotated[
    str, matching(r"\d+(-\d+)?(:\d+){0,2}|(?i:UNLIMITED|INFINITE)", 'minutes or a time such as "24:00:00" are expected')
]
SbatchOption = Annotated[
    str,
    matching(
        r"-(?!-(nodes|ntasks|signal|no-requeue|chdir|array|job-name)\b|[NnDaJ])[!-~]+",
        "an option such as --mem=0 is expected; name, machines, tasks, signal, requeue, folder are set by the launcher",
    ),
]
Line = Annotated[
    str, matching(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]+", "one line is expected, without control characters")
]
SecretKey = Annotated[str, matching(r"[-._A-Za-z0-9]{1,253}", "letters, digits, '-', '_' and '.' are accepted")]
ImageName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matching(r"[^\s<>]*", "is not the name of an image; expected registry/name:tag or registry/name@sha256:…"),
]


def is_http_address(text: str) -> bool:
    """http://HOST:PORT, without a user: it is shown in messages."""
    try:
        place = urlsplit(text)
        return (
            place.scheme in ("http", "https")
            and bool(place.hostname)
            and place.port != 0
            and not re.search(r"[@\s]", text)
        )
    except ValueError:  # of the port
        return False


class ClusterSection(Section):
    kind: Literal["eks", "gke", "kubernetes", "slurm", "local"] = setting(
        ..., "Who runs the cluster; decides fabric, Spot and storage; local is this machine."
    )
    context: Line | None = setting(None, "Context of the kubeconfig; null is the current one.")
    namespace: Label = setting("default", "Namespace of everything that a run creates.")
    name: Word | None = setting(
        None, "Name of an EKS cluster: `setup` finds subnets and security groups by its discovery tag."
    )


class ImageSection(Section):
    name: ImageName = setting(..., "Image with posttrain and Ray; best with a digest: repo/posttrain@sha256:….")
    pull_secret: Subdomain | None = setting(None, "Secret with the registry's login; null needs none.")
    seccomp: Literal["RuntimeDefault", "Unconfined"] = setting(
        "RuntimeDefault",
        "System call filter of the pods; Unconfined is for the code sandbox `strict`, which makes user namespaces.",
    )
    ray_version: Word = setting("2.60.0", "Version of Ray in the image; KubeRay asks for it.")


class NodesSection(Section):
    instance_type: LabelValue | None = setting(
        None, "Type of machine, e.g. p5en.48xlarge; null needs gpus, cpu, memory_gib."
    )
    capacity: Literal["spot", "on_demand"] = setting("on_demand", "Spot machines, or on-demand ones.")
    zone: LabelValue | None = setting(None, "The one zone of all machines; EFA and RDMA do not cross zones.")
    gpus: NonNegativeInt | None = setting(None, "GPUs of a machine that is not in the table; 0 trains on CPUs.")
    cpu: PositiveFloat | None = setting(None, "Its allocatable CPU cores.")
    memory_gib: PositiveFloat | None = setting(None, "Its allocatable memory, GiB.")
    selector: dict[LabelKey, LabelValue] = setting(dict, "Labels of nodes, beside those of the type.")
    max_nodes: PositiveInt = setting(8, "Machines that `setup` lets Karpenter and quotas have.")
    pool: Subdomain = setting("posttrain", "Name of the node pool, node class, queue and flavor of `setup`.")
    role: Word | None = setting(None, "IAM role of EKS nodes; null is KarpenterNodeRole-CLUSTER.")
    grace_s: PositiveInt | None = setting(
        None,
        "Seconds between the signal to end and the kill; null is what the provider leaves, on GKE Spot 15 unless the "
        "node pool raises it.",
    )

    @model_validator(mode="after")
    def _has_a_size(self) -> NodesSection:
        own = (self.gpus, self.cpu, self.memory_gib)
        if self.instance_type is None and None in own:
            raise ValueError("give instance_type, or all of gpus, cpu and memory_gib")
        if self.instance_type is not None and any(value is not None for value in own):
            raise ValueError("gpus, cpu and memory_gib are those of instance_type; leave them out")
        return self


class SchedulerSection(Section):
    kind: Literal["job", "jobset", "volcano", "rayjob", "raycluster", "slurm"] = setting(
        "jobset", "What starts the pods, and starts them again together after an interruption."
    )
    kueue_queue: Subdomain | None = setting(None, "LocalQueue of Kueue that admits the run; null is none.")
    queue: Subdomain | None = setting(None, "Queue of Volcano; null is nodes.pool.")
    priority_class: Subdomain | None = setting(None, "PriorityClass of the pods; null is the default.")
    ray_address: str | None = setting(
        None,
        "Address of the dashboard of a raycluster, http://HOST:PORT; null is RAY_API_SERVER_ADDRESS, else "
        "http://127.0.0.1:8265, a forwarded port.",
    )
    operator_namespace: Label = setting(
        "kuberay-operator", "Namespace of KubeRay's operator: only its pods, and those of the run, reach the dashboard."
    )
    topology: list[LabelKey] = setting(
        list, "Labels of nodes, the widest first, by which Kueue places a run close together; its machines must exist."
    )

    @field_validator("ray_address")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is not None and not is_http_address(address):
            raise ValueError("http://HOST:PORT or https://HOST:PORT is accepted, without a user or password")
        return address

    @model_validator(mode="after")
    def _is_legal(self) -> SchedulerSection:
        if self.kueue_queue is not None and self.kind == "volcano":
            raise ValueError("kueue_queue with kind volcano: two queues would each wait for the other; choose one")
        if self.queue is not None and self.kind != "volcano":
            raise ValueError(f"queue is for kind volcano, not for {self.kind}; for Kueue set kueue_queue")
        if self.ray_address is not None and self.kind != "raycluster":
            raise ValueError(f"ray_address is for kind raycluster, not for {self.kind}")
        if self.topology and self.kueue_queue is None:
            raise ValueError("topology is for Kueue: set kueue_queue")
        return self


class StorageSection(Section):
    claim: Subdomain = setting(..., "PersistentVolumeClaim that every pod mounts, ReadWriteMany.")
    mount: Line = setting("/shared", "Folder of the mount; checkpoints and models are below it.")
    size_gib: PositiveInt = setting(1200, "Size that `setup` asks for, GiB.")
    file_system: Word | None = setting(
        None, "An existing file system: fs-… of FSx, project/zone/instance of Managed Lustre; null makes a new one."
    )
    address: Word | None = setting(None, "DNS name (FSx) or IP (Lustre) of the existing file system.")
    export_name: Word | None = setting(None, "Mount name (FSx) or filesystem (Lustre) of the existing one.")
    throughput: Literal[125, 250, 500, 1000] = setting(250, "MB/s per TiB of a new file system.")
    subnet: Word | None = setting(None, "Subnet of a new FSx file system, subnet-….")
    security_group: Word | None = setting(None, "Security group of a new FSx file system, sg-….")

    @field_validator("mount")
    @classmethod
    def _is_absolute(cls, mount: str) -> str:
        if not PurePosixPath(mount).is_absolute() or PurePosixPath(mount) == PurePosixPath("/"):
            raise ValueError("must be an absolute folder such as /shared")
        return mount.rstrip("/")

    @model_validator(mode="after")
    def _existing_one_is_complete(self) -> StorageSection:
        if self.file_system is not None and (self.address is None or self.export_name is None):
            raise ValueError("file_system needs address and export_name as well")
        return self


class TolerationSection(Section):
    key: LabelKey | None = setting(None, "Key of the taint; null, with operator Exists, is every taint.")
    operator: Literal["Exists", "Equal"] = setting("Exists", "Whether the taint exists, or has this value.")
    value: LabelValue | None = setting(None, "Value of the taint, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = setting(
        None, "Effect of the taint; null is every effect."
    )

    @model_validator(mode="after")
    def _is_legal(self) -> TolerationSection:
        if (self.operator == "Exists") != (self.value is None):
            raise ValueError("value is for operator Equal, which needs it")
        if self.key is None and self.operator == "Equal":
            raise ValueError("operator Equal needs a key")
        if self.key == "cloud.google.com/impending-node-termination":
            raise ValueError("new pods would start on nodes that are about to end; leave this toleration out")
        return self


class VolumeSection(Section):
    mount: Line = setting(..., "Folder of the mount in the pods.")
    claim: Subdomain | None = setting(None, "A PersistentVolumeClaim.")
    config_map: Subdomain | None = setting(None, "Or a ConfigMap.")
    secret: Subdomain | None = setting(None, "Or a Secret.")
    host_path: Line | None = setting(None, "Or a folder of the machine.")
    read_only: bool = setting(True, "Pods cannot write to it.")

    @model_validator(mode="after")
    def _has_one_source(self) -> VolumeSection:
        if sum(source is not None for source in (self.claim, self.config_map, self.secret, self.host_path)) != 1:
            raise ValueError("give one of claim, config_map, secret and host_path")
        taken = ("/", "/tmp", "/dev/shm", "/etc/posttrain", "/etc/posttrain-control")
        if not self.mount.startswith("/") or self.mount.rstrip("/") in ("", *taken):
            raise ValueError(f"mount = {self.mount!r}: an absolute folder other than {', '.join(taken)} is accepted")
        return self


class PodsSection(Section):
    tolerations: list[TolerationSection] = setting(list, "Taints of nodes, beside those of GPUs and Spot.")
    service_account: Subdomain | None = setting(None, "ServiceAccount of the pods; null is the namespace's default.")
    service_account_annotations: dict[LabelKey, Line] = setting(
        dict,
        "With these `setup` creates it: eks.amazonaws.com/role-arn (IRSA) or iam.gke.io/gcp-service-account (Workload "
        "Identity).",
    )
    annotations: dict[LabelKey, str] = setting(dict, "Annotations of the pods, beside those of the fabric.")
    labels: dict[LabelKey, LabelValue] = setting(dict, "Labels of the pods, beside those of the run.")
    host_network: bool = setting(False, "Pods use the network of their machine; no NetworkPolicy protects them then.")
    volumes: list[VolumeSection] = setting(list, "Volumes beside the shared file system.")

    @model_validator(mode="after")
    def _account_has_a_name(self) -> PodsSection:
        if self.service_account_annotations and self.service_account is None:
            raise ValueError("service_account_annotations needs service_account")
        return self


class SlurmSection(Section):
    partition: Word | None = setting(None, "Partition; null is the cluster's default.")
    account: Word | None = setting(None, "Account that the job is charged to; null is yours.")
    qos: Word | None = setting(None, "Quality of service; null is the default.")
    time: SlurmTime | None = setting(None, "Time limit of one attempt, such as 24:00:00; null is the partition's.")
    setup: list[Line] = setting(
        list, "Shell lines before the run, such as `source /shared/venv/bin/activate`: posttrain must be on the PATH."
    )
    sbatch_options: list[SbatchOption] = setting(list, "More options of the job, such as --mem=0 or --constraint=h200.")
    srun_options: list[Word] = setting(list, "More options of the step, such as --container-image=….")


class SecretReference(Section):
    secret: Subdomain = setting(..., "Name of the Secret.")
    key: SecretKey = setting(..., "Key in it.")


class PriceSection(Section):
    """Prices of one machine for one hour, USD. They replace those of the built-in table."""

    on_demand: PositiveFloat | None = setting(None, "On-demand price of a machine, USD an hour.")
    spot: PositiveFloat | None = setting(None, "Spot price of a machine, USD an hour.")
    as_of: str = setting(..., "Day of the price, YYYY-MM-DD; older than 90 days warns.")
    source: Line = setting("cluster profile", "Where the price is from.")

    @field_validator("as_of")
    @classmethod
    def _is_day(cls, text: str) -> str:
        try:
            date.fromisoformat(text)
        except ValueError:
            raise ValueError("must be a day such as 2026-11-01") from None
        return text

    @model_validator(mode="after")
    def _is_a_price(self) -> PriceSection:
        if self.on_demand is None and self.spot is None:
            raise ValueError("give on_demand or spot, or both")
        return self


class CostSection(Section):
    price: PriceSection | None = setting(None, "Your prices; null takes the built-in table.")
    storage_per_gib_month: NonNegativeFloat = setting(0.14, "Price of the file system, USD per GiB-month.")
    storage_months: NonNegativeFloat = setting(0.5, "Months of the file system that one run pays for.")
    other: NonNegativeFloat = setting(0.0, "What else a run costs, such as object storage, USD.")
    runs_per_year: PositiveInt = setting(24, "Runs in a year, for the yearly figure.")
    boot_s: NonNegativeFloat = setting(600.0, "Seconds from a machine's start to the first step; it is billed.")
    node_mtbf_hours: PositiveFloat | None = setting(
        None, "Mean hours between interruptions of one Spot machine; null shows a range."
    )
    notice_share: Fraction = setting(0.0, "Share of interruptions that a notice lets the run save before.")
    restart_s: NonNegativeFloat = setting(360.0, "Seconds from an interruption to the next step.")
    save_s: PositiveFloat | None = setting(
        None, "Seconds that training stands still for one save; null is planned, or measured by --run."
    )


class ClusterProfile(Section):
    cluster: ClusterSection = setting(..., "Which cluster.")
    image: ImageSection = setting(..., "What the pods run.")
    nodes: NodesSection = setting(..., "Which machines.")
    scheduler: SchedulerSection = setting(SchedulerSection, "What starts the pods.")
    storage: StorageSection = setting(..., "The shared file system.")
    pods: PodsSection = setting(PodsSection, "What the pods have beside that.")
    slurm: SlurmSection = setting(SlurmSection, "What a job of Slurm is submitted with.")
    secrets: dict[Variable, SecretReference] = setting(
        dict, "Environment variables with values of Secrets in the cluster."
    )
    env: dict[Variable, str] = setting(dict, "Other environment variables; no secrets.")
    log_image: ImageName | None = setting(
        None, "Fluent Bit image that ships Ray's logs (raycluster only); null ships none."
    )
    cost: CostSection = setting(CostSection, "What `plan --on` counts with.")

    @model_validator(mode="before")
    @classmethod
    def _complete_local(cls, values: object) -> object:
        """This machine and Slurm need less of a description: what the profile leaves out is filled in."""
        if not isinstance(values, dict) or not isinstance(values.get("cluster"), dict):
            return values
        if values["cluster"].get("kind") == "slurm":  # no image, claim or scheduler to choose
            fixed: dict[str, dict[str, object]] = {
                "image": {"name": "none:1"},
                "scheduler": {"kind": "slurm"},
                "storage": {"claim": "none"},
            }
            return {**values, **{name: {**fixed[name], **(values.get(name) or {})} for name in fixed}}
        if values["cluster"].get("kind") != "local":
            return values
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
        usual: dict[str, dict[str, object]] = {
            "image": {"name": "local:1"},
            "nodes": {"capacity": "spot", "gpus": 0, "cpu": os.cpu_count() or 1, "memory_gib": memory_bytes / 2**30},
            "storage": {"claim": "shared"},
            "env": {"HF_HOME": hub, "HF_HUB_OFFLINE": "1"},  # pods see the files of this machine, and no network
        }
        given = {name: values.get(name) or {} for name in usual}
        if isinstance(given["nodes"], dict) and "instance_type" in given["nodes"]:
            del usual["nodes"]  # rejected with a separate message
        return {**values, **{name: {**usual[name], **own} for name in usual if isinstance(own := given[name], dict)}}

    @field_validator("env")
    @classmethod
    def _has_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if is_secret_key(name) or redact(value) != value:
                raise ValueError(f"{name} looks like a secret; put it into a Secret and name that under secrets")
        return env

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterProfile:
        if (self.cluster.kind == "slurm") != (self.scheduler.kind == "slurm"):
            raise ValueError("scheduler.kind slurm is that of cluster.kind slurm, which has no other; leave it out")
        if self.cluster.kind != "slurm" and self.slurm != SlurmSection():
            raise ValueError("slurm: is for cluster.kind slurm; leave it out")
        if self.cluster.kind == "slurm" and (self.secrets or self.pods != PodsSection()):
            raise ValueError(
                "secrets and pods are of Kubernetes: a job of Slurm has the environment of the shell that submits it"
            )
        if self.log_image is not None and self.scheduler.kind != "raycluster":
            raise ValueError("log_image is for scheduler.kind raycluster: elsewhere the pod's own output is the log")
        if self.cluster.kind == "local" and self.scheduler.kind == "raycluster":
            raise ValueError("scheduler.kind raycluster: cluster.kind local has no long-lived cluster; use rayjob")
        if self.cluster.kind == "local" and self.pods != PodsSection():
            raise ValueError("pods: with cluster.kind local none of it has an effect; leave it out")
        if any(volume.mount.rstrip("/") == self.storage.mount for volume in self.pods.volumes):
            raise ValueError(f"pods.volumes: {self.storage.mount} is storage.mount")
        if self.cluster.kind == "local" and self.nodes.gpus != 0:
            raise ValueError("nodes: with cluster.kind local pods have no GPUs; leave instance_type and gpus out")
        return self
