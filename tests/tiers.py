"""Which tests run: `--tier fast` (`make test`), `rest` (what it leaves out) or `full` (everything, the default).

The choice is made by measured times. `tests/durations.json` has the seconds of each test and of each fixture that tests
of a file share; `--record-durations` writes it. In the fast tier each test function may take `LIMIT_S`: its cases run
in their order until the next one would exceed it. A test marked `invariant` is in the fast tier in any case, with its
first case. Tests that were never measured are in it, too.

With `--until SECONDS` (since 1970) no test is started that would end later by its measured time; what was left out is
printed. `--rotate` begins with the files named by `--first`, for at most `FIRST_S`, and continues at a place that moves
on every day by an equal share of the measured time. The tests of Ray are one list, which one worker runs, and the
others are another. So the whole tier is run within `ROTATION_DAYS` if two workers have `DAY_S` each; `.ci/run` leaves
about 1,100 s.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import local_ray
import pytest

FILE = Path(__file__).with_name("durations.json")
LAST_RUN = FILE.parents[1] / "results" / "make_test.json"
LIMIT_S = 2.0
ROTATION_DAYS = 8
DAY_S = 1000.0
FIRST_S = 150.0  # of each list
MEASURED_FROM_S = 0.2  # shorter ones are not recorded
Durations = dict[str, dict[str, float]]  # by file, then by test or @fixture


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    tier = os.environ.get("POSTTRAIN_TEST_TIER", "full")
    group.addoption("--tier", choices=("fast", "rest", "full"), default=tier, help="which tests, by measured time")
    group.addoption("--record-durations", action="store_true", help=f"write the measured times to {FILE.name}")
    group.addoption(
        "--until", type=float, metavar="SECONDS", help="start no test that would end later (time since 1970)"
    )
    group.addoption("--rotate", action="store_true", help="begin at another file each day")
    group.addoption("--first", action="append", default=[], metavar="FILE", help="with --rotate: run these before")


def pytest_configure(config: pytest.Config) -> None:
    # What a nested process runs belongs to the test that starts it.
    os.environ["POSTTRAIN_TEST_TIER"] = "fast" if config.getoption("--tier") == "fast" else "full"
    config.pluginmanager.register(Tiers(config))


def read_durations() -> Durations:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def name_of(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def rotated(seconds: Mapping[str, float], day: int, first: Collection[str]) -> list[str]:
    """The files in the order of a day. What does not fit into `FIRST_S` keeps its place in the rotation."""
    start, left = sum(seconds.values()) * (day % ROTATION_DAYS) / ROTATION_DAYS, FIRST_S
    early, later, earlier, begun = [], [], [], 0.0
    for name, taken in seconds.items():
        if name in first and taken <= left:
            early.append(name)
            left -= taken
        else:
            (later if begun >= start else earlier).append(name)
        begun += taken
    return [*early, *later, *earlier]


class Tiers:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.durations = read_durations()
        self.fixtures: list[tuple[str, str, float]] = []  # file, fixture, seconds: of the test that is being run
        self.measured: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.left_out: defaultdict[str, int] = defaultdict(int)
        self.began, self.cpu_s = time.monotonic(), 0.0

    # -- choice --------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tier = self.config.getoption("--tier")
        if tier != "full":
            fast = set(self._fast(items))
            chosen = [item for item in items if (item in fast) == (tier == "fast")]
            self.config.hook.pytest_deselected(items=[item for item in items if (item in fast) != (tier == "fast")])
            items[:] = chosen
        if self.config.getoption("--rotate"):
            items[:] = self._rotated(items)

    def _fast(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        spent: defaultdict[str, float] = defaultdict(float)  # by test function
        paid: set[str] = set()  # shared fixtures
        for item in items:
            known = self.durations.get(file_of(item), {})
            params = getattr(item, "callspec", None)
            shared = [
                (f"{file_of(item)} {name} {params.id if params else ''}", known[f"@{name}"])
                for name in item.fixturenames
                if f"@{name}" in known
            ]
            seconds = known.get(name_of(item.nodeid), 0.0) + sum(cost for key, cost in shared if key not in paid)
            function = item.nodeid.partition("[")[0]
            is_first = function not in spent
            spent[function] += seconds
            if (spent[function] <= LIMIT_S and not item.get_closest_marker("full")) or (
                is_first and item.get_closest_marker("invariant")
            ):
                paid |= {key for key, _ in shared}
                yield item

    def _rotated(self, items: list[pytest.Item]) -> list[pytest.Item]:
        day = int(os.environ.setdefault("POSTTRAIN_TEST_DAY", str(int(time.time() // 86400))))  # one for all workers
        chosen = []
        for of_ray in (True, False):
            files: defaultdict[str, list[pytest.Item]] = defaultdict(list)
            for item in items:
                if of_ray == (item.get_closest_marker("ray") is not None):
                    files[file_of(item)].append(item)
            seconds = {name: self._seconds(name, of_file) for name, of_file in files.items()}
            chosen += [item for name in rotated(seconds, day, self.config.getoption("--first")) for item in files[name]]
        return chosen

    def _seconds(self, file: str, items: list[pytest.Item]) -> float:
        known = self.durations.get(file, {})
        shared = sum(seconds for name, seconds in known.items() if name.startswith("@"))
        return shared + sum(known.get(name_of(item.nodeid), MEASURED_FROM_S) for item in items)

    # -- clock ---------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        until = self.config.getoption("--until")
        seconds = self.durations.get(file_of(item), {}).get(name_of(item.nodeid), 0.0)
        if until is None or time.time() + seconds < until:
            return None
        self.left_out[file_of(item)] += 1
        # The test before kept the fixtures that it shares with this one.
        item.session._setupstate.teardown_exact(nextitem)
        local_ray.stop_unless_needed(nextitem)
        return True

    # -- measuring -----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        if fixturedef.scope not in ("module", "class", "package"):
            return (yield)
        inside, began = len(self.fixtures), time.monotonic()
        result = yield
        took = time.monotonic() - began - sum(seconds for _, _, seconds in self.fixtures[inside:])
        self.fixtures.append((request.node.nodeid.partition("::")[0], f"@{fixturedef.argname}", took))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if self.config.getoption("--record-durations"):
            report.user_properties.append(("fixtures", self.fixtures))
        self.fixtures = []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the process that collects the reports of all workers."""
        shared = [entry for key, value in report.user_properties if key == "fixtures" for entry in value]
        file, _, name = report.nodeid.partition("::")
        own = report.duration - (sum(seconds for _, _, seconds in shared) if report.when == "setup" else 0.0)
        times = self.measured[file]
        times[name] = times.get(name, 0.0) + max(0.0, own)
        if report.when == "setup":
            for place, fixture, seconds in shared:
                self.measured[place][fixture] = max(seconds, self.measured[place].get(fixture, 0.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = dict(self.left_out)
            output["cpu_s"] = sum(os.times()[:4])  # of this process and of its children that have ended
            return
        if self.config.getoption("--tier") == "fast" and self.config.args_source.name != "ARGS":
            self._write_last_run()
        if self.config.getoption("--record-durations"):
            recorded = read_durations()
            for file, times in self.measured.items():  # a full run replaces what is known of a file
                recorded[file] = times if self.config.getoption("--tier") == "full" else recorded.get(file, {}) | times
            long = {
                file: {name: round(s, 1) for name, s in sorted(times.items()) if s >= MEASURED_FROM_S}
                for file, times in sorted(recorded.items())
                if Path(self.config.rootpath, file).exists()
            }
            FILE.write_text(json.dumps({file: times for file, times in long.items() if times}, indent=0) + "\n")

    def _write_last_run(self) -> None:
        """For `make measure`."""
        LAST_RUN.parent.mkdir(exist_ok=True)
        cpu_s = self.cpu_s + sum(os.times()[:2])
        LAST_RUN.write_text(json.dumps({"wall_s": time.monotonic() - self.began, "cpu_s": cpu_s}) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        self.cpu_s += output.get("cpu_s", 0.0)
        for file, count in output.get("left_out", {}).items():
            self.left_out[file] += count

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            total = sum(self.left_out.values())
            terminalreporter.section(f"no time left for {total} tests")
            for file, count in sorted(self.left_out.items()):
                terminalreporter.line(f"{file}: {count}")
