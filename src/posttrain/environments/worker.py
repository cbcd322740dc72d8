"""The main program of a worker process: reads completions from one pipe, judges them, writes the verdicts to another.

It is run as a file, in a session of its own, with nothing of posttrain imported until the parent has sent its
`sys.path`. It never imports torch. Scored code may do anything: raise, hang, print, exit. The parent enforces time
limits and kills. This program only ensures that a reply is always a short JSON object, and that this process ends when
the parent does.

A request is a pickled number (0 is the start, then one per completion) and bytes; a reply is JSON with the same number.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain import processes
    from posttrain.environments.item import ScoringItem
    from posttrain.files.json_files import JsonObject
else:
    processes = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "processes.py")))

DUMP_SIGNAL = signal.SIGUSR1  # the parent sends it before it kills: the stack shows where the time went
_MAX_ERROR_CHARACTERS = 300
_MAX_TRACEBACK_CHARACTERS = 8000


def main() -> None:
    request_fd, reply_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:4])
    for fd in (request_fd, reply_fd, lifeline_fd):
        os.set_inheritable(fd, False)  # programs that a reward starts must not hold our pipes
    processes.die_with_parent(lifeline_fd)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    start = processes.read_frame(request_fd)
    if start is None:
        return
    setup = json.loads(pickle.loads(start)[1])
    sys.path[:] = setup["sys_path"]
    try:
        scorer = build_scorer(setup)
    except BaseException as error:
        reply(reply_fd, 0, failure(error))
        return
    reply(reply_fd, 0, {})
    serve(request_fd, reply_fd, scorer)


def build_scorer(setup: JsonObject) -> Callable[[ScoringItem], object]:
    """The function from an item to its worth. Slow imports happen here, outside of any completion's time limit."""
    from posttrain.environments.reward_types import MEMORY_LIMIT_BYTES, worker_scorer
    from posttrain.files.redaction import name_credentials

    name_credentials(setup)
    _limit_memory(MEMORY_LIMIT_BYTES.get(setup["type"]))
    return worker_scorer(setup)


def _limit_memory(num_bytes: int | None) -> None:
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    if num_bytes is not None and (hard_limit == resource.RLIM_INFINITY or hard_limit > num_bytes):
        with suppress(ValueError, OSError):  # not every system has this limit
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard_limit))


def serve(request_fd: int, reply_fd: int, scorer: Callable[[ScoringItem], object]) -> None:
    """Judge completions until the parent closes the pipe."""
    process_id = os.getpid()
    while (request := processes.read_frame(request_fd)) is not None:
        number, payload = pickle.loads(request)
        verdict = judge(scorer, payload)
        if os.getpid() != process_id:
            os._exit(0)  # the reward forked and this is the child: only the parent may reply
        reply(reply_fd, number, verdict)
        if verdict.get("out_of_memory"):
            return  # the memory may still be in use; the parent starts a new process


def reply(reply_fd: int, number: int, verdict: JsonObject) -> None:
    processes.write_frame(reply_fd, json.dumps([number, verdict]).encode())


def judge(scorer: Callable[[ScoringItem], object], payload: bytes) -> JsonObject:
    from posttrain.environments.item import PlainReply, to_reward

    try:
        found = scorer(pickle.loads(payload))
        if isinstance(found, PlainReply):
            return found.fields
        reward, parts = to_reward(found)
        return {"reward": reward, "parts": {clean(name, 100): part for name, part in parts.items()}}
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: a completion may not end the worker
        return failure(error)


def failure(error: BaseException) -> JsonObject:
    """One line and a traceback, of bounded size, in characters that any file can hold."""
    from posttrain.environments.item import BadSetup, Unscored
    from posttrain.files.redaction import redact

    try:
        message = redact(str(error))
    except Exception:
        message = "<the error has no text>"
    if isinstance(error, (Unscored, BadSetup)):
        return {"error": clean(message, 4 * _MAX_ERROR_CHARACTERS), "traceback": None}
    line = f"{type(error).__name__}: {message}" if message else type(error).__name__
    line = " ".join(line.split())
    try:
        text = redact("".join(traceback.format_exception(type(error), error, users_frames(error))))
    except Exception:
        text = line
    return {
        "error": clean(line, _MAX_ERROR_CHARACTERS),
        "traceback": clean(text, _MAX_TRACEBACK_CHARACTERS),
        "out_of_memory": isinstance(error, MemoryError),
    }


def users_frames(error: BaseException) -> TracebackType | None:
    """The traceback below the last frame of posttrain: where the user's code, or a library, went wrong."""
    ours = os.path.dirname(os.path.abspath(__file__))
    frame = shown = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(ours) and frame.tb_next is not None:
            shown = frame.tb_next
        frame = frame.tb_next
    return shown


def clean(text: str, max_characters: int) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")
    return (
        text if len(text) <= max_characters else text[: max_characters // 4] + " … " + text[-max_characters * 3 // 4 :]
    )


if __name__ == "__main__":
    main()
