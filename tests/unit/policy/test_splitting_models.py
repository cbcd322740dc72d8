"""Which models may be split over ranks, and what the mesh of ranks makes of sizes. What split models compute is in
`tests/invariants/test_parallel_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import tiny_model

from posttrain.config import load_config
from posttrain.config.policy import DtensorConfig
from posttrain.errors import InputError
from posttrain.policy.head import OutputHead
from posttrain.policy.memory.model_shape import find_shape, shape_of_config
from posttrain.policy.memory.peak_memory import RankMemory
from posttrain.policy.memory.settings import run_settings
from posttrain.policy.parallel.experts import ExpertGroup
from posttrain.policy.parallel.mesh import Mesh
from posttrain.policy.parallel.tensor import ENGINE_FIELD, split_over_ranks

CPU = torch.device("cpu")


def ranks(size: int) -> Any:
    """A mesh that can be asked for its size alone."""
    return cast(Any, SimpleNamespace(size=lambda: size))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "qwen3-moe",
            "the family qwen3_moe, which has experts, is split in ways that posttrain does not implement .*experts",
        ),
        ("mixtral", "the family mixtral, which has experts"),
        (
            "phi3",
            r"the family phi3 is split in ways that posttrain does not implement \(colwise_gather_output",
        ),
    ],
)
def test_families_whose_plan_is_not_implemented_are_refused_by_name(family: str, message: str) -> None:
    model = tiny_model(family)
    with pytest.raises(InputError, match=f"tensor_parallel_size: {message}.*set it to 1"):
        split_over_ranks(model, OutputHead(model), ranks(2), CPU)


def test_a_family_without_a_plan_is_refused() -> None:
    model = tiny_model()
    model.config.base_model_tp_plan = None
    with pytest.raises(InputError, match="transformers has no plan for the attention of the family llama"):
        split_over_ranks(model, OutputHead(model), ranks(2), CPU)


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (4, {}, "= 4 does not divide the model's num_key_value_heads = 2"),
        (3, {}, "= 3 does not divide the model's num_attention_heads = 4"),
        (2, {"intermediate_size": 47}, "intermediate_size = 47"),
    ],
)
def test_sizes_of_the_model_that_cannot_be_split_are_named(size: int, settings: dict[str, int], message: str) -> None:
    model = tiny_model(**settings)
    with pytest.raises(InputError, match=message):
        split_over_ranks(model, OutputHead(model), ranks(size), CPU)
    with pytest.raises(InputError, match=f"^policy.generation.vllm_cfg.tensor_parallel_size.*{message}"):
        split_over_ranks(model, OutputHead(model), ranks(size), CPU, ENGINE_FIELD)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen3-moe", 3, r"expert_parallel_size = 3 does not divide the 4 experts of model.layers.0.mlp.experts"),
        ("llama", 2, "expert_parallel_size = 2: the family llama has no experts"),
    ],
)
def test_experts_that_cannot_be_shared_are_named(family: str, size: int, message: str) -> None:
    model = tiny_model(family)
    with pytest.raises(InputError, match=message):
        ExpertGroup(cast(Any, SimpleNamespace(size=lambda dim: size))).split(model, OutputHead(model), CPU)


def test_ranks_that_share_rows_or_layers_have_the_same_data() -> None:
    mesh = Mesh.over(16, DtensorConfig(tensor_parallel_size=2, context_parallel_size=2, dp_replicate_size=2))
    assert (mesh.dp, mesh.cp, mesh.tp, mesh.replicas, mesh.size) == (4, 2, 2, 2, 16)
    assert [mesh.dp_index(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.num_shards == 8, "gradients are averaged over all that have tokens of their own"


def test_ranks_that_share_rows_sample_different_prompts() -> None:
    mesh = Mesh(dp=2, cp=2, tp=2).for_sampling
    assert [mesh.dp_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.one_per_shard(range(8)) == [0, 2, 4, 6]


def test_a_rank_that_shares_layers_is_counted_with_its_part_of_the_weights_while_sampling() -> None:
    config = tiny_model().config.to_dict()
    found = []
    for size in (1, 8):
        words = ["cluster.gpus_per_node=8", f"policy.dtensor_cfg.tensor_parallel_size={size}"]
        words += ["data.train={dataset_name: ResponseDataset, data_path: none.jsonl}", "data.default.env_name=math"]
        policy = load_config("grpo", None, words).config.policy
        memory = RankMemory(shape_of_config("tiny", config), run_settings(policy, has_reference=False, ranks=8))
        found.append(memory.while_sampling()["whole weights"])
    assert found[1] == found[0] / 8


def test_a_rank_that_shares_experts_is_counted_with_its_share_of_them() -> None:
    shape, found = find_shape("qwen-30b-a3b"), []
    assert shape.counted is not None
    for size in (1, 4, 8):
        words = ["cluster.gpus_per_node=8", f"policy.dtensor_cfg.expert_parallel_size={size}"]
        words += ["data.train={dataset_name: ResponseDataset, data_path: none.jsonl}", "data.default.env_name=math"]
        policy = load_config("grpo", None, words).config.policy
        found.append(RankMemory(shape, run_settings(policy, has_reference=False, ranks=8)))
    whole = [memory.while_sampling()["whole weights"] for memory in found]
    of_experts = 2 * shape.counted.expert_weights  # bf16
    assert whole == pytest.approx([2 * shape.num_weights - of_experts * share for share in (0, 3 / 4, 7 / 8)])
    assert whole[2] < 0.18 * whole[0]
    gathered = [memory.gathered_weights()["gathered layers"] for memory in found]
    assert gathered[0] - gathered[1] == pytest.approx(2 * of_experts * 3 / 4 / shape.layers)
    assert gathered[0] - gathered[2] == pytest.approx(2 * of_experts / shape.layers), "theirs are there already"
    assert [memory.captures_graphs for memory in found] == [True, False, False]


def test_one_rank_has_no_process_groups() -> None:
    axes = Mesh().axes(CPU)
    assert (axes.parameters, axes.layers, axes.rows) == (None, None, None)
