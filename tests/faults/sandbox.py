"""Programs that try to get out of the sandbox, or to take more than they may. None succeeds.

A program prints ESCAPED when it has got what it tried for. Most of them do where only limits are set
(`without_sandbox`): so the tries are real.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from faults.campaign import Case, NotPossibleHere, Part
from faults.lab import Lab

PRELUDE = """
import ctypes, os, socket, sys, time
SECRET, PORT, MARKER, OUTSIDE = {secret!r}, {port}, {marker!r}, {outside!r}
libc = ctypes.CDLL(None, use_errno=True)
def escaped(condition=True):
    if condition:
        print("ESCAPED", flush=True)
"""

# Each line or text: Python. Paths of files of the host that it must not read or change are in SECRET, OUTSIDE.
READ = {
    "open": "escaped('planted' in open(SECRET).read())",
    "open-by-descriptor": "escaped('planted' in os.fdopen(os.open(SECRET, os.O_RDONLY)).read())",
    "symlink": "os.symlink(SECRET, 'link'); escaped('planted' in open('link').read())",
    "hard-link": "os.link(SECRET, 'link'); escaped('planted' in open('link').read())",
    "relative-path": "escaped('planted' in open('../' * 40 + SECRET).read())",
    "proc-root": "escaped('planted' in open('/proc/1/root' + SECRET).read())",
    "proc-self-root": "escaped('planted' in open('/proc/self/root' + SECRET).read())",
    "proc-parent-root": "escaped('planted' in open(f'/proc/{os.getppid()}/root' + SECRET).read())",
    "proc-parent-environ": "escaped('PATH' in open(f'/proc/{os.getppid()}/environ').read())",
    "proc-parent-mem": "escaped(open(f'/proc/{os.getppid()}/mem', 'rb').read(1) is not None)",
    "proc-parent-fd": "escaped(os.listdir(f'/proc/{os.getppid()}/fd'))",
    "inherited-descriptors": """
for fd in range(3, 1024):
    try:
        escaped(os.path.isdir(f'/proc/self/fd/{fd}') or bool(os.listdir(fd)))
    except OSError:
        pass""",
    "openat-of-inherited": """
for fd in range(3, 256):
    try:
        escaped('planted' in os.fdopen(os.open(SECRET.lstrip('/'), os.O_RDONLY, dir_fd=fd)).read())
    except OSError:
        pass""",
    "chroot-and-back": """
os.mkdir('d')
os.chroot('d')
for _ in range(40):
    os.chdir('..')
