"""The header of a run: what is trained, on what, how, and where it is written. Shown before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config import DpoRunConfig, GrpoRunConfig, RunConfig
from posttrain.files.json_files import JsonObject
from posttrain.policy.trainer import ModelFacts
from posttrain.recipes.recipe import Prepared


def header_lines(
    config: RunConfig,
    prepared: Prepared,
    facts: ModelFacts,
    *,
    unit: str,
    num_devices: int,
    max_steps: int,
    planned: str,
    unused_epochs: str,
) -> list[str]:
    """`planned`: predicted memory and time; empty if there is no prediction. `unused_epochs`: see `LoadedConfig`."""
    policy, sizes = config.policy, config.step_sizes()
    lora = policy.dtensor_cfg.lora_cfg
    trained = f"LoRA adapters of rank {lora.dim}" if lora.enabled else "all weights are trained"
    held_out = f", {len(prepared.validation):,} held out" if prepared.validation is not None else ""
    each = f" x {sizes.num_answers_per_row} answers" if isinstance(config, GrpoRunConfig) else ""
    updates = f" in {sizes.num_updates} updates" if sizes.num_updates > 1 else ""
    rows = {
        "model": f"{policy.model_name}, {_count(facts.num_parameters)} parameters, {trained}",
        "devices": f"{num_devices} x {facts.device_name}, {policy.precision}",
        "data": f"{len(prepared.train):,} {unit}{held_out}",
        "step": f"{sizes.num_rows} {unit}{each}{updates}; {max_steps:,} step{'' if max_steps == 1 else 's'}",
        "epochs": f"{unused_epochs} is not used: steps is given" if unused_epochs else "",
        "settings": ", ".join(_settings(config, max_steps)),
        "planned": planned,
    }
    return [f"{name:<9}{text}" for name, text in rows.items() if text]


def _settings(config: RunConfig, max_steps: int) -> Sequence[str]:
    lr = config.policy.optimizer.kwargs.get("lr")
    found = [_learning_rate(lr, config.policy.scheduler, max_steps)] if isinstance(lr, int | float) else []
    if isinstance(config, GrpoRunConfig):
        penalty, period = config.loss_fn.reference_policy_kl_penalty, config.kl_period
        measured = f"estimated every {period} steps" if period else "not measured (doctor.kl_period=10 estimates it)"
        found.append(f"KL penalty {penalty:g}" if penalty else f"no KL penalty, KL {measured}")
        default = config.data.default.env_name if config.data.default is not None else None
        names = dict.fromkeys(entry.env_name or default for entry in config.data.train_sets())
        used = [name for name in names if name]
        found.append(f"reward {', '.join(_reward(config, name) for name in used) or 'of the traces'}")
    if isinstance(config, DpoRunConfig):
        found.append(f"{config.dpo.preference_loss} loss, beta {config.dpo.reference_policy_kl_penalty:g}")
    return found


def _reward(config: GrpoRunConfig, environment: str) -> str:
    """The name of the function, where the environment is one."""
    function = getattr(config.env.get(environment), "function", None)
    return function.rpartition(":")[2] if function else environment


def _learning_rate(lr: float, scheduler: list[JsonObject] | JsonObject | None, max_steps: int) -> str:
    """With the warm-up, if the schedule begins with one."""
    first = (scheduler[0] if isinstance(scheduler, list) else scheduler) if scheduler else {}
    kwargs = first.get("kwargs") or {}
    start, end, steps = kwargs.get("start_factor", 1 / 3), kwargs.get("end_factor", 1.0), kwargs.get("total_iters", 5)
    if not first.get("name", "").endswith("LinearLR") or start >= end:
        return f"lr {lr:g}"
    if max_steps > steps:
        return f"lr {lr * end:g} after a warm-up of {steps} steps"
    reached = lr * (start + (end - start) * (max_steps - 1) / steps)
    return f"lr at most {reached:.3g}, as the warm-up to {lr * end:g} takes {steps} steps (policy.scheduler=null: none)"


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
