"""Parses the tests of a task from dataset formats into one of three kinds. Independent of how tests are run.

- `ProgramSuite`: the solution is a program; each case is what it reads and what it must print (APPS, CodeContests,
  TACO).
- `CallSuite`: the solution defines a function; each case is its arguments and what it must return (`fn_name` of APPS).
- `StepSuite`: Python code that fails when the solution is wrong: assert lines (MBPP), `test_…()` functions without
  arguments, `check(candidate)` (HumanEval).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.files.json_files import JsonMapping

_TEST_KEYS = ("tests", "test", "test_list", "input_output")
_SETUP_KEYS = ("setup", "test_setup_code", "test_imports")
_ENTRY_POINT_KEYS = ("entry_point", "fn_name", "func_name")


@dataclass(frozen=True)
class ProgramSuite:
    cases: tuple[tuple[str, str], ...]  # (standard input, expected standard output)


@dataclass(frozen=True)
class CallSuite:
    function: str
    cases: tuple[tuple[tuple[object, ...], object], ...]  # (arguments, expected value), as JSON values
    setup: str = ""


@dataclass(frozen=True)
class StepSuite:
    steps: tuple[tuple[str, bool], ...]  # (code, whether it is a test or prepares for those that follow)
    setup: str = ""


Suite = ProgramSuite | CallSuite | StepSuite


def suite_of(item: ScoringItem, tests_key: str | None) -> Suite:
    """The tests of a task: from its metadata under `tests_key` or a usual name, else from its reference."""
    if tests_key is not None:
        if tests_key not in item.metadata:
            known = ", ".join(map(str, item.metadata)) or "nothing"
            raise Unscored(f"the task's metadata has no {tests_key!r}; it has {known}")
        value = item.metadata[tests_key]
    else:
        value = next((item.metadata[key] for key in _TEST_KEYS if item.metadata.get(key)), item.reference)
    if value is None or value == "" or value == []:
        raise Unscored("the task has no tests")
    return read_suite(value, item.metadata)


def read_suite(value: object, around: JsonMapping) -> Suite:
    """`around` may hold the function name and set-up code, if the tests do not."""
    if isinstance(value, str):
        value = _unpacked(value)
    if isinstance(value, str):
        return _python_suite(value, around)
    if isinstance(value, Mapping):
        return _mapping_suite(value, around)
    if isinstance(value, Sequence) and value and all(isinstance(one, str) for one in value):
        for number, code in enumerate(value, start=1):
            _parsed(code, f"test {number}")
        return StepSuite(tuple((code, True) for code in value), _setup(around))
    if isinstance(value, Sequence) and value and all(isinstance(one, Mapping) for one in value):
        return _cases(value, around)
    raise Unscored(f"the tests of the task cannot be read: {value!r:.100} ({type(value).__name__})")


def _unpacked(text: str) -> object:
    """Tests that a dataset keeps as JSON in a string."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _mapping_suite(value: JsonMapping, around: JsonMapping) -> Suite:
    inner = {**around, **{key: one for key, one in value.items() if one is not None}}
    for key in _TEST_KEYS:
        if value.get(key):
            return read_suite(value[key], inner)
    if "inputs" in value and "outputs" in value:
        inputs, outputs = value["inputs"], value["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise Unscored("the task's tests need as many inputs as outputs, and at least one of each")
        pairs = list(zip(inputs, outputs, strict=True))
        name = _entry_point(value)
        if name is None:
            return ProgramSuite(tuple((_text(given), _text(expected)) for given, expected in pairs))
        return CallSuite(name, tuple((_arguments(given), _plain(expected)) for given, expected in pairs), _setup(inner))
    if "input" in value and "output" in value:
        return _cases([value], inner)
    raise Unscored(f"the tests of the task cannot be read: a map with {', '.join(map(str, value)) or 'nothing'}")


def _cases(cases: Sequence[JsonMapping], around: JsonMapping) -> Suite:
    for number, case in enumerate(cases, start=1):
        if "input" not in case or "output" not in case:
            raise Unscored(f"test {number} of the task has no `input` or no `output`")
    if not any(case.get("testtype") == "functional" for case in cases):
        return ProgramSuite(tuple((_text(case["input"]), _text(case["output"])) for case in cases))
    name = _entry_point(around)
    if name is None:
        raise Unscored(f"the tests call a function, and none of {', '.join(_ENTRY_POINT_KEYS)} names it")
    try:
        read = [
            (tuple(json.loads(line) for line in str(case["input"]).splitlines()), json.loads(str(case["output"])))
            for case in cases
        ]
    except (ValueError, RecursionError) as error:
        raise Unscored(f"the tests call a function, and an input or output is not JSON: {error}") from None
    return CallSuite(name, tuple(read), _setup(around))


def _python_suite(source: str, around: JsonMapping) -> StepSuite:
    tree = _parsed(source, "the test code")
    setup = _setup(around)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {_called_function(node) for node in tree.body}
    if "check" in functions and "check" not in called:
        name = _entry_point(around)
        if name is None:
            raise Unscored(
                f"the tests are check(candidate), and none of {', '.join(_ENTRY_POINT_KEYS)} names the candidate"
            )
        return StepSuite(((source, False), (f"check({name})", True)), setup)
    tests = [name for name, node in functions.items() if name.startswith("test") and not node.args.args]
    if tests and not set(tests) & called:
        return StepSuite(((source, False), *((f"{name}()", True) for name in tests)), setup)
    steps = tuple(
        (ast.unparse(node), isinstance(node, ast.Assert) or _called_function(node) in functions) for node in tree.body
    )
    if not any(counts for _, counts in steps):
        raise Unscored("the test code has no assert line, no check(candidate) and no test function")
    return StepSuite(steps, setup)


def _called_function(node: ast.stmt) -> str | None:
    """The name of the function that a statement does nothing else but call."""
    call = node.value if isinstance(node, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None


def _parsed(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unscored(f"{what} of the task is not Python: {error}") from None


def _setup(around: JsonMapping) -> str:
    parts = []
    for key in _SETUP_KEYS:
        value = around.get(key)
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, Sequence):
            parts += [str(line) for line in value]
    text = "\n".join(parts)
    _parsed(text, "the set-up code")
    return text


def _entry_point(around: JsonMapping) -> str | None:
    name = next((around[key] for key in _ENTRY_POINT_KEYS if around.get(key)), None)
    if name is not None and not str(name).isidentifier():
        raise Unscored(f"the function to test is {name!r:.80}, which is not a name")
    return None if name is None else str(name)


def _text(value: object) -> str:
    """Input or output of a program: text, or its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: object) -> tuple[object, ...]:
    plain = _plain(value)
    if not isinstance(plain, list):
        raise Unscored(f"the arguments of a call are {plain!r:.80}: a list is needed")
    return tuple(plain)


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise Unscored(f"a test of the task cannot be written as JSON: {error}") from None
