"""A root folder that holds nothing but what a program needs to run: libraries read-only, and one folder to write to.

Called in a fresh mount namespace. It is in memory and part of that namespace, so nothing remains on the disk when the
process ends.
"""

from __future__ import annotations

import os

from posttrain.environments.sandbox import kernel

BOX = "/box"  # the writable folder, as a path inside the sandbox
WRITABLE = (BOX, f"{BOX}/tmp", f"{BOX}/shm")
_OLD = "/.old"
# Name -> device. `full` reads as zeros too. Unlike `zero` it cannot be mapped, as memory that nobody counts.
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
_BASE_OPTIONS = "size=8m,nr_inodes=20000,mode=755"
_MAX_FILES = 4096


def enter_private_root(read_only: list[str], box_bytes: int) -> None:
    """Make this process see a root with `read_only` in their places, a few devices, and an empty writable `BOX`."""
    places = _places(read_only)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _BASE_OPTIONS)
    os.mkdir("/tmp" + _OLD)
    kernel.pivot_root("/tmp", "/tmp" + _OLD)
    os.chdir("/")
    os.mkdir("/dev")
    for name, device in _DEVICES.items():
        _bind(f"{_OLD}/dev/{device}", f"/dev/{name}")
    os.mkdir(BOX)
    options = f"size={box_bytes},nr_inodes={_MAX_FILES},mode=755"
    kernel.mount("tmpfs", BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for folder, name in zip(WRITABLE[1:], ("/tmp", "/dev/shm"), strict=True):
        os.mkdir(folder)
        os.symlink(folder, name)
    for place, source in places.items():  # after the links: one of these may be beneath /tmp
        _show(source, place)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    kernel.mount(
        None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )
    os.chdir(BOX)


def _places(read_only: list[str]) -> dict[str, str]:
    """Path in the sandbox -> source path. A path under one that is there already needs no mount of its own."""
    places: dict[str, str] = {}
    wanted = {*read_only, *map(os.path.realpath, read_only)}
    for path in sorted(wanted, key=len):
        real = os.path.realpath(path)
        if not any(_beneath(path, place) and _beneath(real, source) for place, source in places.items()):
            places[path] = real
    return places


def _beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _show(source: str, place: str) -> None:
    _bind(_OLD + source, place)
    # The bind mount includes submounts, each of which must be made read-only separately.
    for target in [place, *_mounts_beneath(place)]:
        flags = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount(None, target, None, flags | _locked_flags(target))


def _bind(source: str, place: str) -> None:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    elif not os.path.exists(place):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, place, None, kernel.MS_BIND | kernel.MS_REC)


def _locked_flags(target: str) -> int:
    """What a mount of another user namespace is already restricted to may not be relaxed, so it has to be repeated."""
    found = os.statvfs(target).f_flag
    pairs = (
        (os.ST_NOEXEC, kernel.MS_NOEXEC),
        (os.ST_NOATIME, kernel.MS_NOATIME),
        (os.ST_NODIRATIME, kernel.MS_NODIRATIME),
        (os.ST_RELATIME, kernel.MS_RELATIME),
    )
    return sum(ours for theirs, ours in pairs if found & theirs)


def _mounts_beneath(place: str) -> list[str]:
    beneath = os.path.realpath(place).rstrip("/") + "/"
    with open(f"{_OLD}/proc/self/mountinfo") as lines:
        targets = [_unescaped(line.split()[4]) for line in lines]
    return [target for target in targets if target.startswith(beneath)]


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
