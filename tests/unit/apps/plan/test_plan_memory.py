"""Bytes that the planner counts against the tensors that the code makes, and against slow hand counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.phases import cache_pages, plan_memory
from posttrain.apps.plan.workload import MeanLengths, MicroBatch, SharedPrompt, Workload
from posttrain.config.policy import OptimizerConfig
from posttrain.data.packing import MicroBatching, cost, plan_micro_batches
from posttrain.engines.native.engine import _pages_wanted
from posttrain.engines.native.scheduler import PromptGroup
from posttrain.policy.memory.layer_bytes import LayerBytes, Pass
from posttrain.policy.memory.model_shape import NAMED_SHAPES, shape_of_config
from posttrain.policy.memory.peak_memory import (
    GIB,
    OPTIMIZER,
    RUNTIME_BYTES,
    SAMPLING,
    SCORING,
    TRAINING,
    RankMemory,
    block_size,
    state_bytes,
)
from posttrain.policy.memory.settings import EngineSettings, OptimizerSettings, RunSettings
from posttrain.policy.optimizer import low_precision, make_optimizer
from posttrain.types import Task, TokenBatch

LLAMA = NAMED_SHAPES["llama-8b"]
H200 = GPUS["h200"]
PLAIN = RunSettings(
    element=2,
    checkpointing=False,
    lora_rank=None,
    optimizer=OptimizerSettings(),
    has_reference=False,
    chunk_tokens=None,
    scores_answers=False,
    ranks=1,
    engine=EngineSettings(512, 16, 8192, None, 0.9),
)


def workload(**changes: object) -> Workload:
    step = Workload(
        kind="grpo",
        num_groups=64,
        group_size=32,
        lengths=MeanLengths(128, 772, "test"),
        max_total_tokens=900,
        max_new_tokens=772,
        fixed_length=True,
        num_updates=1,
        num_sampled=32,
        num_scorings=1,
        train=MicroBatch(8192, 4),
        score=MicroBatch(16384, 4),
    )
    return replace(step, **changes)  # type: ignore[arg-type]


def model_of(settings: RunSettings = PLAIN) -> RankMemory:
    return RankMemory(LLAMA, settings)


# -- optimizer state
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "bfloat16"},
        {"state_dtype": "bfloat16", "master_weights": "none"},
        {"state_dtype": "int8", "master_weights": "none"},
        {"state_dtype": "int8"},
        {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}},
        {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
    ],
)
def test_optimizer_state_takes_the_bytes_of_its_tensors(dtype: torch.dtype, options: dict[str, object]) -> None:
    config = OptimizerConfig(**{"kwargs": {"lr": 1e-3}, **options})  # type: ignore[arg-type]
    model = tiny_model("qwen2", dtype=dtype)
    optimizer = make_optimizer(model, config, None, 0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.collect_gradients()
    optimizer.step(1.0)
    kept = sum(
        t.numel() * t.element_size() for key, t in optimizer.state_tensors().items() if not key.endswith("/step")
    )
    shape = shape_of_config("tiny", model.config.to_dict())
    settings = OptimizerSettings.of(config)
    assert sum(state_bytes(kind, settings, dtype.itemsize) for kind in shape.tensors) == pytest.approx(kept, rel=1e-9)


@pytest.mark.parametrize("columns", [1, 5, 15, 16, 17, 96, 100, 576, 1000, 1536, 4096, 14336])
def test_blocks_of_8_bit_state_are_those_of_the_optimizer(columns: int) -> None:
    assert block_size(columns) == low_precision.block_size((3, columns))


def test_state_of_an_8b_model_by_hand() -> None:
    """fp32: masters and two moments, 12 bytes a weight. bf16 without masters: 4. 8 bits without masters: 2
    and scales.
    """
    n = 8_030_261_248
    assert LLAMA.num_weights == n
    assert model_of().state_bytes() == 12 * n
    short = replace(PLAIN, optimizer=OptimizerSettings("compact", 2, "bfloat16", has_masters=False))
    assert model_of(short).state_bytes() == 4 * n
    shortest = replace(PLAIN, optimizer=OptimizerSettings("compact", 2, "int8", has_masters=False))
    assert model_of(shortest).state_bytes() == pytest.approx(n * (2 + 8 / 256), rel=1e-3)
    offloaded = replace(PLAIN, optimizer=OptimizerSettings("compact", 2, "bfloat16", False, is_offloaded=True))
    plan = plan_memory(model_of(offloaded), workload(), H200)
    assert plan.host_items == {"optimizer state": 4 * n}
    for copy, bytes_each in (("with optimizer", 2 + 4), ("weights", 2)):
        copied = replace(short, checkpoint_copy=copy)
        assert plan_memory(model_of(copied), workload(), H200).host_items == {"copy of a checkpoint": bytes_each * n}
    assert all("optimizer state" not in phase.items for phase in plan.phases)


def test_full_fine_tuning_of_an_8b_model_fits_80_gib_with_parameters_in_host_memory() -> None:
    n = 8_030_261_248
    config = OptimizerConfig(kwargs={"lr": 1e-3})
    away = OptimizerSettings.of(config, in_host_memory=True)
    hosted = replace(PLAIN, has_reference=True, optimizer=away, in_host_memory=True)
    plan = plan_memory(model_of(hosted), workload(), H200)
    assert plan.host_items == {"weights": 2 * n, "reference": 2 * n, "gradients": 4 * n, "optimizer state": 12 * n}
    by_name = {phase.name: phase for phase in plan.phases}
    assert by_name[SAMPLING].items["whole weights"] == 2 * n
    assert by_name[TRAINING].items["gathered layers"] < 0.2 * 2 * n
    assert by_name[OPTIMIZER].peak_bytes < 2 * GIB
    assert max(by_name[name].needed_bytes for name in (TRAINING, OPTIMIZER)) < 80 * GIB
    resident = plan_memory(model_of(replace(PLAIN, has_reference=True)), workload(), H200)
    assert max(phase.needed_bytes for phase in resident.phases) > 140 * GIB


# -- activations
# ---------------------------------------------------------------------------------------------------------


def test_a_layer_of_an_8b_model_keeps_what_its_operations_keep() -> None:
    hidden, inner, heads, kv_heads, head_dim = 4096, 14336, 32, 8, 128
    residuals = 4 * hidden + 4 * hidden
    qkv = 2 * (heads + 2 * kv_heads) * head_dim
    attended = 2 * heads * head_dim + 4 * heads  # and the log of its sums
    gate_and_up = 2 * inner + 2 * inner
    norm_factors = 4 + 4
    expected = residuals + qkv + attended + gate_and_up + norm_factors
    assert LayerBytes(LLAMA, PLAIN).kept_per_token() == expected


def test_recomputing_keeps_the_stream_between_layers_and_one_layer_at_a_time() -> None:
    row = SharedPrompt(1, 900, 1).in_one_pass(9, None)
    plain = LayerBytes(LLAMA, PLAIN)
    recomputing = LayerBytes(LLAMA, replace(PLAIN, checkpointing=True))
    stream = 32 * 4 * 4096 * row.tokens
    assert recomputing.kept(row) == plain.kept(row) - 32 * plain.kept_by_layer(row) + stream
    assert recomputing.layer_backward(row) == plain.layer_backward(row) + plain.kept_by_layer(row)


def test_keys_of_a_shared_prompt_are_repeated_for_every_answer() -> None:
    """One prompt of 1,024 tokens with 16 answers of 129, of which 128 are fed: counted token by token."""
    bundle = SharedPrompt(1024, 129, 16)
    keys = pairs = 0
    for query in range(1024):
        pairs += query + 1
    keys += 1024
    for _ in range(16):
        keys += 1024 + 128
        for query in range(128):
            pairs += 1024 + query + 1
    assert bundle.gathered == keys
    assert bundle.pairs(None) == pairs
    assert bundle.fed == 1024 + 16 * 128
    row = bundle.in_one_pass(1, None)
    layer = LayerBytes(LLAMA, PLAIN)
    assert layer.kept_by_layer(row) - row.tokens * layer.kept_per_token() == keys * 2 * 2 * 1024
    assert SharedPrompt(1024, 129, 1).gathered == 0, "an answer alone is one sequence with its prompt"


def test_the_head_holds_logits_of_one_chunk_and_a_gradient_in_fp32() -> None:
    vocab, chunk = 128256, 2**30 // 128256
    layer = LayerBytes(LLAMA, PLAIN)
    assert layer.chunk_tokens == chunk
    long = Pass(3 * chunk, 3 * chunk, 0, 0)
    assert layer.head_forward(long) == 4 * vocab * chunk
    assert layer.head_backward(long, accumulates=False) == (4 + 2) * vocab * chunk + 4 * vocab * 4096
    assert layer.head_backward(long, accumulates=True) == (4 + 2) * vocab * chunk, (
        "it is added to the sum that is there"
    )
    sharded = LayerBytes(LLAMA, replace(PLAIN, ranks=8))
    assert sharded.head_backward(long, accumulates=True) == layer.head_backward(long, accumulates=False)
    short = Pass(100, 100, 0, 0)
    assert layer.head_backward(short, accumulates=False) == 2 * vocab * 100 + 4 * vocab * 4096
    assert not layer.recomputes_logits(short)
    assert layer.recomputes_logits(long)
    adapters = LayerBytes(LLAMA, replace(PLAIN, lora_rank=8))
    assert adapters.head_backward(short, accumulates=False) == (4 + 2) * vocab * 100, "a frozen head has no gradient"


@pytest.mark.parametrize(("tokens", "measured_gib"), [(8100, 58.0), (16200, 87.0)])
def test_the_peak_of_a_measured_training_pass_is_predicted_within_15_percent(tokens: int, measured_gib: float) -> None:
    """Measured with gradients in bf16 and without an optimizer; sequences of 900 tokens."""
    layer = LayerBytes(LLAMA, PLAIN)
    row = SharedPrompt(1, 899, 1).in_one_pass(tokens / 900, None)
    moment = max(layer.head_backward(row, accumulates=False), layer.layer_backward(row))
    predicted = (2 * 2 * LLAMA.num_weights + layer.kept(row) + moment) / GIB
    assert predicted == pytest.approx(measured_gib, rel=0.15)


# -- phases
# --------------------------------------------------------------------------------------------------------------


def test_gradients_are_there_from_the_second_micro_batch_on() -> None:
    gradients = 4 * LLAMA.num_weights
    many = plan_memory(model_of(), workload(), H200)
    items = next(phase.items for phase in many.phases if phase.name == TRAINING)
    assert items["gradients"] == gradients
    one = workload(num_groups=1, group_size=2, lengths=MeanLengths(10, 20, ""), train=MicroBatch(8192, 4))
    alone = next(phase.items for phase in plan_memory(model_of(), one, H200).phases if phase.name == TRAINING)
    assert alone["activations"] < items["activations"] / 10
    assert sum(alone.values()) < sum(items.values())


def test_a_reference_is_a_second_copy_unless_there_are_adapters() -> None:
    def items(settings: RunSettings) -> dict[str, float]:
        return dict(
            next(p.items for p in plan_memory(model_of(settings), workload(), H200).phases if p.name == SCORING)
        )

    assert items(replace(PLAIN, has_reference=True))["reference"] == 2 * LLAMA.num_weights
    assert "reference" not in items(replace(PLAIN, has_reference=True, lora_rank=8))


def test_foreach_adam_needs_another_copy_in_fp32_and_fused_does_not() -> None:
    def work(kind: str) -> float:
        settings = replace(PLAIN, optimizer=OptimizerSettings(kind))  # type: ignore[arg-type]
        return next(p for p in plan_memory(model_of(settings), workload(), H200).phases if p.name == OPTIMIZER).items[
            "optimizer's work"
        ]

    assert work("foreach") == 4 * LLAMA.num_weights
    assert work("fused") < 0.1 * work("foreach")


def test_ranks_share_weights_and_state_and_gather_layers() -> None:
    one, four = model_of(), model_of(replace(PLAIN, ranks=4))
    assert four.resident() == {name: num_bytes / 4 for name, num_bytes in one.resident().items()}
    assert four.gathered_weights()["gathered layers"] > 2 * 2 * LLAMA.head_products
    assert not one.gathered_weights()


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_has_the_pages_that_the_engine_asks_for(seed: int) -> None:
    rng = random.Random(seed)
    prompt, new, size = rng.randrange(1, 300), rng.randrange(1, 300), rng.choice([1, 8, 16, 64])
    groups, samples, rows = rng.randrange(1, 20), rng.randrange(1, 20), rng.randrange(1, 200)
    tasks = [PromptGroup(Task(i, str(i), "", tuple([1] * prompt)), new) for i in range(groups)]
    step = workload(
        num_groups=groups,
        num_sampled=samples,
        lengths=MeanLengths(prompt, new, ""),
        max_new_tokens=new,
        max_total_tokens=prompt + new,
    )
    assert cache_pages(step, size, rows)[0] == _pages_wanted([(task, samples) for task in tasks], rows, size)


def test_the_rank_with_most_prompts_decides_the_cache() -> None:
    three = cache_pages(workload(num_groups=3, num_sampled=4), 16, 512)
    assert cache_pages(workload(num_groups=5 / 2, num_sampled=4), 16, 512) == three


def test_a_pair_is_the_largest_pass_where_the_budget_is_smaller() -> None:
    pairs = workload(
        num_groups=64, group_size=2, lengths=MeanLengths(100, 50, "test"), fixed_length=False,
        train=MicroBatch(900, 2, keeps_groups_whole=True),
    )  # fmt: skip
    batch = TokenBatch.build([[1] * 100], [[1] * 800, [1] * 800], [0, 0], {"mask": torch.ones(1600)})
    (rows,) = plan_micro_batches(batch, MicroBatching(900), keep_groups_whole=True)[0]
    assert pairs.largest_pass(pairs.train, None).responses == pytest.approx(cost(batch, rows) / 200 * 100)


def test_the_cache_takes_what_is_left_and_goes_when_it_is_large() -> None:
    cache = plan_memory(
        model_of(replace(PLAIN, optimizer=OptimizerSettings("compact", 2, "int8", False))), workload(), H200
    ).cache
    assert cache is not None
    assert cache.bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert not cache.is_short
    assert not cache.is_kept
    tight = plan_memory(model_of(), workload(), H200).cache
    assert tight is not None
    assert tight.is_short
    used = model_of().while_sampling()
    assert sum(used.values()) + RUNTIME_BYTES + tight.num_bytes == pytest.approx(0.9 * H200.memory_bytes, rel=0.001)
    fixed = replace(PLAIN, engine=EngineSettings(512, 16, 8192, 2.0, 0.9))
    small = plan_memory(model_of(fixed), workload(), H200).cache
    assert small is not None
    assert small.num_bytes == pytest.approx(2 * GIB, rel=0.01)
    assert small.is_kept
