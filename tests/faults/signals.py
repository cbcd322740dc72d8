"""Signals, and a console that goes away: the run saves or goes on, and ends with the bits of one left alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.lab import Lab, assert_no_traceback

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KINDS = ("dpo", "grpo", "dpo-background")
# bash: "$@" is the command.
CONSOLES = {
    "stdout-full": '"$@" >/dev/full',
    "stderr-full": '"$@" 2>/dev/full',
    "both-full": '"$@" >/dev/full 2>&1',
    "reader-left": '"$@" | head -1; exit ${PIPESTATUS[0]}',
    "reader-left-at-once": '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}',
    "stdout-closed": '"$@" >&-',
    "stderr-closed": '"$@" 2>&-',
    "stdin-closed": '"$@" <&-',
    "all-closed": '"$@" <&- >&- 2>&-',
    "hangup-of-the-terminal": 'trap "" HUP; "$@"',
}
SHORT_CONSOLES = ("all-closed",)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for kind in KINDS[:1] if short else KINDS:
        for sent in SIGNALS:
            yield Case(f"{sent.name}:{kind}", partial(one_signal, lab, kind, sent))
            if not short:
                yield Case(f"{sent.name}-in-the-group:{kind}", partial(one_signal, lab, kind, sent, to_group=True))
                yield Case(f"{sent.name}-twice:{kind}", partial(two_signals, lab, kind, (sent, sent)))
    if not short:
        yield Case("SIGTERM-then-SIGHUP", partial(two_signals, lab, "dpo", (signal.SIGTERM, signal.SIGHUP)))
        yield Case("SIGPIPE", partial(harmless_signal, lab, signal.SIGPIPE))
        yield Case("SIGWINCH", partial(harmless_signal, lab, signal.SIGWINCH))
    for name in SHORT_CONSOLES if short else CONSOLES:
        yield Case(f"console:{name}", partial(console, lab, CONSOLES[name]))
    yield Case("folder-deleted", partial(folder_deleted, lab))


PART = Part("signals", "a signal saves and stops; training goes on without its console", cases, 3)


def begun(lab: Lab, kind: str, folder: Path, chance: random.Random) -> processes.Running:
    run = folder / "run"
    running = processes.begin(lab.arguments(kind, run), folder / "stopped.log")
    rows = chance.randrange(0, 4)
    has_begun = running.wait_for(lambda: tiny_runs.count_rows(run) >= rows and "\nfolder " in running.output())
    assert has_begun, f"the run ended by itself: {running.finish()}"
    return running


def send(running: processes.Running, sent: signal.Signals, to_group: bool = False) -> None:
    with suppress(ProcessLookupError):  # the run is over
        (os.killpg if to_group else os.kill)(running.pid, sent)


def one_signal(
    lab: Lab, kind: str, sent: signal.Signals, folder: Path, chance: random.Random, to_group: bool = False
) -> None:
    lab.whole(kind)
    running = begun(lab, kind, folder, chance)
    send(running, sent, to_group)
    stopped = running.finish()
    assert_no_traceback(stopped)
    run = folder / "run"
    rows = [row["step"] for row in tiny_runs.rows_of(run)]
    if stopped.code != 0:  # 0: the run was over before it heard of the signal
        assert stopped.code > 0, f"the signal ended the process: {stopped}"
        trained = [step for step in rows if step > 0]
        assert not trained or (run / f"step_{trained[-1]}").is_dir(), f"not saved after step {rows[-1:]}: {stopped}"
    lab.assert_same_end(kind, run, processes.run(lab.arguments(kind, run), folder / "log"))


def two_signals(lab: Lab, kind: str, sent: tuple[signal.Signals, ...], folder: Path, chance: random.Random) -> None:
    """The second one, at whatever moment it comes, may cost the save, and nothing else."""
    lab.whole(kind)
    running = begun(lab, kind, folder, chance)
    for one in sent:
        send(running, one)
        time.sleep(chance.uniform(0, 0.2))
    assert_no_traceback(running.finish())
    run = folder / "run"
    lab.assert_same_end(kind, run, processes.run(lab.arguments(kind, run), folder / "log"))


def harmless_signal(lab: Lab, sent: signal.Signals, folder: Path, chance: random.Random) -> None:
    running = begun(lab, "dpo", folder, chance)
    send(running, sent)
    lab.assert_same_end("dpo", folder / "run", running.finish())


def console(lab: Lab, shell: str, folder: Path, chance: random.Random) -> None:
    run = folder / "run"
    finished = processes.run_as_user(lab.arguments("dpo", run), shell=shell)
    assert_no_traceback(finished)
    lab.assert_same_end("dpo", run, finished)


def folder_deleted(lab: Lab, folder: Path, chance: random.Random) -> None:
    """The record of the run is lost: an exit code of 0 would say that it is there."""
    run = folder / "run"
    running = begun(lab, "grpo", folder, chance)
    running.wait_for(lambda: tiny_runs.count_rows(run) >= 2)
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)  # what was written meanwhile
    finished = running.finish()
    assert_no_traceback(finished)
    complete = [row["step"] for row in tiny_runs.rows_of(lab.whole("grpo"))]
    if [row["step"] for row in tiny_runs.rows_of(run)] != complete:
        assert finished.code == 1, f"rows are lost, and the exit code does not say so: {finished}"
        assert str(run) in finished.output
