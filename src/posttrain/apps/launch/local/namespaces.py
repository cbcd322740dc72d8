"""A pod without a container engine: a process in its own namespaces, created by an unprivileged user. Linux only.

    namespaces.py probe                 what this kernel forbids; nothing if pods can be made
    namespaces.py pod DESCRIPTOR        a pod: its PID goes to the descriptor, which is closed when the command begins;
                                        its description comes over standard input
    namespaces.py enter PID             a command in the pod of which PID is the first process; the same description

Standard library only: it is started without site packages, so that a pod begins in a fraction of a second. The user of
a pod is 1000, as the manifests ask; outside it is the user who started the cluster. The file system of a pod is that of
this machine, with the pod's volumes in it; its network is a private one.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn, TypedDict

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18
)  # fmt: skip
_MNT_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
USER = 1000
NOT_STARTED = 128  # exit code of a pod whose command could not be started, as a container engine reports it

_libc = ctypes.CDLL(None, use_errno=True)


class Mount(TypedDict):
    path: str
    source: str | None  # None: memory, of `size` bytes
    size: int
    read_only: bool
    files: dict[str, str]  # of a mount in memory


class CommandSpec(TypedDict):
    command: list[str]
    env: dict[str, str]
    folder: str


class PodSpec(CommandSpec):
    ip_command: str
    network: str  # commands for `ip -batch`
    hostname: str
    root: str
    read_only_root: bool
    mounts: list[Mount]
    links: dict[str, str]


def _checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = [text.encode() if text else None for text in (source, target, kind)]
    _checked(f"mount {target}", _libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data else None))


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    mount(source, target, flags=_MS_BIND | _MS_REC)
    if read_only:
        mount("", target, flags=_MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def make_read_only(path: str, *, recursive: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size)
    if result != 0 and ctypes.get_errno() != errno.ENOSYS:  # Linux before 5.12
        _checked(f"mount_setattr {path}", result)


def end_with_parent() -> None:
    _checked("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def become_user(inside: int) -> None:
    """A user namespace in which the present user is `inside`."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_cluster() -> int:
    """Namespaces in which an ordinary user may make networks and pods. Continues in a child, PID 1 of the new
    namespaces, and returns 0 there; the parent waits for it and returns its PID. If either ends, everything in the
    namespaces ends.
    """
    become_user(0)
    unshare(NEW_NET | NEW_NS | NEW_PID)
    child = os.fork()
    if child == 0:
        end_with_parent()
        mount("", "/", flags=_MS_REC | _MS_PRIVATE)
        mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    return child


# -- the root of a pod -------------------------------------------------------------------------------------------------


def _make_root(root: str, mounts: list[Mount], links: dict[str, str], *, read_only: bool) -> None:
    """A root of which every folder is this machine's, with links and mount points that this machine does not have."""
    mount("", "/", flags=_MS_REC | _MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    missing = [one["path"] for one in mounts if not os.path.exists(one["path"])]
    opened = {"/", *(os.path.dirname(path) for path in links)}
    for path in missing:
        while (path := os.path.dirname(path)) not in opened:
            opened.add(path)
    _expose("/", root, opened, {"/proc", *links}, read_only=read_only)
    for path in ("/proc", *missing):
        os.makedirs(root + path, exist_ok=True)
    for path, target in links.items():
        os.symlink(target, root + path)
    mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for one in sorted(mounts, key=lambda one: len(one["path"])):
        target = root + one["path"]
        if one["source"] is None:
            mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={one['size']},mode=1777")
            for name, text in one["files"].items():
                with open(os.open(f"{target}/{name}", os.O_WRONLY | os.O_CREAT, 0o440), "w") as file:
                    file.write(text)
            if one["read_only"]:
                mount("", target, flags=_MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        else:
            bind(one["source"], target, read_only=one["read_only"])
    os.mkdir(f"{root}/.old")
    _checked("pivot_root", _libc.pivot_root(root.encode(), f"{root}/.old".encode()))
    os.chdir("/")
    _checked("umount", _libc.umount2(b"/.old", _MNT_DETACH))
    os.rmdir("/.old")
    if read_only:
        make_read_only("/", recursive=False)


def _expose(folder: str, root: str, opened: set[str], left_out: set[str], *, read_only: bool) -> None:
    """Bind what `folder` contains below `root`; folders of `opened` become new ones with the same content."""

    def show(path: str) -> None:
        bind(path, root + path)
        if read_only and not path.startswith("/dev"):  # devices stay writable, as in a container
            make_read_only(root + path, recursive=True)

    for entry in os.scandir(folder):
        target = root + entry.path
        if entry.path in left_out:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir():
            os.mkdir(target)
            if entry.path in opened:
                _expose(entry.path, root, opened, left_out, read_only=read_only)
            else:
                show(entry.path)
        elif entry.is_file():
            os.close(os.open(target, os.O_CREAT))
            show(entry.path)


# -- commands ----------------------------------------------------------------------------------------------------------


def _run_pod(spec: PodSpec) -> NoReturn:
    """As PID 1 of the pod."""
    subprocess.run([spec["ip_command"], "-batch", "-"], input=spec["network"], text=True, check=True)
    _checked("sethostname", _libc.sethostname(spec["hostname"].encode(), len(spec["hostname"])))
    _make_root(spec["root"], spec["mounts"], spec["links"], read_only=spec["read_only_root"])
    become_user(USER)
    _execute(spec)


def _execute(spec: CommandSpec) -> NoReturn:
    _checked("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGINT):  # Python's own settings
        signal.signal(number, signal.SIG_DFL)
    os.chdir(spec["folder"])
    os.environ.clear()
    os.environ.update(spec["env"])
    try:
        os.execvp(spec["command"][0], spec["command"])
    except OSError as error:
        sys.exit(f"{spec['command'][0]}: {error.strerror}")


def _as_child(work: Callable[[], NoReturn], report: int | None = None) -> int:
    """The exit code of `work` in a child, as a container engine reports it."""
    child = os.fork()
    if child == 0:
        try:
            end_with_parent()
            if report is not None:
                os.set_inheritable(report, False)  # closed by the start of the command
            work()
        except BaseException as error:
            print(f"pod: {error}", file=sys.stderr, flush=True)
            os._exit(NOT_STARTED)
    if report is not None:
        os.write(report, f"{child}\n".encode())
        os.close(report)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 128 - code if code < 0 else code


def _pod(report: int) -> int:
    unshare(NEW_NET | NEW_NS | NEW_UTS | NEW_IPC | NEW_PID)
    return _as_child(lambda: _run_pod(json.load(sys.stdin)), report)


def _enter(pid: int) -> int:
    spec = json.load(sys.stdin)
    descriptors = [  # that of users last: it has no rights over the others
        os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("ipc", "uts", "net", "pid", "mnt", "user")
    ]
    for descriptor in descriptors:
        _checked("setns", _libc.setns(descriptor, 0))
    return _as_child(lambda: _execute(spec))


def _probe() -> int:
    if enter_cluster() == 0:
        try:
            unshare(NEW_NET | NEW_NS | NEW_UTS | NEW_IPC | NEW_PID)
            become_user(USER)
            os._exit(0)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.wait()[1])


if __name__ == "__main__":
    try:
        if sys.argv[1] == "probe":
            sys.exit(_probe())
        sys.exit(_pod(int(sys.argv[2])) if sys.argv[1] == "pod" else _enter(int(sys.argv[2])))
    except OSError as error:
        sys.exit(str(error))
