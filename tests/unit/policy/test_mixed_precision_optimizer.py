"""The optimizer: fp32 masters under bf16 parameters, schedules, skipped steps, and state that survives a restart."""

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain.checkpointing import CheckpointError
from posttrain.errors import InputError
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer, gradient_norm

ADAMW = ("torch.optim.AdamW", {"lr": 1e-2, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8})
SGD = ("torch.optim.SGD", {"lr": 1.0})
WARMUP = [
    {
        "name": "torch.optim.lr_scheduler.LinearLR",
        "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50},
    },
    {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10000000000}},
    {"milestones": [50]},
]
COSINE = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 10}}


class Net(nn.Module):
    """Two tensors, one frozen, so that names matter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(4, 3, generator=generator).bfloat16().to(dtype))
        self.b = nn.Parameter(torch.randn(3, generator=generator).bfloat16().to(dtype))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)


def build(
    dtype: torch.dtype, kind: tuple[str, dict[str, Any]] = ADAMW, scheduler: Any = None
) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(dtype)
    return net, MixedPrecisionOptimizer(net, *kind, scheduler)


def give(net: Net, optimizer: MixedPrecisionOptimizer, seed: int, scale: float = 1.0) -> None:
    """Leave a gradient on the parameters, as one backward pass of a micro-batch would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (net.a, net.b):
        # Rounded to bf16 in both precisions: the two runs then differ in nothing but the optimizer.
        gradient = (scale * torch.randn(parameter.shape, generator=generator)).bfloat16().to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    optimizer.collect_gradients()


def values(net: Net) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


# -- precision ---------------------------------------------------------------------------------------------------------


def test_bf16_parameters_follow_an_fp32_run_to_their_last_bit() -> None:
    low, low_optimizer = build(torch.bfloat16, scheduler=WARMUP)
    full, full_optimizer = build(torch.float32, scheduler=WARMUP)
    for net, optimizer in ((low, low_optimizer), (full, full_optimizer)):
        advance(net, optimizer, range(60))
    for name in ("a", "b"):
        torch.testing.assert_close(low_optimizer.masters[name], full_optimizer.masters[name], rtol=1e-6, atol=1e-7)
        assert torch.equal(getattr(low, name), low_optimizer.masters[name].bfloat16())
    assert not torch.equal(full.a, Net(torch.float32).a)


def test_updates_below_bf16_resolution_add_up_in_the_masters() -> None:
    net, optimizer = build(torch.bfloat16, ("torch.optim.SGD", {"lr": 1e-4}))
    start = net.a.detach().float().clone()
    for _ in range(2000):
        net.a.grad = torch.ones_like(net.a)
        optimizer.collect_gradients()
        optimizer.step(None)
    # 2000 steps of 1e-4: each is lost when added to a bf16 number near 1, all together they are 0.2.
    torch.testing.assert_close(optimizer.masters["a"].detach(), start - 0.2, rtol=0, atol=1e-3)
    torch.testing.assert_close(net.a.detach().float(), start - 0.2, rtol=1e-2, atol=1e-2)


def test_fp32_parameters_have_no_second_copy() -> None:
    net, optimizer = build(torch.float32)
    assert optimizer.masters["a"] is net.a
    assert not [key for key in optimizer.state_tensors() if key.startswith("master/")]


def test_frozen_parameters_are_left_alone() -> None:
    net, optimizer = build(torch.bfloat16)
    assert set(optimizer.masters) == {"a", "b"}
    advance(net, optimizer, range(1))
    assert torch.equal(net.frozen, torch.ones(2, dtype=torch.bfloat16))


