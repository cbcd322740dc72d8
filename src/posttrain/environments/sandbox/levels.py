"""Detects, by trial, the isolation level that this machine supports, and suggests fixes if it is insufficient."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.environments.sandbox.program import (
    Level,
    Limits,
    Program,
    SandboxFailure,
    SandboxUnavailable,
)
from posttrain.environments.sandbox.sandbox import Sandbox

Mode = Literal["strict", "best_effort", "none"]
LEVELS: tuple[Level, ...] = ("namespaces", "landlock", "limits")
_MACHINES = ("x86_64", "aarch64")
_SYSTEM_LIBRARIES = (
    *("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo", "/etc/localtime"),
)
_PROBE = "import os; os.write(3, b'ready\\n')"
_PROBE_LIMITS = Limits(wall_s=30.0, cpu_s=30)

NOT_PROTECTED: dict[Level, str] = {
    "namespaces": "",
    "landlock": (
        "the program shares the process numbers of this machine and, unless posttrain runs as root, its user: with a "
        "kernel before 6.12 it can end other processes of that user, and its limit of processes counts all of theirs"
    ),
    "limits": (
        "the program runs with your rights: it can read and change your files, use the network and see your processes; "
        "only time, memory, output and the number of processes are limited"
    ),
}


@dataclass(frozen=True)
class Interpreter:
    """A Python that runs in the sandbox: its program, and the folders without which it does not start."""

    executable: str
    read_only: tuple[str, ...]
    site_packages: tuple[str, ...] = ()  # of its environment; visible only on request

    def command(self, *arguments: str) -> tuple[str, ...]:
        return (self.executable, "-I", "-S", "-B", *arguments)


_DESCRIBE = """
import json, os, sys, sysconfig
print(json.dumps([getattr(sys, "_base_executable", sys.executable), [sys.base_prefix, sys.base_exec_prefix],
[sysconfig.get_path("stdlib")], [sysconfig.get_path(n) for n in ("purelib", "platlib")]]))
"""


def find_interpreter(python: str | None = None) -> Interpreter:
    """The Python that runs us, or the one named. Raises `SandboxUnavailable` if that is none."""
    if python is None:
        executable = getattr(sys, "_base_executable", sys.executable)
        prefixes = [sys.base_prefix, sys.base_exec_prefix]
        library = [sysconfig.get_path("stdlib")]
        packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    else:
        try:
            asked = subprocess.run(
                [python, "-I", "-c", _DESCRIBE], capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL
            )
            executable, prefixes, library, packages = json.loads(asked.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise SandboxUnavailable(f"python is {python!r}, which cannot be used as a Python: {error}") from error
    executable = os.path.realpath(executable)
    folders = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
    visible = [executable, *folders, *library, *_SYSTEM_LIBRARIES]
    if executable.startswith("/nix/store/"):
        visible.append("/nix/store")
    read_only = tuple(dict.fromkeys(path for path in visible if os.path.exists(path)))
    return Interpreter(executable, read_only, tuple(dict.fromkeys(packages)))


def open_sandbox(mode: Mode, interpreter: Interpreter, read_only_paths: Sequence[str] = ()) -> tuple[Sandbox, str]:
    """The best sandbox that `mode` accepts, and what it does not protect (empty: full protection).

    Each level is tried by running a program in it. `strict` takes nothing but namespaces, `best_effort` the first that
    works, `none` has limits only. Raises `SandboxUnavailable` with what is missing.
    """
    for path in read_only_paths:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise SandboxUnavailable(f"read_only_paths names {path!r}: the absolute path of an existing file is needed")
    visible = (*interpreter.read_only, *read_only_paths)
    levels: tuple[Level, ...] = {"strict": LEVELS[:1], "best_effort": LEVELS, "none": LEVELS[2:]}[mode]
    reasons: list[str] = []
    for level in levels:
        sandbox = Sandbox(level, visible)
        reason = why_not(sandbox, interpreter)
        if reason is None:
            warnings = [f"sandbox level {level!r}: {NOT_PROTECTED[level]}", *reasons] if NOT_PROTECTED[level] else []
            return sandbox, "\n".join(warnings)
        reasons.append(f"level {level!r} does not work here: {reason}")
    advice = (
        ""
        if mode != "strict"
        else (
            "\nWith `sandbox: best_effort` the next best protection is used, and a warning names what it does not "
            "protect."
        )
    )
    raise SandboxUnavailable("\n".join(reasons) + advice)


def why_not(sandbox: Sandbox, interpreter: Interpreter) -> str | None:
    """Why programs cannot be run in this sandbox on this machine; None if they can."""
    if platform.system() != "Linux":
        return f"it needs Linux, and this is {platform.system()}"
    if sandbox.level != "limits" and platform.machine() not in _MACHINES:
        return f"it supports the processors {' and '.join(_MACHINES)}, and this is {platform.machine()}"
    program = Program(interpreter.command("-c", _PROBE), announces=True)
    try:
        outcome = sandbox.run(program, _PROBE_LIMITS)
    except SandboxFailure as error:
        return "\n  ".join([str(error), *remedies(sandbox.level, str(error), interpreter)])
    return None if outcome.succeeded else f"a program that does nothing ended with {outcome.reason()}"


def remedies(level: Level, error: str, interpreter: Interpreter) -> list[str]:
    """What the user can do about an error, if the cause can be detected."""
    if "did not start" in error or "execve" in error or "No such file" in error or "Permission denied: '/" in error:
        return [
            f"the interpreter {interpreter.executable} needs something that the sandbox does not show it, or may not "
            "be read by other users: name folders in `read_only_paths`, or another Python in `python`"
        ]
    if level == "landlock":
        return ["Landlock needs Linux 5.13 or later with `landlock` among the active security modules (lsm= at boot)"]
    if level != "namespaces":
        return []
    found = []
    for setting, bad, command in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("user/max_net_namespaces", "0", "sysctl -w user.max_net_namespaces=15000"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        if _setting(setting) == bad:
            found.append(
                f"{setting.replace('/', '.')} is {bad}: as root, `{command}` (and in /etc/sysctl.d to keep it)"
            )
    if not os.path.exists("/proc/self/ns/user") and os.geteuid() != 0:
        found.append("this kernel has no user namespaces (CONFIG_USER_NS)")
    if _setting_in_status("Seccomp") not in ("", "0"):
        found.append(
            "this process is itself under a system call filter, as in a container: start the container with "
            "`--security-opt seccomp=unconfined --cap-add SYS_ADMIN` (Kubernetes: seccompProfile Unconfined and "
            "capabilities add SYS_ADMIN), or use a machine without a container"
        )
    if os.geteuid() == 0 and not int(_setting_in_status("CapEff") or "0", 16) >> 21 & 1:  # CAP_SYS_ADMIN
        found.append(
            "this is root without CAP_SYS_ADMIN: give the container that capability, or run as an ordinary user"
        )
    return found or ["no setting that is known to cause this was found; the error above is the kernel's own"]


def _setting(name: str) -> str:
    try:
        with open(f"/proc/sys/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


def _setting_in_status(name: str) -> str:
    try:
        with open("/proc/self/status") as lines:
            return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")
    except OSError:
        return ""
