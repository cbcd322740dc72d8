"""Run with TRITON_INTERPRET=1: bytes that a forward pass of a tiny model keeps for its backward pass, beside the
planner's count.

Prints one JSON object per case. Tensors that only the CPU's attention needs (its mask, a second copy of its output) are
named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tiny_models import tiny_model
from torch import Tensor

from posttrain.apps.plan.workload import SharedPrompt
from posttrain.config import LoraConfig
from posttrain.models.attention_interface import attention_context
from posttrain.models.lora import add_lora
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.memory.layer_bytes import LayerBytes
from posttrain.policy.memory.model_shape import shape_of_config
from posttrain.policy.memory.settings import OptimizerSettings, RunSettings
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch

ANSWER, CHUNK, RANK = 9, 4, 4


def measure(family: str, lora: bool) -> dict[str, object]:
    model = tiny_model(family, dtype=torch.bfloat16)
    shape = shape_of_config(family, model.config.to_dict())
    adapted = add_lora(model, LoraConfig(enabled=True, dim=RANK), 0) if lora else model
    forward = TokenLogprobs(adapted.train(), CHUNK)  # more than one chunk: no logits are kept
    num_fused = fuse_layers(forward.head.decoder, may_join=True)
    batch = TokenBatch(
        (torch.zeros(1, dtype=torch.long),), (torch.ones(ANSWER, dtype=torch.long),), (0,),
        {"mask": torch.ones(ANSWER)}, 1.0, 1.0, 1.0,
    )  # fmt: skip
    row = PackedRow.build(batch, torch.device("cpu"))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in adapted.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        is_mask = tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] == row.num_tokens
        if place not in parameters and not is_mask and tensor.dtype != torch.long:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), attention_context(row.attention):
        forward(row, 1.0)
    settings = RunSettings(2, False, RANK if lora else None, OptimizerSettings(), False, CHUNK, False, 1, None)
    counted = LayerBytes(shape, settings).kept(SharedPrompt(1, ANSWER, 1).in_one_pass(1, None))
    return {
        "case": f"{family}{' with LoRA' if lora else ''}",
        "num_fused": num_fused,
        "kept": sum(tensor.untyped_storage().nbytes() for tensor in kept.values()),
        "second_outputs": shape.layers * 2 * shape.query_width * row.num_tokens,
        "counted": counted,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in (("llama", False), ("llama", True), ("qwen3", False)):
        print(json.dumps(measure(*one)))
