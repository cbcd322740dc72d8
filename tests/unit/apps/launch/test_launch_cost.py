"""Costs: the tables of the guides to the dollar, the formula of interruptions against a simulation, prices."""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from launch_profiles import EKS, make_profile, write_profile

from posttrain.apps.launch.cost import (
    PRICES,
    CostReport,
    Interruptions,
    LaunchCost,
    planned_save_s,
    price_of,
    report_cost,
)
from posttrain.apps.plan.plan import estimate_run, find_gpu
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.errors import InputError

STEP_S = 122.9


def gang(save_s: float, notice_share: float) -> Interruptions:
    return Interruptions(24 * 3600, 3, save_s, notice_share, restart_s=360)


@pytest.mark.parametrize(
    ("save_s", "share", "interval", "steps", "overhead"),
    [(21.5, 0, 1113, 9, 5.1), (21.5, 0.9, 3519, 29, 2.5), (1, 0, 240, 2, 2.1), (1, 0.9, 759, 6, 1.5)]
    + [(0.3, 0, 131, 1, 1.7), (0.3, 0.9, 416, 3, 1.4)],
)
def test_best_interval_between_saves(save_s: float, share: float, interval: int, steps: int, overhead: float) -> None:
    found = gang(save_s, share)
    assert round(found.best_interval_s) == interval
    assert found.steps_between_saves(STEP_S) == steps
    assert round(100 * found.overhead(found.best_interval_s), 1) == overhead
    assert found.overhead(found.best_interval_s) < min(found.overhead(0.8 * interval), found.overhead(1.25 * interval))


def test_with_every_interruption_announced_no_regular_save_is_needed() -> None:
    assert gang(21.5, 1.0).steps_between_saves(STEP_S) is None


@pytest.mark.parametrize(
    ("gpu_price", "hours", "overhead", "storage", "a_run", "a_year"),
    [
        (10.0, 4, 0.0, 60, 1020, 24480),  # the guide's own sums: right, with a price that is not a Spot price
        (15.0, 6, 0.0, 60, 2220, 53280),
        (3.29, 4, 0.051, 94, 426, 10223),
        (3.36, 6, 0.051, 94, 603, 14460),
        (7.91, 4, 0.0, 94, 853, 20481),
        (7.91, 6, 0.0, 94, 1233, 29593),
    ],
)
def test_24_gpus_for_4_to_6_hours(
    gpu_price: float, hours: float, overhead: float, storage: float, a_run: int, a_year: int
) -> None:
    cost = LaunchCost(hours, 3, 8 * gpu_price, overhead, storage=storage).in_all
    assert (round(cost), round(24 * cost)) == (a_run, a_year)


def test_100_steps_on_16_b200() -> None:
    hours, price = 100 * STEP_S / 3600, PRICES["a4-highgpu-8g"]
    assert price.spot is not None
    assert price.on_demand is not None
    assert round(LaunchCost(hours, 2, price.spot[0]).in_all) == 271  # 270 with $4.95 a GPU, which is rounded
    assert round(LaunchCost(hours, 2, 8 * 4.95).in_all) == 270
    assert round(LaunchCost(hours, 2, price.on_demand).in_all) == 616


def simulated_overhead(case: Interruptions, interval_s: float, num_interruptions: int, seed: int) -> float:
    """Runs until so many interruptions have happened; time wasted over work done."""
    draw = random.Random(seed)
    elapsed = work = since_save = 0.0
    for _ in range(num_interruptions):
        left = draw.expovariate(1 / case.gang_mtbf_s)
        while left > 0:
            to_save = interval_s - since_save
            if left < to_save:  # interrupted while training
                elapsed, work, since_save, left = elapsed + left, work + left, since_save + left, 0.0
            else:
                elapsed, work, since_save, left = elapsed + to_save, work + to_save, 0.0, left - to_save
                elapsed += case.save_s
                left -= case.save_s
        if draw.random() >= case.notice_share:
            work -= since_save
        since_save = 0.0
        elapsed += case.restart_s
    return elapsed / work - 1


@pytest.mark.parametrize(
    "case", [Interruptions(240 * 3600, 3, 21.5, 0.0, 360), Interruptions(240 * 3600, 3, 1.0, 0.9, 360)]
)
def test_formula_of_interruptions_agrees_with_a_simulation(case: Interruptions) -> None:
    interval = case.best_interval_s
    assert simulated_overhead(case, interval, 20_000, seed=3) == pytest.approx(case.overhead(interval), rel=0.03)


def test_total_time_agrees_with_a_simulation_where_machines_are_lost_often() -> None:
    case = gang(21.5, 0.0)
    interval = case.best_interval_s
    assert 1 + simulated_overhead(case, interval, 20_000, seed=4) == pytest.approx(
        1 + case.overhead(interval), rel=0.03
    )


