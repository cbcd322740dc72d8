"""The planner's count of a training pass against the memory that a GPU held."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from posttrain.apps.plan.workload import SharedPrompt
from posttrain.config.policy import OptimizerConfig
from posttrain.models.attention_interface import attention_context
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.memory.layer_bytes import LayerBytes
from posttrain.policy.memory.model_shape import shape_of_config
from posttrain.policy.memory.settings import OptimizerSettings, RunSettings
from posttrain.policy.optimizer import make_optimizer
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
PROMPT, ANSWER = 256, 513


def batch_of(num_groups: int, group_size: int) -> TokenBatch:
    answers = num_groups * group_size
    return TokenBatch(
        prompts=tuple(torch.randint(3, 32000, (PROMPT,)) for _ in range(num_groups)),
        responses=tuple(torch.randint(3, 32000, (ANSWER,)) for _ in range(answers)),
        prompt_of=tuple(row // group_size for row in range(answers)),
        columns={"mask": torch.ones(answers * ANSWER)},
        num_tokens=float(answers * ANSWER),
        num_sequences=float(answers),
        num_computed_tokens=float(answers * ANSWER),
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("num_groups", "group_size"), [(16, 1), (3, 8)], ids=["alone", "shared prompts"])
@pytest.mark.parametrize("chunk", [None, 2048], ids=["one chunk of logits", "several"])
def test_the_peak_of_a_training_pass_is_predicted_within_15_percent(
    checkpointing: bool, num_groups: int, group_size: int, chunk: int | None
) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, **SIZES).to("cuda").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model, OptimizerConfig(kwargs={"lr": 1e-3}), None, 0)
    forward = TokenLogprobs(model, chunk)
    assert fuse_layers(forward.head.decoder, may_join=True) == 8
    row = PackedRow.build(batch_of(num_groups, group_size), torch.device("cuda"))

    def run() -> None:
        with attention_context(row.attention):
            forward(row, 1.0).sum().backward()
        optimizer.collect_gradients()

    run()  # gradients are there from now on, and kernels are compiled
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    measured = torch.cuda.max_memory_allocated() - before

    shape = shape_of_config("tiny", model.config.to_dict())
    settings = RunSettings(2, checkpointing, None, OptimizerSettings(), False, chunk, False, 1, None)
    layer = LayerBytes(shape, settings)
    counted = SharedPrompt(PROMPT, ANSWER, group_size).in_one_pass(num_groups, None)
    head = layer.head_backward(counted, accumulates=True)
    predicted = layer.kept(counted) + max(head, layer.layer_backward(counted))
    assert predicted == pytest.approx(measured, rel=0.15)
