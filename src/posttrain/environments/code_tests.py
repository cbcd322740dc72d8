"""Runs the tests of a task on the code in a completion. Runs in a worker process; the code runs in a sandbox.

Code that fails, crashes, hangs, or otherwise does not pass is wrong: reward 0, or the fraction of tests passed. If
tests cannot be read or the sandbox fails, the completion is unscored.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config.rewards import CodeRewardConfig
from posttrain.environments.code_suites import CallSuite, ProgramSuite, StepSuite, Suite, suite_of
from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.environments.sandbox.levels import Interpreter, find_interpreter, open_sandbox
from posttrain.environments.sandbox.program import Limits, Outcome, Program, SandboxFailure, SandboxUnavailable
from posttrain.environments.sandbox.sandbox import Sandbox
from posttrain.files.json_files import JsonMapping, JsonObject

_GUEST = (Path(__file__).parent / "sandbox" / "guest.py").read_bytes()
_MIB, _KIB = 1 << 20, 1 << 10
_FLOAT_TOLERANCE = 1e-9
ATTEMPTS = 2  # processes or memory may be available again


def code_scorer(setup: JsonMapping) -> Callable[[ScoringItem], dict[str, float]]:
    """The scorer for a `CodeRewardConfig`. Raises `BadSetup` if this machine has no sandbox as strict as required."""
    wall_s = float(setup["wall_time_limit_s"] or 3 * setup["time_limit_s"])
    timeout_s = float(setup["timeout_s"] or CodeRewardConfig.default_timeout_s)
    # Must be shorter than the pool's limit: running out of time is a verdict on the code, a killed worker is not.
    budget_s = timeout_s - max(1.0, 0.1 * timeout_s)
    if budget_s < wall_s:
        raise BadSetup(
            f"timeout_s is {timeout_s:g}, for all tests of one answer: with {wall_s:g} s for one program (3 x "
            f"time_limit_s, or wall_time_limit_s) at least {math.ceil(max(wall_s + 1, wall_s / 0.9))} is needed"
        )
    limits = Limits(
        cpu_s=math.ceil(setup["time_limit_s"]),
        wall_s=wall_s,
        max_memory_bytes=setup["max_memory_mib"] * _MIB,
        max_processes=setup["max_processes"],
        max_files_bytes=setup["max_files_mib"] * _MIB,
        max_output_bytes=setup["max_output_kib"] * _KIB,
    )
    try:
        interpreter = find_interpreter(setup["python"])
        packages = interpreter.site_packages if setup["site_packages"] else ()
        sandbox, warning = open_sandbox(setup["sandbox"], interpreter, [*setup["read_only_paths"], *packages])
    except SandboxUnavailable as error:
        raise BadSetup(f"there is no sandbox for `sandbox: {setup['sandbox']}`: {error}") from None
    if warning and setup["sandbox"] != "none":
        print(f"warning: {warning}", file=sys.stderr)
    bench = _Bench(sandbox, interpreter, limits, budget_s, tuple(packages), setup["output_match"])
    all_or_nothing = setup["reward"] == "all_passed"

    def score(item: ScoringItem) -> dict[str, float]:
        suite = suite_of(item, setup["tests_key"])
        code = extracted_code(item.response, setup["code_block"])
        if code is None:
            return {"reward": 0.0, "tests_passed": 0.0, "tests_total": float(num_tests(suite)), "has_code": 0.0}
        passed = bench.passed(code, suite, stop_early=all_or_nothing)
        total = num_tests(suite)
        return {
            "reward": float(passed == total) if all_or_nothing else passed / total,
            "tests_passed": float(passed),
            "tests_total": float(total),
            "has_code": 1.0,
        }

    return score


def extracted_code(response: str, code_block: str) -> str | None:
    """The last closed ``` block of that language (`any`: of whatever language); for `whole` all of the response."""
    if code_block == "whole":
        return response
    accepted = {"python": ("python", "python3", "py")}.get(code_block)
    found = None
    language: str | None = None  # of the current block
    lines: list[str] = []
    for line in response.splitlines():
        fence = re.match(r"\s*(?:```+|~~~+)\s*([\w+#.-]*)[^`]*$", line)
        if language is None:
            if fence:
                language, lines = fence[1].lower(), []
        elif re.fullmatch(r"\s*(?:```+|~~~+)\s*", line):
            if accepted is None or language in accepted:
                found = textwrap.dedent("\n".join(lines)) + "\n"
            language = None
        else:
            lines.append(line)
    return found


def num_tests(suite: Suite) -> int:
    return sum(counts for _, counts in suite.steps) if isinstance(suite, StepSuite) else len(suite.cases)


@dataclass(frozen=True)
class _Bench:
    """Runs solutions against their tests."""

    sandbox: Sandbox
    interpreter: Interpreter
    limits: Limits
    budget_s: float  # for one completion
    sys_path: tuple[str, ...]
    output_match: str

    def passed(self, code: str, suite: Suite, *, stop_early: bool) -> int:
        """How many tests of the suite the code passes; with `stop_early`, none after the first that it fails."""
        if isinstance(suite, ProgramSuite):
            return self._programs_passed(code, suite, stop_early)
        token = secrets.token_hex(16)
        setup: JsonObject = {"token": token, "setup": suite.setup}
        if isinstance(suite, CallSuite):
            steps = [{"arguments": list(arguments)} for arguments, _ in suite.cases]
            job = {"kind": "calls", "function": suite.function, "steps": steps, **setup}
        else:
            job = {
                "kind": "steps",
                "steps": [{"code": text, "counts": counts} for text, counts in suite.steps],
                **setup,
            }
        reported = _reported(self._run(code, job, b"", self.limits).report, token)
        if "setup" in reported:
            raise Unscored(f"the set-up of the task's tests fails in the sandbox: {reported['setup']}")
        if isinstance(suite, StepSuite):
            return sum(
                reported.get(str(number)) == "passed" for number, (_, counts) in enumerate(suite.steps) if counts
            )
        return sum(_is_value(reported.get(str(number)), expected) for number, (_, expected) in enumerate(suite.cases))

    def _programs_passed(self, code: str, suite: ProgramSuite, stop_early: bool) -> int:
        started_at = time.monotonic()
        passed, used_s = 0, 0.0
        for number, (given, expected) in enumerate(suite.cases):
            left_s = started_at + self.budget_s - time.monotonic()
            limits = replace(self.limits, wall_s=min(self.limits.wall_s, max(0.0, left_s)))
            outcome = (
                self._run(code, {"kind": "program"}, given.encode("utf-8", "replace"), limits) if left_s > 0 else None
            )
            used_s += outcome.wall_s if outcome else 0.0
            out_of_time = outcome is None or (outcome.stopped == "wall time" and limits.wall_s < self.limits.wall_s)
            if out_of_time:
                if used_s < self.budget_s / 2:
                    raise Unscored(
                        f"this machine ran {number} of {len(suite.cases)} tests in {self.budget_s:.0f} s, of which the "
                        f"code itself had {used_s:.0f} s: a larger timeout_s, or fewer workers, would help"
                    )
                break
            assert outcome is not None, "there was time to run it"
            if outcome.succeeded and _same_output(outcome.stdout, expected, self.output_match):
                passed += 1
            elif stop_early:
                break
        return passed

    def _run(self, code: str, job: JsonObject, stdin: bytes, limits: Limits) -> Outcome:
        files = {
            "guest.py": _GUEST,
            "solution.py": code.encode("utf-8", "replace"),  # sampled text may contain lone surrogates
            "job.json": json.dumps({**job, "sys_path": list(self.sys_path)}).encode(),
        }
        program = Program(self.interpreter.command("guest.py"), files, stdin, announces=True)
        failure: SandboxFailure | None = None
        for _ in range(ATTEMPTS):
            try:
                return self.sandbox.run(program, limits)
            except SandboxFailure as error:
                failure = error
        raise Unscored(f"the sandbox failed: {failure}")


def _reported(report: bytes, token: str) -> dict[str, str]:
    """The guest's report of each step and of a failed set-up. Lines without the token are not from the guest."""
    reported: dict[str, str] = {}
    for line in report.decode("utf-8", "replace").splitlines():
        match = re.fullmatch(rf"{token} (\d+|setup) (.*)", line)
        if match:
            reported.setdefault(match[1], match[2])
    return reported


def _is_value(text: str | None, expected: object) -> bool:
    try:
        return text is not None and _same_value(json.loads(text), expected)
    except (ValueError, RecursionError):
        return False


def _same_value(value: object, expected: object) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, (int, float)) or not isinstance(expected, (int, float)):
            return False
        return math.isclose(value, expected, rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)
    return type(value) is type(expected) and bool(value == expected)


def _same_output(printed: bytes, expected: str, output_match: str) -> bool:
    text = printed.decode("utf-8", "replace")
    if output_match == "tokens":
        return text.split() == expected.split()
    return _lines(text) == _lines(expected)


def _lines(text: str) -> list[str]:
    """Lines without the white space at their ends, and without empty ones at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
