"""What the programs of this folder share: they read requests, answer each, and end with the process that started them.

A request is a frame of JSON. The first is the setup. An answer is {"done": ...}, or {"error": ..., "kind": ...}, where
the kind is empty or a word that the two sides have agreed on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

processes = runpy.run_path(str(Path(__file__).parents[2] / "processes.py"))


class Problem(Exception):
    """An error in one line."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


def require(package: str, least: str, below: str) -> str:
    """The installed version, which must be at least `least` and below `below`."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if not found or not number(least) <= number(found) < number(below):
        has = f"has {package} {found}" if found else f"has no {package}"
        raise Problem(f"{sys.executable} {has}: {package}>={least},<{below} is needed", "version")
    return found


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def serve(start: Callable[[Any], tuple[Any, object]]) -> None:
    """`start` gets the setup and returns a description, and an object whose methods answer requests: operations."""
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    for each in (descriptor, lifeline):
        os.set_inheritable(each, False)
    processes["die_with_parent"](lifeline)
    side: object = None
    while (data := processes["read_frame"](descriptor)) is not None:
        request = json.loads(data)
        try:
            if side is None:
                done, side = start(request)
            else:
                done = getattr(side, request["operation"])(**request["arguments"])
            reply = {"done": done}
        except Problem as error:
            reply = {"error": str(error), "kind": error.kind}
        except BaseException as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}", "kind": ""}
        processes["write_frame"](descriptor, json.dumps(reply).encode())
    os._exit(0)  # without waiting for threads of the package
