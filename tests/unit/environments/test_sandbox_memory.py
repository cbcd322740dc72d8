"""Programs that hold memory where nobody counts it get none, or are stopped. Ordinary programs run as before."""

from __future__ import annotations

import io
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from faults.campaign import NotPossibleHere
from faults.sandbox import MEMORY, TRIES, held_in

from posttrain.environments.sandbox import processes
from posttrain.environments.sandbox.levels import find_interpreter, why_not
from posttrain.environments.sandbox.program import Limits, Outcome, Program
from posttrain.environments.sandbox.sandbox import Sandbox


@pytest.mark.parametrize("name", [*MEMORY, "name-of-host"])
def test_it_is_held(name: str, tmp_path: Path) -> None:
    try:
        held_in("namespaces", TRIES[name], tmp_path, random.Random(0))
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


ORDINARY = {
    "asyncio": """
        import asyncio
        async def add(a, b):
            await asyncio.sleep(0)
            return a + b
        for _ in range(50):  # each has a pair of sockets and an epoll
            total = asyncio.run(add(1, 2))
        print(total)
    """,
    "subprocess": """
        import asyncio, subprocess, sys
        command = [sys.executable, "-I", "-S", "-c", "print(input()[::-1])"]
        async def reverse(text):
            child = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
            return (await child.communicate(text))[0].decode().strip()
        first = subprocess.run(command, input="3", capture_output=True, text=True).stdout.strip()
        print(first if first == asyncio.run(reverse(b"3")) else "different")
    """,
    "multiprocessing": """
        import multiprocessing
        from multiprocessing.shared_memory import SharedMemory
        def answer(connection, queue, value):
            queue.put(connection.recv())
            value.value += 1
        ours, theirs = multiprocessing.Pipe()
        queue, value = multiprocessing.Queue(), multiprocessing.Value("i", 1)
        child = multiprocessing.Process(target=answer, args=(theirs, queue, value))
        child.start()
        ours.send(1)
        received = queue.get()
        child.join()
        shared = SharedMemory(create=True, size=1000)
        shared.buf[0] = received + value.value
        with multiprocessing.Pool(2) as pool:
            print(pool.map(abs, [-shared.buf[0]])[0])
        shared.close()
        shared.unlink()
    """,
    "files": """
        import mmap, shutil, sqlite3
        with open("a", "wb") as file:
            file.write(b"abc" * 1_000_000)
        shutil.copy("a", "b")
        with open("b", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[0] = 51
        database = sqlite3.connect("c.db")
        database.execute("create table t (a)")
        database.execute("insert into t values (?)", (open("b").read(1),))
        database.commit()
        zeros = open("/dev/zero", "rb").read(10)
        print(database.execute("select a from t").fetchone()[0] if zeros == bytes(10) else "no zeros")
    """,
    "threads": """
        import ctypes, mmap, signal, threading
        from concurrent.futures import ThreadPoolExecutor
        signal.setitimer(signal.ITIMER_REAL, 600)
        threading.stack_size(64 << 20)
        private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)
        private[0] = 2
        compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
        numbers = (ctypes.c_int * 2)(2, 1)
        ctypes.CDLL(None).qsort(numbers, 2, 4, compare(lambda a, b: a[0] - b[0]))
        with ThreadPoolExecutor(6) as pool:
            print(private[0] + list(pool.map(abs, numbers))[0])
    """,
    "numpy": """
        import numpy
        matrix = numpy.eye(200) * 3
        numpy.memmap("m", dtype="f4", mode="w+", shape=(100,))[:] = 1
        print(round((numpy.linalg.inv(matrix) @ matrix @ matrix)[5, 5]))
    """,
}


def run(code: str) -> Outcome:
    interpreter = find_interpreter()
    sandbox = Sandbox("namespaces", (*interpreter.read_only, *interpreter.site_packages))
    if (reason := why_not(sandbox, interpreter)) is not None:
        pytest.skip(reason)
    path = f"import sys; sys.path += {list(interpreter.site_packages)!r}\nif True:\n"
    return sandbox.run(
        Program(interpreter.command("main.py"), {"main.py": (path + code).encode()}), Limits(cpu_s=30, wall_s=60)
    )


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_program_runs(name: str) -> None:
    if name == "numpy":
        pytest.importorskip("numpy")
    outcome = run(ORDINARY[name])
    assert (outcome.exit_code, outcome.stdout.decode().strip()) == (0, "3"), outcome.stderr.decode()


def test_what_a_process_has_open_is_counted_once_however_many_share_it() -> None:
    pairs = [socket.socketpair() for _ in range(8)]
    read, write = os.pipe()
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    given = [end.fileno() for pair in pairs for end in pair]
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdin=read, stdout=-1, pass_fds=fds)
        for fds in ((), given, given)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        without = processes.memory_bytes([children[0].pid], 2**40)
        one = processes.memory_bytes([children[1].pid], 2**40)
        both = processes.memory_bytes([child.pid for child in children[1:]], 2**40)
        assert one - without > 7 << 20
        assert both - one - without < 4 << 20
    finally:
        os.close(write)
        os.close(read)
        for child in children:
            child.communicate()
        for end in (end for pair in pairs for end in pair):
            end.close()


def test_descriptors_that_cannot_be_read_count_as_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> None:
        raise PermissionError(path)

    for name in ("readlink", "listdir"):
        before = processes.memory_bytes([os.getpid()], 2**40)
        with monkeypatch.context() as patch:
            patch.setattr(processes.os, name, refused)
            assert processes.memory_bytes([os.getpid()], 2**40) > before + (3 << 20)


def test_buffers_count_with_the_sizes_of_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator may have set larger buffers of sockets, and a page may have 64 KiB."""
    monkeypatch.setattr(processes.socket.socket, "getsockopt", lambda *_: 8 << 20)
    monkeypatch.setattr(processes.os, "sysconf", lambda _: 64 << 10)
    found = processes._bytes_by_kind()
    assert (found["socket"], found["pipe"]) == (20 << 20, 1 << 20)
    with socket.socketpair()[0] as one:
        monkeypatch.undo()
        assert processes._BYTES_BY_KIND["socket"] > 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.mark.parametrize("enough", [0, 2**40])
def test_huge_pages_are_counted(monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
    before = processes.memory_bytes([os.getpid()], enough)
    opened = open

    def with_huge_pages(path: str) -> object:
        if not str(path).endswith("/status"):
            return opened(path)
        return io.StringIO(Path(path).read_text().replace("HugetlbPages:\t       0", "HugetlbPages:\t 1048576"))

    monkeypatch.setattr(processes, "open", with_huge_pages, raising=False)
    assert processes.memory_bytes([os.getpid()], enough) - before > 900 << 20
