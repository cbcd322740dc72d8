"""Hostile programs, run for real: what each one tries fails in the sandbox, and works where only limits are set."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from tiny_runs import wait_until

from posttrain.environments.sandbox import processes
from posttrain.environments.sandbox import sandbox as sandbox_module
from posttrain.environments.sandbox.levels import Interpreter, find_interpreter, why_not
from posttrain.environments.sandbox.program import Level, Limits, Outcome, Program, SandboxFailure
from posttrain.environments.sandbox.sandbox import Sandbox
from posttrain.environments.sandbox.syscall_filter import syscall_filter

QUICK = Limits(cpu_s=20, wall_s=30.0)


def interpreter_for(level: Level) -> Interpreter:
    """At the level of Landlock root gives up its user, and then has to find a Python that everybody may read."""
    return find_interpreter("/usr/bin/python3" if level == "landlock" and os.geteuid() == 0 else None)


def run(code: str, level: Level = "namespaces", limits: Limits = QUICK, *, name: str = "main.py") -> Outcome:
    if level == "landlock" and os.geteuid() == 0 and not os.path.exists("/usr/bin/python3"):
        pytest.skip("no Python that every user may read")
    interpreter = interpreter_for(level)
    sandbox = Sandbox(level, interpreter.read_only)
    key = (level, interpreter.executable)
    if key not in _reasons:
        _reasons[key] = why_not(sandbox, interpreter)
    if _reasons[key] is not None:
        pytest.skip(f"this machine has no level {level!r}: {_reasons[key]}")
    source = textwrap.dedent(code).encode()
    return sandbox.run(Program(interpreter.command(name), {name: source}), limits)


_reasons: dict[tuple[str, str], str | None] = {}


def text_of(outcome: Outcome) -> str:
    assert outcome.succeeded, (outcome.reason(), outcome.stderr.decode()[-2000:])
    return outcome.stdout.decode().strip()


ATTEMPT = """
    import os
    def attempt(what):
        try:
            return what()
        except OSError as error:
            return type(error).__name__
"""


def attempt(expression: str, level: Level) -> str:
    return text_of(run(ATTEMPT + f"\n    print(attempt(lambda: {expression}))", level))


LOCKED: tuple[Level, ...] = ("namespaces", "landlock")


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that every user of this machine may enter and write to: only the sandbox keeps a program out of it."""
    folder = Path("/tmp") / f"posttrain-test-{uuid.uuid4().hex}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder  # type: ignore[misc]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("level", LOCKED)
def test_a_file_of_the_user_cannot_be_read(level: Level, open_folder: Path) -> None:
    secret = open_folder / "secret.txt"
    secret.write_text("my password")
    secret.chmod(0o666)
    reading = f"open({str(secret)!r}).read()"
    assert attempt(reading, "limits") == "my password"
    assert attempt(reading, level) in ("FileNotFoundError", "PermissionError")


@pytest.mark.parametrize("level", LOCKED)
def test_nothing_can_be_written_outside_of_the_own_folder(level: Level, open_folder: Path) -> None:
    for place, there in (("limits", True), (level, False)):
        target = open_folder / f"written-{place}"
        attempt(f"open({str(target)!r}, 'w').write('x')", place)  # type: ignore[arg-type]
        assert target.exists() is there


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/1/environ", "/proc/self/status", "/sys/kernel", "/home", "/var"]
)
def test_the_private_root_has_no_such_place(path: str) -> None:
    assert attempt(f"os.stat({path!r})", "namespaces") == "FileNotFoundError"


def test_the_home_folder_holds_nothing_but_the_way_to_the_interpreter() -> None:
    home = os.path.expanduser("~")
    found = attempt(f"sorted(os.listdir({home!r}))", "namespaces")
    assert found == "FileNotFoundError" or len(found.split(",")) == 1
    assert len(os.listdir(home)) > 1


@pytest.mark.parametrize("level", LOCKED)
def test_libraries_are_read_only(level: Level) -> None:
    folder = os.path.dirname(text_of(run("import os; print(os.__file__)", level)))
    assert attempt(f"open({folder + '/planted.py'!r}, 'w')", level) in ("OSError", "PermissionError")
    assert not os.path.exists(folder + "/planted.py")


@pytest.mark.parametrize("level", LOCKED)
def test_the_own_folder_can_be_used_and_is_gone_afterwards(level: Level) -> None:
    outcome = run(
        "import os, tempfile; open('x', 'w').write('y'); print(open('x').read(), tempfile.gettempdir(), os.getcwd())",
        level,
    )
    content, temporary, folder = text_of(outcome).split()
    assert content == "y"
    assert temporary == folder
    assert not os.path.exists(folder)


