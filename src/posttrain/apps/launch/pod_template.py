"""The pod of a run: one per machine, the same under every scheduler. `posttrain node` is its PID 1; no shell is
started.

The environment variables and paths are a contract with `posttrain node` (docs/decisions/0040).
"""

from __future__ import annotations

import base64
import secrets

from posttrain.apps.launch.launch_request import CONFIG_FOLDER, LaunchRequest
from posttrain.apps.launch.manifest_files import render_objects
from posttrain.files.json_files import JsonObject

Object = JsonObject  # of Kubernetes

CONTAINER = "posttrain"
RUN_LABEL = "posttrain.dev/run"
RAY_PORT = 6379
SECRET_KEY = "secret"  # in the Secret of the run, and the file below /etc/posttrain-control
NODE_COMMAND = ["posttrain", "node"]
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_CONSTANTS = {
    "CONFIG_FOLDER": CONFIG_FOLDER,
    "CONTAINER": CONTAINER,
    "CONTAINER_SECURITY": CONTAINER_SECURITY,
    "CONTROL_PORT": 6390,
    "DASHBOARD_PORT": 8265,
    "NODE_COMMAND": NODE_COMMAND,
    "RAY_PORT": RAY_PORT,
    "SECRET_KEY": SECRET_KEY,
}


def labels_of(request: LaunchRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "posttrain", "app.kubernetes.io/managed-by": "posttrain", RUN_LABEL: request.name}


def metadata_of(request: LaunchRequest, name: str) -> Object:
    return {"name": name, "namespace": request.profile.cluster.namespace, "labels": labels_of(request)}


def config_map(request: LaunchRequest) -> Object:
    """Resolved config and the files that it names. Keys have no folders; the volume's items put them back."""
    texts, binary = {"config.yaml": request.config_text}, {}
    for number, content in enumerate(request.files.values()):
        try:
            texts[f"file-{number}"] = content.decode()
        except UnicodeDecodeError:
            binary[f"file-{number}"] = base64.b64encode(content).decode()
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata_of(request, f"{request.name}-config")}
    return {**made, "immutable": True, "data": texts, **({"binaryData": binary} if binary else {})}


def control_name(run: str) -> str:
    """Of the Secret and of the NetworkPolicy. Volcano makes a policy with the name of the job, and removes it."""
    return f"{run}-control"


def control_secret(request: LaunchRequest) -> Object:
    """Without its value, which `with_new_value` adds on the way to the cluster: manifests are printed and kept."""
    metadata = metadata_of(request, control_name(request.name))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


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


def render_for(request: LaunchRequest, template: str, **values: object) -> list[Object]:
    """The objects of a template that is about a run."""
    known = {"request": request, "profile": request.profile, "control_name": control_name(request.name)}
    return render_objects(template, **_CONSTANTS, **known, **values)


def pod_template(
    request: LaunchRequest,
    *,
    head_host: str | None = None,
    role: str | None = None,
    rank_offset: int = 0,
    subdomain: str | None = None,
) -> Object:
    """`role` is given where the scheduler does not number pods; `rank_offset` is added to the number that it gives."""
    (own,) = render_for(request, "environment.yaml", head_host=head_host, role=role, rank_offset=rank_offset)
    environment = {**own, **request.fabric.env, **request.profile.env}
    values = {"environment": environment, "labels": labels_of(request), "role": role, "subdomain": subdomain}
    (pod,) = render_for(request, "pod.yaml", **values)
    return {part: {key: value for key, value in pod[part].items() if value not in (None, {}, [])} for part in pod}
