"""The calls to the Linux kernel that the sandbox needs and Python's `os` lacks, through ctypes. Each raises `OSError`.

Standard library only: this runs before the untrusted program, in an interpreter without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK_CREATE_RULESET = 444  # the same number on every architecture
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_LANDLOCK_CREATE_RULESET_VERSION = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int, name: str) -> None:
    _checked(f"unshare({name})", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(f"mount({kind or source} on {target})", result)


def unmount(target: str) -> None:
    _checked(f"umount({target})", _libc.umount2(os.fsencode(target), MNT_DETACH))


def pivot_root(new_root: str, put_old: str) -> None:
    number = _PIVOT_ROOT[platform.machine()]
    _checked("pivot_root", _libc.syscall(ctypes.c_long(number), os.fsencode(new_root), os.fsencode(put_old)))


def set_host_name(name: bytes) -> None:
    """In a new namespace: hide the name and the domain of the machine."""
    _checked("sethostname", _libc.sethostname(name, ctypes.c_size_t(len(name))))
    _checked("setdomainname", _libc.setdomainname(name, ctypes.c_size_t(len(name))))


def _prctl(name: str, option: int, *arguments: int | ctypes.c_void_p) -> int:
    words: list[object] = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    return _checked(name, _libc.prctl(ctypes.c_int(option), *words))


def die_with_parent(signal_number: int, parent: int) -> None:
    """Be sent this signal when the process that started us ends. A change of user forgets it: call this afterwards."""
    _prctl("prctl(PR_SET_PDEATHSIG)", _PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != parent:
        os._exit(1)  # the parent had ended before the call


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become our children, so that none is lost."""
    _prctl("prctl(PR_SET_CHILD_SUBREAPER)", _PR_SET_CHILD_SUBREAPER, 1)


def forget_capabilities() -> None:
    """Drop privileges permanently, also for programs executed later."""
    for capability in range(_LAST_CAPABILITY + 1):
        with contextlib.suppress(OSError):  # a number this kernel does not know, or we may not, and then have none
            _prctl("prctl(PR_CAPBSET_DROP)", _PR_CAPBSET_DROP, capability)
    with contextlib.suppress(OSError):
        _prctl("prctl(PR_CAP_AMBIENT)", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def allow_no_new_privileges() -> None:
    _prctl("prctl(PR_SET_NO_NEW_PRIVS)", _PR_SET_NO_NEW_PRIVS, 1)


def hide_memory() -> None:
    """Processes of the same user may neither read our memory nor attach to us."""
    _prctl("prctl(PR_SET_DUMPABLE)", _PR_SET_DUMPABLE, 0)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def install_filter(program: bytes) -> None:
    """Install a BPF program (8 bytes per instruction) as filter of all later system calls of this process."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = _FilterProgram(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    pointer = ctypes.cast(ctypes.pointer(header), ctypes.c_void_p)
    _prctl("prctl(PR_SET_SECCOMP)", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer)


def landlock_version() -> int:
    """The version of Landlock in this kernel; 0 when there is none."""
    if os.name != "posix" or platform.system() != "Linux":
        return 0
    result = _libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET),
        None,
        ctypes.c_size_t(0),
        ctypes.c_uint(_LANDLOCK_CREATE_RULESET_VERSION),
    )
    return max(0, int(result))


def landlock_restrict(handled: int, handled_network: int, scoped: int, version: int, rules: dict[str, int]) -> None:
    """Deny this process and its children the `handled` file accesses, except those that `rules` grant beneath paths."""
    attributes = struct.pack("=QQQ", handled, handled_network, scoped)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _checked(
        "landlock_create_ruleset",
        _libc.syscall(
            ctypes.c_long(_LANDLOCK_CREATE_RULESET), buffer, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
        ),
    )
    try:
        for path, access in rules.items():
            _add_rule(ruleset, path, access)
        result = _libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0))
        _checked("landlock_restrict_self", result)
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, access: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, place)
        result = _libc.syscall(
            ctypes.c_long(_LANDLOCK_ADD_RULE),
            ctypes.c_int(ruleset),
            ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH),
            ctypes.create_string_buffer(rule, len(rule)),
            ctypes.c_uint(0),
        )
        _checked(f"landlock_add_rule({path})", result)
    finally:
        os.close(place)


# -- landlock(7): which files a process may touch where it has no root of its own --------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_ONLY_READ = _EXECUTE | _READ_FILE
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # later versions: 16
_SCOPE_SINCE = 6
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_ZERO = "/dev/zero"  # opened for writing, it could be mapped as memory that nobody counts


def restrict_files(read_only: Iterable[str], writable_folder: str) -> None:
    """From here on: reading beneath `read_only`, anything beneath `writable_folder`, nothing anywhere else."""
    version = landlock_version()
    everything = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    zero = [_ZERO] if os.path.exists(_ZERO) else []
    rules = {path: _READ if os.path.isdir(path) else _FILE_ONLY_READ for path in (*read_only, *zero)}
    rules |= {device: _READ_FILE | _WRITE_FILE for device in _DEVICES if os.path.exists(device)}
    rules[writable_folder] = everything
    scoped = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPE_SINCE else 0
    landlock_restrict(everything, 0, scoped, version, rules)