def test_a_folder_that_the_program_locked_is_removed_and_what_it_points_to_left_alone(open_folder: Path) -> None:
    open_folder.chmod(0o750)
    code = (
        f"import os; os.makedirs('a/b'); open('a/b/c', 'w'); os.symlink({str(open_folder)!r}, 'link'); os.chmod('a', 0)"
    )
    folder = text_of(run(code + "; print(os.getcwd())", "limits"))
    assert not os.path.exists(folder)
    assert open_folder.stat().st_mode & 0o777 == 0o750


def test_the_environment_of_posttrain_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-secret")
    assert "sk-secret" in subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    for level in ("namespaces", "limits"):
        assert "sk-secret" not in text_of(run("import os; print(dict(os.environ))", level))  # type: ignore[arg-type]


# ── network ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", LOCKED)
def test_a_program_cannot_reach_a_server_on_this_machine(level: Level) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        dial = f"__import__('socket').create_connection(('127.0.0.1', {server.getsockname()[1]}), 2) and 'connected'"
        assert attempt(dial, "limits") == "connected"
        server.accept()[0].close()
        assert attempt(dial, level) == "PermissionError"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("level", LOCKED)
def test_no_kind_of_socket_but_a_pair_within_the_program(level: Level) -> None:
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        assert attempt(f"__import__('socket').socket(__import__('socket').{family})", level) == "PermissionError"
    assert text_of(run("import asyncio; asyncio.run(asyncio.sleep(0)); print('done')", level)) == "done"


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────

FORK_BOMB = """
    import os, time
    children = 0
    try:
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(600)
            children += 1
    except OSError as error:
        print(type(error).__name__, end=" ")
    print(children, flush=True)
"""


@pytest.mark.parametrize("level", LOCKED)
def test_a_fork_bomb_gets_no_more_processes_than_allowed_and_is_cleared_away(level: Level) -> None:
    marker = f"bomb_{uuid.uuid4().hex}.py"
    stopped = run(FORK_BOMB, level, Limits(cpu_s=20, wall_s=30, max_processes=8), name=marker)
    assert text_of(stopped) == "BlockingIOError 7"  # the first process counts
    assert text_of(run(FORK_BOMB, level, Limits(cpu_s=20, wall_s=30, max_processes=101), name=marker)) == "100"
    assert not processes_named(marker)


def test_where_the_kernel_does_not_count_processes_they_are_counted_by_looking() -> None:
    """Root has no limit of processes, and at the lowest level it stays root."""
    code = FORK_BOMB + "\n    time.sleep(600)"
    outcome = run(code, "limits", Limits(cpu_s=20, wall_s=10, max_processes=8))
    if os.geteuid() == 0:
        assert outcome.stopped == "processes"
    else:
        assert b"BlockingIOError" in outcome.stdout


