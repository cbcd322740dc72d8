"""A stand-in for the metadata services of AWS and Google Cloud."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeMetadata:
    """Answers as the metadata services of both clouds do; what is not in `answers` is 404."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.token = "first"
        self.num_tokens = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                outer.num_tokens += 1
                assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self._answer(200, outer.token)

            def do_GET(self) -> None:
                if "/latest/" in self.path and self.headers["X-aws-ec2-metadata-token"] != outer.token:
                    return self._answer(401, "")
                if "computeMetadata" in self.path and self.headers["Metadata-Flavor"] != "Google":
                    return self._answer(403, "")
                found = [text for name, text in outer.answers.items() if self.path.endswith(name)]
                return self._answer(200, found[0]) if found else self._answer(404, "")

            def _answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
