"""No part of a training run waits for a thread, a process or a machine without a deadline."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import posttrain

SOURCE = Path(posttrain.__file__).parent
PACKAGES = ("algorithms", "checkpointing", "engines", "environments", "orchestration", "policy", "recipes", "rollouts")
# Methods that wait for ever if they are called without arguments, and functions that do without `timeout`.
WAITS = {"result", "exception", "wait", "join", "acquire", "recv", "communicate", "get"}
FUNCTIONS = {
    *(f"ray.{name}" for name in ("get", "wait")),
    *(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")),
    *("wait", "as_completed", "futures.wait", "futures.as_completed"),  # of concurrent.futures
}
# (file, call): why it needs none.
BOUNDED = {
    ("checkpointing/integrity.py", "result"): "hashes of files, by threads of the process itself",
    ("environments/router.py", "result"): "scores, each of which has its own time limit",
    ("environments/sandbox/sandbox.py", "wait"): "a process that was just killed",
    ("checkpointing/save_and_resume.py", "wait"): "BackgroundWrite.wait, which has a deadline",
    ("policy/checkpoint/writer.py", "wait"): "HostCopy.wait, which has a deadline",
    ("checkpointing/stopping.py", "get"): "a thread that waits for a signal, and for which nothing waits",
    ("orchestration/ray_actor.py", "exception"): "of a future that is done",
    ("orchestration/workers.py", "exception"): "of futures that are done",
}


def waits_without_a_deadline(tree: ast.AST) -> Iterator[ast.Call]:
    """Not `"".join(...)`, `wait(10)` and `result(timeout=…)`, which have arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) in FUNCTIONS:
            waits = not any(keyword.arg == "timeout" for keyword in node.keywords)
        else:
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
            waits = is_method and not node.args and not node.keywords
        if waits:
            yield node


def found() -> dict[tuple[str, str], int]:
    files = [*SOURCE.glob("*.py"), *(file for name in PACKAGES for file in (SOURCE / name).rglob("*.py"))]
    places = {}
    for file in files:
        for call in waits_without_a_deadline(ast.parse(file.read_text(encoding="utf-8"))):
            name = ast.unparse(call.func).rpartition(".")[2]
            places[file.relative_to(SOURCE).as_posix(), name] = call.lineno
    return places


def test_every_wait_of_a_run_has_a_deadline() -> None:
    unbounded = {place: line for place, line in found().items() if place not in BOUNDED}
    assert not unbounded, "give these a deadline, and an error that says what did not come"


def test_the_exceptions_exist() -> None:
    assert set(BOUNDED) <= set(found())


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("future.result()", True),
        ("event.wait()", True),
        ("queue.get()", True),
        ("wait(pending)", True),
        ("subprocess.run(command)", True),
        ("ray.get(reference)", True),
        ("future.result(timeout=3)", False),
        ("thread.join(3)", False),
        ("', '.join(names)", False),
        ("ray.get(reference, timeout=3)", False),
        ("wait(pending, timeout=3)", False),
        ("settings.get(name)", False),
    ],
)
def test_what_counts_as_a_wait_without_a_deadline(text: str, is_found: bool) -> None:
    assert bool(list(waits_without_a_deadline(ast.parse(text)))) == is_found
