"""Llama 8B and 70B and Qwen 32B on 8 x 8 GPUs, without the GPUs: a process group that sends nothing, tensors without
memory.

One forward and backward pass runs through the code that splits, shards and fuses. Counted are the bytes that one rank
stores, keeps and sends, beside what the planner says.

    PYTHONPATH=src:tests python tests/large_models.py                every plan, as the table of docs/planner.md
    PYTHONPATH=src:tests python tests/large_models.py --layers 2     with two layers of each model, in a minute
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_references import use_torch_kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from posttrain.config import load_config
from posttrain.config.policy import DtensorConfig
from posttrain.models.attention_interface import ATTENTION, attention_context
from posttrain.policy.fused import layers as fused_layers
from posttrain.policy.fused import trials
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.memory.layer_bytes import Pass
from posttrain.policy.memory.model_shape import shape_of_config
from posttrain.policy.memory.peak_memory import RankMemory
from posttrain.policy.memory.settings import run_settings
from posttrain.policy.packed import PackedRow
from posttrain.policy.parallel import tensor as tensor_parallel
from posttrain.policy.parallel.context import RowGroup
from posttrain.policy.parallel.fsdp import local_part, shard
from posttrain.policy.parallel.mesh import Mesh
from posttrain.types import TokenBatch

WORLD = 64
TOKENS = 4096  # of the packed row that ranks compute, as one sequence
CHUNK = 1024  # of logits: more than one, so none are kept
CPU = torch.device("cpu")
BIG = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, int]]] = {
    "Llama 8B": (
        LlamaConfig,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "Llama 70B": (
        LlamaConfig,
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "Qwen 32B": (
        Qwen3Config,
        {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
}
Plan = tuple[int, int, int]  # ranks that share layers, ranks that share rows, replicas
ALL_PLANS: list[Plan] = [(tp, cp, 1) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8]
ALL_PLANS += [(tp, 1, 8) for tp in (1, 2, 8)]


@dataclass(frozen=True)
class RankBytes:
    """Of one rank."""

    weights: float  # stored
    whole_weights: float  # while sampling
    kept: float  # by a forward pass for its backward pass
    gradients: float


@dataclass(frozen=True)
class Found:
    held: RankBytes
    planned: RankBytes
    sent: Counter[str]  # bytes that a rank hands to each kind of collective, in one forward and backward pass

    @property
    def largest_error(self) -> float:
        pairs = zip(vars(self.held).values(), vars(self.planned).values(), strict=True)
        return max(abs(planned / held - 1) for held, planned in pairs)


@contextmanager
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_config(name: str, num_layers: int | None = None) -> PretrainedConfig:
    kind, sizes = MODELS[name]
    depth = {} if num_layers is None else {"num_hidden_layers": num_layers}
    return kind(**{**BIG, **sizes, **depth})


def run_plan(config: PretrainedConfig, plan: Plan, patches: pytest.MonkeyPatch) -> Found:
    """One pass of one rank. Tensors without memory have no values: trials that compare some are left out."""
    use_torch_kernels(patches)
    patches.setattr(tensor_parallel, "_trial", lambda head: None)
    patches.setattr(tensor_parallel, "_compare", lambda *_: None)
    for module in (trials, fused_layers):
        patches.setattr(module, "is_near", lambda *_, **__: True)
    sizes = dict(zip(("tensor_parallel_size", "context_parallel_size", "dp_replicate_size"), plan, strict=True))
    mesh = Mesh.over(WORLD, DtensorConfig(**sizes))
    axes = mesh.axes(CPU)
    row = _row(None if axes.rows is None else RowGroup(axes.rows))
    without_memory = FakeTensorMode()
    with without_memory:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
        root = TokenLogprobs(model, CHUNK)
        if axes.layers is not None:
            tensor_parallel.split_over_ranks(model, root.head, axes.layers, CPU)
        whole = num_bytes(model)
        assert fuse_layers(root.head.decoder, may_join=False) == config.num_hidden_layers
    shard(root, list(root.head.decoder.layers), axes.parameters)  # the mesh has values
    stored = num_bytes(model)
    row = _faked(row, without_memory.from_tensor)
    with without_memory:
        sent = CollectiveBytes()
        with attention_context(row.attention), sent:
            with kept_tensors() as kept:
                logprobs = root(row, 1.0)
            parameters = {local_part(parameter).untyped_storage()._cdata for parameter in root.parameters()}
            # What FSDP gathered is freed after each layer, and gathered again.
            num_kept = sum(s.nbytes() for key, s in kept.items() if key not in parameters)
            logprobs.sum().backward()
    gradients = [local_part(p.grad) for p in root.parameters() if p.grad is not None]
    assert len(gradients) == len(list(root.parameters()))
    assert all(parameter.grad.shape == parameter.shape for parameter in root.parameters())
    in_fp32 = sum(4 * gradient.numel() for gradient in gradients)  # as they are added up
    return Found(RankBytes(stored, whole, num_kept, in_fp32), planned(config, sizes), sent.by_kind)


def planned(config: PretrainedConfig, sizes: dict[str, int]) -> RankBytes:
    words = ["cluster.num_nodes=8", "cluster.gpus_per_node=8", "policy.precision=bfloat16"]
    words += [f"policy.logprob_chunk_size={CHUNK}"]
    words += [f"policy.dtensor_cfg.{name}={size}" for name, size in sizes.items()]
    words += ["data.train={dataset_name: ResponseDataset, data_path: none.jsonl}", "data.default.env_name=math"]
    policy: Any = load_config("grpo", None, words).config.policy
    memory = RankMemory(
        shape_of_config("model", config.to_dict()), run_settings(policy, has_reference=False, ranks=WORLD)
    )
    kept = memory.layer.kept(Pass(TOKENS, TOKENS, 0.0, 0.0))
    return RankBytes(memory.resident()["weights"], memory.while_sampling()["whole weights"], kept, memory.gradients())


def num_bytes(model: nn.Module) -> int:
    return sum(local_part(parameter).nbytes for parameter in set(model.parameters()))


def _row(share: RowGroup | None) -> PackedRow:
    batch = TokenBatch(
        (torch.zeros(1, dtype=torch.long),), (torch.ones(TOKENS, dtype=torch.long),), (0,),
        {"mask": torch.ones(TOKENS)}, 1.0, 1.0, 1.0,
    )  # fmt: skip
    whole = replace(PackedRow.build(batch, torch.device("cpu")), attention=KeepsAsOnAGpu())
    return whole if share is None else share.own_part(whole)


def _faked(row: PackedRow, fake: Callable[[Tensor], Tensor]) -> PackedRow:
    names = ("input_ids", "position_ids", "source", "targets", "last")
    share = None if row.share is None else replace(row.share, own=fake(row.share.own))
    return replace(row, **{name: fake(getattr(row, name)) for name in names}, share=share)


class KeepsAsOnAGpu:
    """Keeps what variable-length attention on a GPU keeps: inputs, output, the log of its sums."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = torch.empty(query.shape[:2], device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@contextmanager
