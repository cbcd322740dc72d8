"""No part of a training run waits for a thread, a process or a machine without a deadline."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import posttrain

SOURCE = Path(posttrain.__file__).parent
PACKAGES = ("algorithms", "checkpointing", "engines", "environments", "orchestration", "policy", "recipes", "rollouts")
WAITS = {"result", "wait", "join", "acquire", "recv", "communicate"}
# (file, call): why it needs none.
BOUNDED = {
    ("checkpointing/integrity.py", "result"): "hashes of files, by threads of the process itself",
    ("environments/combined.py", "result"): "scores, each of which has its own time limit",
    ("environments/sandbox/sandbox.py", "wait"): "a process that was just killed",
    ("checkpointing/save_and_resume.py", "wait"): "BackgroundWrite.wait, which has a deadline",
    ("policy/checkpoint/writer.py", "wait"): "HostCopy.wait, which has a deadline",
}


def waits_without_a_deadline(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls without arguments: `"".join(...)`, `wait(10)` and `result(timeout=…)` have some."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_ray_get = (
                node.func.attr == "get" and isinstance(node.func.value, ast.Name) and node.func.value.id == "ray"
            )
            if is_ray_get and not any(keyword.arg == "timeout" for keyword in node.keywords):
                yield node
            if node.func.attr in WAITS and not node.args and not node.keywords:
                yield node


def found() -> dict[tuple[str, str], int]:
    files = [*SOURCE.glob("*.py"), *(file for name in PACKAGES for file in (SOURCE / name).rglob("*.py"))]
    places = {}
    for file in files:
        for call in waits_without_a_deadline(ast.parse(file.read_text(encoding="utf-8"))):
            assert isinstance(call.func, ast.Attribute)
            places[file.relative_to(SOURCE).as_posix(), call.func.attr] = call.lineno
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
        ("ray.get(reference)", True),
        ("future.result(timeout=3)", False),
        ("thread.join(3)", False),
        ("', '.join(names)", False),
        ("ray.get(reference, timeout=3)", False),
    ],
)
def test_what_counts_as_a_wait_without_a_deadline(text: str, is_found: bool) -> None:
    assert bool(list(waits_without_a_deadline(ast.parse(text)))) == is_found
