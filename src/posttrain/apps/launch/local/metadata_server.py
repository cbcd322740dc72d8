"""The metadata service of a cloud's machine, for pods of the local cluster: IMDSv2 of EC2 and that of Compute Engine.

It answers at the address of the real ones, inside the private network, and identifies the pod by its IP. It serves only
the paths of interruptions.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from posttrain.apps.launch.local.pods import as_time

_TOKEN = "local-metadata-token"
_AWS = "/latest/meta-data"
_GCE = "/computeMetadata/v1/instance"
_LONG_POLL_S = 60.0


@dataclass
class Notices:
    """IPs of pods whose machine is about to end, and when."""

    ends: dict[str, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def give(self, ip: str, at: float) -> None:
        with self.changed:
            self.ends[ip] = at
            self.changed.notify_all()


@contextmanager
def metadata_server(notices: Notices, address: str, port: int = 80) -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """No request log: pods poll every few seconds."""

        def do_PUT(self) -> None:
            if self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers:
                self._answer(200, _TOKEN)
            else:
                self._answer(400, "")

        def do_GET(self) -> None:
            path = urlsplit(self.path).path.rstrip("/")
            if path.startswith("/latest/"):
                self._aws(path)
            elif path.startswith("/computeMetadata/"):
                self._gce(path)
            else:
                self._answer(404, "")

        def _end(self) -> float | None:
            return notices.ends.get(self.client_address[0])

        def _aws(self, path: str) -> None:
            end = self._end()
            if self.headers.get("X-aws-ec2-metadata-token") != _TOKEN:
                self._answer(401, "")
            elif end is None:
                self._answer(404, "")
            elif path == f"{_AWS}/spot/instance-action":
                time = as_time(end).partition(".")[0] + "Z"
                self._answer(200, json.dumps({"action": "terminate", "time": time}))
            elif path == f"{_AWS}/events/recommendations/rebalance":
                self._answer(200, json.dumps({"noticeTime": as_time(end).partition(".")[0] + "Z"}))
            else:
                self._answer(404, "")

        def _gce(self, path: str) -> None:
            if self.headers.get("Metadata-Flavor") != "Google":
                self._answer(403, "")
                return
            asked = parse_qs(urlsplit(self.path).query)
            if asked.get("wait_for_change") == ["true"]:
                limit_s = float(asked.get("timeout_sec", [str(_LONG_POLL_S)])[0])
                with notices.changed:
                    notices.changed.wait_for(lambda: self._end() is not None, timeout=limit_s)
            lost = self._end() is not None
            texts = {
                f"{_GCE}/preempted": "TRUE" if lost else "FALSE",
                f"{_GCE}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE" if lost else "NONE",
            }
            self._answer(200, texts[path]) if path in texts else self._answer(404, "")

        def _answer(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metadata", daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
