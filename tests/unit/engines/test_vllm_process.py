"""vLLM's process, with short programs in its place: what is said when it ends, hangs, refuses or cannot start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from posttrain.engines.vllm.process import SIDE, Deadlines, VllmError, VllmLostError, VllmProcess
from posttrain.errors import InputError, RankLostError

HEAD = f"""
import os, signal, socket, sys, time
sys.path.insert(0, {str(SIDE)!r})
from posttrain_vllm import Channel
channel = Channel(int(sys.argv[2]))
options = channel.receive()["options"]
print("a line of the log", flush=True)
"""
READY = HEAD + 'channel.send(done={"version": "0.25.0"})\nrequest = channel.receive()\n'


def start(folder: Path, text: str, *, start_s: float = 60.0, answer_s: float = 60.0) -> VllmProcess:
    program = folder / "program.py"
    program.write_text(text)
    limits = Deadlines(start_s, answer_s)
    return VllmProcess(sys.executable, {"model": "m"}, {"A": "1"}, limits, folder / "weights", program)


def test_an_answer_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    process = start(
        tmp_path, READY + 'channel.send(done=[request, os.environ["A"], os.environ["PYTHONPATH"], options])\n'
    )
    assert process.version == "0.25.0"
    request, variable, path, options = process.call("sleep", level=2)
    assert request == {"operation": "sleep", "level": 2}
    assert (variable, path, options) == ("1", str(SIDE), {"model": "m"})
    process.close()


def test_nothing_of_this_environment_reaches_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    process = start(tmp_path, READY + "channel.send(done=dict(os.environ))\n")
    theirs = process.call("x")
    assert theirs["PYTHONPATH"] == str(SIDE)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in theirs
    process.close()


def test_a_process_that_is_killed_is_named_with_its_signal_and_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, READY + "os.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(
        VllmLostError, match=rf"process {process.pid}\) ended during `generate`, signal 9 \(SIGKILL\)"
    ) as caught:
        process.call("generate")
    assert "a line of the log" in str(caught.value)


def test_a_process_that_hangs_is_named_at_its_deadline_and_ended(tmp_path: Path) -> None:
    process = start(tmp_path, READY + "time.sleep(3600)\n", answer_s=0.2)
    with pytest.raises(VllmLostError, match="no sign of life for 0 s during `bucket`"):
        process.call("bucket")
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_signs_of_life_extend_the_deadline_of_sampling(tmp_path: Path) -> None:
    """Each frame has the whole deadline: a long call of many frames is not a hang."""
    body = "for n in range(3):\n    channel.send(finished=[[n]])\nchannel.send(done=[])\n"
    process = start(tmp_path, READY + body)
    answers = process.stream("generate")
    seen = []
    while answers.rest is None:
        seen += answers.next_finished()
    assert seen == [[0], [1], [2]]
    process.close()


def test_an_error_of_vllm_is_passed_on(tmp_path: Path) -> None:
    process = start(tmp_path, READY + 'channel.send(error="RuntimeError: `sample` in state `asleep`")\n')
    with pytest.raises(VllmError, match="failed during `resume`: RuntimeError: `sample` in state `asleep`") as caught:
        process.call("resume")
    assert not isinstance(caught.value, RankLostError), "another attempt would fail too"


def test_a_start_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(VllmError, match="failed during `start`: ValueError: no such model"):
        start(tmp_path, HEAD + 'channel.send(error="ValueError: no such model")\n')
    with pytest.raises(VllmError, match="ended during `start`, exit code 3") as caught:
        start(tmp_path, HEAD + "sys.exit(3)\n")
    assert not isinstance(caught.value, RankLostError)
    with pytest.raises(VllmError, match="no sign of life for 0 s during `start`"):
        start(tmp_path, HEAD + "time.sleep(3600)\n", start_s=0.2)


def test_an_interpreter_that_does_not_exist_is_an_error_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vllm_cfg.python = /no/such/python: cannot be started"):
        VllmProcess("/no/such/python", {}, {}, Deadlines(1, 1), tmp_path)


def test_an_environment_without_vllm_is_an_error_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"vllm_cfg.python = {sys.executable}: .* no vLLM 0.25 or newer"):
        start(tmp_path, HEAD + "channel.send(error=\"ModuleNotFoundError: No module named 'vllm'\")\n")


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Its lifeline is a pipe: a thread sees the other end close. Weights do not stay in memory."""
    program = HEAD.partition("channel =")[0] + (
        "import posttrain_vllm\n"
        "def serve(channel):\n"
        "    channel.receive(), channel.send(done={'version': '0.25.0'})\n"
        "    channel.receive(), channel.send(done=None), time.sleep(3600)\n"
        "posttrain_vllm.serve = serve\n"
        "posttrain_vllm.main(sys.argv[1], *map(int, sys.argv[2:4]))\n"
    )
    (tmp_path / "weights" / "adapter-1").mkdir(parents=True)
    process = start(tmp_path, program)
    process.call("x")
    process._process.hang_up()
    process._process.wait(60)
    assert process._process.returncode == -9
    assert not (tmp_path / "weights").exists()
    process._end.detach()
    process._socket.close()
