"""A server over a tiny model, in this process unless the options say otherwise, on a free port."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import byte_tokenizer, tiny_model

from posttrain.apps.serve.engine_host import EngineThread
from posttrain.apps.serve.listener import listen
from posttrain.apps.serve.loading import build_service
from posttrain.apps.serve.options import EngineOptions, ServeOptions
from posttrain.apps.serve.server import DrainingServer
from posttrain.apps.serve.service import Service
from posttrain.engines.native.session import GenerationSession, SessionRequest
from posttrain.types import Sampling

VOCAB_SIZE = 260  # that of the tokenizer of bytes
MODEL_LENGTH = 1024  # of which the server uses less
ENGINE = EngineOptions(precision="float32", device="cpu", max_model_len=256, max_batch_size=8, kv_cache_gib=0.01)


def save_model(folder: Path, seed: int = 0) -> Path:
    """A random Llama that answers in random bytes, as a Hugging Face folder."""
    tokenizer = byte_tokenizer()
    model = tiny_model(
        "llama",
        seed=seed,
        vocab_size=VOCAB_SIZE,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=MODEL_LENGTH,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, seed: int) -> Path:
    """An adapter that changes the answers."""
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(tiny_model("llama", vocab_size=VOCAB_SIZE), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


class RunningServer:
    def __init__(self, service: Service, url: str, event_loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.service = service
        self.url = url
        self._event_loop = event_loop

    @property
    def sessions(self) -> list[GenerationSession]:
        """Of a server in one process: those that the engine's thread steps."""
        host = self.service.engine.host
        assert isinstance(host, EngineThread)
        return host.loop.sessions

    def wait_until(self, condition: Callable[[], Any], limit_s: float = 20.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.005)

    def wait_until_empty(self) -> None:
        """No request is inside, and the engine takes no further step: another model may run in this process.

        The counts in the server are those of the last report. A client that leaves before the first report about its
        request leaves counts of zero and a running step behind. So the engine is asked first.
        """
        self.wait_until(lambda: not self.service.num_inside)
        self._wait_for_report()
        left = [session.counts for session in self.service.engine.sessions]
        assert all(counts[:3] == (0, 0, 0) for counts in left), f"no request is inside, and the engine holds {left}"

    def _wait_for_report(self, limit_s: float = 20.0) -> None:
        """Wait for a report that the engine sends after all messages that the server has sent until now.

        Messages are handled in order, and a request with an empty prompt is reported as failed without a step.
        """
        assert self._event_loop is not None, "only for a server that `running` has started"
        engine, reported = self.service.engine, threading.Event()
        refused = SessionRequest(f"refused-{uuid.uuid4().hex}", (), Sampling(1), seed=0)
        receiver = SimpleNamespace(receive=lambda tokens: None, fail=lambda message: reported.set())
        self._event_loop.call_soon_threadsafe(engine.submit, engine.sessions[0], [refused], receiver)
        assert reported.wait(limit_s), "the engine does not report"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is sampled inside, so that requests which are running or queued remain so."""
        may_step = threading.Event()
        for session in self.sessions:
            session.step = partial(_once, may_step, session.step)  # type: ignore[method-assign]
        try:
            yield
        finally:
            may_step.set()

    def slow_down(self, seconds: float) -> None:
        """Every step takes this much longer, so that a tiny model does not finish before the test can act."""
        for session in self.sessions:
            session.step = partial(_after, seconds, session.step)  # type: ignore[method-assign]

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0


def _once(may_step: threading.Event, step: Callable[[], Any]) -> Any:
    may_step.wait()
    return step()


def _after(seconds: float, step: Callable[[], Any]) -> Any:
    time.sleep(seconds)
    return step()


@contextmanager
def running(options: ServeOptions, printed: list[str] | None = None) -> Iterator[RunningServer]:
    service = build_service(options, (printed if printed is not None else []).append)
    with listen("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        event_loops: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
        server = DrainingServer(
            service, "127.0.0.1", port, 5.0, on_ready=lambda: event_loops.put(asyncio.get_running_loop())
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        event_loop = event_loops.get(timeout=20)
        try:
            yield RunningServer(service, f"http://127.0.0.1:{port}", event_loop)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
    assert not thread.is_alive()


def options_for(model: Path, **changes: Any) -> ServeOptions:
    options = ServeOptions(str(model), served_name="tiny", engine=ENGINE)
    return replace(options, **changes)