def report(profile: ClusterProfile, **changed: Any) -> CostReport:
    given = {"num_nodes": 3, "num_steps": 100, "step_s": STEP_S, "step_source": "measured", "save_period": 10}
    given |= {"save_s": 21.5, "save_source": "measured", "today": date(2026, 9, 1)}
    return report_cost(profile, **(given | changed))


EIGHT_BIT = ["policy.optimizer.state_dtype=int8", "policy.optimizer.master_weights=none"]


@pytest.mark.parametrize(
    ("settings", "expected_s"),
    [
        ([*EIGHT_BIT, "checkpointing.async_save=false"], 46.0),
        ([*EIGHT_BIT], 0.32),
        (["cluster.gpus_per_node=8"], 0.32 + 16.06e9 / 50e9),  # the first rank gathers the weights
    ],
)
def test_a_save_costs_what_was_measured_to_block_training(settings: list[str], expected_s: float) -> None:
    config = load_config("grpo", None, ["policy.model_name=llama-8b", *settings]).config
    assert planned_save_s(estimate_run(config, find_gpu("h200"))) == pytest.approx(expected_s, rel=0.05)


def test_the_time_of_a_save_is_that_of_the_profile_of_the_run_or_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["grpo", "policy.model_name=llama-1.5b", "grpo.max_num_steps=50"]
    for given, said in (
        ({}, "(planned)"),
        ({"save_s": 7.5}, "7.5 s that training stands still for a save (cost.save_s)"),
    ):
        profile = write_profile(tmp_path, {**EKS, "cost": given})
        assert main(["plan", "--on", str(profile), *run]) == 0
        assert said in capsys.readouterr().out.replace("\n", " ")


def test_report_has_spot_beside_on_demand_and_names_its_price(tmp_path: Path) -> None:
    found = report(make_profile(tmp_path, EKS, "cost.node_mtbf_hours=24"))
    assert [row.capacity for row in found.rows] == ["spot", "on_demand"]
    assert found.rows[0].low.in_all < found.rows[1].low.in_all
    text = "\n".join(found.lines())
    assert "2026-08-22" in text
    assert "us-east-2" in text
    assert "this config: 10" in text
    assert found.warnings == []


def test_best_period_of_a_short_run_is_at_most_the_run(tmp_path: Path) -> None:
    found = report(make_profile(tmp_path, EKS), num_steps=2, step_s=0.1, save_period=1000)
    assert found.best_save_period == 2


def test_unknown_rate_of_interruptions_is_shown_as_a_range(tmp_path: Path) -> None:
    found = report(make_profile(tmp_path, EKS), step_source="planned", today=date(2026, 12, 1))
    assert [row.node_mtbf_hours for row in found.rows] == [12, 24, 72, None]
    assert any("node_mtbf_hours" in warning for warning in found.warnings)
    assert any("101 days old" in warning for warning in found.warnings)
    assert any("lower bound" in warning for warning in found.warnings)


def test_price_of_the_profile_replaces_the_table(tmp_path: Path) -> None:
    profile = make_profile(tmp_path, EKS, "cost.price={spot: 20.0, as_of: 2026-11-01, source: contract}")
    price = price_of("p5en.48xlarge", profile.cost.price)
    assert price.spot == (20.0, 20.0)
    assert price.on_demand is None
    assert not any("days old" in warning for warning in report(profile, today=date(2026, 11, 20)).warnings)
    with pytest.raises(InputError, match=r"cost\.price"):
        price_of("", None)


def test_plan_on_a_cluster_takes_the_machine_and_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = write_profile(tmp_path, {**EKS, "cost": {"node_mtbf_hours": 24.0}})
    run = ["grpo", "policy.model_name=llama-1.5b", "cluster.num_nodes=2", "cluster.gpus_per_node=8"]
    assert main(["plan", "--on", str(profile), *run, "grpo.max_num_steps=50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["on_cluster"]
    assert [row["capacity"] for row in found["rows"]] == ["spot", "on_demand"]
    assert found["num_nodes"] == 2
    assert found["hours"] == pytest.approx(50 * found["step_s"] / 3600)
    assert main(["plan", "--on", str(profile), *run, "grpo.max_num_steps=50"]) == 0
    assert "cost on the cluster" in capsys.readouterr().out


def test_plan_on_a_cluster_needs_a_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = write_profile(tmp_path, EKS)
    assert (
        main(["plan", "--on", str(profile), "grpo", "policy.model_name=llama-1.5b", "grpo.max_num_steps=1000000"]) == 64
    )
    assert "max_num_steps" in capsys.readouterr().err
