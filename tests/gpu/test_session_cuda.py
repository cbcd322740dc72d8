"""A session on a GPU: what the engine gives each request alone, with different settings and adapters side by side."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.session import GenerationSession, SessionRequest, TokenEvent
from posttrain.types import NoiseKey, Sampling, Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENIZER = byte_tokenizer()
SETTINGS = NativeSettings(page_size=4, max_batch_size=6, max_prefill_tokens=32, max_total_tokens=64, kv_cache_gib=0.01)
NAMES = ("", "one", "two")


def requests() -> list[SessionRequest]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(18):
        length = 1 + int(torch.randint(0, 20, (1,), generator=generator))
        prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        sampling = Sampling(
            4 + index, temperature=(0.0, 0.7, 1.0)[index % 3], top_p=(1.0, 0.9)[index % 2], ignore_eos=True
        )
        found.append(
            SessionRequest(f"r{index}", tuple(prompt), sampling, seed=index, num_samples=1 + index % 2,
                           adapter=NAMES[(index // 3) % 3])
        )  # fmt: skip
    return found


def test_session_equals_the_engine_alone() -> None:
    """fp32, so that the order of a sum changes no draw. Adapters are on the model before the engine sees it."""
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model: Any = get_peft_model(tiny_model("llama"), config, adapter_name="one")
    model.add_adapter("two", config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model = model.cuda()

    def activate(name: str) -> None:
        if name:
            model.base_model.enable_adapter_layers()
            model.base_model.set_adapter(name)
        else:
            model.base_model.disable_adapter_layers()

    engine = NativeEngine(model, TOKENIZER, SETTINGS)
    expected: dict[tuple[str, int], tuple[int, ...]] = {}
    for name in NAMES:
        activate(name)
        for request in (request for request in requests() if request.adapter == name):
            task = Task(0, request.id, "", request.prompt_ids)
            [found] = engine.generate([task], request.num_samples, request.sampling, NoiseKey(request.seed, 0))
            expected |= {(request.id, index): completion.token_ids for index, completion in enumerate(found)}
        engine.release()  # its graphs were captured with this adapter

    session = GenerationSession(engine, activate)
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    waiting = requests()
    while waiting or session.unfinished:
        if waiting:
            session.add(waiting.pop(0))
        for event in session.step():
            assert isinstance(event, TokenEvent)
            answers[event.request_id, event.sample].append(event.token_id)
    assert {key: tuple(ids) for key, ids in answers.items()} == expected
    assert session.pages_in_use == 0
