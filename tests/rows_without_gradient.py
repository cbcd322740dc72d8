"""Run as a program: steps of GRPO in which most answers give no gradient, with these left out and with all of them
computed.

python rows_without_gradient.py FOLDER WORLD

Every case runs on WORLD ranks (gloo, one process each) in float64, through `Grpo.step` and `ShardedTrainer`.
FOLDER/WORLD.pt: by case and packing, the gradients of each update, the metrics of each step, and weights and optimizer
state at the end. One rank also computes each case without leaving anything out: the packing ALL_ROWS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from float64 import float64
from parallel_ranks import MODELS, VOCAB, setup, whole
from tiny_models import byte_tokenizer, tiny_model
from torch.distributed.fsdp import MixedPrecisionPolicy

from posttrain.algorithms.advantages import GroupAdvantages
from posttrain.algorithms.credit import Credit
from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.config import LossFnConfig
from posttrain.data.packing import MicroBatching
from posttrain.orchestration.rank import Rank, build_rank
from posttrain.orchestration.sharded import ShardedTrainer, SharedWeights
from posttrain.orchestration.workers import LocalWorker, WorkerGroup
from posttrain.policy import trainer
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.policy.parallel import fsdp
from posttrain.types import Completion, Group, Rollout, Score, TakenGroups, Task

STEPS = 2
ALL_ROWS = "all rows"
PACKINGS = {"packed": MicroBatching(max_tokens=40), "two by two": MicroBatching(num_responses=2)}
# Advantage 0: the second and the third group, and two answers of the last. One answer of the first could not be scored.
REWARDS = ([1.0, 0.0, None, 1.0], [1.0] * 4, [0.0] * 4, [0.0, 1.0, 0.5, 0.5])
GSPO = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": 30.0,
}


@dataclass(frozen=True)
class Case:
    loss: Mapping[str, Any] = field(default_factory=dict)
    num_updates: int = 2
    overlong_filtering: bool = False
    age: int = 0  # steps by which the weights that sampled the answers are behind
    has_turns: bool = False  # some tokens are the environment's


CASES = {
    "token level, one update": Case(num_updates=1),
    "token level": Case(),
    "sequence level": Case({"token_level_loss": False}),
    "a constant length": Case({"loss_normalizer": "max_tokens", "max_response_tokens": 12}),
    "corrected": Case(
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
        | {"truncated_importance_sampling_ratio": 2.0}
    ),
    "gspo": Case({"sequence_level_importance_ratios": True, "token_level_loss": False}),
    "gspo, corrected": Case(GSPO),
    "cispo": Case({"use_cispo": True}),
    "sapo": Case({"trust_region": "soft"}),
    "gmpo": Case({"trust_region": "geometric_mean", "token_level_loss": False}),
    "dppo": Case({"trust_region": "tv"}),
    "reinforce": Case({"disable_ppo_ratio": True}),
    "older weights": Case({"ratio_clip_c": 3.0}, num_updates=1, age=1),
    "turns": Case(has_turns=True),
    "turns, sequence level": Case({"token_level_loss": False}, has_turns=True),
    "updates without any gradient": Case(num_updates=4),
    "cut-off answers are masked": Case(overlong_filtering=True),
    "likelihood of rewarded answers": Case({"positive_example_nll_weight": 0.1}),
    "kl in the loss, cut-off answers are masked": Case({"reference_policy_kl_penalty": 0.1}, overlong_filtering=True),
}


@dataclass(frozen=True)
class MadeRollouts:
    case: Case

    def take(self, num_groups: int, step: int) -> TakenGroups:
        random = torch.Generator().manual_seed(step)
        groups = tuple(self._group(draw, rewards, step, random) for draw, rewards in enumerate(REWARDS))
        return TakenGroups(groups, groups, {})

    def _group(self, draw: int, rewards: Sequence[float | None], step: int, random: torch.Generator) -> Group:
        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(3, VOCAB, (count,), generator=random).tolist())

        rollouts = []
        for sample, reward in enumerate(rewards):
            count = 3 + (5 * sample + 2 * draw) % 7
            logprobs = tuple((-5 - torch.rand(count, generator=random)).tolist())
            reason = "length" if sample == 0 else "stop"
            answer = Completion(ids(count), logprobs, "", reason, versions=((0, step - 1 - self.case.age),))
            if self.case.has_turns:
                mask = tuple(place % 3 != 1 for place in range(count))
                kept = tuple(value if own else 0.0 for value, own in zip(logprobs, mask, strict=True))
                answer = replace(answer, mask=mask, logprobs=kept)
            rollouts.append(Rollout(answer, Score(reward)))
        return Group(Task(draw, str(draw), "", ids(4 + draw)), tuple(rollouts))


class RanksInStep:
    """A `WorkerGroup` of ranks in processes of their own, each of which runs the same driver. No process has another's
    rank: results are exchanged after each call.
    """

    in_process, unit, num_nodes = False, "rank", 1

    def __init__(self, rank: Rank) -> None:
        self.mesh, self.workers = rank.trainer.mesh, [_Member(self, at) for at in range(dist.get_world_size())]
        self.rank, self.pending, self.results = rank, dict[int, Future[Any]](), list[Any]()

    def beside(self, name: str) -> None:
        return None

    def call(self, number: int, operation: Callable[..., Any], *args: Any) -> Future[Any]:
        future = self.pending[number] = Future()
        if number == dist.get_rank():
            self.results = [None] * len(self.workers)
            dist.all_gather_object(self.results, getattr(self.rank, operation.__name__)(*args))
        if self.results:
            for at, waiting in self.pending.items():
                if not waiting.done():
                    waiting.set_result(self.results[at])
        if len(self.pending) == len(self.workers):
            self.pending, self.results = {}, []
        return future


@dataclass(frozen=True)
class _Member:
    group: RanksInStep
    number: int

    def submit(self, operation: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.group.call(self.number, operation, *args)


def train(case: Case, batching: MicroBatching, folder: Path) -> dict[str, Any]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = build_rank(setup(f"llama/grpo/float64/dp{world}", folder))
    optimizer = rank.trainer.optimizer
    assert optimizer is not None
    found: dict[str, Any] = {"gradients": [], "metrics": []}
    optimizer.before_change = lambda: found["gradients"].append(whole(optimizer._gradients()))
    group: WorkerGroup = LocalWorker(rank) if world == 1 else RanksInStep(rank)  # type: ignore[assignment]
    settings = GrpoSettings(
        len(REWARDS), num_updates_per_step=case.num_updates, overlong_filtering=case.overlong_filtering
    )
    grpo = Grpo(
        settings,
        ClippedPolicyGradient(LossFnConfig(**{"reference_policy_kl_penalty": 0.0, **case.loss})),
        Credit(GroupAdvantages(normalize_rewards=False)),
        ShardedTrainer(group, batching, batching, seed=0),
        MadeRollouts(case),
        SharedWeights(),
    )
    found["metrics"] = [dict(grpo.step(step).metrics) for step in range(1, STEPS + 1)]
    found["state"] = whole(dict(rank.trainer.model.named_parameters()) | optimizer.state_tensors())
    return found


def run(number: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=number, world_size=world)
    trainer.DTYPES["float32"] = torch.float64
    fsdp.MixedPrecisionPolicy = lambda reduce_dtype: MixedPrecisionPolicy()  # it would add up in float32
    found = {}
    for name, case in CASES.items():
        for packing, batching in PACKINGS.items():
            with float64():
                found[name, packing] = train(case, batching, folder)
        if world == 1:
            with float64(), pytest.MonkeyPatch.context() as patches:
                patches.setattr(ClippedPolicyGradient, "with_gradient", lambda _, batch: batch)
                found[name, ALL_ROWS] = train(case, PACKINGS["packed"], folder)
    if number == 0:
        torch.save(found, folder / f"{world}.pt")
    if world > 1:
        dist.destroy_process_group()


def main(folder: Path, world: int) -> None:
    family, settings = MODELS["llama"]
    tiny_model(family, **{"vocab_size": VOCAB, **settings}).save_pretrained(folder / "llama")
    byte_tokenizer().save_pretrained(folder / "llama")
    mp.start_processes(run, args=(world, folder), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
