"""The clock of the machine is set back or forward by an hour while a run is going on."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import tiny_runs

from faults.campaign import Case, NotPossibleHere, Part
from faults.lab import Lab, assert_no_traceback
from faults.processes import Finished

HOUR_S = 3600
# Adds the seconds in the file $CLOCK_SHIFT to every clock that can be set.
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) {
    char text[32] = "";
    const char *name = getenv("CLOCK_SHIFT");
    int file = name ? open(name, O_RDONLY) : -1;
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, found);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) found->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) { found->tv_sec = now.tv_sec; found->tv_usec = now.tv_nsec / 1000; }
    return 0;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for kind in ("dpo", "grpo") if not short else ():
        for seconds in (-HOUR_S, HOUR_S):
            yield Case(f"{kind}:{seconds:+}", partial(set_clock, lab, kind, seconds))


PART = Part("clock", "a clock that is set by an hour in mid-run changes no result", cases, 1)


def library(lab: Lab) -> Path:
    def make(shared: Path) -> Path:
        compiler = shutil.which("cc")
        if compiler is None:
            raise NotPossibleHere("no C compiler for a library that shifts the clock")
        (shared / "clock.c").write_text(SOURCE)
        command = [compiler, "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]
        subprocess.run(command, cwd=shared, check=True, capture_output=True)
        return shared / "clock.so"

    found: Path = lab.shared("clock", make)
    return found


def set_clock(lab: Lab, kind: str, seconds: int, folder: Path, chance: random.Random) -> None:
    lab.whole(kind)
    run, shift = folder / "run", folder / "shift"
    shift.write_text("0")
    environment = {**os.environ, "LD_PRELOAD": str(library(lab)), "CLOCK_SHIFT": str(shift)}
    looked = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env={**environment, "CLOCK_SHIFT": str(_written(folder / "other", seconds))},
        capture_output=True,
        check=True,
    )
    assert abs(float(looked.stdout) - time.time() - seconds) < 600, "the clock is not shifted"
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "posttrain.cli.main", *lab.arguments(kind, run)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        while process.poll() is None and tiny_runs.count_rows(run) < 2:
            time.sleep(0.01)
        _written(shift, seconds)
        code = process.wait(180)
    finally:
        process.kill()
    finished = Finished(code, (folder / "log").read_text(errors="replace"))
    assert_no_traceback(finished)
    lab.assert_same_end(kind, run, finished)


def _written(path: Path, seconds: int) -> Path:
    path.write_text(str(seconds))
    return path
