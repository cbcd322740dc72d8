"""Predicted time and cost of a training beside what it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_profiles import EKS, write_profile
from tiny_runs import write_rows

from posttrain.apps.ship.pipeline.predicted_cost import actual_cost, predict, predicted_cost, profile_of
from posttrain.cli.main import main
from posttrain.config import RunConfig, load_config
from posttrain.config.pipeline import PipelineSettings
from posttrain.errors import InputError

RUN = ["policy.model_name=llama-8b", "cluster.num_nodes=3", "cluster.gpus_per_node=8"]
STEPS = ["grpo.max_num_steps=100"]
SPOT = (26.28, 26.92)  # of a p5en.48xlarge


def config(*words: str) -> RunConfig:
    loaded: RunConfig = load_config("grpo", None, [*RUN, *words]).config
    return loaded


def settings(profile: Path | None = None, price: float | None = None) -> PipelineSettings:
    name = None if profile is None else str(profile)
    return PipelineSettings(name="maths", folder="none", gpu_hour_price=price, cluster_profile=name)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run whose steps took 12 s, and the first of them longer."""
    rows = [{"step": step, "timing/train/total_step_time": 90.0 if step == 1 else 12.0} for step in range(1, 5)]
    (tmp_path / "run").mkdir()
    write_rows(tmp_path / "run" / "metrics.jsonl", rows)
    return tmp_path / "run"


def test_a_profile_predicts_what_plan_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = write_profile(tmp_path, EKS)
    main(["plan", "--on", str(profile), "--json", "grpo", *RUN, *STEPS])
    planned = json.loads(capsys.readouterr().out)["on_cluster"]
    spot = [amount for row in planned["rows"] if row["capacity"] == "spot" for amount in row["usd"]]
    found = predicted_cost(predict(config(*STEPS), settings(profile, price=1.0), None))
    assert found is not None
    assert (found.hours, found.num_steps, found.currency) == (planned["hours"], 100, "$")
    assert found.cost == (min(spot), max(spot))


def test_what_it_took_is_counted_at_the_same_price(tmp_path: Path) -> None:
    record = predict(config(*STEPS), settings(write_profile(tmp_path, EKS)), None)
    actual = actual_cost({**record, "step": 90}, seconds=7200.0)
    start, storage = 600 / 3600 * 3 * SPOT[1], 1200 * 0.14 * 0.5
    assert actual.cost == pytest.approx([2 * 3 * price + start + storage for price in SPOT])
    assert actual.text.startswith("2h 00m, $")
    assert actual.text.endswith(", 90 steps")


def test_the_steps_of_an_iteration_before_are_taken_on_any_machine(earlier: Path, tmp_path: Path) -> None:
    found = predicted_cost(predict(config(*STEPS), settings(price=2.0), earlier))
    assert found is not None
    assert found.hours == pytest.approx(100 * 12 / 3600)
    assert found.cost == pytest.approx([2.0 * 24 * found.hours] * 2)
    assert found.text == "20m 00s, 16, 100 steps"
    on_machines = predicted_cost(predict(config(*STEPS), settings(write_profile(tmp_path, EKS)), earlier))
    assert on_machines is not None
    assert on_machines.hours == pytest.approx(found.hours)


@pytest.mark.parametrize(
    ("words", "with_profile", "why"),
    [
        (STEPS, False, "no machine is known to plan for"),
        (["grpo.max_num_steps=1000000"], True, "depends on the data"),
        ([*STEPS, "policy.model_name=/none"], True, "/none"),
    ],
)
def test_what_cannot_be_predicted_is_said_and_not_invented(
    tmp_path: Path, words: list[str], with_profile: bool, why: str
) -> None:
    record = predict(config(*words), settings(write_profile(tmp_path, EKS) if with_profile else None, price=2.0), None)
    assert predicted_cost(record) is None
    assert why in record["not_predicted"]
    assert actual_cost({**record, "step": 3}, seconds=3600.0).cost is not None, "what it took has a price all the same"


def test_without_a_price_hours_are_shown_alone(earlier: Path) -> None:
    record = predict(config(*STEPS), settings(), earlier)
    found = predicted_cost(record)
    assert found is not None
    assert found.text == "20m 00s, 100 steps"
    assert actual_cost({**record, "step": 3}, seconds=90.0).text == "1m 30s, 3 steps"


def test_a_profile_with_an_error_is_refused_before_anything_runs(tmp_path: Path) -> None:
    profile = write_profile(tmp_path, {**EKS, "nodes": {"instance_typ": "p5en.48xlarge"}})
    with pytest.raises(InputError, match="did you mean"):
        profile_of(settings(profile))