os.chroot('.')
escaped('planted' in open(SECRET).read())""",
    "pivot-root": "escaped(libc.syscall(155, b'.', b'.') == 0)",
    "new-mounts": "escaped(libc.unshare(0x20000) == 0 and libc.mount(b'/', b'.', None, 0x1000, None) == 0)",
    "new-user-namespace": "escaped(libc.unshare(0x10000000) == 0)",
    "mount-proc": "os.mkdir('p'); escaped(libc.mount(b'proc', b'p', b'proc', 0, None) == 0)",
    "mount-tmpfs": "os.mkdir('p'); escaped(libc.mount(b't', b'p', b'tmpfs', 0, None) == 0)",
    "setns-of-parent": "escaped(libc.setns(os.open(f'/proc/{os.getppid()}/ns/mnt', 0), 0) == 0)",
    "passwd": "escaped('root' in open('/etc/passwd').read())",
    "shadow": "escaped('root' in open('/etc/shadow').read())",
    "home": "escaped(len(os.listdir(os.path.expanduser('~root'))) > 0 and os.path.exists('/root/.bashrc'))",
    "ssh-keys": "escaped(os.listdir('/root/.ssh') is not None)",
    "service-account": "escaped(open('/var/run/secrets/kubernetes.io/serviceaccount/token').read())",
    "environment": "escaped('FAULTS_PLANTED' in os.environ)",
    "environment-of-parent": "escaped(b'FAULTS_PLANTED' in open(f'/proc/{os.getppid()}/environ', 'rb').read())",
    "open-tree": "escaped(libc.syscall(428, -100, b'/', 1) >= 0)",
    "name-to-handle": "escaped(libc.syscall(304, -100, ctypes.create_string_buffer(64), 0) >= 0)",
    "dev-disk": "os.mknod('disk', 0o60600, os.makedev(8, 0)); escaped(open('disk', 'rb').read(1))",
    "dev-mem": "escaped(open('/dev/mem', 'rb').read(1))",
    "kernel-log": "escaped(libc.klogctl(3, ctypes.create_string_buffer(100), 100) > 0)",
    "kernel-symbols": "escaped(open('/proc/kallsyms').read(1))",
    "cgroup": "escaped(os.listdir('/sys/fs/cgroup'))",
}
WRITE = {
    "write-outside": "open(OUTSIDE + '/planted', 'w').write('x')",
    "append-to-secret": "open(SECRET, 'a').write('changed')",
    "rename-outside": "open('a', 'w').write('x'); os.rename('a', OUTSIDE + '/planted')",
    "link-outside": "open('a', 'w').write('x'); os.link('a', OUTSIDE + '/planted')",
    "delete-outside": "os.unlink(SECRET)",
    "chmod-outside": "os.chmod(SECRET, 0)",
    "truncate-outside": "os.truncate(SECRET, 0)",
    "make-folder-outside": "os.mkdir(OUTSIDE + '/planted')",
    "library": "open(os.path.dirname(os.__file__) + '/planted_by_faults.py', 'w').write('x')",
    "core-pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/false')",
    "shared-memory": "open('/dev/shm/' + MARKER, 'w').write('x'); escaped(False)",
    "fifo-outside": "os.mkfifo(OUTSIDE + '/planted')",
    "copy-by-sendfile": "open('a', 'w').write('x'); "
    "os.sendfile(os.open(SECRET, os.O_WRONLY), os.open('a', os.O_RDONLY), 0, 1)",
}
NETWORK = {
    "tcp": "socket.create_connection(('127.0.0.1', PORT), 2).send(b'x'); escaped()",
    "tcp6": "socket.create_connection(('::1', PORT), 2); escaped()",
    "udp": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', PORT)); escaped()",
    "raw": "escaped(socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))",
    "packet": "escaped(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
    "abstract-socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + MARKER); escaped()",
    "unix-socket": "s = socket.socket(socket.AF_UNIX); s.connect(OUTSIDE + '/socket'); escaped()",
    "netlink": "escaped(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))",
    "vsock": "escaped(socket.socket(40, socket.SOCK_STREAM))",
    "listen": "s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); escaped()",
    "metadata-service": "socket.create_connection(('169.254.169.254', 80), 2); escaped()",
    "io-uring": "escaped(libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0)",
}
PROCESSES = {
    "kill-parent": "os.kill(os.getppid(), 9); escaped(os.getppid() != os.getppid())",
    "ptrace-parent": "escaped(libc.ptrace(16, os.getppid(), 0, 0) == 0)",
    "process-vm-readv": "escaped(libc.syscall(310, os.getppid(), 0, 0, 0, 0, 0) == 0)",
    "pidfd-getfd": "escaped(libc.syscall(438, libc.syscall(434, os.getppid(), 0), 0, 0) >= 0)",
    "setuid": "os.setuid(0) or escaped(os.getuid() == 0 and open('/etc/shadow'))",
    "capabilities": "escaped(int("
    "[l for l in open('/proc/self/status') if l.startswith('CapEff')][0].split()[1], 16) != 0)",
    "keyring": "escaped(libc.syscall(248, b'user', b'x', b'y', 1, -5) > 0)",
    "bpf": "escaped(libc.syscall(321, 0, ctypes.create_string_buffer(128), 128) >= 0)",
    "perf": "escaped(libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0)",
    "userfaultfd": "escaped(libc.syscall(323, 0) >= 0)",
    "reboot": "escaped(libc.reboot(0x89ABCDEF) == 0)",
    "load-module": "escaped(libc.syscall(175, b'', 0, b'') == 0)",
    "swap": "escaped(libc.swapon(b'x', 0) == 0)",
    "set-clock": "escaped(libc.syscall(227, 0, ctypes.create_string_buffer(16)) == 0)",
    "host-name": "socket.sethostname('planted'); escaped()",
    "nice": "os.nice(-10); escaped()",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()""",
    "daemon-that-is-deaf": """
import signal
if os.fork() == 0:
    os.setsid()
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
    time.sleep(600)""",
}
TRIES = {**READ, **WRITE, **NETWORK, **PROCESSES}
SHORT = (
    "open",
    "hard-link",
    "proc-root",
    "write-outside",
    "delete-outside",
    "tcp",
    "abstract-socket",
    "ptrace-parent",
    "daemon",
)
REAL_WITHOUT_SANDBOX = (
    "open",
    "symlink",
    "relative-path",
    "write-outside",
    "tcp",
    "udp",
    "unix-socket",
    "listen",
    "passwd",
)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name, code in TRIES.items():
        if not short or name in SHORT:
            yield Case(name, partial(held_in, "namespaces", code))
        if not short and name in (*READ, *WRITE, *NETWORK):
            yield Case(f"landlock:{name}", partial(held_in, "landlock", code))
    for name in ("open", "tcp") if short else REAL_WITHOUT_SANDBOX:
        yield Case(f"without-sandbox:{name}", partial(succeeds_without_sandbox, TRIES[name]))


