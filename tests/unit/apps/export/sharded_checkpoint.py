"""Run as a program: two ranks write one model's weights as training frameworks do, each its half of every tensor.

python sharded_checkpoint.py MODEL_FOLDER TARGET

TARGET/dcp          torch DCP, keys under "model." as NeMo RL saves them
TARGET/safetensors  one safetensors file per rank, as NeMo RL's default does
TARGET/lora         torch DCP of LoRA weights alone: rank 4, all linear layers of attention
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANK = 4


def lora_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    found = {}
    for name, tensor in weights.items():
        if "self_attn" in name:
            module = name.removesuffix(".weight")
            found[f"{module}.lora_A.weight"] = torch.randn(RANK, tensor.shape[1], generator=generator) * 0.2
            found[f"{module}.lora_B.weight"] = torch.randn(tensor.shape[0], RANK, generator=generator) * 0.2
    return found


def write(rank: int, model: str, target: str, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{target}/rendezvous", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    weights = load_file(f"{model}/model.safetensors")

    def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}

    everything = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}  # NeMo RL saves tied weights twice
    dcp.save({"model": sharded(everything)}, checkpoint_id=f"{target}/dcp")
    dcp.save({"model": sharded(lora_weights(weights))}, checkpoint_id=f"{target}/lora")
    mapping = dict.fromkeys(weights, 1)
    storage = dcp.HuggingFaceStorageWriter(
        f"{target}/safetensors", fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=False
    )
    dcp.save(sharded(weights), storage_writer=storage)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.start_processes(write, args=(sys.argv[1], str(folder), 2), nprocs=2, start_method="fork")
