"""Which processes descend from one, and how much memory they hold, from /proc. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket


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


_PAGES = ("VmRSS", "VmSwap", "HugetlbPages")


def memory_bytes(process_ids: list[int], enough: int) -> int:
    """Memory that the processes hold together: their pages, in memory and in swap, the tables of these, and what their
    sockets, pipes and sets of watched files can hold. Shared pages count once, which is slow to find out: only beyond
    `enough`."""
    statuses = {place: status for process_id in process_ids for place, status in [_place_and_status(process_id)]}
    tables = sum(status.get("VmPTE", 0) for status in statuses.values()) * 1024
    files = _bytes_in_files(statuses)
    pages = sum(status.get(name, 0) for status in statuses.values() for name in _PAGES) * 1024
    if pages + tables + files > enough:
        pages = sum(_proportional_bytes(place, status) for place, status in statuses.items())
    return pages + tables + files


def _bytes_by_kind() -> dict[str, int]:
    """What the kernel keeps for an open file, at most: the default buffer of a socket, which the administrator sets,
    and one message beyond it, the 16 pages of a pipe, and for an epoll every pair of a file and a descriptor of 128."""
    with socket.socketpair()[0] as one:
        buffer = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    pipe = 16 * os.sysconf("SC_PAGE_SIZE")
    return {"socket": max(512 << 10, 5 * buffer // 2), "pipe": pipe, "anon_inode:[eventpoll]": 3 << 20}


_BYTES_BY_KIND = _bytes_by_kind()


def _bytes_in_files(statuses: dict[str, dict[str, int]]) -> int:
    counted: set[str] = set()
    total = num_unknown = 0
    for place, status in statuses.items():
        folder = f"{place}/fd"
        try:
            names = os.listdir(folder)
        except PermissionError:
            num_unknown += _num_descriptors(folder, status)
            continue
        except OSError:
            continue  # it has ended
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except PermissionError:  # root in a container may list them, but not read them
                num_unknown += 1
                continue
            except OSError:
                continue
            kind = target.partition(":[")[0]
            if kind in _BYTES_BY_KIND and target not in counted:
                counted.add(target)  # processes share them
                total += _BYTES_BY_KIND[kind]
            total += _BYTES_BY_KIND.get(target, 0)  # an epoll has no number of its own
    return total + num_unknown * max(_BYTES_BY_KIND.values())


def _num_descriptors(folder: str, status: dict[str, int]) -> int:
    """How many are open where they may not be listed. Kernels before 6.2 show the size of the table only."""
    with contextlib.suppress(OSError):
        return os.stat(folder).st_size or status.get("FDSize", 0)
    return 0


def _place_and_status(process_id: int) -> tuple[str, dict[str, int]]:
    """Where /proc describes a process: at a thread if its first thread has ended, which then shows no memory."""
    place = f"/proc/{process_id}"
    status = _status(place)
    with contextlib.suppress(OSError):
        if "VmRSS" not in status:
            for thread in os.listdir(f"{place}/task"):
                of_thread = _status(f"{place}/task/{thread}")
                if "VmRSS" in of_thread:
                    return f"{place}/task/{thread}", of_thread
    return place, status


def _status(place: str) -> dict[str, int]:
    """The numbers in its file `status`, sizes in KiB."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open(f"{place}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in (*_PAGES, "VmPTE", "FDSize"):
                found[name] = int(value.split()[0])
    return found


def _proportional_bytes(place: str, status: dict[str, int]) -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError), open(f"{place}/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Pss:", "SwapPss:")):
                total += int(line.split()[1]) * 1024
    if not total:
        return sum(status.get(name, 0) for name in _PAGES) * 1024
    return total + status.get("HugetlbPages", 0) * 1024  # they are in no other number


def num_processes_of_user(user: int) -> int:
    """Threads of this user, which is what the kernel's limit of processes counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count
