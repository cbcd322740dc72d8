"""What runs inside the sandbox: it brings up the untrusted solution and puts it to the test. Never imported by posttrain.

Its text is put into the sandbox's folder beside `solution.py` and `job.json`. It first says that it is up; what happens from
then on is the solution's own doing. A passed test is told with a token that is made anew for each run, so that a solution
that ends the process, or prints what it takes for a verdict, passes nothing. Both live in one process, though: a solution
that goes looking for the token in its caller's frames will find it. Standard library only, any Python 3.8 or later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from typing import Any

REPORT_FD = 3


def main() -> None:
    with open("job.json") as file:
        job = json.load(file)
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    for name in ("job.json", sys.argv[0]):
        os.unlink(name)
    sys.path += job["sys_path"]
    sys.argv = ["solution.py"]
    os.write(REPORT_FD, b"ready\n")
    if job["kind"] == "program":
        os.close(REPORT_FD)
        exec(compile(source, "solution.py", "exec"), _module("__main__").__dict__)
        return
    values = _module("solution").__dict__
    try:
        exec(compile(job["setup"], "setup.py", "exec"), values)
        exec(compile(source, "solution.py", "exec"), values)
    except BaseException as error:
        _tell("-", error)
        _end(1)
    run = _call if job["kind"] == "calls" else _step
    for number, step in enumerate(job["steps"]):
        try:
            text = run(values, step, job)
        except BaseException as error:  # a test that exits has not passed either
            _tell(number, error)
            if not step.get("counts", True):
                break  # what the later tests stand on is missing
        else:
            if text is not None:
                os.write(REPORT_FD, f"{job['token']} {number} {text}\n".encode())
    _end(0)


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _step(values: dict[str, Any], step: dict[str, Any], job: dict[str, Any]) -> str | None:
    exec(compile(step["code"], "test.py", "exec"), values)
    return "passed" if step["counts"] else None


def _call(values: dict[str, Any], step: dict[str, Any], job: dict[str, Any]) -> str | None:
    name = job["function"]
    function = values[name] if name in values else getattr(values["Solution"](), name)
    # What is expected never comes in here: the value goes out and is compared there.
    return json.dumps(function(*step["arguments"]))


def _tell(number: object, error: BaseException) -> None:
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    except BaseException:
        text = type(error).__name__
    os.write(REPORT_FD, f"failed {number} {text}\n".encode("utf-8", "replace"))


def _end(code: int) -> None:
    """At once: threads that the solution left running shall not keep us."""
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