# -- clipping and skipping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_the_norm_is_over_all_parameters_and_clipping_scales_all_alike(dtype: torch.dtype, limit: float | None) -> None:
    net, optimizer = build(dtype, SGD)
    before = {name: m.detach().clone() for name, m in optimizer.masters.items()}
    give(net, optimizer, 3)
    gradients = {name: m.grad.clone() for name, m in optimizer.masters.items()}
    expected_norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    norm, taken = optimizer.step(limit)
    assert taken
    assert norm == pytest.approx(expected_norm, rel=1e-5)  # before clipping
    factor = 1.0 if limit is None else min(1.0, limit / expected_norm)
    for name, master in optimizer.masters.items():
        torch.testing.assert_close(master.detach(), before[name] - factor * gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_forgotten(
    dtype: torch.dtype, poison: float, limit: float | None
) -> None:
    net, optimizer = build(dtype)
    give(net, optimizer, 0)
    optimizer.step(limit)
    before, state = values(net), {k: v.clone() for k, v in optimizer.state_tensors().items()}

    give(net, optimizer, 1)
    optimizer.masters["b"].grad[1] = poison
    norm, taken = optimizer.step(limit)
    assert not taken
    assert not math.isfinite(norm)
    assert all(torch.equal(value, before[name]) for name, value in values(net).items())
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state_tensors().items())
    assert all(p.grad is None for p in (*net.parameters(), *optimizer.masters.values()))

    # The run goes on as if that batch had not been.
    twin, twin_optimizer = build(dtype)
    for seed in (0, 2):
        give(twin, twin_optimizer, seed)
        twin_optimizer.step(limit)
    give(net, optimizer, 2)
    optimizer.step(limit)
    assert all(torch.equal(value, values(net)[name]) for name, value in values(twin).items())


def test_a_step_forgets_its_gradients() -> None:
    net, optimizer = build(torch.bfloat16, SGD)
    give(net, optimizer, 0)
    optimizer.step(None)
    before = values(net)
    norm, _ = optimizer.step(None)
    assert norm == 0.0
    assert all(torch.equal(value, before[name]) for name, value in values(net).items())


# -- schedules ---------------------------------------------------------------------------------------------------------


STEP_DOWN = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 2, "gamma": 0.5}}
CONSTANTS = [
    {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": factor, "total_iters": 1000}}
    for factor in (0.1, 0.2, 0.3)
]


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (WARMUP, [0.1 + 0.9 * min(step, 50) / 50 for step in range(61)]),
        (STEP_DOWN, [1, 1, 0.5, 0.5, 0.25]),
        ([STEP_DOWN], [1, 1, 0.5, 0.5, 0.25]),
        (None, [1.0, 1.0, 1.0]),
        ([*CONSTANTS, {"milestones": [2, 3]}], [0.1, 0.1, 0.2, 0.3, 0.3]),
    ],
    ids=["linear warmup, then constant", "by name", "a list of one", "none", "three at their milestones"],
)
def test_schedulers(scheduler: Any, rates: list[float]) -> None:
    net, optimizer = build(torch.float32, ("torch.optim.AdamW", {"lr": 1.0}), scheduler)
    found = []
    for step in range(len(rates)):
        found.append(optimizer.learning_rate)
        advance(net, optimizer, range(step, step + 1))
    assert found == pytest.approx(rates)


def test_the_schedule_counts_steps_of_the_algorithm_not_updates() -> None:
    net, optimizer = build(torch.float32, SGD, WARMUP)
    for seed in range(4):
        give(net, optimizer, seed)
        optimizer.step(None)
    assert optimizer.learning_rate == pytest.approx(0.1)
    optimizer.end_step()
    assert optimizer.learning_rate == pytest.approx(0.1 + 0.9 / 50)