PART = Part("sandbox", "code in an answer reads, changes and reaches nothing outside of its sandbox", cases, 1)


class Outside:
    """What a program finds on the host: a secret file, a folder for all users, servers at a port and at sockets."""

    def __init__(self, folder: Path) -> None:
        self.marker = f"faults-{uuid.uuid4().hex}"
        # Not in `folder`: that may be closed to other users, and then the sandbox would not be what keeps a program
        # out.
        self.folder = Path("/tmp") / self.marker
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.secret = self.folder / "secret"
        self.secret.write_text("planted")
        self.secret.chmod(0o666)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self.abstract, self.unix = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0{self.marker}")
        self.unix.bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        self.reached: list[str] = []
        for name, server in (("tcp", self.tcp), ("abstract", self.abstract), ("unix", self.unix)):
            server.listen()
            threading.Thread(target=self._accept, args=(name, server), daemon=True).start()
        self.udp.settimeout(0.2)

    def _accept(self, name: str, server: socket.socket) -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return
            self.reached.append(name)

    def changes(self) -> list[str]:
        """What a program has done to it."""
        found = list(self.reached)
        with contextlib.suppress(OSError):
            found += ["udp"] if self.udp.recv(10) else []
        names = sorted(path.name for path in self.folder.iterdir())
        if names != ["secret", "socket"]:
            found.append(f"files: {names}")
        if "secret" in names and (self.secret.read_text() != "planted" or self.secret.stat().st_mode & 0o777 != 0o666):
            found.append("the secret was changed")
        if os.path.exists(os.path.join(os.path.dirname(os.__file__), "planted_by_faults.py")):
            found.append("a library was planted")
        if os.path.exists(f"/dev/shm/{self.marker}"):
            found.append("shared memory")
        if left := [pid for pid in os.listdir("/proc") if pid.isdigit() and self.marker in _command_line(pid)]:
            found.append(f"processes {left}")
        return found

    def close(self) -> None:
        for server in (self.tcp, self.udp, self.abstract, self.unix):
            server.close()
        for path in self.folder.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()
        self.folder.rmdir()


def _command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def try_it(level: str, code: str, folder: Path) -> tuple[str, list[str]]:
    """What the program printed, and what it did to the host."""
    from posttrain.environments.sandbox.levels import find_interpreter, why_not
    from posttrain.environments.sandbox.program import Limits, Program
    from posttrain.environments.sandbox.sandbox import Sandbox

    as_root = level == "landlock" and os.geteuid() == 0  # it gives up its user, and then needs a Python for everybody
    if as_root and not os.path.exists("/usr/bin/python3"):
        raise NotPossibleHere("no Python that every user may read")
    interpreter = find_interpreter("/usr/bin/python3" if as_root else None)
    sandbox = Sandbox(level, interpreter.read_only)  # type: ignore[arg-type]
    if level not in _reasons:
        _reasons[level] = why_not(sandbox, interpreter)
    if (reason := _reasons[level]) is not None:
        raise NotPossibleHere(f"this machine has no level {level}: {reason}")
    outside = Outside(folder)
    os.environ["FAULTS_PLANTED"] = "planted"
    try:
        name = f"{outside.marker}.py"
        values = {"secret": str(outside.secret), "port": outside.port, "marker": outside.marker}
        source = PRELUDE.format(**values, outside=str(outside.folder)) + code
        outcome = sandbox.run(Program(interpreter.command(name), {name: source.encode()}), Limits(cpu_s=10, wall_s=20))
        return outcome.stdout.decode(errors="replace"), outside.changes()
    finally:
        outside.close()


_reasons: dict[str, str | None] = {}


def held_in(level: str, code: str, folder: Path, chance: random.Random) -> None:
    printed, changes = try_it(level, code, folder)
    assert "ESCAPED" not in printed, f"escaped: {printed}"
    assert not changes, f"it changed the host: {changes}"


def succeeds_without_sandbox(code: str, folder: Path, chance: random.Random) -> None:
    """Otherwise the try would show nothing."""
    printed, changes = try_it("limits", code, folder)
    assert "ESCAPED" in printed or changes, "this try fails without a sandbox too: it shows nothing"
