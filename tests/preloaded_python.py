"""A Python that has its imports behind it: commands of shell scripts run in forks of one process, seconds faster each.

    python tests/preloaded_python.py serve SOCKET          imports posttrain, then forks for every command
    python -S tests/preloaded_python.py run SOCKET ARGS…  as `python ARGS…`: a script, `-m MODULE` or `-` (stdin)

The command gets the caller's standard streams, folder and environment, and ends with the caller.
"""

import json
import os
import signal
import socket
import struct
import sys
import threading

PRELOADED = (
    "posttrain.cli.main",
    "posttrain.build",
    "posttrain.recipes.dpo",
    "posttrain.recipes.grpo",
    "posttrain.apps.export.convert",
    "posttrain.apps.evaluate.build",
    "posttrain.apps.serve",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "peft",
    "pyarrow.parquet",
    "math_verify",
)


def ask(path: str, arguments: list[str]) -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    what = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(connection, [struct.pack("!I", len(what))], [0, 1, 2])
    connection.sendall(what)
    code = connection.recv(4)
    return struct.unpack("!i", code)[0] if len(code) == 4 else 1


def serve(path: str) -> None:
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            command(connection)
        connection.close()


def command(connection: socket.socket) -> None:
    """One command, in a fork. Does not return."""
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    (length,) = struct.unpack("!I", size)
    what = b""
    while len(what) < length:
        what += connection.recv(length - len(what))
    given = json.loads(what)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    os.setpgrp()
    threading.Thread(target=_end_with_caller, args=(connection,), daemon=True).start()
    code = _execute(given["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(struct.pack("!i", code))
    os._exit(0)


def _end_with_caller(connection: socket.socket) -> None:
    if connection.recv(1) == b"":
        os.kill(os.getpid(), signal.SIGTERM)


def _execute(arguments: list[str]) -> int:
    import runpy
    import traceback

    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-":
            sys.argv = arguments
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(ask(sys.argv[2], sys.argv[3:]))