@pytest.mark.parametrize(
    ("kind", "scheduler", "field"),
    [
        (("torch.optim.AdamV", {}), None, "policy.optimizer.name"),
        (("AdamW", {}), None, "policy.optimizer.name"),
        (("torch.optim.AdamW", {"momentum": 0.9}), None, "policy.optimizer.kwargs"),
        (ADAMW, {"name": "torch.optim.lr_scheduler.Nope"}, "policy.scheduler"),
        (ADAMW, WARMUP[:2], "policy.scheduler"),
        (ADAMW, {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"gama": 1}}, "policy.scheduler"),
    ],
)
def test_settings_that_do_not_fit_name_their_field(kind: Any, scheduler: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        build(torch.float32, kind, scheduler)


# -- state -------------------------------------------------------------------------------------------------------------

KINDS = {
    "adamw": ADAMW,
    "adamw amsgrad": ("torch.optim.AdamW", {"lr": 1e-2, "amsgrad": True}),
    "sgd": SGD,
    "sgd with momentum": ("torch.optim.SGD", {"lr": 1e-2, "momentum": 0.9}),
    "adafactor": ("torch.optim.Adafactor", {"lr": 1e-2}),
    "nadam": ("torch.optim.NAdam", {"lr": 1e-2}),
    "rmsprop": ("torch.optim.RMSprop", {"lr": 1e-3}),
}


def advance(net: Net, optimizer: MixedPrecisionOptimizer, seeds: range) -> None:
    for seed in seeds:
        give(net, optimizer, seed)
        optimizer.step(1.0)
        optimizer.end_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_saved_and_loaded_the_next_steps_are_bitwise_the_same(
    kind: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    net, optimizer = build(dtype, kind, WARMUP)
    advance(net, optimizer, range(30))
    saved = {key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}
    schedule, weights = optimizer.schedule_state(), values(net)
    advance(net, optimizer, range(30, 55))

    fresh, restored = build(dtype, kind, WARMUP)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(weights[name])
    slots = restored.empty_like_saved({key: (tuple(t.shape), t.dtype) for key, t in saved.items()})
    assert {key: (t.shape, t.dtype) for key, t in slots.items()} == {k: (t.shape, t.dtype) for k, t in saved.items()}
    for key, slot in slots.items():
        slot.copy_(saved[key])
    restored.load_state_tensors(slots)
    restored.load_schedule_state(schedule)
    advance(fresh, restored, range(30, 55))

    assert restored.learning_rate == optimizer.learning_rate
    assert all(torch.equal(value, values(net)[name]) for name, value in values(fresh).items())
    again = restored.state_tensors()
    assert all(torch.equal(again[key], tensor) for key, tensor in optimizer.state_tensors().items())


ONE_CYCLE = {"name": "torch.optim.lr_scheduler.OneCycleLR", "kwargs": {"max_lr": 1.0, "total_steps": 8}}


def scheduled(kind: tuple[str, dict[str, Any]], scheduler: Any, steps: int) -> MixedPrecisionOptimizer:
    net, optimizer = build(torch.float32, kind, scheduler)
    advance(net, optimizer, range(steps))
    return optimizer


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (COSINE, {**COSINE, "kwargs": {"T_max": 100}}),
        (COSINE, {**COSINE, "kwargs": {"T_max": 10, "eta_min": 1e-3}}),
        (WARMUP, [{**WARMUP[0], "kwargs": {**WARMUP[0]["kwargs"], "total_iters": 9}}, WARMUP[1], {"milestones": [9]}]),
    ],
)
def test_a_schedule_that_was_changed_holds_from_the_checkpoint_on(before: Any, after: Any) -> None:
    """The rate is what it would be had the schedule been that from the start."""
    faster = (ADAMW[0], {**ADAMW[1], "lr": 5e-2})
    state = scheduled(ADAMW, before, 5).schedule_state()
    net, resumed = build(torch.float32, faster, after)
    resumed.load_schedule_state(state)
    assert resumed.learning_rate == scheduled(faster, after, 5).learning_rate
    advance(net, resumed, range(6))
    assert resumed.learning_rate == scheduled(faster, after, 11).learning_rate


def test_schedule_that_ends_before_the_checkpoint_is_refused() -> None:
    state = scheduled(ADAMW, ONE_CYCLE, 6).schedule_state()
    shorter = build(torch.float32, ADAMW, {**ONE_CYCLE, "kwargs": {"max_lr": 1.0, "total_steps": 4}})[1]
    with pytest.raises(InputError, match=r"policy.scheduler ends before the checkpoint"):
        shorter.load_schedule_state(state)


