"""Optimizer state in fewer bits, without masters, in host memory: against torch's AdamW; saved and loaded."""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from posttrain.checkpointing import CheckpointError
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import InputError
from posttrain.policy.optimizer import make_optimizer
from posttrain.policy.optimizer.compact import CompactOptimizer
from posttrain.policy.optimizer.compact_adam import CompactAdam, StateFormat
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer

KWARGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
FORMATS = [
    StateFormat(moments, masters, offload)
    for moments, masters, offload in itertools.product(("float32", "bfloat16", "int8"), (True, False), (False, True))
    if not StateFormat(moments, masters, offload).is_plain  # type: ignore[arg-type]
]


def name_of(form: StateFormat) -> str:
    return f"{form.moments}-{'masters' if form.masters else 'none'}{'-host' if form.offload else ''}"


class Net(nn.Module):
    """A matrix of whole blocks, one of a small block per row, one without a block size, a vector, a frozen one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"wide": (6, 512), "small": (5, 8), "odd": (4, 37), "bias": (16,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)


def compact(
    dtype: torch.dtype, form: StateFormat, seed: int = 0, name: str = "torch.optim.AdamW", **kwargs: Any
) -> tuple[Net, CompactOptimizer]:
    net = Net(dtype)
    return net, CompactOptimizer(net, name, {**KWARGS, **kwargs}, None, form, seed)


def ordinary(dtype: torch.dtype, name: str = "torch.optim.AdamW", **kwargs: Any) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(dtype)
    return net, MixedPrecisionOptimizer(net, name, {**KWARGS, **kwargs}, None)


def give(net: Net, optimizer: MixedPrecisionOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * (1 + parameter.shape[-1])
            parameter.grad = noise.bfloat16().to(parameter.dtype)
    optimizer.collect_gradients()


def train(net: Net, optimizer: MixedPrecisionOptimizer, steps: range, max_norm: float | None = None) -> None:
    for step in steps:
        give(net, optimizer, step)
        optimizer.step(max_norm)
        optimizer.end_step()


def values(net: Net) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


# -- fp32 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch.optim.AdamW", "torch.optim.Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_fp32_state_equals_torch_adam(kind: str, dtype: torch.dtype) -> None:
    ours, our_optimizer = compact(dtype, StateFormat(offload=True), name=kind, weight_decay=0.1)
    theirs, their_optimizer = ordinary(dtype, kind, weight_decay=0.1)
    for net, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
        train(net, optimizer, range(30), max_norm=1.0)
    saved, expected = our_optimizer.state_tensors(), their_optimizer.state_tensors()
    assert saved.keys() == expected.keys()
    # Each of the 30 steps rounds a number a few times: 30 * 3 * eps. Fused multiply-adds round less often.
    rtol = 30 * 3 * torch.finfo(torch.float32).eps
    for key, tensor in saved.items():
        torch.testing.assert_close(
            tensor, expected[key], rtol=rtol, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    for name, parameter in values(ours).items():
        torch.testing.assert_close(
            parameter, values(theirs)[name], rtol=rtol if dtype == torch.float32 else 8e-3, atol=1e-6
        )
    assert torch.equal(ours.frozen, torch.ones(2, dtype=dtype))


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    form = StateFormat("int8", masters=False)
    whole, whole_optimizer = compact(torch.bfloat16, form)
    train(whole, whole_optimizer, range(5))
    monkeypatch.setattr("posttrain.policy.optimizer.compact_adam._SLICE", 300)
    sliced, sliced_optimizer = compact(torch.bfloat16, form)
    train(sliced, sliced_optimizer, range(5))
    for name, parameter in values(sliced).items():
        assert torch.equal(parameter, values(whole)[name]), name


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_host_memory_changes_no_number(moments: Any) -> None:
    results = []
    for offload in (False, True):
        net, optimizer = compact(torch.bfloat16, StateFormat(moments, masters=False, offload=offload))
        train(net, optimizer, range(5))
        results.append({**values(net), **optimizer.state_tensors()})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


# -- fewer bits --------------------------------------------------------------------------------------------------------


@functools.cache
def regression(form: StateFormat | None, steps: int = 300, lr: float = 2e-2) -> tuple[float, Tensor]:
    """(loss at the end, weights) of a linear regression in bf16 with noise in the targets; None: torch in fp32."""
    generator = torch.Generator().manual_seed(1)
    inputs, truth = torch.randn(512, 64, generator=generator), torch.randn(32, 64, generator=generator)
    targets = inputs @ truth.T + 0.1 * torch.randn(512, 32, generator=generator)
    net = nn.Linear(64, 32, bias=False)
    nn.init.zeros_(net.weight)
    kwargs = {"lr": lr, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    optimizer: MixedPrecisionOptimizer
    if form is None:
        optimizer = MixedPrecisionOptimizer(net, "torch.optim.AdamW", kwargs, None)
    else:
        net = net.bfloat16()
        optimizer = CompactOptimizer(net, "torch.optim.AdamW", kwargs, None, form, 0)
    for step in range(steps):
        rows = torch.randperm(512, generator=torch.Generator().manual_seed(step))[:64]
        loss = (nn.functional.linear(inputs[rows], net.weight.float()) - targets[rows]).square().mean()
        loss.backward()
        optimizer.collect_gradients()
        optimizer.step(None)
    weights = net.weight.detach().float()
    return float((inputs @ weights.T - targets).square().mean()), weights


@pytest.mark.parametrize("form", [form for form in FORMATS if not form.offload], ids=name_of)
def test_a_regression_ends_where_fp32_ends(form: StateFormat) -> None:
    """The bounds that docs/decisions/0021 states. fp32 comes from a loss of 63 to 0.026; noise in the targets is 0.01
    of it.

    With masters what is left is within 3 % of that and weights within 0.3 %. Without, the weights themselves are bf16
    numbers,
    0.2 % apart: 25 % and 1 %.
    """
    loss, weights = regression(form)
    expected, expected_weights = regression(None)
    assert expected < 0.03
    assert loss < expected * (1.03 if form.masters else 1.25)
    relative = float((weights - expected_weights).norm() / expected_weights.norm())
    assert relative < (0.003 if form.masters else 0.01)


def test_without_masters_small_updates_add_up_by_stochastic_rounding() -> None:
    """500 steps of 4e-5 on a weight of 1: bf16 has nothing between 1 and 0.996, so to the nearest it would stay 1."""
    net = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    kwargs = {"lr": 4e-5, "weight_decay": 0.0}
    optimizer = CompactOptimizer(net, "torch.optim.AdamW", kwargs, None, StateFormat("bfloat16", masters=False), 0)
    for _ in range(500):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.collect_gradients()
        optimizer.step(None)
    assert float(net.weight.detach().float().mean()) == pytest.approx(0.98, abs=0.001)


def test_rounding_depends_on_the_seed_and_nothing_else() -> None:
    form = StateFormat("int8", masters=False)
    runs = {}
    for what, seed in (("one", 0), ("again", 0), ("other", 1)):
        torch.manual_seed(hash(what) % 1000)  # the global generator has no part in it
        net, optimizer = compact(torch.bfloat16, form, seed=seed)
        train(net, optimizer, range(3))
        runs[what] = values(net)
    assert all(torch.equal(runs["one"][name], runs["again"][name]) for name in runs["one"])
    assert not torch.equal(runs["one"]["wide"], runs["other"]["wide"])


PLAIN_AND_COMPACT = {
    "plain": lambda: ordinary(torch.bfloat16),
    "compact": lambda: compact(torch.bfloat16, StateFormat("int8", masters=False)),
}


@pytest.mark.parametrize("build", PLAIN_AND_COMPACT.values(), ids=PLAIN_AND_COMPACT)
def test_gradients_of_micro_batches_add_up_in_fp32_whatever_the_format(build: Any) -> None:
    net, optimizer = build()
    for _ in range(1024):
        net.wide.grad = torch.full_like(net.wide, 0.01)
        optimizer.collect_gradients()
        assert net.wide.grad is None
    one = float(torch.tensor(0.01).bfloat16())
    gradient = optimizer._gradients()["wide"]
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, torch.full((6, 512), 1024 * one), rtol=1e-5, atol=0)


@pytest.mark.parametrize("build", PLAIN_AND_COMPACT.values(), ids=PLAIN_AND_COMPACT)
def test_a_backward_pass_leaves_no_bf16_gradients_behind(build: Any) -> None:
    net, optimizer = build()
    (net.wide.float().sum() + (2 * net.bias.float()).sum()).backward()
    assert net.wide.grad is None
    assert net.bias.grad is None
    gradients = optimizer._gradients()
    assert torch.equal(gradients["wide"], torch.ones(6, 512))
    assert torch.equal(gradients["bias"], torch.full((16,), 2.0))


@pytest.mark.parametrize(
    ("form", "bytes_per_number"),
    [
        (StateFormat("bfloat16"), 8.0),
        (StateFormat("bfloat16", masters=False), 4.0),
        (StateFormat("int8"), 6 + 8 / 256),
        (StateFormat("int8", masters=False), 2 + 8 / 256),
    ],
    ids=lambda value: name_of(value) if isinstance(value, StateFormat) else "",
)
def test_state_takes_the_documented_memory(form: StateFormat, bytes_per_number: float) -> None:
    net, optimizer = compact(torch.bfloat16, form)
    train(net, optimizer, range(1))
    of_wide = [t for key, t in optimizer.state_tensors().items() if "wide" in key and t.dim() > 0]
    assert sum(t.numel() * t.element_size() for t in of_wide) == bytes_per_number * net.wide.numel()


# -- saved and loaded --------------------------------------------------------------------------------------------------


def saved_and_loaded(optimizer: MixedPrecisionOptimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    file = io.BytesIO()
    # Clones: pieces of one memory, as in host memory, are more than pickle understands. DCP does the same.
    torch.save(({key: t.clone() for key, t in optimizer.state_tensors().items()}, optimizer.schedule_state()), file)
    file.seek(0)
    tensors, schedule = torch.load(file, weights_only=True)
    return tensors, schedule


def restore(net: Net, optimizer: MixedPrecisionOptimizer, weights: dict[str, Tensor], saved: Any) -> None:
    tensors, schedule = saved
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(weights[name])
    optimizer.check_kinds(schedule)
    empty = optimizer.empty_like_saved({key: (tuple(t.shape), t.dtype) for key, t in tensors.items()})
    for key, tensor in empty.items():
        assert (tensor.shape, tensor.dtype) == (tensors[key].shape, tensors[key].dtype), key
        tensor.copy_(tensors[key])
    optimizer.load_state_tensors(empty)
    optimizer.load_schedule_state(schedule)


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_optimizer_state_is_bitwise_equal(form: StateFormat, dtype: torch.dtype) -> None:
    whole, whole_optimizer = compact(dtype, form)
    train(whole, whole_optimizer, range(8))
    first, first_optimizer = compact(dtype, form)
    train(first, first_optimizer, range(5))
    second, second_optimizer = compact(dtype, form)
    restore(second, second_optimizer, values(first), saved_and_loaded(first_optimizer))
    train(second, second_optimizer, range(5, 8))
    for name, parameter in values(second).items():
        assert torch.equal(parameter, values(whole)[name]), name
    expected = whole_optimizer.state_tensors()
    assert second_optimizer.state_tensors().keys() == expected.keys()
    for key, tensor in second_optimizer.state_tensors().items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moves_to_host_memory_and_back_between_two_starts(dtype: torch.dtype) -> None:
    on_device, first = ordinary(dtype)
    train(on_device, first, range(3))
    in_host_memory, second = compact(dtype, StateFormat(offload=True))
    restore(in_host_memory, second, values(on_device), saved_and_loaded(first))
    train(in_host_memory, second, range(3, 5))
    back, third = ordinary(dtype)
    restore(back, third, values(in_host_memory), saved_and_loaded(second))
    train(back, third, range(5, 7))
    train(on_device, first, range(3, 7))
    for name, parameter in values(back).items():
        torch.testing.assert_close(parameter, values(on_device)[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (StateFormat("int8"), StateFormat("bfloat16"), "state_dtype: .* int8, this run has bfloat16"),
        (StateFormat(), StateFormat("int8"), "state_dtype: .* float32, this run has int8"),
        (StateFormat("int8"), StateFormat(), "state_dtype: .* int8, this run has float32"),
        (StateFormat(), StateFormat(masters=False), "master_weights: .* float32, this run has none"),
        (StateFormat(masters=False), StateFormat(), "master_weights: .* none, this run has float32"),
    ],
)
def test_state_in_another_format_is_refused(saved: StateFormat, now: StateFormat, message: str) -> None:
    def build(form: StateFormat) -> tuple[Net, MixedPrecisionOptimizer]:
        return ordinary(torch.bfloat16) if form.is_plain else compact(torch.bfloat16, form)

    net, optimizer = build(saved)
    train(net, optimizer, range(1))
    with pytest.raises(CheckpointError, match=message):
        build(now)[1].check_kinds(optimizer.schedule_state())


def test_a_checkpoint_from_before_there_were_formats_is_fp32() -> None:
    state = {"kinds": {"policy.optimizer.name": ["torch.optim.adamw.AdamW"], "policy.scheduler": []}}
    ordinary(torch.bfloat16)[1].check_kinds(state)
    compact(torch.bfloat16, StateFormat(offload=True))[1].check_kinds(state)
    with pytest.raises(CheckpointError, match="state_dtype"):
        compact(torch.bfloat16, StateFormat("int8"))[1].check_kinds(state)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_config_chooses_the_optimizer() -> None:
    def made(**settings: Any) -> MixedPrecisionOptimizer:
        return make_optimizer(Net(torch.bfloat16), OptimizerConfig(kwargs=KWARGS, **settings), None, seed=3)

    assert type(made()) is MixedPrecisionOptimizer
    assert type(made().optimizer) is torch.optim.AdamW
    small = made(state_dtype="int8", master_weights="none", offload_states=True)
    assert isinstance(small.optimizer, CompactAdam)
    assert small.optimizer.form == StateFormat("int8", masters=False, offload=True)
    assert small.optimizer.seed == 3
    assert OptimizerConfig(state_dtype="bf16", master_weights="fp32").state_dtype == "bfloat16"


def test_schedules_and_learning_rates_are_those_of_the_plain_optimizer() -> None:
    schedule = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}}
    net = Net(torch.bfloat16)
    optimizer = make_optimizer(net, OptimizerConfig(kwargs=KWARGS, state_dtype="int8"), schedule, seed=0)
    rates = []
    for step in range(5):
        rates.append(optimizer.learning_rate)
        train(net, optimizer, range(step, step + 1))
    assert rates == pytest.approx([1e-3, 3.25e-3, 5.5e-3, 7.75e-3, 1e-2])


def test_a_step_with_infinite_gradients_changes_nothing() -> None:
    net, optimizer = compact(torch.bfloat16, StateFormat("int8", masters=False))
    before = values(net)
    net.bias.grad = torch.full_like(net.bias, torch.inf)
    optimizer.collect_gradients()
    norm, taken = optimizer.step(1.0)
    assert norm == torch.inf
    assert not taken
    assert all(torch.equal(parameter, before[name]) for name, parameter in values(net).items())
    assert not optimizer.optimizer.gradients


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"are for torch\.optim\.AdamW"):
        OptimizerConfig(name="torch.optim.SGD", state_dtype="int8")
    with pytest.raises(InputError, match=r"policy\.optimizer\.name is torch\.optim\.SGD"):
        CompactOptimizer(Net(torch.bfloat16), "torch.optim.SGD", {"lr": 1.0}, None, StateFormat("int8"), 0)
    with pytest.raises(InputError, match="amsgrad"):
        CompactOptimizer(Net(torch.bfloat16), "torch.optim.AdamW", {"amsgrad": True}, None, StateFormat("int8"), 0)


@pytest.mark.parametrize("build", PLAIN_AND_COMPACT.values(), ids=PLAIN_AND_COMPACT)
def test_an_update_waits_for_readers_of_the_weights(build: Any) -> None:
    net, optimizer = build()
    give(net, optimizer, 0)
    before, seen = values(net), []
    optimizer.before_change = lambda: seen.append(values(net))
    optimizer.step(1.0)
    assert len(seen) == 1
    assert all(torch.equal(seen[0][name], before[name]) for name in before)
    assert not torch.equal(values(net)["wide"], before["wide"])
