"""A client of OpenEnv, and its server where the environment is a local package. Runs where openenv is installed.

Any error of a session ends it: after a time-out OpenEnv's client would go on with an instance that was never reset.
"""

from __future__ import annotations

import importlib
import json
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain_side import Problem, require, serve

HEALTH_LIMIT_S = 60.0


def start(setup: Any) -> tuple[Any, OpenEnvSide]:
    version = require("openenv", "0.10", "0.11")
    url = setup["base_url"] or serve_package(setup["package"], setup["app"])
    wait_until_healthy(url, HEALTH_LIMIT_S if setup["package"] else 10.0)
    return {"version": version, "schema": ask(f"{url}/schema")}, OpenEnvSide(url, setup["limit_s"])


class OpenEnvSide:
    def __init__(self, url: str, limit_s: float) -> None:
        self.url, self.limit_s = url, limit_s
        self.sessions: dict[str, Any] = {}

    def reset(self, session: str, arguments: Any) -> Any:
        from openenv.core.generic_client import GenericEnvClient

        client = GenericEnvClient(base_url=self.url, message_timeout_s=self.limit_s).sync()
        self.sessions[session] = client

        def begin() -> Any:
            client.connect()
            return client.reset(**arguments)

        return self.call(session, begin)

    def step(self, session: str, action: object) -> Any:
        return self.call(session, lambda: self.sessions[session].step(action))

    def call(self, session: str, act: Callable[[], Any]) -> Any:
        try:
            result = act()
        except Exception as error:
            found = re.search(r"\(code: (\w+)\)", str(error))
            code = found[1] if found else ""
            if code != "VALIDATION_ERROR":  # the action was refused, and nothing has happened
                self.close(session)
            kind = {"VALIDATION_ERROR": "action", "CAPACITY_REACHED": "capacity"}.get(code, "")
            raise Problem(f"{type(error).__name__}: {error}", kind) from error
        return {"observation": result.observation, "reward": result.reward, "done": bool(result.done)}

    def close(self, session: str) -> None:
        client = self.sessions.pop(session, None)
        if client is not None:
            try:
                client.close()
            except Exception as error:
                print(f"the session did not close: {error}", file=sys.stderr)

    def tasks(self, split: str, count: int | None) -> Any:
        """Those of the environment, where it has some; else None."""
        name = (ask(f"{self.url}/metadata") or {}).get("name", "")
        try:
            number = ask(f"{self.url}/{name}/num_tasks", {"split": split})["num_tasks"]
        except (urllib.error.HTTPError, KeyError, TypeError):
            return None
        limit = number if count is None else min(count, number)
        return [ask(f"{self.url}/{name}/task", {"split": split, "index": index}) for index in range(limit)]


def ask(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def wait_until_healthy(url: str, limit_s: float) -> None:
    give_up_at = time.monotonic() + limit_s
    while True:
        try:
            ask(f"{url}/health")
            return
        except urllib.error.HTTPError as error:
            raise Problem(f"{url}/health answers {error.code}: it is no OpenEnv server") from error
        except (OSError, ValueError) as error:
            if time.monotonic() > give_up_at:
                raise Problem(f"{url}/health does not answer: {error}") from error
            time.sleep(0.1)


def serve_package(package: str, app: str) -> str:
    """The package's server, in a thread of this process and on a free port of this machine."""
    import uvicorn

    folder = Path(package).expanduser()
    if folder.is_dir():
        sys.path.insert(0, str(folder.resolve().parent))
        package = folder.resolve().name
    module, _, attribute = app.partition(":")
    try:
        found = getattr(importlib.import_module(f"{package}.{module}"), attribute or "app")
    except (ImportError, AttributeError) as error:
        raise Problem(f"the package {package!r} has no server at {app!r}: {error}") from error
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(found, log_level="warning"))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


if __name__ == "__main__":
    serve(start)
