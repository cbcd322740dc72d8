"""Reward functions and judges that fail: what they failed on is unscored with a reason. It is never a reward of 0."""

from __future__ import annotations

import http.server
import json
import math
import random
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.lab import Lab, assert_no_traceback
from faults.processes import Finished, Surroundings

# What a reward function does with the unlucky half of the answers.
UNSCORED = {
    "raises": "raise ValueError('no')",
    "raises-without-words": "raise ValueError",
    "raises-a-novel": "raise ValueError('x' * 5_000_000)",
    "raises-half-a-character": "raise ValueError(chr(0xD800))",
    "raises-KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises-GeneratorExit": "raise GeneratorExit",
    "raises-StopIteration": "raise StopIteration",
    "raises-MemoryError": "raise MemoryError",
    "recursion": "return f(prompt, response, reference)",
    "exits": "import sys; sys.exit(0)",
    "exits-with-1": "import sys; sys.exit(1)",
    "exits-at-once": "import os; os._exit(7)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "sleeps": "import time; time.sleep(1000)",
    "busy": "while True: pass",
    "busy-and-deaf": "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 14, 15)]\n    while True: pass",
    "nan": "return float('nan')",
    "inf": "return float('inf')",
    "-inf": "return float('-inf')",
    "too-large-an-int": "return 10 ** 400",
    "text": "return 'high'",
    "number-as-text": "return '1.0'",
    "bytes": "return b'1'",
    "none": "return None",
    "nothing": "return",
    "complex": "return 1j",
    "list": "return [1.0]",
    "two-numbers": "return 1.0, 2.0",
    "empty-list": "return []",
    "object": "return object()",
    "function": "return f",
    "raises-when-read": "return type('F', (), {'__float__': lambda self: 1 / 0})()",
    "nan-of-numpy": "import numpy; return numpy.float64('nan')",
    "array": "import numpy; return numpy.zeros(3)",
    "closes-its-pipes": "import os; os.closerange(0, 100)",
    "takes-too-much-memory": "return bytearray(1 << 45)",
}
# These come with the usual value, or with a reason; what must not happen is another number.
ODD = {
    "prints-a-flood": "print('x' * 10_000_000)",
    "prints-a-flood-of-errors": "import sys; sys.stderr.write('x' * 10_000_000)",
    "writes-to-descriptor-1": "import os; os.write(1, b'{\"reward\": 0}' * 1000)",
    "reads-stdin": "import sys; sys.stdin.read()",
    "reads-descriptor-0": "import os; os.read(0, 1)",
    "changes-folder": "import os; os.chdir('/')",
    "leaves-a-thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "leaves-a-process": "import subprocess; subprocess.Popen(['sleep', '1000'])",
    "forgets-json": "import json; json.dumps = None",
    "closes-stdout": "import sys; sys.stdout.close()",
    "takes-memory": "x = bytearray(b'1') * (256 << 20)",
}
EXTREME = {
    "1e308": "return 1e308",
    "-1e308": "return -1e308",
    "max": "return 1.7976931348623157e308",
    "tiny": "return 5e-324",
}
SHORT = ("raises", "exits-at-once", "nan", "text", "two-numbers")

FUNCTION = """
import zlib

def f(prompt, response, reference):
    if zlib.crc32(response.encode()) % 2:
        return fault(prompt, response, reference)
    return 0.5 + zlib.crc32(response.encode()) % 1000 / 4000

def fault(prompt, response, reference):
    {fault}
    return 0.5 + zlib.crc32(response.encode()) % 1000 / 4000
"""


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name, fault in UNSCORED.items():
        if not short or name in SHORT:
            yield Case(f"function:{name}", partial(faulty_function, lab, fault, "unscored"))
    for name, fault in () if short else ODD.items():
        yield Case(f"function:{name}", partial(faulty_function, lab, fault, "either"))
    for name, fault in EXTREME.items():
        if not short or name == "1e308":
            yield Case(f"function:{name}", partial(faulty_function, lab, fault, "anything"))
    yield Case("run:nothing-scored", partial(nothing_scored, lab))
    yield Case("run:1e308", partial(faulty_run, lab, EXTREME["1e308"]))
    for name in () if short else ("raises", "nan", "exits-at-once", "sleeps", "two-numbers", "killed"):
        yield Case(f"run:{name}", partial(faulty_run, lab, UNSCORED[name]))
    for name in SHORT_JUDGES if short else JUDGES:
        yield Case(f"judge:{name}", partial(faulty_judge, lab, name))


