"""Seconds: against what was measured, against a simulation token by token, and in the direction that settings push."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from test_plan_memory import H200, LLAMA, PLAIN, workload

from posttrain.apps.plan.calibration import CALIBRATION
from posttrain.apps.plan.decoding import answer_lengths, batch_sizes, prompt_reads, stretches
from posttrain.apps.plan.phases import plan_memory
from posttrain.apps.plan.timing import TimeModel
from posttrain.apps.plan.workload import MeanLengths, MicroBatch, SharedPrompt
from posttrain.engines.native import graphs
from posttrain.policy.memory.layer_bytes import Pass
from posttrain.policy.memory.model_shape import NAMED_SHAPES
from posttrain.policy.memory.peak_memory import RankMemory
from posttrain.policy.memory.settings import OptimizerSettings, RunSettings

# The machine that most was measured on.
FAST_H200 = replace(H200, matrix_flops=806e12)


def time_of(settings: RunSettings = PLAIN) -> TimeModel:
    return TimeModel(RankMemory(LLAMA, settings), FAST_H200)


def rows_of_900(tokens: int) -> Pass:
    return SharedPrompt(1, 899, 1).in_one_pass(tokens / 900, None)


# -- against measurements (calibration.py)
# -------------------------------------------------------------------------------


def test_log_probabilities_are_predicted_within_5_percent() -> None:
    assert 16200 / time_of().forward_s(rows_of_900(16200)) == pytest.approx(40_363, rel=0.05)


@pytest.mark.parametrize(("tokens", "measured"), [(8100, 12_487), (16200, 12_616)])
def test_training_is_predicted_within_5_percent(tokens: int, measured: float) -> None:
    """Measured with gradients that are added up in bf16: 6 bytes a weight and micro-batch."""
    time, row = time_of(), rows_of_900(tokens)
    seconds = time.forward_s(row) + time.backward_s(row) + time._moved_s(6 * LLAMA.num_weights)
    assert tokens / seconds == pytest.approx(measured, rel=0.05)


def test_prompts_are_predicted_within_5_percent() -> None:
    row = Pass(8192, 0, 0, 8192 * 64)
    assert 8192 / time_of().forward_s(row, head=False) == pytest.approx(43_700, rel=0.05)


def test_a_decode_step_is_predicted_within_5_percent() -> None:
    time = time_of()
    assert time._few_rows_s(LLAMA.layer_products, 512) == pytest.approx(10.85e-3, rel=0.05)
    assert time._few_rows_s(LLAMA.head_products, 512) == pytest.approx(0.87e-3, rel=0.10)
    assert time.decode_step_s(512, 512, 0, 256, 1) == pytest.approx(18.8e-3, rel=0.05)


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "own", "group", "milliseconds"),
    [
        ("llama-8b", 512, 0, 256, 1, 18.45),
        ("llama-8b", 512, 0, 578, 1, 22.82),
        ("llama-1.5b", 64, 512, 256, 16, 2.18),
        ("llama-1.5b", 512, 1024, 64, 16, 5.55),
    ],
)
def test_decode_steps_of_other_contexts_and_models_are_predicted_within_15_percent(
    name: str, rows: int, prompt: int, own: int, group: int, milliseconds: float
) -> None:
    gpu = replace(H200, matrix_flops=752e12)
    time = TimeModel(RankMemory(NAMED_SHAPES[name], PLAIN), gpu)
    assert 1e3 * time.decode_step_s(rows, rows, prompt, own, group) == pytest.approx(milliseconds, rel=0.15)


FP8 = replace(PLAIN, engine=replace(PLAIN.engine, in_fp8=True, cache_in_fp8=True))


@pytest.mark.parametrize(("context", "milliseconds"), [(256, 11.68), (578, 14.31)])
def test_decode_steps_in_fp8_are_predicted_within_15_percent(context: float, milliseconds: float) -> None:
    time = TimeModel(RankMemory(LLAMA, FP8), H200)
    assert 1e3 * time.decode_step_s(512, 512, 0, context, 1) == pytest.approx(milliseconds, rel=0.15)


def test_training_in_fp8_is_planned_with_its_copies_and_quantising() -> None:
    in_fp8 = replace(PLAIN, fp8=True)
    plain, fp8 = time_of(), time_of(in_fp8)
    step = workload()
    assert 1.25 < plain.passes_s(step) / fp8.passes_s(step) < 1.45, "two of three products are twice as fast"
    assert 1.5 < plain.scoring_s(step) / fp8.scoring_s(step) < 1.8
    assert fp8.optimizer_s() == plain.optimizer_s()
    # Weights are quantised once an update: several cost more than one.
    updates = [fp8.passes_s(replace(step, num_updates=count)) for count in (1, 8)]
    assert updates[1] - updates[0] > 6 * fp8._quantising_s(gradients=True)
    assert fp8._quantising_s(gradients=True) == pytest.approx(0.0145, rel=0.1)
    memory = [plan_memory(RankMemory(LLAMA, settings), step, H200) for settings in (PLAIN, in_fp8)]
    for name, copies in (("training", 2), ("logprobs", 1), ("optimizer", 0), ("sampling", 0)):
        more = memory[1].peak_bytes(name) - memory[0].peak_bytes(name)
        assert more == copies * LLAMA.layer_products, name


def test_layers_left_in_bf16_cost_as_much_as_before() -> None:
    half = replace(FP8, engine=replace(FP8.engine, layers_in_bf16=LLAMA.layers // 2))
    steps = [TimeModel(RankMemory(LLAMA, s), H200).decode_step_s(16, 16, 0, 256, 1) for s in (PLAIN, half, FP8)]
    assert steps[0] > steps[1] > steps[2]
    plain, half_memory, fp8 = (RankMemory(LLAMA, settings) for settings in (PLAIN, half, FP8))
    assert not plain.fp8_weights()
    assert 2 * half_memory.fp8_weights()["FP8 weights"] == fp8.fp8_weights()["FP8 weights"] == LLAMA.layer_products
    per_token = 32 * 8 * (2 * 128 + 2 * 4)  # a byte for each number, and two factors for each head
    assert fp8.cache_bytes_per_token() == per_token
    assert half_memory.cache_bytes_per_token() == (per_token + plain.cache_bytes_per_token()) / 2


# -- decoding
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_stretches_are_those_of_a_simulation_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 40))]
    max_rows = rng.randrange(1, 12)

    waiting = [length - 1 for length in lengths if length > 1]
    active: list[list[int]] = []  # [tokens left, tokens written]
    expected: list[tuple[int, float]] = []  # rows, and tokens of their own that they see
    while waiting or active:
        while waiting and len(active) < max_rows:
            active.append([waiting.pop(0), 1])
        expected.append((len(active), statistics.fmean(written for _, written in active)))
        for sample in active:
            sample[0] -= 1
            sample[1] += 1
        active = [sample for sample in active if sample[0]]

    found = list(stretches(lengths, max_rows))
    assert sum(s.steps for s in found) == len(expected)
    assert sum(s.steps * s.rows for s in found) == sum(rows for rows, _ in expected) == sum(lengths) - len(lengths)
    assert sum(s.steps * s.rows * s.own_tokens for s in found) == pytest.approx(sum(r * own for r, own in expected))


@pytest.mark.parametrize(("mean", "longest"), [(50, 100), (100, 1000), (700, 772), (20, 2000), (99.5, 100)])
def test_answer_lengths_have_the_requested_mean(mean: float, longest: int) -> None:
    lengths = answer_lengths(4000, mean, longest)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.03)
    assert max(lengths) <= longest
    first, second = statistics.fmean(lengths[:2000]), statistics.fmean(lengths[2000:])
    assert first == pytest.approx(second, rel=0.03), "the queue has no trend"


def test_drafts_shorten_the_tail_where_reading_weights_takes_the_time() -> None:
    def decoding_s(num_drafts: int | None, answer: float = 300.0, fixed: bool = False) -> float:
        settings = replace(PLAIN, engine=replace(PLAIN.engine, num_drafts=num_drafts))
        work = replace(workload(), lengths=MeanLengths(128, answer, "test"), max_new_tokens=772, fixed_length=fixed)
        memory = plan_memory(RankMemory(LLAMA, settings), work, H200)
        return TimeModel(RankMemory(LLAMA, settings), H200).step(work, memory.cache).decoding_s

    assert decoding_s(None) < decoding_s(0)
    assert decoding_s(15) > decoding_s(None), "drafts that are always made cost where they do not pay"
    assert decoding_s(None, fixed=True) == decoding_s(0, fixed=True), "equal answers have no tail"


def test_gpus_that_share_the_layers_they_train_decode_without_graphs_at_the_pace_of_the_host() -> None:
    def step_s(settings: RunSettings, rows: int) -> float:
        return TimeModel(RankMemory(LLAMA, settings), H200).decode_step_s(rows, rows, 128, 300, 1)

    assert step_s(replace(PLAIN, ranks=8), 8) == step_s(PLAIN, 8), "whole parameters while sampling"
    eight = replace(PLAIN, ranks=8, layer_shares=2)
    assert step_s(eight, 8) == LLAMA.layers * CALIBRATION.forward_host_s > 1.5 * step_s(PLAIN, 8)
    assert step_s(eight, 512) > step_s(eight, 8), "the device takes longer than launching its kernels"
    assert step_s(replace(eight, trains=False), 8) < step_s(eight, 8), "parts of an engine that only samples"
    vllm = replace(eight, engine=replace(eight.engine, has_own_weights=True))
    assert step_s(vllm, 8) < step_s(eight, 8)
    memory = RankMemory(LLAMA, eight)
    assert TimeModel(memory, H200).step(workload(), plan_memory(memory, workload(), H200).cache).capture_s == 0


@pytest.mark.parametrize("max_rows", [1, 7, 8, 9, 100, 256, 257, 512, 1000])
def test_graph_sizes_are_those_of_the_engine(max_rows: int) -> None:
    assert batch_sizes(max_rows) == graphs.batch_sizes(max_rows)


@pytest.mark.parametrize("group_size", [4, 8, 16, 31, 64, 100])
@pytest.mark.parametrize("heads_per_kv_head", [1, 3, 4, 8])
def test_shared_prompts_are_read_once_per_tile_of_the_kernel(group_size: int, heads_per_kv_head: int) -> None:
    kernels = pytest.importorskip("posttrain.engines.native.kernels", reason="needs Triton")
    tile = kernels.samples_per_tile(heads_per_kv_head, 2, group_size)
    assert prompt_reads(group_size, heads_per_kv_head, 2) == -(-group_size // tile)


def test_the_tail_of_long_answers_costs_time() -> None:
    """The same tokens: equal lengths keep every row busy, unequal ones end with few rows."""
    model = RankMemory(
        LLAMA,
        replace(PLAIN, optimizer=OptimizerSettings("compact", 2, "int8", False)),
    )
    time = TimeModel(model, H200)
    equal = workload(num_groups=16, lengths=MeanLengths(128, 300, ""), max_new_tokens=300)
    tailed = replace(equal, fixed_length=False, max_new_tokens=2000, max_total_tokens=2128)
    caches = [plan_memory(model, step, H200).cache for step in (equal, tailed)]
    seconds = [time.step(step, cache) for step, cache in zip((equal, tailed), caches, strict=True)]
    assert seconds[1].num_decode_steps > 3 * seconds[0].num_decode_steps
    assert seconds[1].decoding_s > 1.3 * seconds[0].decoding_s


# -- directions
# ----------------------------------------------------------------------------------------------------------


def test_recomputing_activations_adds_a_forward_pass() -> None:
    row = rows_of_900(8100)
    plain, again = time_of(), time_of(replace(PLAIN, checkpointing=True))
    assert again.backward_s(row) == pytest.approx(plain.backward_s(row) + plain.forward_s(row, head=False))


def test_adapters_need_no_gradients_of_weights() -> None:
    row = rows_of_900(8100)
    full, lora = time_of().backward_s(row), time_of(replace(PLAIN, lora_rank=8)).backward_s(row)
    assert 0.5 < lora / full < 0.75


def test_sharing_long_prompts_pays() -> None:
    """1,024 tokens of prompt, 128 of answer, groups of 16: the goal is three times the speed."""
    shared = workload(
        num_groups=32, group_size=16, num_sampled=16, lengths=MeanLengths(1024, 128, ""), max_total_tokens=1152
    )
    alone = replace(shared, num_groups=512, group_size=1, num_sampled=1)
    assert time_of().passes_s(alone) > 4 * time_of().passes_s(shared)


@pytest.mark.parametrize("budget", [2048, 8192, 32768])
def test_micro_batches_hold_all_tokens(budget: int) -> None:
    step = workload(train=MicroBatch(budget, 1), fixed_length=False)
    row, count = step.passes(step.train, None)
    assert row.responses * count == pytest.approx(64 * 32 * 772)
    assert row.tokens <= budget
    assert step.largest_pass(step.train, None).tokens <= max(budget, 900) * 1.001


def test_offloaded_state_is_bound_by_the_link_to_the_host() -> None:
    near = OptimizerSettings("compact", 2, "bfloat16", has_masters=False)
    seconds = [time_of(replace(PLAIN, optimizer=o)).optimizer_s() for o in (near, replace(near, is_offloaded=True))]
    assert seconds[1] == pytest.approx(4 * LLAMA.num_weights / H200.host_bytes_per_s)
    assert seconds[0] < 0.2 * seconds[1]
