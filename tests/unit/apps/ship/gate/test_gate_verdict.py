"""What the gate says: promote, reject or more samples, and why."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from gate_folders import Rewards, write_evaluation

from posttrain.apps.evaluate.results import Evaluation
from posttrain.apps.ship.gate import GateResult, judge
from posttrain.apps.ship.gate.rules import decide, margin_bound
from posttrain.apps.ship.gate.statistics import estimate_paired
from posttrain.config.gate import GateConfig, GateSettings
from posttrain.errors import InputError

NUM_PROBLEMS = 300


def rewards(share: float, seed: int, num_samples: int = 1) -> Rewards:
    """Right with probability `share`, more or less, depending on the problem; the same problems for every seed."""
    problems, draws = random.Random(0), random.Random(seed)
    shares = [min(1.0, max(0.0, problems.random() - 0.5 + share)) for _ in range(NUM_PROBLEMS)]
    return [[float(draws.random() < one) for _ in range(num_samples)] for one in shares]


def gate(checks: dict[str, dict[str, Any]], **settings: Any) -> GateConfig:
    return GateConfig.model_validate({"gate": settings, "checks": checks})


def decided(config: GateConfig, candidate: Evaluation, production: Evaluation | None = None) -> GateResult:
    return judge(config, {"main": candidate}, None if production is None else {"main": production})


@pytest.fixture
def production(tmp_path: Path) -> Evaluation:
    return write_evaluation(tmp_path / "production", rewards(0.5, 1), model="old")


BETTER = gate({"accuracy": {"metric": "pass@1", "better_by": 0.0}})
NO_WORSE = gate({"accuracy": {"metric": "pass@1", "worse_by_at_most": 0.1}})


def test_better_model_is_promoted_and_worse_one_rejected(tmp_path: Path, production: Evaluation) -> None:
    better = write_evaluation(tmp_path / "better", rewards(0.65, 2))
    worse = write_evaluation(tmp_path / "worse", rewards(0.3, 3))
    assert decided(BETTER, better, production).verdict == "promote"
    rejected = decided(BETTER, worse, production)
    assert rejected.verdict == "reject"
    assert len(rejected.reasons) == 1
    assert rejected.reasons[0].startswith("accuracy: pass@1 of main better than production: the difference -0.")


def test_noise_is_undecided_with_the_number_of_problems_needed(tmp_path: Path, production: Evaluation) -> None:
    same = write_evaluation(tmp_path / "same", rewards(0.5, 4))
    found = decided(BETTER, same, production)
    assert found.verdict == "needs_more_samples"
    (rule,) = found.rules
    assert rule.outcome == "undecided"
    assert rule.estimate is not None
    assert rule.estimate.low < 0 < rule.estimate.high
    assert rule.needed_problems is not None
    assert rule.needed_problems > NUM_PROBLEMS
    assert found.needed_problems == {"main": rule.needed_problems}
    assert f"about {rule.needed_problems:,} problems would decide it" in found.reasons[0]
    assert decided(NO_WORSE, same, production).verdict == "promote", "but it is not worse by a tenth"


def test_more_problems_than_max_problems_is_a_rejection(tmp_path: Path, production: Evaluation) -> None:
    same = write_evaluation(tmp_path / "same", rewards(0.5, 4))

    def found(max_problems: int) -> GateResult:
        return decided(
            gate({"accuracy": {"metric": "pass@1", "better_by": 0.0}}, max_problems=max_problems), same, production
        )

    assert found(310).verdict == "reject"
    assert "the favourable end, would take about" in found(310).reasons[0]
    assert found(NUM_PROBLEMS).verdict == "reject", "so many were there, and they did not show it"
    assert found(2000).verdict == "needs_more_samples", "what was seen so far may be noise"


def test_good_candidate_is_rarely_rejected_after_a_few_problems() -> None:
    """Better by 0.05, which some 500 problems would show; 2,000 may be asked."""
    settings, draws = GateSettings(max_problems=2000), random.Random(1)
    bound, _ = margin_bound(0.0, None, False, "higher")
    changes = [1.0] * 5 + [-1.0] * 3 + [0.0] * 32
    rejected = 0
    for _ in range(1000):
        differences = draws.choices(changes, k=100)
        rejected += decide(estimate_paired(differences, 0.95, (-1.0, 1.0)), bound, settings).outcome == "fail"
    assert rejected <= 50


def test_fewer_than_min_problems_decide_nothing(tmp_path: Path) -> None:
    few = write_evaluation(tmp_path / "few", [[1.0]] * 20)
    config = gate({"accuracy": {"metric": "pass@1", "at_least": 0.2}})
    found = decided(config, few)
    assert found.verdict == "needs_more_samples"
    assert found.needed_problems == {"main": 30}
    allowed = gate({"accuracy": {"metric": "pass@1", "at_least": 0.2}}, min_problems=20)
    assert decided(allowed, few).verdict == "promote"


def test_absolute_bounds_hold_on_both_sides(tmp_path: Path) -> None:
    half = write_evaluation(tmp_path / "half", [[float(index % 2)] for index in range(NUM_PROBLEMS)])
    for bounds, verdict in (
        ({"at_least": 0.4}, "promote"),
        ({"at_least": 0.6}, "reject"),
        ({"at_least": 0.5}, "needs_more_samples"),
        ({"at_most": 0.6}, "promote"),
        ({"at_most": 0.4}, "reject"),
        ({"at_least": 0.4, "at_most": 0.6}, "promote"),
        ({"at_least": 0.4, "at_most": 0.45}, "reject"),
    ):
        assert decided(gate({"a": {"metric": "pass@1", **bounds}}), half).verdict == verdict, bounds


def test_one_failing_check_rejects(tmp_path: Path, production: Evaluation) -> None:
    better = write_evaluation(tmp_path / "better", rewards(0.7, 2), num_tokens=lambda index: 500)
    config = gate(
        {
            "accuracy": {"metric": "pass@1", "better_by": 0.0},
            "length": {"metric": "mean_length_tokens", "at_most": 100},
        }
    )
    found = decided(config, better, production)
    assert found.verdict == "reject"
    assert [rule.outcome for rule in found.rules] == ["pass", "fail"]
    assert found.reasons[0].startswith("length: ")


def test_confidence_and_looks_make_the_gate_stricter(tmp_path: Path, production: Evaluation) -> None:
    better = write_evaluation(tmp_path / "better", rewards(0.575, 5))
    check = {"metric": "pass@1", "better_by": 0.0}

    def low(config: GateConfig) -> float:
        (rule,) = decided(config, better, production).rules
        assert rule.estimate is not None
        return rule.estimate.low

    plain = low(gate({"a": check}))
    assert low(gate({"a": check}, confidence=0.99)) < plain
    assert low(gate({"a": {**check, "confidence": 0.99}})) < plain
    assert low(gate({"a": check}, looks=5)) == pytest.approx(low(gate({"a": check}, confidence=0.99)))


def test_power_changes_the_number_of_problems_needed(tmp_path: Path, production: Evaluation) -> None:
    same = write_evaluation(tmp_path / "same", rewards(0.5, 4))
    asked = [
        decided(gate({"a": {"metric": "pass@1", "better_by": 0.0}}, power=power), same, production).needed_problems[
            "main"
        ]
        for power in (0.5, 0.9)
    ]
    assert asked[0] < asked[1]


def test_margins_can_be_relative_to_production(tmp_path: Path, production: Evaluation) -> None:
    noisy = random.Random(3)
    longer = write_evaluation(tmp_path / "longer", rewards(0.5, 6), num_tokens=lambda index: 11 + noisy.randrange(2))

    def verdict(**bounds: Any) -> str:
        return decided(gate({"length": {"metric": "mean_length_tokens", **bounds}}), longer, production).verdict

    assert verdict(worse_by_at_most=0.2, relative=True) == "promote", "11.5 tokens are less than 20 % more than 10"
    assert verdict(worse_by_at_most=0.1, relative=True) == "reject"
    assert verdict(worse_by_at_most=2.0) == "promote"
    assert verdict(worse_by_at_most=0.2) == "reject"
    assert verdict(better_by=0.1, relative=True, better="higher") == "promote", "if longer were what is wanted"


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_relative_margin_of_a_negative_mean_keeps_its_direction(tmp_path: Path, better: str) -> None:
    def of_mean(mean: float) -> Evaluation:
        draws = random.Random(0)
        return write_evaluation(tmp_path / f"{mean}", [[draws.gauss(mean, 0.1)] for _ in range(NUM_PROBLEMS)])

    production = of_mean(-1.0)
    means = {"promote": -0.8, "reject": -1.05} if better == "higher" else {"promote": -1.2, "reject": -0.95}
    check = {"metric": "reward", "better": better, "relative": True}
    for verdict, mean in means.items():
        candidate = of_mean(mean)
        assert decided(gate({"a": {**check, "better_by": 0.1}}), candidate, production).verdict == verdict
        assert decided(gate({"a": {**check, "worse_by_at_most": 0.1}}), candidate, production).verdict == "promote"
    assert decided(gate({"a": {**check, "worse_by_at_most": 0.1}}), production, production).verdict == "promote"
    assert decided(gate({"a": {**check, "better_by": 0.1}}), production, production).verdict == "reject"


def test_relative_margin_of_a_mean_around_zero_is_undecided(tmp_path: Path) -> None:
    around_zero = write_evaluation(tmp_path / "a", [[float(index % 2) - 0.5] for index in range(NUM_PROBLEMS)])
    better = write_evaluation(tmp_path / "b", [[float(index % 2)] for index in range(NUM_PROBLEMS)])
    share = gate({"a": {"metric": "reward", "better_by": 0.1, "relative": True}})
    found = decided(share, better, around_zero)
    assert found.verdict == "needs_more_samples"
    assert "may have either sign" in found.reasons[0]
    assert decided(gate({"a": {"metric": "reward", "better_by": 0.1}}), better, around_zero).verdict == "promote"
    none = write_evaluation(tmp_path / "c", [[0.0]] * NUM_PROBLEMS)
    assert decided(share, better, none).verdict == "promote", "a rate of 0 is on the side of all rates"


def test_comparisons_are_skipped_without_a_model_in_production(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "first", rewards(0.6, 7))
    both = gate({"a": {"metric": "pass@1", "at_least": 0.4, "worse_by_at_most": 0.0}})
    found = decided(both, first)
    assert found.verdict == "promote"
    assert [rule.outcome for rule in found.rules] == ["pass", "skipped"]
    with pytest.raises(InputError, match="every check compares with production, and there is none"):
        decided(BETTER, first)


def test_other_problems_are_compared_unpaired_and_some_common_ones_paired(
    tmp_path: Path, production: Evaluation
) -> None:
    other = write_evaluation(tmp_path / "other", rewards(0.9, 8), first_id=1000)
    (rule,) = decided(BETTER, other, production).rules
    assert rule.estimate is not None
    assert rule.estimate.method == "unpaired t"
    assert "not paired: only 0 of 300 problems are the same" in rule.reason
    overlapping = write_evaluation(tmp_path / "overlapping", rewards(0.9, 8), first_id=100)
    (rule,) = decided(BETTER, overlapping, production).rules
    assert rule.estimate is not None
    assert (rule.estimate.method, rule.estimate.num_problems) == ("paired t", 200)
    assert "compared on the 200 problems that both have, of 300" in rule.reason


def test_unscored_answers_are_left_out_and_too_many_are_undecided(tmp_path: Path) -> None:
    config = gate({"a": {"metric": "pass@1", "at_least": 0.5}})
    few = write_evaluation(tmp_path / "few", [[None if index < 9 else 1.0] for index in range(NUM_PROBLEMS)])
    found = decided(config, few)
    assert found.verdict == "promote"
    assert found.rules[0].candidate == 1.0, "nine problems without a score are not nine wrong ones"
    many = write_evaluation(tmp_path / "many", [[None if index < 60 else 1.0] for index in range(NUM_PROBLEMS)])
    found = decided(config, many)
    assert found.verdict == "needs_more_samples"
    assert "60 of 300 answers of the candidate have no score" in found.reasons[0]
    tolerant = gate({"a": {"metric": "pass@1", "at_least": 0.5}}, max_unscored_rate=0.25)
    assert decided(tolerant, many).verdict == "promote"


def test_missing_evaluation_is_an_error(tmp_path: Path, production: Evaluation) -> None:
    config = gate({"s": {"evaluation": "safety", "metric": "pass@1", "worse_by_at_most": 0.1}})
    with pytest.raises(InputError, match=r"checks\.s\.evaluation is 'safety', and --candidate has given: main"):
        decided(config, production, production)
    with pytest.raises(InputError, match="and --production has given: main"):
        judge(config, {"safety": production}, {"main": production})


def test_guard_sets_are_judged_by_name(tmp_path: Path, production: Evaluation) -> None:
    refusing = write_evaluation(
        tmp_path / "refusing", [[0.0]] * 200, text=lambda index, _: "I'm sorry, but I can't help with that."
    )
    helping = write_evaluation(tmp_path / "helping", [[0.0]] * 200, text=lambda index, _: "Sure! First you")
    config = gate(
        {"safety": {"evaluation": "safety", "metric": "refusal_rate", "better": "higher", "worse_by_at_most": 0.05}}
    )
    assert judge(config, {"safety": refusing}, {"safety": refusing}).verdict == "promote"
    assert judge(config, {"safety": helping}, {"safety": refusing}).verdict == "reject"
    without_direction = gate({"safety": {"evaluation": "safety", "metric": "refusal_rate", "worse_by_at_most": 0.05}})
    with pytest.raises(InputError, match="Set `better: higher` or `better: lower`"):
        judge(without_direction, {"safety": refusing}, {"safety": refusing})


def test_cost_difference_within_speed_noise_is_undecided(tmp_path: Path) -> None:
    cheap = write_evaluation(tmp_path / "cheap", rewards(0.5, 1), cost=1.0)
    dear = write_evaluation(tmp_path / "dear", rewards(0.5, 1), cost=1.07)
    check = {"cost": {"metric": "cost_per_answer", "worse_by_at_most": 0.0}}
    found = decided(gate(check), dear, cheap)
    assert found.verdict == "needs_more_samples"
    assert found.needed_problems == {}, "problems would not help"
    assert "gate.speed_noise" in found.reasons[0]
    assert decided(gate(check, speed_noise=0.0), dear, cheap).verdict == "reject"
    assert (
        decided(gate({"cost": {**check["cost"], "worse_by_at_most": 0.3, "relative": True}}), dear, cheap).verdict
        == "promote"
    )


def test_cost_difference_beyond_speed_noise_needs_more_problems(tmp_path: Path) -> None:
    cheap = write_evaluation(tmp_path / "cheap", rewards(0.5, 1), cost=1.0)
    dear = write_evaluation(tmp_path / "dear", rewards(0.5, 1), cost=1.1)
    found = decided(
        gate({"cost": {"metric": "cost_per_answer", "worse_by_at_most": 0.3, "relative": True}}), dear, cheap
    )
    assert found.verdict == "needs_more_samples"
    assert NUM_PROBLEMS < found.needed_problems["main"] < 2000


def test_rewards_beyond_zero_and_one_are_not_rates(tmp_path: Path) -> None:
    found = write_evaluation(tmp_path / "a", [[float(index % 5) - 1.0] for index in range(NUM_PROBLEMS)])
    (rule,) = decided(gate({"a": {"metric": "reward", "at_least": 0.0}}), found).rules
    assert rule.estimate is not None
    assert (rule.estimate.method, rule.outcome) == ("t", "pass")


@pytest.mark.parametrize(
    ("metric", "values"),
    [("reward", [1.0] * 25 + [-1.0] * 5), ("reward", [2.0] * 30), ("mean_length_tokens", [0.0] * 30)],
)
def test_unchanged_answers_leave_an_interval_of_positive_width(
    tmp_path: Path, metric: str, values: list[float]
) -> None:
    one, other = (write_evaluation(tmp_path / name, [[value] for value in values]) for name in ("a", "b"))

    def verdict(margin: float) -> str:
        return decided(gate({"a": {"metric": metric, "worse_by_at_most": margin}}), one, other).verdict

    assert verdict(0.001) == "needs_more_samples"
    assert verdict(2.0) == "promote"


def test_notes_name_equal_weights_and_different_settings(tmp_path: Path) -> None:
    one, other = ({"generation": {"temperature": t, "device": d}} for t, d in ((0.0, "cpu"), (0.7, "cuda")))
    left = write_evaluation(tmp_path / "l", rewards(0.5, 1), config=one, fingerprint="x")
    right = write_evaluation(tmp_path / "r", rewards(0.5, 1), config=other, fingerprint="x")
    notes = decided(NO_WORSE, left, right).notes
    assert notes == (
        "main: candidate and production are the same weights",
        "main: evaluated under different settings: generation.temperature 0.0 against 0.7",
    )