def test_rows_and_columns_of_adafactor_are_loaded_where_the_weights_are() -> None:
    kind = ("torch.optim.Adafactor", {"lr": 1e-2})
    net, optimizer = build(torch.float32, kind)
    advance(net, optimizer, range(2))
    saved = {key: (tuple(t.shape), t.dtype) for key, t in optimizer.state_tensors().items()}
    elsewhere = MixedPrecisionOptimizer(Net(torch.float32).to("meta"), *kind, None)
    places = {key: slot.device.type for key, slot in elsewhere.empty_like_saved(saved).items()}
    assert {place for key, place in places.items() if key.endswith("_var")} == {"meta"}
    assert {place for key, place in places.items() if key.endswith("/step")} == {"cpu"}


def test_masters_come_back_with_more_digits_than_the_weights_have() -> None:
    net, optimizer = build(torch.bfloat16)
    advance(net, optimizer, range(3))
    fresh, restored = build(torch.bfloat16)
    restored.load_state_tensors({key: t.clone() for key, t in optimizer.state_tensors().items()})
    assert torch.equal(restored.masters["a"], optimizer.masters["a"])
    assert not torch.equal(restored.masters["a"], restored.masters["a"].bfloat16().float())
    assert torch.equal(fresh.a, net.a)  # rounded back into the parameters


def test_state_is_named_by_parameter() -> None:
    net, optimizer = build(torch.bfloat16)
    advance(net, optimizer, range(1))
    expected = {f"{kind}/{name}{entry}" for name in "ab" for kind, entry in (
        ("master", ""), ("state", "/step"), ("state", "/exp_avg"), ("state", "/exp_avg_sq"))}  # fmt: skip
    assert set(optimizer.state_tensors()) == expected


def test_a_schedule_state_is_plain_values() -> None:
    """It is written with torch.save and read back with weights_only."""
    net, optimizer = build(torch.float32, scheduler=WARMUP)
    advance(net, optimizer, range(2))

    buffer = io.BytesIO()
    torch.save(optimizer.schedule_state(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["groups"][0]["lr"] == optimizer.learning_rate


@pytest.mark.parametrize(
    ("saved", "now", "parts"),
    [
        ((ADAMW, None), (SGD, None), ["policy.optimizer.name", "AdamW", "SGD"]),
        ((ADAMW, WARMUP), (ADAMW, COSINE), ["policy.scheduler", "LinearLR, then", "ConstantLR", "CosineAnnealingLR"]),
        ((ADAMW, WARMUP), (ADAMW, None), ["policy.scheduler", "this run has none"]),
        ((ADAMW, None), (ADAMW, COSINE), ["policy.scheduler", "made with none"]),
    ],
)
def test_the_state_of_another_optimizer_or_schedule_is_refused(saved: Any, now: Any, parts: list[str]) -> None:
    state = build(torch.float32, *saved)[1].schedule_state()
    with pytest.raises(CheckpointError) as caught:
        build(torch.float32, *now)[1].check_kinds(state)
    for part in [*parts, "policy.model_name"]:
        assert part in str(caught.value)


def test_check_kinds_accepts_other_hyperparameters_and_checkpoints_without_kinds() -> None:
    state = build(torch.float32, ADAMW, COSINE)[1].schedule_state()
    slower = (ADAMW[0], {**ADAMW[1], "lr": 1e-3})
    build(torch.float32, slower, {**COSINE, "kwargs": {"T_max": 20}})[1].check_kinds(state)
    other = build(torch.float32, SGD, None)[1]
    with pytest.raises(CheckpointError):
        other.check_kinds(state)
    del state["kinds"]  # as older versions saved it
    assert other.check_kinds(state) is None


def test_the_norm_of_many_numbers_is_right() -> None:
    numbers = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    exact = float(numbers.double().square().sum().sqrt())
    assert gradient_norm([numbers]) == pytest.approx(exact, rel=1e-6)
