"""How tests are distributed over processes, and what happens when such a process dies.

The tests of a file run in one process and share its fixtures. All files with tests marked `ray` run in the same process
and share one Ray. (Marks of pytest-xdist 3.8 for groups have no effect under pytest 9.2.)

If a process dies, for want of memory for example, its test runs once more in another process, and the summary names the
test and the signal. If that dies as well, the test has failed. pytest-xdist itself ends with an error of its own if two
processes die while their replacements still collect tests.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._scopes: dict[str, str] = {}
        self._died_once: set[str] = set()

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file not in self._scopes:
            has_ray = "mark.ray" in self.config.rootpath.joinpath(file).read_text()
            self._scopes[file] = "ray" if has_ray else file
        return self._scopes[file]

    def remove_node(self, node: Any) -> str | None:
        """Give what a process had not completed to others. Returns the test that it ran when it died."""
        units = self.assigned_work.pop(node)
        pending = [(unit, test) for unit in units.values() for test, is_completed in unit.items() if not is_completed]
        if not pending:
            return None
        unit, died = pending[0]
        unit[died] = died in self._died_once
        self._died_once.add(died)
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.nodes:
            self._reschedule(other)
        return died

    def _reschedule(self, node: Any) -> None:
        if node in self.registered_collections:  # else it will be called when this process has collected its tests
            super()._reschedule(node)


class Distribution:
    def __init__(self) -> None:
        self.repeated: dict[str, str] = {}

    @pytest.hookimpl
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduling | None:
        return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None

    @pytest.hookimpl
    def pytest_handlecrashitem(self, crashitem: str, report: Any, sched: Any) -> None:
        popen = report.node.gateway._io.popen
        try:
            code = popen.wait(10)
        except Exception:  # it lives, but its connection is gone
            code = None
        ending = f"signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"exit code {code}"
        report.longrepr = f"{report.longrepr}: {ending}"
        if crashitem not in self.repeated:
            self.repeated[crashitem] = report.longrepr
            report.outcome = "rerun"

    @pytest.hookimpl
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for message in self.repeated.values():
            terminalreporter.line(f"run again: {message}")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):  # whose hooks these are
        config.pluginmanager.register(Distribution())
