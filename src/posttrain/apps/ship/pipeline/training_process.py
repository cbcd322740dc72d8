"""Runs training in a child process and returns its exit code.

The child has its own process group: signals reach it once, forwarded by the pipeline. If the pipeline is killed, the
kernel (Linux) sends the training SIGTERM, so that it saves and ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from posttrain.checkpointing.stopping import Interruption
from posttrain.processes import be_signalled_with_parent

_POLL_S = 0.2


def run_training(
    kind: str,
    config: Path,
    *,
    quiet: bool,
    lock: int | None,
    heartbeat: Callable[[], None] = lambda: None,
    variables: Mapping[str, str] | None = None,
) -> int:
    """The exit code of `posttrain KIND --config FILE`. SIGTERM and Ctrl-C are forwarded, so that it saves.

    `variables`: further environment variables that the config refers to.
    """
    arguments = [kind, "--config", str(config), *(["--quiet"] if quiet else [])]
    command = [sys.executable, "-m", __spec__.name, str(os.getpid()), str(-1 if lock is None else lock), *arguments]
    with Interruption() as interruption:
        child = subprocess.Popen(
            command,
            process_group=0,
            pass_fds=() if lock is None else (lock,),
            env={**os.environ, **(variables or {})},
        )
        forwarded = False
        try:
            while True:
                try:
                    code = child.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    heartbeat()
                if interruption.signal is not None and not forwarded:
                    child.send_signal(interruption.signal)
                    forwarded = True
        except BaseException:  # a second Ctrl-C, or an error of ours: do not leave the child behind
            child.kill()
            child.wait()
            raise
    if code == 0 and interruption.signal is not None:  # it came too late for the training, but must stop the pipeline
        os.kill(os.getpid(), interruption.signal)
    return code


def main(arguments: Sequence[str]) -> int:
    parent, lock, *rest = arguments
    if int(lock) >= 0:
        os.set_inheritable(int(lock), False)  # held by this process, not by its children
    be_signalled_with_parent(signal.SIGTERM, int(parent))
    # By name: the command line is built on this package.
    sys.argv[1:] = rest
    runpy.run_module("posttrain.cli.main", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
