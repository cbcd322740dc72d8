"""A server over a model of some ten thousand parameters, in this process unless the options say otherwise, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import byte_tokenizer, tiny_model

from posttrain.engines.native.session import GenerationSession
from posttrain.serve.engine_host import EngineThread
from posttrain.serve.listener import listen
from posttrain.serve.loading import build_service
from posttrain.serve.options import EngineOptions, ServeOptions
from posttrain.serve.server import DrainingServer
from posttrain.serve.service import Service

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
    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.url = url

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
        sessions = self.service.engine.sessions
        self.wait_until(lambda: not self.service.num_inside and all(one.counts[:3] == (0, 0, 0) for one in sessions))

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
        server = DrainingServer(service, "127.0.0.1", port, drain_timeout_s=5.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.005)
        try:
            yield RunningServer(service, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
    assert not thread.is_alive()


def options_for(model: Path, **changes: Any) -> ServeOptions:
    options = ServeOptions(str(model), served_name="tiny", engine=ENGINE)
    return replace(options, **changes)
