"""The program of vLLM's process: owns a `vllm.LLM` and serves posttrain's requests over a socket, one at a time.

    python posttrain_vllm.py WEIGHTS_FOLDER SOCKET_FD LIFELINE_FD

Frames hold JSON. The first frame has the arguments of `vllm.LLM`. Every request gets one last frame with
`done` or `error`; sampling sends others before it: finished answers as they arrive, and a heartbeat every second.

All requests of a call are added before its first step, so without vLLM's second process calls are reproducible.
"""

from __future__ import annotations

import base64
import contextlib
import json
import runpy
import shutil
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from posttrain import processes
else:
    processes = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "processes.py")))

_SIGN_OF_LIFE_S = 1.0


class Channel:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, **fields: object) -> None:
        processes.write_frame(self._descriptor, json.dumps(fields).encode())

    def receive(self) -> dict[str, Any]:
        data = processes.read_frame(self._descriptor)
        if data is None:
            raise EOFError
        return dict(json.loads(data))


class Lease:
    """The order in which weights may change: paused and idle, awake, updated, cache emptied; only then are answers
    sampled.
    """

    # Allowed states of each operation, and the state after it.
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
        self._asleep: set[str] = set()  # memory that is released: weights, kv_cache
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
        """Returns the error; None if every worker holds `version` and the prefix cache is clear of earlier versions."""
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
        """A new id for each version: vLLM keeps the old adapter under a known id."""
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest(f"version-{number}", number, folder)

    # -- memory --------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Frees GPU memory. Level 1 keeps the weights in host memory, level 2 drops them."""
        self._lease.take("sleep")
        self._wake("kv_cache")  # vLLM ignores the request while a part of it sleeps
        self.llm.sleep(level=level)
        self._asleep, self._keeps_weights = {"weights", "kv_cache"}, level == 1

    def resume(self) -> None:
        """Restore all memory, so that sampling can start."""
        if self._lease.state == "sampling":
            return
        if self._keeps_weights:
            self._lease.take("restore")  # weights are restored, and vLLM clears its prefix cache on sleep
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
        """Answers to `requests` (prompt, seed, longest answer). With `asks`, the client decides after finished answers
        whether to continue; if not, unfinished answers are returned as they are.
        """
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
                    routes = _packed(getattr(new, "routed_experts", None))
                    finished.append([*answers.pop(output.request_id), new.finish_reason, routes])
            if not finished and time.monotonic() < told_at + _SIGN_OF_LIFE_S:
                continue
            channel.send(finished=finished)
            told_at = time.monotonic()
            if asks and finished and not channel.receive()["go_on"]:
                engine.abort_request(list(answers))
                break
        return list(answers.values())


def _packed(experts: Any) -> list[Any] | None:
    """An array of integers as its shape, its type and its bytes."""
    return None if experts is None else [
        list(experts.shape), experts.dtype.name, base64.b64encode(experts.tobytes()).decode()
    ]  # fmt: skip


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


def main(weights: str, connection: int, lifeline: int) -> None:
    def remove_weights() -> None:  # they are in shared memory
        shutil.rmtree(weights, ignore_errors=True)

    processes.die_on_hangup(lifeline, remove_weights)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer is done
        serve(Channel(connection))
    remove_weights()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
