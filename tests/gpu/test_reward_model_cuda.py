"""A reward model on a GPU: packed scores in bf16 are those of `transformers`, and the judge gives its memory back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tiny_models import byte_tokenizer
from tiny_reward_models import random_pairs, score_tokens, tiny_reward_model

from posttrain.environments import build_environments
from posttrain.models.attention_interface import attention_context
from posttrain.policy.packed import PackedRow
from posttrain.policy.reward_head import SequenceScores
from posttrain.types import Completion, Task


def test_packed_scores_in_bf16_are_close_to_those_of_a_cpu_in_fp32() -> None:
    pairs = random_pairs([50, 90, 1, 70, 40, 6], [70, 30, 120])
    expected = score_tokens(tiny_reward_model(head_dim=32), pairs).detach()
    model = tiny_reward_model(head_dim=32).to("cuda", torch.bfloat16)
    row = PackedRow.build(pairs, torch.device("cuda"), reads_own_token=True)
    with attention_context(row.attention):
        scores = SequenceScores(model)(row)
        scores.sum().backward()
    assert scores.dtype == torch.float32
    assert bool(torch.isfinite(model.score.weight.grad).all())
    torch.testing.assert_close(scores.cpu(), expected, rtol=0.1, atol=0.1)


def test_the_judge_scores_on_the_gpu_and_gives_its_memory_back(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tiny_reward_model(attention="eager", vocab_size=len(tokenizer), hidden_size=512).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    task = Task(0, "t:0", "?", (1,), messages=({"role": "user", "content": "?"},))
    answers = [Completion((1,), (0.0,), text, "stop") for text in ("yes", "no")]
    scores = {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for device in ("cpu", "cuda"):
        block = {"type": "reward_model", "model_name": str(tmp_path), "device": device, "precision": "float32"}
        environment = build_environments({"rm": block})
        scores[device] = [score.reward for score in environment.score([task] * 2, answers)]
        if device == "cuda":
            assert torch.cuda.memory_allocated() > before + 2**20
        environment.close()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**16
    assert scores["cuda"] == pytest.approx(scores["cpu"], rel=1e-2, abs=1e-2)
