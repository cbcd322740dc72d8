"""Memory of worker groups on GPUs of their own: which machines they are on, and what one of their GPUs needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from posttrain.apps.plan.phases import scoring_phase
from posttrain.apps.plan.plan import RunEstimate, estimate_run
from posttrain.config import GrpoRunConfig, RunConfig
from posttrain.config.placement import ENGINE, REFERENCE, ResourcesConfig, group_of_reward
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.policy.memory.model_shape import find_shape
from posttrain.policy.memory.peak_memory import SAMPLING, Phase, RankMemory


@dataclass(frozen=True)
class PlannedGroup:
    name: str
    gpus: dict[int, int]  # machine, counted from 1 -> GPUs there
    needed_bytes: float | None  # of one GPU; None: its model is not known here
    fits: bool = True

    def as_json(self) -> JsonObject:
        return {"name": self.name, "gpus": self.gpus, "needed_bytes": self.needed_bytes, "fits": self.fits}


def planned_groups(found: RunEstimate, config: RunConfig) -> list[PlannedGroup]:
    """The ranks that train first. Empty if they are alone."""
    placement = config.placement
    if not placement.groups:
        return []
    sampling = [phase for phase in found.memory.phases if phase.name == SAMPLING]
    own = [phase for phase in found.memory.phases if phase not in sampling or not config.num_engines]
    rows = [("policy", placement.ranks, own)]
    for group in placement.groups:
        if group.name == ENGINE:
            rows.append((group.name, group.machines, sampling))
        elif group.name == REFERENCE:
            rows.append((group.name, group.machines, [_reference(found, group.size)]))
        else:
            rows.append((group.name, group.machines, _reward(found, config, group.name)))
    return [
        PlannedGroup(
            name,
            dict(sorted(Counter(machine + 1 for machine in machines).items())),
            max((phase.needed_bytes for phase in phases), default=None),
            all(found.fits(phase) for phase in phases),
        )
        for name, machines, phases in rows
    ]


_ONLY_SCORES: JsonObject = {  # settings of GPUs whose model is whole, and not trained
    "row_shares": 1,
    "expert_shares": 1,
    "num_engines": 0,
    "lora_rank": None,
    "trains": False,
    "in_host_memory": False,
}


def _reference(found: RunEstimate, size: int) -> Phase:
    settings = replace(found.settings, ranks=size, layer_shares=size, **_ONLY_SCORES)
    return scoring_phase(RankMemory(found.shape, settings), found.workload, {})


def _reward(found: RunEstimate, config: RunConfig, name: str) -> list[Phase]:
    assert isinstance(config, GrpoRunConfig)
    [reward] = [own for field, own in config.placed_rewards.items() if group_of_reward(field) == name]
    try:
        shape = find_shape(reward.model_name).without_output_table()
    except InputError:
        return []
    settings = replace(
        found.settings,
        element=4 if reward.precision == "float32" else 2,
        ranks=1,
        layer_shares=1,
        scores_answers=True,
        **_ONLY_SCORES,
    )
    batch = replace(found.workload.score, max_tokens=max(reward.max_batch_tokens, reward.max_model_len or 0))
    return [scoring_phase(RankMemory(shape, settings), replace(found.workload, score=batch), {})]


def proposed_placement(found: RunEstimate, config: RunConfig) -> list[str]:
    """Settings that give the reference GPUs of its own, where ranks that train fit without it and not with it."""
    cluster, size = config.cluster, config.policy.dtensor_cfg.tensor_parallel_size
    if not found.too_large or not found.settings.holds_copy or config.placement.group(REFERENCE) is not None:
        return []
    for count in range(size, cluster.gpus_per_node + 1, size):
        resources = ResourcesConfig(gpus_per_node=count, num_nodes=1 if cluster.num_nodes > 1 else None)
        section = config.policy.reference.colocated.model_copy(update={"enabled": False, "resources": resources})
        policy = config.policy.model_copy(
            update={"reference": config.policy.reference.model_copy(update={"colocated": section})}
        )
        changed = config.model_copy(update={"policy": policy})
        if any(True for _ in changed.problems(lambda key: False)):
            continue
        other = estimate_run(changed, found.gpu, shape=found.shape, lengths=found.workload.lengths)
        if not other.too_large and all(group.fits for group in planned_groups(other, changed)):
            key = "policy.reference.colocated"
            words = [f"{key}.enabled=false", f"{key}.resources.gpus_per_node={count}"]
            return [*words, f"{key}.resources.num_nodes=1"] if cluster.num_nodes > 1 else words
    return []
