"""The main program of the process that puts an untrusted program into its sandbox and waits for it.

Three processes: this one unshares the namespaces; its child is the first process of the new ones, so that everything in
them ends with it; the grandchild drops its remaining privileges and becomes the untrusted program. Where there are no
namespaces the child is that program, and its descendants are found and killed. The outcome is one line of JSON on a
pipe that the program cannot reach. Run as `launch(spec_fd, status_fd, report_fd)`; the spec is what `sandbox.py` wrote.
Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn, TypedDict

from posttrain.environments.sandbox import kernel
from posttrain.environments.sandbox.kernel import restrict_files
from posttrain.environments.sandbox.private_root import BOX, WRITABLE, enter_private_root
from posttrain.environments.sandbox.processes import descendants
from posttrain.environments.sandbox.syscall_filter import syscall_filter

REPORT_FD = 3  # where the untrusted program finds the pipe for its own report
_INSIDE_ID = 1000
_FIRST_OWN_USER = 2_000_000_000  # as root: each run gets its own unused user id
_NOBODY = 65534
_SEPARATE_PROCESS_COUNTS = (5, 14)  # the kernel that counts RLIMIT_NPROC for each user namespace
_NAMESPACES = (
    (kernel.CLONE_NEWNS, "mount"),
    (kernel.CLONE_NEWPID, "pid"),
    (kernel.CLONE_NEWNET, "network"),
    (kernel.CLONE_NEWIPC, "ipc"),
    (kernel.CLONE_NEWUTS, "host name"),
)
_GIVE_UP_KILLING_S = 10.0
_MAX_PENDING_SIGNALS = 1024  # timers count


class LaunchSpec(TypedDict):
    """What `sandbox.py` asks for, as JSON."""

    parent: int
    level: str
    command: list[str]
    environment: dict[str, str]
    files: dict[str, str]  # by name, in base64
    limits: dict[str, int]
    read_only: list[str]
    folder: str  # null in namespaces
    num_processes_of_user: int


def launch(spec_fd: int, status_fd: int, report_fd: int) -> None:
    with os.fdopen(spec_fd) as file:
        spec: LaunchSpec = json.load(file)
    kernel.die_with_parent(signal.SIGTERM, spec["parent"])
    # Python turns it into an exception, with which the program could make us report a failure of the sandbox as our
    # own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # preferred victim of the OOM killer
    try:
        if spec["level"] == "namespaces":
            _launch_in_namespaces(spec, status_fd, report_fd)
        else:
            _launch_beside(spec, status_fd, report_fd)
    except Exception as error:
        _tell(status_fd, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _launch_in_namespaces(spec: LaunchSpec, status_fd: int, report_fd: int) -> None:
    ids = _own_ids() if os.geteuid() == 0 else None
    if ids is None:
        _unshare_user()
    for flag, name in _NAMESPACES:
        kernel.unshare(flag, f"{name} namespace")
    kernel.set_host_name(b"sandbox")
    lifeline, our_end = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(our_end)
        _or_tell(status_fd, lambda: _first_process(spec, ids, lifeline, status_fd, report_fd))
    _kill_on_request(lambda: os.kill(first, signal.SIGKILL))
    os.waitpid(first, 0)


def _unshare_user() -> None:
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER, "user namespace")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INSIDE_ID} {user} 1"),
        ("gid_map", f"{_INSIDE_ID} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _own_ids() -> tuple[int, int]:
    """As root: an unused user and group id. Some containers do not map such high ids."""
    own = _FIRST_OWN_USER + os.getpid()
    return tuple(own if _is_mapped(own, kind) else _NOBODY for kind in ("uid", "gid"))  # type: ignore[return-value]


def _is_mapped(number: int, kind: str) -> bool:
    with open(f"/proc/self/{kind}_map") as lines:
        ranges = [tuple(map(int, line.split())) for line in lines]
    return any(first <= number < first + count for first, _, count in ranges)


def _first_process(
    spec: LaunchSpec, ids: tuple[int, int] | None, lifeline: int, status_fd: int, report_fd: int
) -> NoReturn:
    """Process 1 of the new namespaces: sets them up, starts the program, and exits with it, which ends all processes in
    them.

    `ids` are the user and group to switch to from root; without them the process is an ordinary user in its own user
    namespace.
    """
    os.setsid()
    read_only = [path for path in spec["read_only"] if os.path.exists(path)]
    enter_private_root(read_only, spec["limits"]["max_files_bytes"])
    kernel.forget_capabilities()
    _write_files(spec["files"], BOX, ids)
    for folder in WRITABLE:
        if ids:
            os.chown(folder, *ids)
    extra = 1  # ourselves
    if ids:
        _become(ids)
    elif _kernel_version() < _SEPARATE_PROCESS_COUNTS:
        extra += spec["num_processes_of_user"]
    kernel.allow_no_new_privileges()
    kernel.hide_memory()
    # The launcher is outside of our namespace, so its pid reads as 0, dead or alive: the pipe shows it instead.
    kernel.die_with_parent(signal.SIGKILL, 0)
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)
    _run_and_tell(spec, status_fd, report_fd, extra, restrict=lambda: None)
    os._exit(0)


def _launch_beside(spec: LaunchSpec, status_fd: int, report_fd: int) -> None:
    """Without namespaces: the program shares ours, under the rules of Landlock if the level has it."""
    kernel.adopt_orphans()
    ids = _own_ids() if os.geteuid() == 0 and spec["level"] == "landlock" else None
    _write_files(spec["files"], spec["folder"], ids)
    _kill_on_request(_kill_descendants)
    extra = 0 if ids else spec["num_processes_of_user"]

    def restrict() -> None:
        if ids:
            kernel.forget_capabilities()
            _become(ids)
        kernel.allow_no_new_privileges()
        if spec["level"] == "landlock":
            restrict_files([path for path in spec["read_only"] if os.path.exists(path)], spec["folder"])

    try:
        _run_and_tell(spec, status_fd, report_fd, extra, restrict)
    finally:
        _kill_descendants()


def _run_and_tell(
    spec: LaunchSpec, status_fd: int, report_fd: int, extra_processes: int, restrict: Callable[[], None]
) -> None:
    """Start the program, report the start, wait for it, report its end. If it cannot be started, the sandbox has
    failed.
    """
    error_read, error_write = os.pipe()
    starter = os.getpid()
    program = os.fork()
    if program == 0:
        try:
            error_write = _arrange_descriptors(report_fd, error_write, status_fd)
            _become_program(spec, starter, extra_processes, restrict)
        except BaseException as error:
            os.write(error_write, f"{type(error).__name__}: {error}".encode()[:2000])
        finally:
            os._exit(127)
    os.close(error_write)
    os.close(report_fd)
    for fd in (0, 1, 2):  # the program owns the pipes: they close when its last process ends
        os.close(fd)
    with os.fdopen(error_read, "rb") as file:
        reason = file.read().decode("utf-8", "replace")
    if reason:
        _tell(status_fd, {"error": reason})
        return
    _tell(status_fd, {"started": True})
    while True:
        ended, code, usage = os.wait4(-1, 0)
        if ended == program:
            break
    total = resource.getrusage(resource.RUSAGE_CHILDREN)
    _tell(
        status_fd,
        {
            "exit_code": os.waitstatus_to_exitcode(code),
            "cpu_s": total.ru_utime + total.ru_stime,
            "program_cpu_s": usage.ru_utime + usage.ru_stime,
        },
    )


def _become_program(spec: LaunchSpec, starter: int, extra_processes: int, restrict: Callable[[], None]) -> None:
    namespaces = spec["level"] == "namespaces"
    os.chdir(BOX if namespaces else spec["folder"])
    if not namespaces:
        os.setsid()
    os.umask(0o077)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _limit(spec["limits"], extra_processes)
    restrict()
    if not namespaces:
        kernel.die_with_parent(signal.SIGKILL, starter)
    if spec["level"] != "limits":
        kernel.install_filter(syscall_filter())
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _arrange_descriptors(report_fd: int, error_fd: int, status_fd: int) -> int:
    """0 to 2 are the program's, 3 is its report, and no other pipe of ours is open in it once it runs.

    Returns the new number of the pipe for errors, which closes on exec.
    """
    above = 1 + max(REPORT_FD, report_fd, error_fd, status_fd)
    last = fcntl.fcntl(error_fd, fcntl.F_DUPFD_CLOEXEC, above)
    os.dup2(report_fd, REPORT_FD, inheritable=True)
    os.closerange(REPORT_FD + 1, last)
    return last


def _limit(limits: dict[str, int], extra_processes: int) -> None:
    values = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["max_memory_bytes"],
        resource.RLIMIT_NPROC: limits["max_processes"] + extra_processes,
        resource.RLIMIT_FSIZE: limits["max_files_bytes"],
        resource.RLIMIT_NOFILE: limits["max_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: _MAX_PENDING_SIGNALS,
    }
    for which, value in values.items():
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The soft limit of CPU time sends a signal that can be caught; the hard one, a second later, cannot.
        upper = value + 1 if which == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(which, (value, upper))


def _become(ids: tuple[int, int]) -> None:
    """Drop root permanently."""
    os.setgroups([])
    os.setresgid(ids[1], ids[1], ids[1])
    os.setresuid(ids[0], ids[0], ids[0])
    assert os.getuid() == os.geteuid() == ids[0]
    assert os.getgid() == os.getegid() == ids[1]


def _write_files(files: dict[str, str], folder: str, ids: tuple[int, int] | None) -> None:
    if ids:
        os.chown(folder, *ids)
    for name, content in files.items():
        path = os.path.join(folder, name)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
        os.chmod(path, 0o755)
        if ids:
            os.chown(path, *ids)


def _kill_on_request(kill: Callable[[], None]) -> None:
    def handler(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            kill()

    signal.signal(signal.SIGTERM, handler)


def _kill_descendants() -> None:
    """Kill all descendants. They are stopped first, so that none can fork faster than it is killed."""
    give_up_at = time.monotonic() + _GIVE_UP_KILLING_S
    while time.monotonic() < give_up_at:
        found = descendants(os.getpid())
        if not found:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process_id in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or 0)


def _or_tell(status_fd: int, action: Callable[[], NoReturn]) -> NoReturn:
    try:
        action()
    except BaseException as error:
        _tell(status_fd, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _tell(status_fd: int, message: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(status_fd, json.dumps(message).encode() + b"\n")
