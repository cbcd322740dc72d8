"""A pass of Llama 8B and 70B and Qwen 32B on 8 x 8 GPUs, without the GPUs (tests/large_models.py); a few layers of
each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from large_models import CPU, MODELS, TOKENS, WORLD, Plan, fake_ranks, model_config, num_bytes, run_plan
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from posttrain.config import load_config
from posttrain.config.policy import DtensorConfig
from posttrain.models.attention_interface import ATTENTION
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.memory.model_shape import NAMED_CONFIGS, find_shape, shape_of_config
from posttrain.policy.memory.peak_memory import RankMemory
from posttrain.policy.memory.settings import run_settings
from posttrain.policy.parallel.experts import ExpertGroup
from posttrain.policy.parallel.fsdp import shard
from posttrain.policy.parallel.mesh import Mesh

LAYERS = 2
PLANS: list[Plan] = [(1, 1, 1), (8, 1, 1), (4, 2, 1), (2, 1, 8), (1, 8, 8)]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks():
        yield


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "tp{}-cp{}-replicas{}".format(*plan))
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_and_sends_what_is_counted(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, activations and gradients by the planner; collectives by hand."""
    config = model_config(name, LAYERS)
    found = run_plan(config, plan, monkeypatch)
    assert found.largest_error < 0.05, found

    tp, cp, replicas = plan
    shape = shape_of_config(name, config.to_dict())
    weights, tables = shape.num_weights / tp, 2 * shape.head_products / tp
    shards = WORLD // (tp * replicas)
    stream = 4 * shape.hidden * TOKENS / cp  # in fp32
    heads = 2 * (shape.query_width + shape.kv_width) / tp * TOKENS / cp  # queries, keys, values and their output
    expected = {
        "gathered": 2 * (tables + 2 * (weights - tables)) / shards,  # layers for each direction, tables once
        "scattered": 4 * weights,
        # two sums for each layer and direction, those of embedding and head; gradients between replicas
        "summed": (4 * LAYERS + 2) * stream * (tp > 1) + 4 * weights / shards * (replicas > 1),
        "exchanged": 2 * 2 * heads * LAYERS * (cp > 1),
    }
    if shards == 1:
        expected |= {"gathered": 0, "scattered": 0}
    for kind, size in expected.items():
        assert found.sent[kind] == pytest.approx(size, rel=0.01, abs=2**20), kind


@pytest.mark.parametrize("size", [8, 64])
def test_a_rank_that_shares_the_experts_of_qwen_30b_holds_what_is_counted(size: int) -> None:
    """Without a pass: how many rows travel depends on their values."""
    name, depth = "qwen-30b-a3b", {"num_hidden_layers": LAYERS}
    sizes = {key: value for key, value in NAMED_CONFIGS[name].items() if key != "model_type"} | depth
    axes = Mesh.over(WORLD, DtensorConfig(expert_parallel_size=size)).axes(CPU)
    assert axes.experts is not None
    assert axes.parameters is not None
    with FakeTensorMode():
        config = Qwen3MoeConfig(**sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
        root = TokenLogprobs(model, TOKENS)
        experts = ExpertGroup(axes.experts).split(model, root.head, CPU)
        whole = num_bytes(model)
    shard(root, list(root.head.layers), axes.parameters, experts, axes.expert_parameters)
    words = ["cluster.num_nodes=8", "cluster.gpus_per_node=8", f"policy.dtensor_cfg.expert_parallel_size={size}"]
    words += ["data.train={dataset_name: ResponseDataset, data_path: none.jsonl}", "data.default.env_name=math"]
    settings = run_settings(load_config("grpo", None, words).config.policy, has_reference=False, ranks=WORLD)
    memory = RankMemory(find_shape(name, depth), settings)
    assert whole == pytest.approx(memory.while_sampling()["whole weights"], rel=0.01)
    assert num_bytes(model) == pytest.approx(memory.resident()["weights"], rel=0.01)
