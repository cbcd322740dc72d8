"""A pass of Llama 8B and 70B and Qwen 32B on 8 x 8 GPUs, without the GPUs (tests/large_models.py); a few layers of
each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from large_models import MODELS, TOKENS, WORLD, Plan, fake_ranks, model_config, run_plan

from posttrain.policy.memory.model_shape import shape_of_config

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
    for kind, num_bytes in expected.items():
        assert found.sent[kind] == pytest.approx(num_bytes, rel=0.01, abs=2**20), kind
