"""The program inside the sandbox: loads the untrusted solution and runs its tests. Never imported by posttrain.

Its text is put into the sandbox's folder beside `solution.py` and `job.json`. It first reports that it has started;
what happens from then on is caused by the solution. A passed test is reported with a token that is made anew for each
run, so that a solution that ends the process, or prints what it takes for a verdict, passes nothing. Both run in one
process, though: a solution that searches its caller's frames can find the token. Standard library only, any Python 3.8
or later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, TypedDict

REPORT_FD = 3


class TestStep(TypedDict, total=False):
    """One test: `code` that runs, or the `arguments` of a call."""

    code: str
    counts: bool
    arguments: list[object]


class TestJob(TypedDict):
    kind: str
    steps: list[TestStep]
    function: str  # of calls
    setup: str
    token: str
    sys_path: list[str]


def main() -> None:
    with open("job.json") as file:
        job: TestJob = json.load(file)
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    for name in ("job.json", sys.argv[0]):
        os.unlink(name)
    sys.path += job["sys_path"]
    sys.argv = ["solution.py"]
    os.write(REPORT_FD, b"ready\n")
    if job["kind"] == "program":
        os.close(REPORT_FD)
        exec(_compiled(source, "solution.py"), _module("__main__").__dict__)
        return
    values = _module("solution").__dict__
    # Once the solution has run, these names may stand for something else.
    run = _call if job["kind"] == "calls" else _stepper(job["steps"])
    try:
        exec(_compiled(job["setup"], "setup.py"), values)
    except BaseException as error:  # an error of the task, which only the guest may report
        os.write(REPORT_FD, f"{job['token']} setup {_line(error)}\n".encode("utf-8", "replace"))
        _end(1)
    try:
        exec(_compiled(source, "solution.py"), values)
    except BaseException as error:
        _tell("-", error)
        _end(1)
    for number, step in enumerate(job["steps"]):
        try:
            text = run(values, step, job)
        except BaseException as error:  # a test that exits has not passed either
            _tell(number, error)
            if not step.get("counts", True):
                break  # later tests depend on it
        else:
            if text is not None:
                os.write(REPORT_FD, f"{job['token']} {number} {text}\n".encode())
    _end(0)


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _compiled(source: str, name: str) -> types.CodeType:
    """As in a file of its own: without what this file imports from `__future__`."""
    return compile(source, name, "exec", dont_inherit=True)


def _stepper(steps: list[TestStep]) -> Callable[[dict[str, Any], TestStep, TestJob], str | None]:
    """What runs one test. They are compiled here and now, and `exec` is kept as it is."""
    codes, execute = {step["code"]: _compiled(step["code"], "test.py") for step in steps}, exec

    def run(values: dict[str, Any], step: TestStep, job: TestJob) -> str | None:
        execute(codes[step["code"]], values)
        return "passed" if step["counts"] else None

    return run


def _call(values: dict[str, Any], step: TestStep, job: TestJob) -> str | None:
    name = job["function"]
    function = values[name] if name in values else getattr(values["Solution"](), name)
    # The expected value is not available here: the result is sent out and compared outside.
    return json.dumps(function(*step["arguments"]))


def _tell(number: object, error: BaseException) -> None:
    os.write(REPORT_FD, f"failed {number} {_line(error)}\n".encode("utf-8", "replace"))


def _line(error: BaseException) -> str:
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    except BaseException:
        return type(error).__name__


def _end(code: int) -> None:
    """Exit immediately, without waiting for threads of the solution."""
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