def kept_tensors() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Memory that autograd keeps, each once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        if local.dtype != torch.long:
            kept[local.untyped_storage()._cdata] = local.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


KINDS = {"allgather": "gathered", "reduce_scatter": "scattered", "allreduce": "summed", "alltoall": "exchanged"}


class CollectiveBytes(TorchDispatchMode):
    """Bytes that this rank gives to collectives: its shard of what is gathered, all of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            plain = name.removeprefix("c10d::").strip("_")
            kind = next(kind for start, kind in KINDS.items() if plain.startswith(start))
            inputs = args[0] if kind == "summed" else args[1]
            self.by_kind[kind] += sum(x.nbytes for x in tree_leaves(inputs) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of each model (default: all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    columns = ["", "tp", "cp", "replicas", "weights", "kept", "gradients", *KINDS.values()]
    print(f"| {' | '.join([*columns, 'planner off by'])} |\n|{'---|' * (len(columns) + 1)}")
    with fake_ranks():
        for name in args.models:
            for plan in ALL_PLANS:
                with pytest.MonkeyPatch.context() as patches:
                    found = run_plan(model_config(name, args.layers), plan, patches)
                held = (found.held.weights, found.held.kept, found.held.gradients)
                sizes = [*held, *[found.sent[kind] for kind in KINDS.values()]]
                cells = [name, *map(str, plan), *[f"{size / 2**30:.2f}" for size in sizes]]
                cells.append(f"{found.largest_error:.1%}")
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
