"""Run as a program: trains tiny models on meshes of ranks (gloo, one process each), and saves what each mesh computes.

python parallel_ranks.py FOLDER CASE…      CASE: MODEL/OBJECTIVE/DTYPE/MESH, such as llama/grpo/float64/dp2-tp2

FOLDER/<case>.pt: losses, norms and gradients of two updates, the state after them, and log-probabilities. A case ending
in +OTHER continues after the first update from the checkpoint of the same case on the mesh OTHER; one in +MODEL:OTHER,
from that of another MODEL.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from float64 import float64
from fused_references import use_torch_kernels
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from posttrain.config import DpoConfig, LossFnConfig, load_config
from posttrain.data.packing import MicroBatching, plan_micro_batches
from posttrain.engines.choose_engine import engine_for_training
from posttrain.policy import trainer
from posttrain.policy.fused.layers import FusedLayer
from posttrain.policy.objectives import BradleyTerry, ClippedPolicyGradient, PreferenceLoss
from posttrain.policy.parallel import fsdp
from posttrain.policy.trainer import PolicyTrainer, RankSetup
from posttrain.roles import Objective
from posttrain.types import NoiseKey, Sampling, Task, TokenBatch

VOCAB = 260
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 261}),  # odd: ranks have unequal parts of it
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "qwen2": ("qwen2", {}),
    "cohere": ("cohere", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "moe": ("qwen3-moe", {"num_experts": 8, "tie_word_embeddings": False}),
    "gptoss": ("gpt-oss", {}),
    "deepseek": ("deepseek-v3", {}),
    "mixtral": ("mixtral", {}),
    "qwen3next": ("qwen3-next", {}),
    "mistral": ("mistral", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
}
OBJECTIVES: Mapping[str, Objective] = {
    "grpo": ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.1)),
    "dpo": PreferenceLoss(DpoConfig(reference_policy_kl_penalty=0.3)),
    "rm": BradleyTerry(center_rewards_coefficient=0.1),
}
LORA = ["enabled=true", "dim=4", "alpha=8"]
SAMPLING = Sampling(max_new_tokens=6, ignore_eos=True)


def sizes(mesh: str) -> dict[str, int]:
    """Of "dp2-tp2". Ranks of `ep` are among those of `dp` and `cp`."""
    return {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in mesh.split("-")}


def source_of(case: str) -> str:
    """The case that a resumed one continues from."""
    resumed, _, other = case.partition("+")
    model, objective, dtype, _ = resumed.split("/")
    source, _, mesh = other.rpartition(":")
    return f"{source or model}/{objective}/{dtype}/{mesh}"


def setup(case: str, folder: Path) -> RankSetup:
    model, objective, dtype, mesh = case.partition("+")[0].split("/")
    model, *extra = model.split("-")
    axes = sizes(mesh)
    place = folder / model
    words = [
        f"policy.model_name={place}",
        f"policy.tokenizer.name={place}",
        "policy.device=cpu",
        f"policy.precision={'bfloat16' if dtype == 'bfloat16' else 'float32'}",
        "policy.max_total_sequence_length=64",
        "policy.optimizer.kwargs={lr: 1e-2, eps: 1e-4}",
        "policy.max_grad_norm=0.5",
        f"policy.dtensor_cfg.tensor_parallel_size={axes.get('tp', 1)}",
        f"policy.dtensor_cfg.context_parallel_size={axes.get('cp', 1)}",
        f"policy.dtensor_cfg.expert_parallel_size={axes.get('ep', 1)}",
        f"policy.dtensor_cfg.dp_replicate_size={axes.get('re', 1)}",
        f"policy.dtensor_cfg.activation_checkpointing={'recompute' in extra}".lower(),
        f"policy.optimizer.offload_states={'offload' in extra}".lower(),
        f"policy.dtensor_cfg.cpu_offload={'host' in extra}".lower(),
        f"policy.dtensor_cfg.sequence_parallel={'rows' in extra}".lower(),
        f"cluster.gpus_per_node={axes.get('dp', 1) * axes.get('tp', 1) * axes.get('cp', 1)}",
        *([f"policy.dtensor_cfg.lora_cfg.{word}" for word in LORA] if "lora" in extra else []),
        "data.train={dataset_name: ResponseDataset, data_path: none.jsonl}",
        "data.default.env_name=math",
    ]
    policy = load_config("grpo", None, words).config.policy
    return RankSetup(policy, seed=0, needs_reference=True, reward_model=objective == "rm", answer_ends=(2,))


def batch_for(objective: str) -> TokenBatch:
    """Answers of many lengths. In rows of the longest prompt, a rank of cp2 has no response token."""
    random = torch.Generator().manual_seed(1)
    lengths = [5, 9, 1, 7, 4, 6, 3, 8]
    prompt_of = [0, 0, 0, 0, 1, 1, 2, 2] if objective == "grpo" else [0, 0, 1, 1, 2, 2, 3, 3]
    mask = torch.ones(sum(lengths))
    mask[[1, 20]] = 0.0

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=random).tolist()

    advantages = torch.randn(len(lengths), generator=random).repeat_interleave(torch.tensor(lengths))
    noise = torch.randn(sum(lengths), generator=random) * 0.3
    return TokenBatch.build(
        [ids(length) for length in (2, 5, 30, 11)[: max(prompt_of) + 1]],
        [ids(length) for length in lengths],
        prompt_of,
        {"mask": mask, "advantages": advantages, "noise": noise},
    )


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def train(case: str, folder: Path) -> dict[str, Any]:
    fuses = "fused" in case.split("/")[0].split("-")
    with pytest.MonkeyPatch.context() as patches:
        if fuses:
            use_torch_kernels(patches)
        return computed(case, folder, fuses)


def computed(case: str, folder: Path, fuses: bool) -> dict[str, Any]:
    objective_name = case.split("/")[1]
    rank = PolicyTrainer(setup(case, folder))
    assert rank.optimizer is not None
    assert all(isinstance(layer.forward, FusedLayer) is fuses for layer in rank.forward.head.decoder.layers)
    found: dict[str, Any] = {"gradients": [], "metrics": [], "offloaded": offloaded(rank)}
    rank.optimizer.before_change = lambda: found["gradients"].append(whole(rank.optimizer._gradients()))
    objective, batch = OBJECTIVES[objective_name], batch_for(objective_name)
    (reference,) = rank.reference_logprobs([batch])
    assert reference is not None
    found["reference"] = reference
    near = reference + batch.columns["noise"]
    batch = batch.with_columns(reference_logprobs=reference, prev_logprobs=near, generation_logprobs=near)
    plan = plan_micro_batches(
        batch, MicroBatching(num_responses=2), rank.mesh.dp, keep_groups_whole=objective.keeps_groups_whole
    )
    number = dist.get_rank() if dist.is_initialized() else 0
    parts = [batch.select(rows) if rows else None for rows in plan[rank.mesh.dp_index(number)]]
    others = case.partition("+")[2]
    if others:
        rank.load(folder / source_of(case) / "step_1")
        found["loaded"] = whole(dict(rank.model.named_parameters()) | rank.optimizer.state_tensors())
    for step in (2,) if others else (1, 2):
        found["metrics"].append(gathered(rank, rank.update(parts, objective, seed=step)))
        if step == 1:
            rank.checkpoints.save(folder / case / "step_1", optimizer=True)
            found["saved"] = whole(dict(rank.model.named_parameters()) | rank.optimizer.state_tensors())
    (found["logprobs"],) = rank.logprobs([batch])
    found["state"] = whole(dict(rank.model.named_parameters()) | rank.optimizer.state_tensors())
    if objective_name == "grpo" and not others:
        found["tokens"], found["held while sampling"] = sampled(rank, number)
        found["parameters"] = sum(parameter.numel() for parameter in rank.model.parameters())
    return found


def offloaded(rank: PolicyTrainer) -> set[bool]:
    """Whether FSDP keeps parameters, gradients and the reference in host memory."""
    roots = [root for root in (rank.forward, rank.reference) if root is not None]
    sharded = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
    return {parameter.offload_to_cpu for group in groups if group is not None for parameter in group.fsdp_params}


def gathered(rank: PolicyTrainer, metrics: dict[str, float]) -> dict[str, float]:
    """Of all data-parallel ranks."""
    if not dist.is_initialized():
        return metrics
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, metrics)
    shares = rank.mesh.one_per_shard(shares)
    loss = sum(share["loss"] for share in shares)
    assert len({share["grad_norm"] for share in shares}) == 1
    return {"loss": loss, "grad_norm": metrics["grad_norm"]}


def sampled(rank: PolicyTrainer, number: int) -> tuple[list[Any], int]:
    """Token ids by task, and the parameters that this rank held meanwhile."""
    engine = engine_for_training(rank.model, rank.tokenizer, rank.config, rank.device)
    assert engine is not None
    tasks = [Task(at, str(at), "", tuple(range(5 + at, 9 + 2 * at))) for at in range(3)]
    mesh = rank.mesh.for_sampling
    with rank.sampling():
        held = sum(fsdp.local_part(parameter).numel() for parameter in set(rank.model.parameters()))
        own = engine.generate(tasks[mesh.dp_index(number) :: mesh.dp], 3, SAMPLING, NoiseKey(seed=0, step=1))
    answers = [[completion.token_ids for completion in group] for group in own]
    if not dist.is_initialized():
        return answers, held
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, answers)
    for first in range(0, len(shares), mesh.tp):
        assert all(share == shares[first] for share in shares[first : first + mesh.tp]), "tp ranks draw the same tokens"
    merged: list[Any] = [None] * len(tasks)
    for shard, groups in enumerate(mesh.one_per_shard(shares)):
        merged[shard :: mesh.dp] = groups
    return merged, held


def run(number: int, world: int, cases: Sequence[str], folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder}/meeting{world}", rank=number, world_size=world)
    for case in cases:
        exact = case.split("/")[2] == "float64"
        trainer.DTYPES["float32"] = torch.float64 if exact else torch.float32
        # FSDP would add up in float32, as it should outside of this file.
        fsdp.MixedPrecisionPolicy = (lambda reduce_dtype: MixedPrecisionPolicy()) if exact else MixedPrecisionPolicy
        mode: AbstractContextManager[None] = float64() if exact else nullcontext()
        with mode:
            found = train(case, folder)
        if number == 0:
            torch.save(found, folder / f"{case.replace('/', '_')}.pt")
            print(case, [round(metrics["loss"], 6) for metrics in found["metrics"]], flush=True)
    if world > 1:
        dist.destroy_process_group()


def main(folder: Path, cases: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in {case.split("/")[0].split("-")[0] for case in cases}:
        family, settings = MODELS[name]
        tiny_model(family, **{"vocab_size": VOCAB, **settings}).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    by_world: dict[int, list[str]] = {}
    for case in cases:
        axes = sizes(case.partition("+")[0].rpartition("/")[2])
        by_world.setdefault(axes.get("dp", 1) * axes.get("tp", 1) * axes.get("cp", 1), []).append(case)
    for resumes in (False, True):
        for world, listed in by_world.items():
            chosen = [case for case in listed if ("+" in case) == resumes]
            if chosen:
                (folder / f"meeting{world}").unlink(missing_ok=True)
                mp.start_processes(run, args=(world, chosen, folder), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
