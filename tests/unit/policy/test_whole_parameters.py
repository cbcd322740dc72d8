"""Sharded modules while they sample: whole parameters, and no hook of FSDP, which would use other streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.policy.parallel.fsdp import shard, whole_parameters


@pytest.fixture
def root() -> Iterator[nn.Module]:
    """Two layers on one rank. As in training, a first pass has entered at the root."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard(model, list(model), init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
        yield model
    finally:
        dist.destroy_process_group()


def num_hooks(root: nn.Module) -> int:
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules)


def test_parameters_are_whole_and_only_hooks_of_fsdp_are_off(root: nn.Module) -> None:
    called: list[str] = []
    root[1].register_forward_hook(lambda *_: called.append("own"))  # type: ignore[index]
    before = num_hooks(root)
    expected = root(torch.ones(2, 4))
    called.clear()
    with torch.no_grad(), whole_parameters(root):
        assert not any(isinstance(parameter, DTensor) for parameter in root.parameters())
        assert num_hooks(root) == 1
        assert torch.equal(root(torch.ones(2, 4)), expected)
    assert called == ["own"]
    assert num_hooks(root) == before
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())


def test_training_goes_on_after_sampling_and_after_an_error(root: nn.Module) -> None:
    def gradients() -> list[torch.Tensor]:
        root.zero_grad()
        root(torch.arange(4.0)[None]).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in root.parameters()]  # type: ignore[union-attr, operator]

    expected = gradients()
    with pytest.raises(ValueError, match="stopped"), whole_parameters(root):
        raise ValueError("stopped")
    assert all(torch.equal(found, want) for found, want in zip(gradients(), expected, strict=True))
