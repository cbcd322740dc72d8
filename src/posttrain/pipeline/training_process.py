"""Training in a process of its own: what starts it, and what it does first. A crash there is a number here.

The process is in a group of its own: signals reach it through the pipeline, once, whoever sent them. If the pipeline dies
without a word, the kernel (Linux) sends the training SIGTERM, so that it saves and ends instead of going on unseen.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from posttrain.checkpointing.interruption import Interruption

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def run_training(
    kind: str, config: Path, *, quiet: bool, lock: int | None, heartbeat: Callable[[], None] = lambda: None
) -> int:
    """The exit code of `posttrain KIND --config FILE`. SIGTERM and Ctrl-C are handed on, so that it saves."""
    arguments = [kind, "--config", str(config), *(["--quiet"] if quiet else [])]
    command = [sys.executable, "-m", __spec__.name, str(os.getpid()), str(-1 if lock is None else lock), *arguments]
    with Interruption() as interruption:
        child = subprocess.Popen(command, process_group=0, pass_fds=() if lock is None else (lock,))
        handed_on = False
        try:
            while True:
                try:
                    code = child.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    heartbeat()
                if interruption.signal is not None and not handed_on:
                    child.send_signal(interruption.signal)
                    handed_on = True
        except BaseException:  # a second Ctrl-C, or an error of ours: nobody would look after it any more
            child.kill()
            child.wait()
            raise
    if code == 0 and interruption.signal is not None:  # it came too late to stop the training, and still means stop
        os.kill(os.getpid(), interruption.signal)
    return code


def main(arguments: Sequence[str]) -> int:
    parent, lock, *rest = arguments
    if int(lock) >= 0:
        os.set_inheritable(int(lock), False)  # held by this process, not by those that it starts
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM  # it died before the kernel was asked
    # By name: the command line is built on this package.
    sys.argv[1:] = rest
    runpy.run_module("posttrain.cli.main", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