PART = Part(
    "rewards", "a reward or a judge that fails leaves an answer unscored with the reason, never with 0", cases, 7
)


def usual_value(response: str) -> float:
    return 0.5 + zlib.crc32(response.encode()) % 1000 / 4000


def unlucky(response: str) -> bool:
    return bool(zlib.crc32(response.encode()) % 2)


def scores_of(command: list[str], folder: Path, **environment: str) -> tuple[list[dict[str, Any]], Finished]:
    """Of `rewards test`."""
    out = folder / "scores.jsonl"
    finished = processes.run([*command, "--out", str(out)], folder / "log", Surroundings(environment))
    assert finished.code == 0, finished
    return [json.loads(line) for line in out.read_text().splitlines()], finished


def faulty_function(lab: Lab, fault: str, expected: str, folder: Path, chance: random.Random) -> None:
    responses = [f"answer {chance.randrange(10**9)}" for _ in range(6)]
    while len({unlucky(response) for response in responses}) < 2:
        responses.append(f"answer {chance.randrange(10**9)}")
    (folder / "r.py").write_text(FUNCTION.format(fault=fault).replace("return f(prompt", "return fault(prompt"))
    samples = tiny_runs.write_rows(
        folder / "samples.jsonl", [{"prompt": "?", "response": text, "reference": "1"} for text in responses]
    )
    command = ["rewards", "test", "--type", "python", str(samples), f"function={folder / 'r.py'}:f", "timeout_s=2"]
    rows, finished = scores_of([*command, "num_workers=1"], folder)
    for response, row in zip(responses, rows, strict=True):
        told = f"{response}: {row}; {finished}"
        if not unlucky(response):
            assert row["reward"] == usual_value(response), f"an answer without a fault: {told}"
        elif expected == "unscored" or (expected == "either" and row["reward"] is None):
            assert row["reward"] is None, f"scored: {told}"
            assert row["error"], f"no reason: {told}"
        elif expected == "either":
            assert row["reward"] == usual_value(response), f"another number: {told}"
        else:
            assert row["reward"] is None or abs(row["reward"]) > 1e300 or row["reward"] == 5e-324, f"changed: {told}"


def faulty_run(lab: Lab, fault: str, folder: Path, chance: random.Random) -> None:
    from posttrain.reporting.rows import read_rollouts

    (folder / "r.py").write_text(FUNCTION.format(fault=fault))
    run = folder / "run"
    arguments = tiny_runs.grpo(lab.model, lab.data, run, steps=2, reward=f"{folder / 'r.py'}:f")
    finished = processes.run([*arguments, "env.mine.timeout_s=2", "env.mine.num_workers=4"], folder / "log")
    assert finished.code == 0, finished
    for step in (1, 2):
        for group in read_rollouts(run / "rollouts" / f"step_{step}.jsonl.gz"):
            for completion in group["completions"]:
                if not unlucky(completion["text"]):
                    assert completion["reward"] == usual_value(completion["text"]), completion
                elif completion["reward"] is None:
                    assert completion["error"], completion
                    assert completion["advantage"] == 0, completion
                else:
                    assert completion["reward"] == 1e308, f"a fault became a reward: {completion}"
    for row in tiny_runs.results_of(run):
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        assert all(math.isfinite(value) for value in numbers.values()), numbers


def nothing_scored(lab: Lab, folder: Path, chance: random.Random) -> None:
    """Nothing was learnt: a pipeline must not take that for success."""
    (folder / "r.py").write_text("def f(prompt, response, reference):\n    return None\n")
    arguments = tiny_runs.grpo(lab.model, lab.data, folder / "run", steps=2, reward=f"{folder / 'r.py'}:f")
    finished = processes.run(arguments, folder / "log")
    assert_no_traceback(finished)
    assert finished.code != 0, f"no rollout was scored, and the exit code is 0: {finished}"
    assert "scored" in finished.output


# -- judges ------------------------------------------------------------------------------------------------------------

KEY = "planted-judge-key-71c2e55a"
Reply = Callable[["JudgeHandler"], None]


