"""Cases, parts, and the run of a campaign: one case after another, a line of progress, files with the outcome.

A case draws everything random from a generator of its own, keyed by the seed, its part and its name. So a case that
failed is repeated alone, by name.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faults.lab import Lab

MAX_MESSAGE_CHARACTERS = 4000


class NotPossibleHere(Exception):
    """This machine cannot make the fault: the case is skipped, with this reason."""


@dataclass(frozen=True)
class Case:
    """`check` gets an empty folder and its own random numbers. It raises AssertionError where a promise is broken."""

    name: str
    check: Callable[[Path, random.Random], None]
    tries: int = 1  # faults in it


@dataclass(frozen=True)
class Part:
    """`cases(lab, short)` lists them; with `short` those that CI runs."""

    name: str
    promise: str
    cases: Callable[[Lab, bool], Iterable[Case]]
    minutes: float  # of the long form on two idle cores, about


@dataclass(frozen=True)
class Outcome:
    case: str
    verdict: str  # held, failed, skipped
    tries: int
    seconds: float
    message: str = ""


@dataclass
class PartResult:
    part: str
    promise: str
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    not_tried: int = 0

    def count(self, verdict: str) -> int:
        return sum(outcome.tries for outcome in self.outcomes if outcome.verdict == verdict)

    @property
    def tried(self) -> int:
        return self.count("held") + self.count("failed")

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)

    def repro(self, outcome: Outcome) -> str:
        return f"make faults ONLY={self.part} CASE={outcome.case} SEED={self.seed}"

    def as_json(self) -> dict[str, Any]:
        """Cases that held are counted only: there are ten thousand of them."""
        told = [{**asdict(one), "repro": self.repro(one)} for one in self.outcomes if one.verdict != "held"]
        return {
            "part": self.part,
            "promise": self.promise,
            "seed": self.seed,
            "commit": commit(),
            "ended": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "tried": self.tried,
            "held": self.count("held"),
            "failed": self.count("failed"),
            "skipped": self.count("skipped"),
            "not_tried": self.not_tried,
            "seconds": round(self.seconds, 1),
            "cases": told,
        }


def run_case(case: Case, part: str, seed: int, folder: Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    try:
        case.check(folder, random.Random(f"{seed}/{part}/{case.name}"))
        verdict, message = "held", ""
    except NotPossibleHere as reason:
        verdict, message = "skipped", str(reason)
    except AssertionError as error:
        verdict, message = "failed", str(error) or traceback.format_exc()
    except Exception:
        verdict, message = "failed", traceback.format_exc()
    return Outcome(case.name, verdict, case.tries, time.monotonic() - started, shortened(message))


def shortened(text: str) -> str:
    """The beginning and the end."""
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{text[:half]}\n[…]\n{text[-half:]}"


def run_part(
    part: Part,
    lab: Lab,
    seed: int,
    *,
    short: bool = False,
    only_case: str | None = None,
    give_up_at: float = float("inf"),
    say: Callable[[str], None] = print,
) -> PartResult:
    """`give_up_at`: of time.monotonic(). What has not begun by then is counted as not tried."""
    result = PartResult(part.name, part.promise, seed)
    told_at = started = time.monotonic()
    try:
        cases = [case for case in part.cases(lab, short) if only_case in (None, case.name)]
    except Exception:  # some cases follow from a run that is not disturbed
        message = shortened(traceback.format_exc())
        result.outcomes.append(Outcome("list-of-cases", "failed", 1, time.monotonic() - started, message))
        say(f"  FAILED list of cases: {first_line(message)}")
        return result
    assert cases or short, f"the part {part.name} has no case {only_case}"
    for number, case in enumerate(cases, 1):
        if time.monotonic() > give_up_at:
            result.not_tried = sum(left.tries for left in cases[number - 1 :])
            break
        outcome = run_case(case, part.name, seed, lab.folder / "case")
        result.outcomes.append(outcome)
        if outcome.verdict == "failed":
            say(f"  FAILED {case.name}: {first_line(outcome.message)}\n         {result.repro(outcome)}")
        if time.monotonic() - told_at > 10 or number == len(cases):
            told_at = time.monotonic()
            say(
                f"  {part.name}: {number} of {len(cases)} cases, {result.count('failed')} failed, "
                f"{told_at - started:.0f} s"
            )
    return result


def first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    if text.startswith("Traceback"):
        return " ".join(line.strip() for line in lines[-3:])[:300]
    return lines[0][:300] if lines else "(no message)"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, from what the files of the parts hold."""
    lines = ["| part | tried | held | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for result in results:
        skipped = result["skipped"] + result["not_tried"]
        lines.append(
            f"| {result['part']} | {result['tried']} | {result['held']} | {result['failed']} | {skipped} "
            f"| {result['seconds']:.0f} |"
        )
    total = {key: sum(result[key] for result in results) for key in ("tried", "held", "failed")}
    skipped = sum(result["skipped"] + result["not_tried"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    lines.append(f"| all | {total['tried']} | {total['held']} | {total['failed']} | {skipped} | {seconds:.0f} |")
    for verdict, title in (("failed", "Failed"), ("skipped", "Skipped")):
        told = [(result, case) for result in results for case in result["cases"] if case["verdict"] == verdict]
        if told:
            lines += ["", f"{title}:", ""]
        for result, case in told:
            lines.append(f"- `{result['part']}` {case['case']}: {first_line(case['message'])}")
            if verdict == "failed":
                lines.append(f"  `{case['repro']}`")
    lines += ["", f"Commits: {', '.join(sorted({result['commit'] for result in results}))}"]
    for result in results:
        if result["not_tried"]:
            lines += ["", f"- `{result['part']}`: {result['not_tried']} not tried, the time was over"]
    return "\n".join(lines) + "\n"


@cache
def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_result(result: PartResult, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{result.part}.json", json.dumps(result.as_json(), indent=1, ensure_ascii=False) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Parts that run at the same time read and write the same folder."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)


def read_results(out: Path, order: Sequence[str]) -> list[dict[str, Any]]:
    """Of all parts that have run with this folder, now or before."""
    files = [out / f"{name}.json" for name in order]
    return [json.loads(file.read_text()) for file in files if file.exists()]
