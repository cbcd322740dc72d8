"""A stand-in of Kubernetes' API server over HTTP: objects in memory, found by path and label. It runs nothing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]


class ApiServer:
    """`groups`: the APIs that are installed. `refused`: status and message by a part of the path."""

    def __init__(self, *groups: str) -> None:
        self.groups = {"batch/v1", "networking.k8s.io/v1", *groups}
        self.objects: dict[str, Object] = {}  # by path
        self.logs: dict[str, str] = {}  # by name of the pod
        self.refused: dict[str, tuple[int, str]] = {}
        self.forbidden: set[str] = set()  # "verb resource" that reviews deny
        self.evictions: list[Object] = []
        self.requests: list[tuple[str, str, Object]] = []  # method, path, body
        self.accepts: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, path: Path) -> Path:
        named = {"context": {"cluster": "c", "user": "u", "namespace": "training"}, "name": "stand-in"}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "stand-in",
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {"token": "login-of-a-user"}}],
                    "contexts": [named],
                }
            )
        )
        return path

    def put(self, path: str, body: Object | None = None) -> None:
        """Something that an administrator made."""
        self.objects[path] = {"metadata": {"name": path.rpartition("/")[2]}, **(body or {})}

    def named(self, plural: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self.objects if path.rpartition("/")[0].endswith(f"/{plural}")]

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], body: Object) -> tuple[int, Object | str]:
        for part, (status, message) in self.refused.items():
            wanted, _, where = part.partition(" ")
            if wanted == method and where in path and (status != 500 or "dryRun" not in query):
                return status, {"message": message}
        if path.endswith("/selfsubjectaccessreviews"):
            wish = body["spec"]["resourceAttributes"]
            return 201, {"status": {"allowed": f"{wish['verb']} {wish['resource']}" not in self.forbidden}}
        if path.endswith("/eviction"):
            self.evictions.append(body)
            return 201, {}
        if path.endswith("/log"):
            return 200, self.logs[path.split("/")[-2]]
        if path.startswith("/apis/") and "/".join(path.split("/")[2:4]) not in self.groups:
            return 404, {"message": "the server could not find the requested resource"}
        if path.count("/") == 3 and path.startswith("/apis/"):
            return 200, {"resources": []}
        if method == "POST":
            place = f"{path}/{body['metadata']['name']}"
            if place in self.objects:
                return 409, {"message": f"{body['metadata']['name']} already exists"}
            if "dryRun" not in query:
                self.objects[place] = body
                self.on_create(place, body)
            return 201, {**body, "metadata": {**body["metadata"], "uid": f"uid-of-{body['metadata']['name']}"}}
        if method == "PATCH":
            if path not in self.objects:
                return 404, {"message": "not found"}
            self.objects[path]["metadata"] |= body["metadata"]
            return 200, self.objects[path]
        if method == "DELETE":
            return (200, self.objects.pop(path)) if path in self.objects else (404, {"message": "not found"})
        if path in self.objects:
            return 200, self.objects[path]
        plural = path.rpartition("/")[2]
        if (
            plural.endswith("s")
            and path.count("/") in (3, 4, 5, 6)
            and not path.startswith("/api/v1/namespaces/training/persist")
        ):
            everywhere = "/namespaces/" not in path
            base = path.removesuffix(plural)
            found = [
                one
                for place, one in self.objects.items()
                if place.rpartition("/")[0].endswith(f"/{plural}")
                and place.startswith(base if not everywhere else base.rstrip("/"))
                and _has_label(one, query.get("labelSelector", ""))
            ]
            if found or plural in (
                "jobs",
                "jobsets",
                "rayjobs",
                "rayclusters",
                "pods",
                "events",
                "nodes",
                "services",
                "configmaps",
                "networkpolicies",
            ):
                return 200, {"items": found}
        return 404, {"message": f"{path} not found"}

    def on_create(self, place: str, body: Object) -> None:
        """Pods that read checkpoints end at once, with what the test has put into `logs`."""
        if body.get("kind") == "Pod":
            body["status"] = {"phase": "Succeeded"}
            self.logs.setdefault(body["metadata"]["name"], self.logs.get("reader", "[]"))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def _serve(self) -> None:
                parts = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                api.requests.append((self.command, parts.path, body))
                api.accepts[parts.path] = self.headers.get("Accept", "")
                if self.headers.get("Authorization") != "Bearer login-of-a-user":
                    status, answer = 401, {"message": "Unauthorized"}
                else:
                    status, answer = api.answer(self.command, parts.path, query, body)  # type: ignore[assignment]
                content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve

        return Handler


def _has_label(body: Object, selector: str) -> bool:
    labels = body.get("metadata", {}).get("labels", {})
    key, equals, value = selector.partition("=")
    return not selector or (key in labels and (not equals or labels[key] == value))