class JudgeHandler(http.server.BaseHTTPRequestHandler):
    """The first part of the path chooses what it does."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        try:
            JUDGES[self.path.split("/")[1]](self)
        except OSError:
            self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass

    def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def verdict(self, text: object, **usage: object) -> None:
        self.reply(json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode())

    def echo(self, status: int) -> None:
        self.reply(json.dumps({"error": {"message": f"bad key {self.headers['Authorization']}"}}).encode(), status)

    def drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(1000):
            self.wfile.write(b" ")
            time.sleep(0.05)

    def chunks(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc")

    def headers_without_end(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000)


JUDGES: Mapping[str, Reply] = {
    "401-echoes-the-key": lambda h: h.echo(401),
    "400-echoes-the-key": lambda h: h.echo(400),
    "500-echoes-the-key": lambda h: h.echo(500),
    "403": lambda h: h.reply(b"no", 403),
    "404": lambda h: h.reply(b"", 404),
    "429": lambda h: h.reply(b"", 429),
    "429-tomorrow": lambda h: h.reply(b"", 429, Retry_After="86400"),
    "429-nonsense": lambda h: h.reply(b"", 429, Retry_After="soon"),
    "429-before": lambda h: h.reply(b"", 429, Retry_After="-5"),
    "500": lambda h: h.reply(b"oops", 500),
    "503-huge-body": lambda h: h.reply(b"x" * 50_000_000, 503),
    "redirect-loop": lambda h: h.reply(b"", 302, Location=h.path),
    "redirect-to-a-file": lambda h: h.reply(b"", 302, Location="file:///etc/passwd"),
    "slow": lambda h: time.sleep(30),
    "drips": lambda h: h.drip(),
    "disconnects": lambda h: h.connection.close(),
    "empty": lambda h: h.reply(b""),
    "garbage": lambda h: h.reply(bytes(range(256)) * 40),
    "not-http": lambda h: h.wfile.write(b"\x00\x01\x02\r\n\r\n") and None,
    "wrong-length": lambda h: h.reply(b'{"choices": []}', Content_Length="999999"),
    "bad-chunks": lambda h: h.chunks(),
    "endless-headers": lambda h: h.headers_without_end(),
    "huge-body": lambda h: h.reply(b'{"choices": [{"message": {"content": "' + b"x" * 60_000_000 + b'"}}]}'),
    "deep-body": lambda h: h.reply(b"[" * 200_000),
    "long-number": lambda h: h.reply(b'{"choices": ' + b"9" * 5000 + b"}"),
    "gzip-that-is-none": lambda h: h.reply(b"abc", Content_Encoding="gzip"),
    "no-choices": lambda h: h.reply(b'{"choices": []}'),
    "null": lambda h: h.reply(b"null"),
    "list": lambda h: h.reply(b"[1]"),
    "no-content": lambda h: h.verdict(None),
    "content-is-a-number": lambda h: h.verdict(7),
    "no-score": lambda h: h.verdict("it is fine"),
    "score-nan": lambda h: h.verdict('{"score": NaN}'),
    "score-inf": lambda h: h.verdict('{"score": Infinity}'),
    "score-1e308": lambda h: h.verdict('{"score": 1e308}'),
    "score-text": lambda h: h.verdict('{"score": "ten"}'),
    "score-true": lambda h: h.verdict('{"score": true}'),
    "score-list": lambda h: h.verdict('{"score": [7]}'),
    "score-too-long": lambda h: h.verdict('{"score": ' + "9" * 5000 + "}"),
}
SHORT_JUDGES = ("401-echoes-the-key", "garbage", "disconnects", "score-nan")


def judge_address(lab: Lab) -> str:
    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            """A client that gives up is what these cases are about."""

    def make(_: Path) -> str:
        server = Server(("127.0.0.1", 0), JudgeHandler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        lab.open.callback(server.shutdown)
        return f"127.0.0.1:{server.server_port}"

    address: str = lab.shared("judge", make)
    return address


def faulty_judge(lab: Lab, name: str, folder: Path, chance: random.Random) -> None:
    samples = tiny_runs.write_rows(folder / "samples.jsonl", [{"prompt": "?", "response": "1", "reference": "1"}] * 3)
    command = ["rewards", "test", "--type", "judge", str(samples)]
    command += [f"base_url=http://{judge_address(lab)}/{name}/v1", "model=m", "api_key_env=FAULTS_JUDGE_KEY"]
    command += ["timeout_s=6", "request_timeout_s=1.5", "max_retries=1", "retry_base_s=0.01", "retry_max_s=0.02"]
    command += ["num_workers=3", f"usage_file={folder / 'usage.json'}"]
    rows, finished = scores_of(command, folder, FAULTS_JUDGE_KEY=KEY)
    for row in rows:
        assert row["reward"] is None, f"scored: {row}"
        assert row["error"], f"no reason: {row}"
    assert_no_traceback(finished)
    for file in folder.iterdir():
        assert KEY.encode() not in file.read_bytes(), f"the key is in {file.name}"
