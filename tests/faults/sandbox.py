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
    "name-of-host": f"escaped({socket.gethostname()!r} in (socket.gethostname(), os.uname().nodename))",
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
# Memory that is not mapped, of which a program that may have 256 MiB gets more; or what would give it without end.
_MMAP = """
import mmap
libc.mmap.restype = ctypes.c_void_p
def many(fd):
    for _ in range(8):
        shared = mmap.mmap(fd, 100 << 20)
        if os.fork() == 0:
            time.sleep(60)
        for start in range(0, 100 << 20, 1 << 20):
            shared[start : start + (1 << 20)] = b"x" * (1 << 20)
        shared.close()
    time.sleep(1)
    escaped()
    os._exit(0)
"""
_FILES_OF_15_PROCESSES = """
import fcntl, select
def fill(take):
    for _ in range(15):
        if os.fork() == 0:
            kept = []
            try:
                while True:
                    kept.append(take())
            except OSError:
                time.sleep(60)
    time.sleep(5)
    escaped()
def sockets():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in pair:
        end.setblocking(False)
        try:
            end.send(bytes(200_000))
            end.send(bytes(200_000))
        except BlockingIOError:
            pass
    return pair
"""
MEMORY = {
    "memfd": "kept = [os.memfd_create('x') for _ in range(8)]; escaped(all(os.write(fd, bytes(2**26)) for fd in kept))",
    "files-of-a-thread": "escaped(libc.syscall(436, 900, 900, 2) == 0)",
    "thread-with-files-of-its-own": "escaped(libc.syscall(56, 0x10900, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1)",
    "thread-that-outlives-the-first": """
import threading
def take():
    kept = []
    for _ in range(20):
        kept.append(bytearray(b'x') * (10 << 20))
    time.sleep(3)
    escaped()
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=take).start()
        libc.syscall(60, 0)
time.sleep(6)""",
    "memfd-secret": "escaped(libc.syscall(447, 0) >= 0)",
    "sockets": _FILES_OF_15_PROCESSES + "fill(sockets)",
    "epolls": _FILES_OF_15_PROCESSES + "fill(select.epoll)",
    "socket-buffers": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**25); escaped()",
    "sockets-of-others": "escaped(libc.socketpair(30, 2, 0, (ctypes.c_int * 2)()) == 0 or ctypes.get_errno() != 1)",
    "files-in-flight": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [b.fileno()]); escaped()",
    "pipe-size": "import fcntl; fcntl.fcntl(os.pipe()[1], 1031, 2**20); escaped()",
    "huge-page-in-pipe": """
page = ctypes.create_string_buffer(4096)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
escaped(libc.vmsplice(os.pipe()[1], vector, ctypes.c_ulong(1), 0) > 0)""",
    "named-pipe": "os.mkfifo('a'); escaped(os.write(os.open('a', os.O_RDWR | os.O_NONBLOCK), bytes(60_000)))",
    "named-pipe-by-number": "escaped(libc.syscall(133, b'a', 0o10600, 0) == 0)",
    "huge-pages": "escaped(libc.syscall(9, 0, 2**21, 3, 0x40022, -1, 0) != -1 or ctypes.get_errno() != 1)",
    "file-in-pipe": "open('a', 'w').write('x'); os.splice(os.open('a', 0), os.pipe()[1], 1); escaped()",
    "library-in-pipe": "os.sendfile(os.pipe()[1], os.open(os.__file__, 0), 0, 1); escaped()",
    "tee": "a, b = os.pipe(), os.pipe(); os.write(a[1], b'x'); escaped(libc.tee(a[0], b[1], ctypes.c_long(1), 0) > 0)",
    "shared-memory-of-children": _MMAP + "many(-1)",
    "zero-device": _MMAP + "many(os.open('/dev/zero', os.O_RDWR))",
    "futex-table": "escaped(libc.prctl(78, *map(ctypes.c_ulong, (1, 1 << 23, 0, 0))) == 0)",
    "events": "escaped(libc.inotify_init1(0) >= 0)",
    "events-of-mounts": "escaped(libc.syscall(300, 0x200, 0) >= 0)",
    "rules": "escaped(libc.syscall(444, (ctypes.c_uint64 * 2)(0, 3), ctypes.c_size_t(16), 0) >= 0)",
    "policies": """
import mmap
open('a', 'wb').write(bytes(8192))
file = open('a', 'r+b')
first = ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), 8192))
place = ctypes.addressof(first)
mask = ctypes.c_ulong(1)
words = (ctypes.c_void_p(place), ctypes.c_ulong(4096), 2, ctypes.byref(mask), ctypes.c_ulong(65), 0)
escaped(libc.syscall(237, *words) == 0)""",
    "asynchronous-input": "escaped(libc.syscall(206, 1024, ctypes.byref(ctypes.c_ulong(0))) == 0)",
    "filters": "escaped(libc.syscall(317, 2, 0, ctypes.byref(ctypes.c_uint(0x7FFF0000))) == 0)",
    "signals": """
import signal
signal.pthread_sigmask(0, [34])
signal_of = (ctypes.c_int * 32)(34, 0, -1)
count = 0
while count < 50_000 and libc.syscall(129, os.getpid(), 34, signal_of) == 0:
    count += 1
escaped(count == 50_000)""",
    "timers": """
count = 0
while count < 50_000 and libc.syscall(222, 1, None, ctypes.byref(ctypes.c_int())) == 0:
    count += 1
escaped(count == 50_000)""",
    "streams": _FILES_OF_15_PROCESSES
    + """
def stream():
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        try:
            while True:
                end.send(bytes(60_000))
        except BlockingIOError:
            pass
    return pair
fill(stream)""",
    "packets": _FILES_OF_15_PROCESSES
    + """
def packets():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
        try:
            while True:
                end.send(b'x')
        except BlockingIOError:
            pass
    return pair
fill(packets)""",
    "full-pipes": _FILES_OF_15_PROCESSES
    + """
def pipe():
    ends = os.pipe()
    os.write(ends[1], bytes(60_000))
    return ends
def pages():
    return bytearray(b'x') * (14 << 20), [pipe() for _ in range(58)]
fill(pages)""",
    "hidden-processes": _FILES_OF_15_PROCESSES
    + """
def hidden():
    libc.prctl(4, *map(ctypes.c_ulong, (0, 0, 0, 0)))
    return sockets()
fill(hidden)""",
    "hidden-pages": """
libc.prctl(4, *map(ctypes.c_ulong, (0, 0, 0, 0)))
for _ in range(3):
    if os.fork() == 0:
        kept = bytearray(b'x') * (120 << 20)
        time.sleep(4)
        escaped()
time.sleep(5)""",
    "copied-on-write": """
kept = bytearray(100 << 20)
for _ in range(4):
    if os.fork() == 0:
        kept[::4096] = b'x' * len(kept[::4096])
        time.sleep(4)
        escaped()
time.sleep(5)""",
    "terminals": "escaped([os.openpty() for _ in range(10)])",
    "other-sockets-in-a-pair": "escaped([socket.socketpair(family) for family in (16, 17, 38, 40)])",
    "file-without-a-name": """
file = os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR)
for _ in range(200):
    os.write(file, bytes(2**20))
escaped()""",
    "message-queue": "escaped(libc.syscall(240, b'x', 0o102, 0o600, None) >= 0)",
    "messages": "escaped(libc.msgget(0, 0o1600) >= 0)",
    "shared-segment": "escaped(libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600) >= 0)",
    "semaphores": "escaped(libc.semget(0, 1, 0o1600) >= 0)",
    "files": """
for index in range(200):
    open(str(index), 'wb').write(bytes(2**20))
escaped()""",
    "deleted-files": """
kept = []
for index in range(100):
    kept.append(open('a', 'wb'))
    kept[-1].write(bytes(2**20))
    os.unlink('a')
escaped()""",
    "links": """
for index in range(8192):
    os.symlink('x' * 4000, str(index))
escaped()""",
    "attributes": """
for index in range(4000):
    open(f'{index // 100}', 'a').close()
    os.setxattr(f'{index // 100}', f'user.{index}', bytes(60_000))
escaped()""",
}
ON_DISK_WITH_LANDLOCK = ("files", "deleted-files", "links")
TRIES = {**READ, **WRITE, **NETWORK, **PROCESSES, **MEMORY}
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
    "memfd",
    "sockets",
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
    "memfd",
    "socket-buffers",
    "huge-page-in-pipe",
    "zero-device",
    "events",
    "rules",
)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name, code in TRIES.items():
        if not short or name in SHORT:
            yield Case(name, partial(held_in, "namespaces", code))
        if not short and name in (*READ, *WRITE, *NETWORK, *MEMORY) and name not in ON_DISK_WITH_LANDLOCK:
            yield Case(f"landlock:{name}", partial(held_in, "landlock", code))
    for name in ("open", "tcp") if short else REAL_WITHOUT_SANDBOX:
        yield Case(f"without-sandbox:{name}", partial(succeeds_without_sandbox, TRIES[name]))


PROMISE = "code in an answer reads, changes and reaches nothing outside of its sandbox, and holds no memory beyond it"
PART = Part("sandbox", PROMISE, cases, 1)


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
        limits = Limits(cpu_s=10, wall_s=20, max_memory_bytes=256 << 20)
        outcome = sandbox.run(Program(interpreter.command(name), {name: source.encode()}), limits)
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