def processes_named(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in part for part in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
    if "wait" in __file__:
        time.sleep(600)
"""


@pytest.mark.parametrize("level", ["namespaces", "landlock", "limits"])
def test_a_daemon_that_the_program_leaves_behind_is_ended(level: Level) -> None:
    marker = f"daemon_{uuid.uuid4().hex}.py"
    assert run(DAEMON, level, name=marker).succeeded
    assert not processes_named(marker)


@pytest.mark.parametrize("level", ["namespaces", "limits"])
def test_kill_9_of_the_process_that_asked_ends_the_program_too(level: Level) -> None:
    marker = f"wait_{uuid.uuid4().hex}.py"
    code = f"""
from posttrain.environments.sandbox.levels import find_interpreter
from posttrain.environments.sandbox.program import Limits, Program
from posttrain.environments.sandbox.sandbox import Sandbox
interpreter = find_interpreter()
program = Program(interpreter.command({marker!r}), {{{marker!r}: {textwrap.dedent(DAEMON).encode()!r}}})
Sandbox({level!r}, interpreter.read_only).run(program, Limits(wall_s=600))
"""
    run("pass", level)  # skips where this level does not work
    asking = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    wait_until(lambda: len(processes_named(marker)) >= 2 and asking.poll() is None)
    os.killpg(asking.pid, signal.SIGKILL)  # as the kernel does to a worker whose trainer has died
    asking.wait()
    wait_until(lambda: not processes_named(marker))


def test_a_program_can_end_neither_others_nor_its_own_keeper() -> None:
    code = """
        import os, signal
        os.kill(1, signal.SIGKILL)
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError as error:
            print(type(error).__name__)
        print(os.getpid(), os.getuid() != 0)
    """
    pid = text_of(run(code)).split()
    assert pid[-2:] == ["2", "True"], "process 1 is ours and still there, or there would be no report"


@pytest.mark.parametrize(
    "deed",
    [
        "[os.kill(1, number) for number in range(1, 65)]",
        "[resource.prlimit(1, which, (0, 0)) for which in (resource.RLIMIT_CPU, resource.RLIMIT_AS)]",
    ],
)
def test_a_program_cannot_make_its_keeper_report_a_failure_of_the_sandbox(deed: str) -> None:
    """It would be unscored then, which is better than what a wrong answer gets."""
    code = f"""
        import os, resource, time
        try:
            {deed}
        except OSError as error:
            pass
        for _ in range(50):  # the keeper has to look after orphans, which takes time and memory
            if os.fork() == 0:
                os._exit(os.fork() and 0)
            os.wait()
        time.sleep(0.2)
        print("over")
    """
    assert text_of(run(code)) == "over"


def test_a_program_can_limit_itself() -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (3, 3)); print(r.getrlimit(r.RLIMIT_CPU))"
    assert text_of(run(code)) == "(3, 3)"


@pytest.mark.parametrize(
    "call",
    [
        "os.setuid(0)",
        "os.chroot('/')",
        "os.mknod('disk', 0o60600, os.makedev(8, 0))",
        "__import__('socket').sethostname('x')",
    ],
)
def test_privileges_cannot_be_had_again(call: str) -> None:
    assert attempt(call, "namespaces") == "PermissionError"


@pytest.mark.parametrize(
    "call",
    ["unshare(0x10000000)", "unshare(0x20000)", "mount(0, b'/', 0, 0x44000, 0)", "ptrace(0, 0, 0, 0)", "setns(0, 0)"],
)
def test_the_filter_refuses_calls_that_would_reach_around_the_sandbox(call: str) -> None:
    code = f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); r = c.{call}; print(r, ctypes.get_errno())"
    assert text_of(run(code)) == "-1 1"


def test_the_filter_is_complete_for_every_processor_that_we_know() -> None:
    for machine in ("x86_64", "aarch64"):
        program = syscall_filter(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 256 * 16


# ── memory, time, output, disk ─────────────────────────────────────────────────────────────────────────────────────

MIB = 1 << 20


def test_one_process_cannot_take_more_memory_than_allowed() -> None:
    code = "x = bytearray(300 << 20); print('got it')"
    outcome = run(code, limits=Limits(cpu_s=20, wall_s=30, max_memory_bytes=256 * MIB))
    assert outcome.exit_code == 1
    assert b"MemoryError" in outcome.stderr
    assert text_of(run(code, limits=Limits(cpu_s=20, wall_s=30, max_memory_bytes=512 * MIB))) == "got it"


def test_memory_limit_counts_all_processes_together() -> None:
    code = """
        import os, time
        ready, report = os.pipe()
        for _ in range(4):
            if os.fork() == 0:
                x = bytearray(os.urandom(1) * (100 << 20))
                os.write(report, b".")
                time.sleep(600)
        for _ in range(4):
            os.read(ready, 1)
        time.sleep({seconds})
        print("still here", flush=True)
        os._exit(0)
    """
    # Over the limit it is ended within a second; under it, it ends by itself.
    hogging = run(code.format(seconds=60), limits=Limits(cpu_s=60, wall_s=90, max_memory_bytes=256 * MIB))
    assert hogging.stopped == "memory"
    modest = run(code.format(seconds=1), limits=Limits(cpu_s=60, wall_s=90, max_memory_bytes=800 * MIB))
    assert text_of(modest) == "still here"


def test_memory_that_processes_share_counts_once() -> None:
    code = """
        import os, time
        x = bytearray(b"x") * (100 << 20)
        for _ in range(4):
            if os.fork() == 0:
                time.sleep(600)
        time.sleep(0.7)
        os._exit(0)
    """
    assert run(code, limits=Limits(cpu_s=20, wall_s=30, max_memory_bytes=256 * MIB)).succeeded


DEAF = "import signal, time; signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 65))\nwhile True: time.sleep(1)"


@pytest.mark.parametrize(
    ("code", "limits", "stopped"),
    [
        pytest.param("while True: pass", Limits(cpu_s=1, wall_s=60), "cpu time", id="busy"),
        pytest.param("import time; time.sleep(60)", Limits(cpu_s=60, wall_s=0.5), "wall time", id="idle"),
        pytest.param(
            "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            Limits(cpu_s=1, wall_s=60),
            "cpu time",
            id="ignores the signal",
        ),
        pytest.param(DEAF, Limits(cpu_s=60, wall_s=0.5), "wall time", id="deaf to signals"),
    ],
)
def test_a_busy_loop_is_ended_by_its_cpu_time_and_an_idle_one_by_the_clock(
    code: str, limits: Limits, stopped: str
) -> None:
    assert run(code, limits=limits).stopped == stopped


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_off(stream: str) -> None:
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    outcome = run(code, limits=Limits(cpu_s=60, wall_s=60, max_output_bytes=100_000))
    assert outcome.stopped == "output"
    assert len(getattr(outcome, stream)) == 100_000


def test_the_disk_cannot_be_filled_by_large_files_nor_by_many() -> None:
    large = "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))"
    outcome = run(large, limits=Limits(cpu_s=20, wall_s=30, max_files_bytes=8 * MIB))
    assert b"No space left on device" in outcome.stderr or b"File too large" in outcome.stderr
    many = "i = 0\nwhile True:\n    i += 1\n    open('/dev/shm/%d' % i, 'w')"
    assert b"No space left on device" in run(many).stderr
    two = "for name in 'ab': open(name, 'wb').write(b'x' * (6 << 20))"
    assert run(two, limits=Limits(cpu_s=20, wall_s=30, max_files_bytes=8 * MIB)).exit_code == 1
    assert run(two, limits=Limits(cpu_s=20, wall_s=30, max_files_bytes=16 * MIB)).succeeded


# ── whose fault it is ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os; os._exit(3)", 3),
        ("raise ValueError", 1),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_how_a_program_ends_is_reported(code: str, exit_code: int) -> None:
    outcome = run(code)
    assert (outcome.exit_code, outcome.stopped) == (exit_code, None)


def test_a_program_cannot_forge_how_it_ended() -> None:
    code = """
        import os
        for fd in range(3, 256):
            try:
                os.write(fd, b'{"started": true, "exit_code": 0, "cpu_s": 0}\\n{"error": "not my fault"}\\n')
            except OSError:
                pass
        os._exit(5)
    """
    assert run(code).exit_code == 5


def test_what_keeps_a_program_from_starting_is_the_failure_of_the_sandbox() -> None:
    sandbox = Sandbox("namespaces", find_interpreter().read_only)
    run("pass")
    with pytest.raises(SandboxFailure, match="No such file"):
        sandbox.run(Program(("/no/such/program",)), QUICK)
    with pytest.raises(SandboxFailure, match=r"did not start|No such file"):  # without its libraries
        Sandbox("namespaces", (find_interpreter().executable,)).run(
            Program(find_interpreter().command("-c", "pass"), announces=True), QUICK
        )


def test_a_program_that_announces_itself_is_judged_and_one_that_does_not_is_not() -> None:
    interpreter = find_interpreter()
    sandbox = Sandbox("namespaces", interpreter.read_only)
    run("pass")
    up = "import os; os.write(3, b'ready\\n'); os.write(3, b'more'); os._exit(9)"
    outcome = sandbox.run(Program(interpreter.command("-c", up), announces=True), QUICK)
    assert (outcome.exit_code, outcome.report) == (9, b"more")
    with pytest.raises(SandboxFailure, match="did not start"):
        sandbox.run(Program(interpreter.command("-c", "import os; os._exit(9)"), announces=True), QUICK)


def test_a_launcher_that_fails_or_dies_is_the_failure_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(find_interpreter().command("-c", "pass"))
    sandbox = Sandbox("limits")
    monkeypatch.setattr(sandbox_module, "_LAUNCH", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(SandboxFailure, match="ended with code -9"):
        sandbox.run(program, QUICK)
    monkeypatch.setattr(sandbox_module, "_LAUNCH", "raise SystemError('broken')")
    with pytest.raises(SandboxFailure, match="SystemError: broken"):
        sandbox.run(program, QUICK)


def test_standard_input_arrives_whole_and_no_pipe_is_left_open() -> None:
    interpreter = find_interpreter()
    sandbox = Sandbox("namespaces", interpreter.read_only)
    run("pass")
    before = len(os.listdir("/proc/self/fd"))
    code = "import sys; data = sys.stdin.buffer.read(); print(len(data), data[-3:].decode())"
    outcome = sandbox.run(Program(interpreter.command("-c", code), stdin=b"x" * 3_000_000 + b"end"), QUICK)
    assert text_of(outcome) == "3000003 end"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_program_that_is_not_python_runs_too() -> None:
    interpreter = find_interpreter()
    sandbox = Sandbox("namespaces", (*interpreter.read_only, "/usr/bin", "/bin"))
    run("pass")
    outcome = sandbox.run(Program(("/bin/sh", "-c", "cat; echo $HOME; exit 4"), stdin=b"in\n"), QUICK)
    assert (outcome.exit_code, outcome.stdout) == (4, b"in\n/box\n")


def test_a_process_that_ends_while_its_children_are_read_has_no_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_children", Mock(side_effect=ProcessLookupError(errno.ESRCH, "No such process")))
    assert processes.descendants(2**22 + 1) == []  # above the largest PID
