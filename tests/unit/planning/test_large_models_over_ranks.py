"""Llama 8B and 70B and Qwen 32B on 8 x 8 GPUs, without the GPUs: a process group that sends nothing, tensors without memory.

What one rank stores of the weights, and what it holds while sampling, is what the planner counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from posttrain.config import load_config
from posttrain.config.policy import DtensorConfig
from posttrain.models.attention_interface import ATTENTION
from posttrain.policy import tensor_parallel
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.memory.model_shape import shape_of_config
from posttrain.policy.memory.rank import RankMemory
from posttrain.policy.memory.settings import run_settings
from posttrain.policy.parallel import Mesh, local_part, shard

WORLD = 64
META = torch.device("meta")
BIG = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODELS: dict[str, PretrainedConfig] = {
    "Llama 8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **BIG
    ),
    "Llama 70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **BIG
    ),
    "Qwen 32B": Qwen3Config(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        head_dim=128,
        **{**BIG, "vocab_size": 151936},
    ),
}
PLANS = [
    {"tensor_parallel_size": 1},
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 4, "context_parallel_size": 2},
    {"tensor_parallel_size": 2, "dp_replicate_size": 4},
]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(f"{name[:-5]}={size}" for name, size in plan.items()))
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_what_the_planner_counts(name: str, plan: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors without memory have no values to compare.
    monkeypatch.setattr(tensor_parallel, "_trial", lambda head: None)
    monkeypatch.setattr(tensor_parallel, "_compare", lambda head, config, expected: None)
    with META:
        model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=ATTENTION, dtype=torch.bfloat16)
    root = TokenLogprobs(model, None)
    axes = Mesh.over(WORLD, DtensorConfig(**plan)).axes(torch.device("cpu"))
    if axes.layers is not None:
        tensor_parallel.split_over_ranks(model, root.head, axes.layers, META)
    split = num_bytes(model)  # what sampling gathers
    shard(root, list(root.head.decoder.layers), axes.parameters)
    assert sum(isinstance(module, FSDPModule) for module in root.modules()) == MODELS[name].num_hidden_layers + 1

    memory = planned(MODELS[name], plan)
    assert num_bytes(model) == pytest.approx(memory.resident()["weights"], rel=0.05)
    assert split == pytest.approx(memory.while_sampling()["whole weights"], rel=0.05)


def num_bytes(model: torch.nn.Module) -> int:
    return sum(local_part(parameter).nbytes for parameter in set(model.parameters()))


def planned(config: PretrainedConfig, plan: dict[str, int]) -> RankMemory:
    words = ["cluster.num_nodes=8", "cluster.gpus_per_node=8", "policy.precision=bfloat16"]
    words += [f"policy.dtensor_cfg.{name}={size}" for name, size in plan.items()]
    words += ["data.train={dataset_name: ResponseDataset, data_path: none.jsonl}", "data.default.env_name=math"]
    policy: Any = load_config("grpo", None, words).config.policy
    return RankMemory(
        shape_of_config("model", config.to_dict()), run_settings(policy, has_reference=False, ranks=WORLD)
    )
