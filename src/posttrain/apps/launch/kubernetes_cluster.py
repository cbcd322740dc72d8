"""A cluster of Kubernetes, through its API server. The only file that imports the package `kubernetes`, which finds the
server and authenticates; objects are the plain ones that were rendered.
"""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from posttrain.apps.launch.cluster_checks import examine_cluster
from posttrain.apps.launch.manifest_files import render_objects
from posttrain.apps.launch.pod_template import (
    CONTAINER_SECURITY,
    RUN_LABEL,
    Object,
    control_name,
    with_new_value,
)
from posttrain.apps.launch.run_checkpoints import listing_command, pod_spec, run_folders, shared_mount
from posttrain.apps.launch.runs import (
    NOT_STARTING,
    WORKLOADS,
    Check,
    ClusterUnreachable,
    RunPod,
    name_of,
    plural_of,
    pods_by_rank,
)
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonObject, parse_json

_CONNECT_S, _READ_S = 10.0, 60.0
_SMALL_POD_LIMIT_S = 600.0
_ONLY_METADATA = (
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"  # of a Secret: its values stay in the cluster
)


class KubernetesCluster:
    poll_s = 2.0

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        """`namespace` None: runs of all namespaces, or of the context's own where others may not be seen."""
        try:
            settings = client.Configuration()
            self._own_namespace = _load(settings, context)
        except (ConfigException, OSError) as error:
            why = reason_of(error).rstrip(".")
            raise ClusterUnreachable(
                f"no cluster is configured: {why}. Set KUBECONFIG or ~/.kube/config (aws eks update-kubeconfig, gcloud "
                "container clusters get-credentials), or name a context of it in the profile (cluster.context)"
            ) from error
        self._api = client.ApiClient(settings)
        self._server = settings.host
        self._namespace = namespace
        self.title = f"{context or 'the current context'} ({self._server})"

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> Any:
        """The answer as JSON; the open response with `stream`. Raises the server's ApiException."""
        try:
            response = self._api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={
                    "Accept": "*/*" if stream else _ONLY_METADATA if "/secrets/" in path else "application/json",
                    "Content-Type": f"application/{'merge-patch+' if method == 'PATCH' else ''}json",
                },
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=(_CONNECT_S, None if stream else _READ_S),
            )
        except urllib3.exceptions.HTTPError as error:
            raise ClusterUnreachable(
                f"{self._server} does not answer ({reason_of(getattr(error, 'reason', None) or error)}): is the "
                "cluster up, and "
                "is this machine in its network (VPN)? cluster.context of the profile, or --context, names another"
            ) from error
        except ApiException as error:
            if error.status in (0, 401):
                raise ClusterUnreachable(
                    f"{self._server} does not accept this login ({_message_of(error)}): log in again (aws sso login, "
                    "gcloud auth login), or name another context"
                ) from error
            raise
        return response if stream else json.loads(response.data or b"{}")

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """None: it does not exist. ApiException 403: not permitted for this user."""
        try:
            return self.request("GET", path, query=query)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    # -- create --------------------------------------------------------------------------------------------------------

    def examine(self, objects: Sequence[Object]) -> list[Check]:
        def get(path: str) -> Any:
            try:
                return self.get(path)
            except ApiException as error:
                raise PermissionError(_message_of(error)) from error

        def may(verb: str, group: str, resource: str, namespace: str) -> bool:
            resource, _, part = resource.partition("/")
            wanted = {"verb": verb, "group": group, "resource": resource, "subresource": part, "namespace": namespace}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": wanted},
            }
            answer = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
            return bool(answer["status"]["allowed"])

        return examine_cluster(objects, get, may)

    def create(self, objects: Sequence[Object]) -> None:
        for body in objects:  # the server's own checks, quotas and webhooks, before anything exists
            self._create(body, {"dryRun": "All"})
        made: list[Object] = []
        answer: Object = {}
        try:
            for body in objects:
                answer = self._create(with_new_value(body))
                made.append(body)
        except BaseException:
            for body in reversed(made):
                with suppress(ApiException, ClusterUnreachable):
                    self._delete(body)
            raise
        owner = {key: objects[-1][key] for key in ("apiVersion", "kind")}
        owner |= {key: answer.get("metadata", {}).get(key) for key in ("name", "uid")}
        for body in objects[:-1]:  # so that the cluster removes them with the workload, after its time to live
            with suppress(ApiException, ClusterUnreachable):  # some users may not change objects: `stop` removes them
                path = f"{path_of(body)}/{body['metadata']['name']}"
                self.request("PATCH", path, {"metadata": {"ownerReferences": [owner]}})

    def _create(self, body: Object, query: Mapping[str, str] | None = None) -> Object:
        what = f"{body['kind']} {body['metadata']['name']}"
        try:
            query = {"fieldValidation": "Strict", **(query or {})}
            made: Object = self.request("POST", path_of(body), body, query=query)
            return made
        except ApiException as error:
            if error.status == 409:
                run = body["metadata"]["labels"][RUN_LABEL]
                raise InputError(
                    f"{what} exists already in namespace {body['metadata']['namespace']}: `posttrain launch stop "
                    f"{run}` removes the run of this name, or give --name"
                ) from error
            raise InputError(f"{what} was refused: {_message_of(error)}. Nothing of the run is left") from error

    def _delete(self, body: Object) -> None:
        path = f"{path_of(body)}/{body['metadata']['name']}"
        with suppress(_NotFound):
            self._found("DELETE", path, query={"propagationPolicy": "Foreground"})

    def _found(self, method: str, path: str, body: Object | None = None, query: Mapping[str, str] | None = None) -> Any:
        try:
            return self.request(method, path, body, query=query)
        except ApiException as error:
            if error.status == 404:
                raise _NotFound(path) from error
            if error.status == 403:
                raise InputError(
                    f"no permission: {_message_of(error)}; ask the cluster's administrator for it"
                ) from error
            raise InputError(f"{method} {path}: {_message_of(error)}") from error

    # -- what runs -----------------------------------------------------------------------------------------------------

    def workloads(self, name: str | None = None) -> list[Object]:
        selector = RUN_LABEL if name is None else f"{RUN_LABEL}={name}"
        found = []
        for version, kind in WORKLOADS.values():
            for body in self._list(version, plural_of(kind), selector):
                if not body["metadata"].get("ownerReferences"):  # a RayJob has a RayCluster with its labels
                    found.append({"apiVersion": version, "kind": kind, **body})
        return sorted(found, key=lambda body: (name_of(body), body["metadata"].get("namespace", "")))

    def _list(self, version: str, plural: str, selector: str) -> list[Object]:
        base = f"/apis/{version}"
        own = f"{base}/namespaces/{self._namespace or self._own_namespace}/{plural}"
        try:
            if self._namespace is None:
                with suppress(ApiException):
                    answer = self.get(f"{base}/{plural}", {"labelSelector": selector})
                    return [] if answer is None else list(answer["items"])
            answer = self.get(own, {"labelSelector": selector})
        except ApiException as error:
            raise InputError(
                f"listing {plural}: {_message_of(error)}; give --namespace, or ask for the permission"
            ) from error
        return [] if answer is None else list(answer["items"])

    def _in_namespace(self, workload: Object, kind: str) -> str:
        return f"/api/v1/namespaces/{workload['metadata']['namespace']}/{kind}"

    def pods(self, workload: Object) -> list[Object]:
        selector = {"labelSelector": f"{RUN_LABEL}={name_of(workload)}"}
        answer = self._found("GET", self._in_namespace(workload, "pods"), query=selector)
        return list(answer["items"])

    def events(self, workload: Object) -> list[str]:
        name = name_of(workload)
        found = []
        for event in self._found("GET", self._in_namespace(workload, "events"))["items"]:
            if str(event.get("involvedObject", {}).get("name", "")).startswith(name):
                when = (
                    event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
                )
                found.append(f"{when} {event.get('reason', '')}: {event.get('message', '')}")
        return sorted(found)

    def log(self, pod: Object, follow: bool) -> Iterator[str]:
        place = f"{self._in_namespace(pod, 'pods')}/{pod['metadata']['name']}/log"
        container = pod["spec"]["containers"][0]["name"]
        try:
            query = {"follow": "true" if follow else "false", "container": container}
            response = self.request("GET", place, query=query, stream=True)
        except ApiException as error:
            raise InputError(f"no log of pod {pod['metadata']['name']}: {_message_of(error)}") from error
        with response, suppress(urllib3.exceptions.HTTPError):  # a broken connection ends the stream
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            for piece in response.stream(amt=1 << 14):
                yield decode(piece)

    # -- what is asked for ---------------------------------------------------------------------------------------------

    def delete(self, workload: Object) -> None:
        self._delete(workload)
        selector = {"labelSelector": f"{RUN_LABEL}={name_of(workload)}"}
        policies = f"/apis/networking.k8s.io/v1/namespaces/{workload['metadata']['namespace']}/networkpolicies"
        for place in (self._in_namespace(workload, "services"), self._in_namespace(workload, "configmaps"), policies):
            for body in self._found("GET", place, query=selector)["items"]:
                with suppress(_NotFound):
                    self._found("DELETE", f"{place}/{body['metadata']['name']}")
        secret = f"{self._in_namespace(workload, 'secrets')}/{control_name(name_of(workload))}"
        with suppress(_NotFound):  # by name: listing Secrets would show the values of all
            if (self._found("GET", secret)["metadata"].get("labels") or {}).get(RUN_LABEL) == name_of(workload):
                self._found("DELETE", secret)

    def interrupt(self, workload: Object, pod: Object, notice_s: float, evict: bool) -> str:
        """Uses the Eviction API, like a drain. A cloud's metadata service cannot simulate it."""
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        grace_s = int(min(notice_s, pod["spec"].get("terminationGracePeriodSeconds", 30)))
        options = {} if evict else {"gracePeriodSeconds": grace_s}
        metadata = {"name": name, "namespace": namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        try:
            self._found("POST", f"{self._in_namespace(pod, 'pods')}/{name}/eviction", eviction)
        except _NotFound:
            raise InputError(f"pod {name} has ended meanwhile") from None
        return f"evicted: SIGTERM now, SIGKILL {'after its grace period' if evict else f'in {grace_s} s'}"

    def checkpoints(self, workload: Object) -> list[JsonObject]:
        """Read by a small pod with the run's image and claim: on the machine of rank 0 while the run is active, so that
        no machine is started for it, else on any.
        """
        name = name_of(workload)
        try:
            config_map = self._found("GET", f"{self._in_namespace(workload, 'configmaps')}/{name}-config")
        except _NotFound:
            raise InputError(f"ConfigMap {name}-config is gone, which says where the checkpoints are") from None
        alive = [pod.body for pod in pods_by_rank(self.pods(workload)) if pod.phase == "Running"]
        machine = alive[0]["spec"].get("nodeName") if alive else None
        command = listing_command(*run_folders(config_map["data"]["config.yaml"]))
        problem, text = self._run_small_pod(workload, command, machine)
        if problem:
            raise InputError(f"the checkpoints could not be read in the cluster: {problem}")
        rows: list[JsonObject] = parse_json(text)
        return rows

    def try_image(self, objects: Sequence[Object]) -> Check:
        image = pod_spec(objects[-1])["containers"][0]["image"]
        problem, _ = self._run_small_pod(objects[-1], ["posttrain", "--version"], None)
        remedy = "see image.name and image.pull_secret, and the Dockerfile for what an image needs"
        return Check(
            f"image {image}", f"image {image} does not start posttrain ({problem}): {remedy}" if problem else ""
        )

    def _run_small_pod(self, workload: Object, command: Sequence[str], machine: str | None) -> tuple[str, str]:
        """A command in the run's image, with its claim; on `machine`, else on any. Returns why it failed, and its
        output."""
        body = _small_pod(workload, command, machine)
        place = path_of(body)
        self._found("POST", place, body)
        path = f"{place}/{body['metadata']['name']}"
        try:
            end = time.monotonic() + _SMALL_POD_LIMIT_S
            while True:
                pod = RunPod(0, 1, {**body, **self._found("GET", path)})
                if pod.waits_for.partition(":")[0] in NOT_STARTING:
                    return pod.waits_for, ""
                if not pod.is_alive:
                    break
                if time.monotonic() > end:
                    return f"pod {pod.name} is {pod.phase} after {_SMALL_POD_LIMIT_S:.0f} s. {pod.waits_for}", ""
                time.sleep(self.poll_s)
            if pod.end_message:
                return pod.end_message, ""
            text = "".join(self.log(body, follow=False))
            return ("" if pod.phase == "Succeeded" else text.strip()[-500:] or f"exit code {pod.exit_code}"), text
        finally:
            with suppress(ApiException, InputError, _NotFound):
                self.request("DELETE", path, query={"gracePeriodSeconds": "0"})


class _NotFound(LookupError):
    pass


def _load(settings: client.Configuration, context: str | None) -> str:
    """Fills `settings`; returns the namespace of the context."""
    file = os.environ.get("KUBECONFIG")  # the package reads it when it is imported
    settings.retries = False
    try:
        config.load_kube_config(file, context=context, client_configuration=settings, persist_config=False)
    except ConfigException:
        if context is not None:
            raise
        config.load_incluster_config(client_configuration=settings)
        return "default"
    contexts, current = config.list_kube_config_contexts(file)
    chosen = next((one for one in contexts if one["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


def path_of(body: Object) -> str:
    version = body["apiVersion"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{base}/namespaces/{body['metadata']['namespace']}/{plural_of(body['kind'])}"


def _message_of(error: ApiException) -> str:
    """The server's error message."""
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body)["message"])
    return f"{error.status} {error.reason}".strip()


def _small_pod(workload: Object, command: Sequence[str], machine: str | None) -> Object:
    spec = pod_spec(workload)
    mount, claim = shared_mount(workload)
    (body,) = render_objects(
        "small_pod.yaml",
        name=f"{name_of(workload)}-look-{time.time_ns() % 10**6:06d}",
        namespace=workload["metadata"]["namespace"],
        shared={key: spec[key] for key in ("imagePullSecrets", "securityContext", "tolerations") if key in spec},
        machine=machine,
        container=spec["containers"][0],
        command=list(command),
        mount=str(mount),
        claim=claim,
        CONTAINER_SECURITY=CONTAINER_SECURITY,
    )
    return body
