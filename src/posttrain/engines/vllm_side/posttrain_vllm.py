"""The program of vLLM's process: owns a `vllm.LLM`, and does what posttrain asks for over a socket, one request at a time.

    python posttrain_vllm.py SOCKET_FD LIFELINE_FD WEIGHTS_FOLDER

A frame is a length of 4 bytes and JSON. The first frame has the arguments of `vllm.LLM`. Every request gets one last frame with
`done` or `error`; sampling sends others before it: finished answers as they come, and a sign of life every second.

All requests of a call are added before its first step, so without vLLM's second process the same call computes the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any, ClassVar

_LENGTH = struct.Struct("<I")
_SIGN_OF_LIFE_S = 1.0


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, **fields: object) -> None:
        data = json.dumps(fields).encode()
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return dict(json.loads(self._exactly(length)))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._connection.recv(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


class Lease:
    """The order in which weights may change: paused and idle, awake, updated, cache emptied; only then are answers sampled."""

    # What may be done in which states, and the state after it.
    _ORDER: ClassVar = {
        "pause": (("sampling", "clean", "asleep"), "paused"),
        "update": (("paused",), "updating"),
        "bucket": (("updating",), "updating"),
        "finish": (("updating",), "updated"),
        "clean": (("updated",), "clean"),
        "resume": (("clean",), "sampling"),
        "sample": (("sampling",), "sampling"),
        "sleep": (("sampling", "clean"), "asleep"),
        "restore": (("asleep",), "clean"),
    }

    def __init__(self) -> None:
        self.state = "sampling"

    def take(self, action: str) -> None:
        allowed, after = self._ORDER[action]
        if self.state not in allowed:
            raise RuntimeError(f"`{action}` in state `{self.state}`: it is allowed in {' or '.join(allowed)}")
        self.state = after


class LeasedEngine:
    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        self._lease = Lease()
        self._asleep: set[str] = set()  # memory that is not there: weights, kv_cache
        self._keeps_weights = False  # asleep, with a copy of them in host memory
        self._shapes: dict[str, list[int]] = {}
        self._adapter: Any = None
        self._num_calls = 0
        self.llm = vllm.LLM(**options)

    # -- weights -------------------------------------------------------------------------------------------------------

    def begin_update(self, shapes: dict[str, list[int]]) -> None:
        self._lease.take("pause")
        if self.llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("requests are running: weights must not change under them")
        self._wake("weights")
        self._keeps_weights = False
        if shapes != self._shapes:
            self.llm.init_weight_transfer_engine({"init_info": {"shapes": shapes}})
            self._shapes = shapes
        self._lease.take("update")
        self.llm.start_weight_update()

    def bucket(self, bucket: dict[str, Any]) -> None:
        self._lease.take("bucket")
        self.llm.update_weights({"update_info": bucket})

    def end_update(self, version: int) -> str | None:
        """What was wrong; None if every worker holds `version` and no cached prefix is left of an earlier one."""
        self._lease.take("finish")
        self.llm.finish_weight_update()
        states = self.llm.collective_rpc("posttrain_state")
        wrong = next((error or f"holds version {held}" for held, error in states if held != version), None)
        self._lease.take("clean")
        if wrong is None and not self.llm.reset_prefix_cache():
            wrong = "the prefix cache of the earlier weights could not be emptied"
        if wrong is not None:
            self._lease.state = "asleep"  # nothing to sample from; another update may follow
        return wrong

    def adapter(self, folder: str, number: int) -> None:
        """A new number for each version: vLLM would go on with the old adapter under a known one."""
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest(f"version-{number}", number, folder)

    # -- memory --------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Frees GPU memory. Level 1 keeps the weights in host memory, level 2 forgets them."""
        self._lease.take("sleep")
        self._wake("kv_cache")  # vLLM ignores the request while a part of it sleeps
        self.llm.sleep(level=level)
        self._asleep, self._keeps_weights = {"weights", "kv_cache"}, level == 1

    def resume(self) -> None:
        """Ready to sample: all memory is there."""
        if self._lease.state == "sampling":
            return
        if self._keeps_weights:
            self._lease.take("restore")  # they come back, and vLLM empties the cache when it goes to sleep
        self._lease.take("resume")
        self._keeps_weights = False
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, what: str) -> None:
        if what in self._asleep:
            self.llm.wake_up(tags=[what])
            self._asleep.discard(what)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def generate(self, channel: Channel, requests: list[Any], sampling: dict[str, Any], asks: bool) -> list[Any]:
        """Answers to `requests` (prompt, seed, longest answer). With `asks` the other side says after finished answers whether
        to go on; the rest is returned as it is then."""
        self._lease.take("sample")
        kinds = self._vllm.sampling_params.RequestOutputKind
        engine = self.llm.llm_engine
        self._num_calls += 1
        answers: dict[str, list[Any]] = {}  # by request: place, token ids, log-probabilities
        for place, (prompt, seed, max_tokens) in enumerate(requests):
            name = f"{self._num_calls}-{place}"
            parameters = self._vllm.SamplingParams(
                **sampling, seed=seed, max_tokens=max_tokens, output_kind=kinds.DELTA if asks else kinds.FINAL_ONLY
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters, lora_request=self._adapter)
            answers[name] = [place, [], []]
        told_at = time.monotonic()
        while engine.has_unfinished_requests():
            finished = []
            for output in engine.step():
                answer, new = answers[output.request_id], output.outputs[0]
                answer[1].extend(new.token_ids)
                answer[2].extend(found[token].logprob for token, found in zip(new.token_ids, new.logprobs, strict=True))
                if output.finished:
                    finished.append([*answers.pop(output.request_id), new.finish_reason])
            if not finished and time.monotonic() < told_at + _SIGN_OF_LIFE_S:
                continue
            channel.send(finished=finished)
            told_at = time.monotonic()
            if asks and finished and not channel.receive()["go_on"]:
                engine.abort_request(list(answers))
                break
        return list(answers.values())


def serve(channel: Channel) -> None:
    setup = channel.receive()
    try:
        engine = LeasedEngine(setup["options"])
        import vllm

        channel.send(done={"version": vllm.__version__})
    except Exception as error:
        channel.send(error=_error_text(error))
        return
    while True:
        request = channel.receive()
        operation = request.pop("operation")
        try:
            if operation == "generate":
                channel.send(done=engine.generate(channel, **request))
            else:
                channel.send(done=getattr(engine, operation)(**request))
        except OSError:
            raise
        except Exception as error:
            channel.send(error=_error_text(error))


def _error_text(error: Exception) -> str:
    traceback.print_exception(error)  # for the log
    return f"{type(error).__name__}: {error}"


def _end_with(lifeline: int, weights: str) -> None:
    """This process and those that vLLM started end with the trainer, whatever they are doing, and so do weights in memory."""
    os.read(lifeline, 1)
    shutil.rmtree(weights, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[2]), sys.argv[3]), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer is done
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    shutil.rmtree(sys.argv[3], ignore_errors=True)
