"""A process that runs one command after another without the start of an interpreter for each, under limits.

Ten thousand commands in new interpreters would take ten hours. A sample of them is run that way too (`inputs.py`).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faults import processes
from faults.processes import Finished

MAX_CPU_S = 5.0  # for one command; a busy machine must not make a hang of a wait for a core
MAX_WALL_S = 60.0
EXTRA_MEMORY_BYTES = 2 << 30


class Worker:
    """Started when first needed, and again after a command that hung."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: processes.Running | None = None
        self._pipe: Connection | None = None

    def run(self, arguments: Sequence[str], folder: Path) -> Finished:
        """`arguments` of posttrain, or of a reader of data: `@tasks FILE`, `@pairs FILE`, `@examples FILE`."""
        if self._running is None or not self._running.process.is_alive():
            ours, its = processes.context().Pipe()
            self._running = processes.begin_function(_serve, (its,), self._log)
            its.close()
            self._pipe = ours
        assert self._pipe is not None
        self._pipe.send((list(arguments), str(folder)))
        try:
            if self._pipe.poll(MAX_WALL_S):
                code, output, seconds = self._pipe.recv()
                assert seconds <= MAX_CPU_S, f"{seconds:.1f} s of CPU time: {arguments}"
                return Finished(code, output, seconds)
        except EOFError:
            ended = self._running.finish()
            raise AssertionError(f"the process died of {arguments}: {ended}") from None
        self.close()
        raise AssertionError(f"hangs, {MAX_WALL_S:g} s: {arguments}")

    def close(self) -> None:
        if self._running is not None:
            self._running.kill_all()
            self._running = None


def _serve(pipe: Connection) -> int:
    from posttrain.cli.main import main, report_errors

    # A hang in Python or C ends by the CPU time, a bomb by the memory: both are told as what they are.
    processes.limit_memory(EXTRA_MEMORY_BYTES)
    signal.signal(signal.SIGVTALRM, _too_long)
    readers = _readers()
    while True:
        try:
            arguments, folder = pipe.recv()
        except EOFError:
            return 0
        os.chdir(folder)
        output = io.StringIO()
        before = os.times()
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S + 1)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                if arguments[0].startswith("@"):
                    code = report_errors(lambda: readers[arguments[0]](arguments[1]))  # noqa: B023 - called here
                else:
                    code = main(arguments)
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 1
            except BaseException as error:  # what main itself does not catch
                code = 1
                output.write(f"Traceback (most recent call last): {type(error).__name__}: {error}\n")
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        after = os.times()
        pipe.send((code, output.getvalue()[-20_000:], after.user + after.system - before.user - before.system))


class TooLong(BaseException):
    """Not an Exception: no handler of the program takes it for an error of the input."""


def _too_long(*_: object) -> None:
    raise TooLong(f"still computing after {MAX_CPU_S:g} s")


def _readers() -> dict[str, Any]:
    from posttrain.apps.demo.arithmetic import build_tokenizer
    from posttrain.data.chat import ChatFormat
    from posttrain.data.datasets import load_example_dataset, load_pair_dataset, load_task_dataset

    chat = ChatFormat(build_tokenizer())

    def entry(name: str, file: str) -> dict[str, Any]:
        return {"dataset_name": name, "data_path": file}

    def tasks(file: str) -> int:
        load_task_dataset(entry("ResponseDataset", file), None, chat, max_prompt_tokens=None, seed=0)
        return 0

    def pairs(file: str) -> int:
        load_pair_dataset(entry("PreferenceDataset", file), None, chat, max_total_tokens=512, seed=0)
        return 0

    def examples(file: str) -> int:
        load_example_dataset(
            entry("ResponseDataset", file), None, chat, max_total_tokens=512, only_unmask_final=False, seed=0
        )
        return 0

    return {"@tasks": tasks, "@pairs": pairs, "@examples": examples}
