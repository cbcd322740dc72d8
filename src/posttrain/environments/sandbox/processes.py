"""Which processes descend from one, and how much memory they hold, from /proc. Standard library only."""

from __future__ import annotations

import contextlib
import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(process_id: int) -> list[int]:
    """All living descendants, parents before their children."""
    found: list[int] = []
    waiting = [process_id]
    by_parent: dict[int, list[int]] | None = None
    while waiting:
        parent = waiting.pop()
        try:
            children = _children(parent)
        except (FileNotFoundError, ProcessLookupError):  # the second: it ended between opening and reading
            if os.path.exists(f"/proc/{parent}/task"):  # a kernel without the list of children
                by_parent = by_parent or _children_by_parent()
                children = by_parent.get(parent, [])
            else:
                children = []
        found += children
        waiting += children
    return found


def _children(process_id: int) -> list[int]:
    children: list[int] = []
    for thread in os.listdir(f"/proc/{process_id}/task"):
        with open(f"/proc/{process_id}/task/{thread}/children") as file:
            children += map(int, file.read().split())
    return children


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    return children


def memory_bytes(process_ids: list[int], enough: int) -> int:
    """Memory that the processes hold together. Shared pages count once, which is slow to find out: only beyond
    `enough`."""
    resident = sum(_resident_bytes(process_id) for process_id in process_ids)
    if resident <= enough:
        return resident
    return sum(_proportional_bytes(process_id) for process_id in process_ids)


def _resident_bytes(process_id: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process_id}/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def _proportional_bytes(process_id: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{process_id}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident_bytes(process_id)


def num_processes_of_user(user: int) -> int:
    """Threads of this user, which is what the kernel's limit of processes counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count
