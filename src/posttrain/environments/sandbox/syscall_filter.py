"""Which system calls the untrusted program may not make: a seccomp filter, as BPF, for x86-64 and 64-bit ARM.

A deny list: the private root, the namespaces and the lack of privileges are the main protection, and this blocks calls
that could bypass them. No sockets (`socketpair`, which asyncio and multiprocessing use, stays), no namespaces or mounts
of its own, no access to other processes, no kernel interfaces with a history of vulnerabilities, and no memory that
belongs to the kernel or to a file without a name: `processes.py` counts what is mapped, and could not see it.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

from posttrain.environments.sandbox import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# The numbers on x86-64 and on 64-bit ARM of each call.
_TABLE = Path(__file__).with_name("forbidden_calls.txt").read_text("ascii")
_FORBIDDEN = [line.split()[1:] for line in _TABLE.splitlines() if not line.startswith("#")]
_FIRST_UNKNOWN = 463  # calls that are newer than this list; libraries go on without them
_MMAP = (9, 222)
_SOCKETPAIR = (53, 199)
_PRCTL = (157, 167)
_FCNTL = (72, 25)
_CLOSE_RANGE = (436, 436)
_CLOSE_RANGE_CLOEXEC = 4
_CLONE = (56, 220)
_CLONE_FILES = 0x400
_CLONE_THREAD = 0x10000
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_PRLIMIT64 = (302, 261)
_TIOCSTI = 0x5412  # types into the terminal that posttrain was started from
_AF_UNIX = 1
_MAP_SHARED_ANONYMOUS = 0x21  # it remains while any process maps it, and counts where its pages have been touched only
_MAP_HUGETLB = 0x40000  # pages that are in no count of memory; the rest of the flags as for others
_F_SETPIPE_SZ = 1031
# The parent's end, dumpable, name, timer slack, subreaper, no new privileges, and reading them. Others allocate, such
# as PR_FUTEX_HASH, or weaken a protection.
_PRCTL_ALLOWED = (1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39)
_NAMESPACE_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | 0x02000000  # CLONE_NEWCGROUP
    | 0x00000080  # CLONE_NEWTIME
)

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_REFUSE = 0x00050000  # or-ed with an error number
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000


def syscall_filter(machine: str | None = None) -> bytes:
    """The program for this machine. A forbidden call fails with EPERM, so that a program may continue without it."""
    machine = machine or platform.machine()
    column = {"x86_64": 0, "aarch64": 1}[machine]
    # Calls of another architecture have other numbers: such a process is killed.
    program = [
        _instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        _instruction(_RETURN, 0, 0, _KILL_PROCESS),
        _instruction(_LOAD, 0, 0, _NUMBER),
    ]
    missing = _instruction(_RETURN, 0, 0, _REFUSE | errno.ENOSYS)
    if machine == "x86_64":
        program += [_instruction(_JUMP_AT_LEAST, 0, 1, _X32), _EPERM]
    program += [_instruction(_JUMP_AT_LEAST, 0, 1, _FIRST_UNKNOWN), missing]
    for numbers in _FORBIDDEN:
        if numbers[column] != "-":
            program += [_instruction(_JUMP_EQUAL, 0, 1, int(numbers[column])), _EPERM]
    # The arguments of `clone3` are in memory, which a filter cannot read: libraries fall back to `clone`.
    program += [_instruction(_JUMP_EQUAL, 0, 1, _CLONE3[column]), missing]
    # Threads share their open files: those of the first one are counted.
    shared = (0, _CLONE_FILES, _CLONE_THREAD | _CLONE_FILES)
    program += _only(_CLONE[column], 0, shared, mask=_NAMESPACE_FLAGS | _CLONE_THREAD | _CLONE_FILES)
    program += _only(_CLOSE_RANGE[column], 2, (0, _CLOSE_RANGE_CLOEXEC))
    huge = [_MAP_HUGETLB | flags for flags in (0, 0x01, 0x20, 0x21)]
    program += _not(_MMAP[column], 3, (_MAP_SHARED_ANONYMOUS, *huge), mask=_MAP_HUGETLB | _MAP_SHARED_ANONYMOUS)
    program += _only(_SOCKETPAIR[column], 0, (_AF_UNIX,))
    program += _only(_PRCTL[column], 0, _PRCTL_ALLOWED)
    program += _not(_FCNTL[column], 1, (_F_SETPIPE_SZ,))
    program += _not(_IOCTL[column], 1, (_TIOCSTI,))
    # Only own limits may be changed: with others', the process that waits for the program could be killed.
    program += _only(_PRLIMIT64[column], 0, (0,))
    program.append(_instruction(_RETURN, 0, 0, _ALLOW))
    return b"".join(program)


def _only(number: int, argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF) -> list[bytes]:
    """Refuse this call unless its argument, counted from 0, has one of these values in the bits of `mask`."""
    return _by_argument(number, argument, values, mask, _instruction(_RETURN, 0, 0, _ALLOW), _EPERM)


def _not(number: int, argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF) -> list[bytes]:
    """Refuse this call if its argument has one of these values."""
    return _by_argument(number, argument, values, mask, _EPERM, _instruction(_RETURN, 0, 0, _ALLOW))


def _by_argument(
    number: int, argument: int, values: Sequence[int], mask: int, found: bytes, other: bytes
) -> list[bytes]:
    tests = [_instruction(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    load = _instruction(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    body = [load, _instruction(_AND, 0, 0, mask), *tests, other, found]
    return [_instruction(_JUMP_EQUAL, 0, len(body), number), *body]


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_EPERM = _instruction(_RETURN, 0, 0, _REFUSE | errno.EPERM)
