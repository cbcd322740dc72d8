"""Each rule on made-up rows: the run that it names, the same run in health, and the fix that it proposes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import load_config
from posttrain.reporting.doctor import Doctor, Finding
from posttrain.reporting.doctor.doctor import RULES
from posttrain.reporting.doctor.policy_rules import theil_sen
from posttrain.reporting.doctor.rule import short

LR = "policy.optimizer.kwargs.lr"
RECORDED = Path(__file__).parents[3] / "recorded_runs"
SETTINGS: dict[str, Any] = {
    LR: 1e-5,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "policy.generation.max_new_tokens": 256,
    "policy.generation.temperature": 1.0,
    "grpo.num_generations_per_prompt": 8,
}
Curve = Callable[[int], float | None]


def healthy_grpo(step: int) -> dict[str, float | None]:
    """A run that learns: the reward rises, KL and lengths stay, entropy falls a little."""
    share = min(1.0, step / 60)
    return {
        "train/reward": 0.3 + 0.4 * share + 0.02 * (step % 3),
        "train/reward_min": 0.0,
        "train/reward_max": 1.0,
        "train/groups_with_signal": 0.7,
        "train/advantage_max": 2.8,
        "train/kl_penalty": 0.02 * share,
        "train/approx_entropy": 0.5 - 0.2 * share,
        "train/token_mult_prob_error": 1.003,
        "train/gen_kl_error": 2e-5,
        "train/sampling_importance_ratio": 1.0,
        "train/sampling_effective_sample_size": 0.99,
        "train/grad_norm": 0.6 + 0.1 * (step % 4),
        "train/update_skipped": 0.0,
        "train/loss": 0.01,
        "train/truncation_rate": 0.03,
        "train/mean_generation_length": 120.0 + step % 5,
        "train/num_generated_tokens": 8000.0,
        "train/clip_fraction": 0.02,
        "train/unscored": 0.0,
        "train/num_samples": 64.0,
        "train/repetition": 0.05,
        "train/distinct_answers": 0.95,
        "timing/train/generation": 4.0,
    }


def healthy_pairs(step: int) -> dict[str, float | None]:
    share = min(1.0, step / 60)
    return {
        "train/loss": 0.69 - 0.3 * share,
        "train/preference_loss": 0.69 - 0.3 * share,
        "train/accuracy": 0.5 + 0.3 * share,
        "train/rewards_chosen_mean": 0.5 * share,
        "train/rewards_rejected_mean": -2.0 * share,
        "train/tie_rate": 1.0 if step == 1 else 0.0,
        "train/grad_norm": 1.0 + 0.2 * (step % 3),
    }


def healthy_sft(step: int) -> dict[str, float | None]:
    return {"train/loss": 2.0 / (1 + step / 20), "train/grad_norm": 1.0 + 0.2 * (step % 3)}


HEALTHY = {"grpo": healthy_grpo, "dpo": healthy_pairs, "rm": healthy_pairs, "sft": healthy_sft}


def examine(kind: str, steps: int = 60, settings: dict[str, Any] | None = None, **curves: Curve) -> dict[str, Finding]:
    """The findings of a healthy run in which some curves are replaced. `train_x` stands for train/x."""
    doctor = Doctor(kind, {**SETTINGS, **(settings or {})})
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, **HEALTHY[kind](step)}
        for name, curve in curves.items():
            value = curve(step)
            if value is not None or not name.startswith("validation"):
                row[name.replace("_", "/", 1)] = value
        doctor.observe(row)
    doctor.finish()
    return {finding.rule: finding for finding in doctor.findings}


def only(findings: dict[str, Finding]) -> Finding:
    assert len(findings) == 1, sorted(findings)
    return next(iter(findings.values()))


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_no_finding(kind: str) -> None:
    assert examine(kind) == {}


# ---------------------------------------------------------------------------------------------------- GRPO


def test_kl_above_half_for_three_steps_is_an_error_and_two_steps_are_not() -> None:
    found = only(examine("grpo", train_kl_penalty=lambda step: 0.8 if step >= 30 else 0.02))
    assert (found.rule, found.severity, found.step) == ("kl-runaway", "error", 32)
    assert found.fixes[0] == "loss_fn.reference_policy_kl_penalty=0.05"
    assert "kl-runaway" not in examine("grpo", train_kl_penalty=lambda step: 0.8 if step in (30, 31) else 0.02)


def test_kl_that_explodes_within_the_first_steps_is_blamed_on_the_learning_rate() -> None:
    found = examine("grpo", train_kl_penalty=lambda step: 6.8 if step >= 5 else 0.1)["kl-runaway"]
    assert found.fixes[0] == f"{LR}=1e-7"


def test_a_moderate_kl_is_a_warning_and_while_validation_rises_a_note() -> None:
    def moderate(step: int) -> float:
        return 0.2

    def rising(step: int) -> float | None:
        return step / 100 if step % 10 == 0 else None

    assert examine("grpo", train_kl_penalty=moderate)["kl-runaway"].severity == "warning"
    assert (
        examine("grpo", train_kl_penalty=moderate, validation_accuracy=rising, steps=29)["kl-runaway"].severity
        == "warning"
    )  # found before the second validation
    late = examine("grpo", train_kl_penalty=lambda step: 0.2 if step > 30 else 0.02, validation_accuracy=rising)
    assert late["kl-runaway"].severity == "note"


def test_the_estimate_of_an_unpenalised_kl_is_checked_too() -> None:
    doctor = Doctor("grpo", {**SETTINGS, "loss_fn.reference_policy_kl_penalty": 0.0})
    for step in range(1, 41):
        row: dict[str, Any] = {"step": step, **healthy_grpo(step)}
        del row["train/kl_penalty"]
        if step % 10 == 0:
            row["train/kl_to_start"] = 0.1 * step
        doctor.observe(row)
    found = doctor.findings[0]
    assert (found.rule, found.severity, found.metric) == ("kl-runaway", "error", "train/kl_to_start")
    assert "loss_fn.reference_policy_kl_penalty=0.01" in found.fixes


def test_entropy_is_judged_against_the_start_of_the_run() -> None:
    assert examine("grpo", train_approx_entropy=lambda step: 0.02) == {}  # low, but from the start
    fallen = examine("grpo", train_approx_entropy=lambda step: 0.5 if step < 20 else 0.08)
    assert only(fallen).rule == "entropy-collapse"
    assert only(fallen).severity == "warning"
    gone = examine("grpo", train_approx_entropy=lambda step: 0.5 if step < 20 else 0.001)
    assert only(gone).severity == "error"
    assert only(gone).fixes[0] == f"{LR}=1e-6"


def test_an_advantage_beyond_the_bound_of_the_default_estimator_is_a_warning() -> None:
    found = examine("grpo", train_advantage_max=lambda step: 27.7 if step == 60 else 2.8)["exploding-advantages"]
    assert found.severity == "warning"
    assert "grpo.advantage_clip_high=5" in found.fixes
    assert "exploding-advantages" not in examine("grpo", train_advantage_max=lambda step: 4.9)


@pytest.mark.parametrize(
    ("name", "whitened", "std_over", "is_found"),
    [
        ("gae", None, "group", False),
        ("reinforce_plus_plus", None, "group", False),
        ("gdpo", None, "group", False),
        ("gdpo", "none", "group", True),
        ("grpo", "tokens", "group", False),
        ("grpo", "tokens", "others", True),
        ("grpo", None, "group", True),
    ],
)
def test_advantages_that_are_whitened_over_the_step_have_no_bound(
    name: str, whitened: str | None, std_over: str, is_found: bool
) -> None:
    key = "grpo.adv_estimator"
    settings = {f"{key}.name": name, f"{key}.whiten_advantages": whitened, f"{key}.std_over": std_over}
    found = examine("grpo", settings=settings, train_advantage_max=lambda step: 9.0)
    assert ("exploding-advantages" in found) == is_found


def test_a_sampler_that_disagrees_is_an_error_unless_its_samples_are_weighted() -> None:
    found = only(examine("grpo", train_token_mult_prob_error=lambda step: 1.2))
    assert (found.rule, found.severity) == ("sampler-mismatch", "error")
    assert found.fixes == ("loss_fn.use_importance_sampling_correction=true",)
    weighted = {"loss_fn.use_importance_sampling_correction": True}
    assert only(examine("grpo", settings=weighted, train_token_mult_prob_error=lambda step: 1.2)).severity == "warning"
    assert only(examine("grpo", train_gen_kl_error=lambda step: 0.005)).rule == "sampler-mismatch"


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [("policy.generation.native_cfg.precision", "fp8", "auto"), ("policy.fp8", True, "false")],
)
def test_a_disagreement_in_fp8_is_mended_by_a_setting_that_the_config_accepts(
    key: str, value: object, fix: str
) -> None:
    found = only(examine("grpo", settings={key: value}, train_token_mult_prob_error=lambda step: 1.2))
    assert found.fixes == (f"{key}={fix}",)
    load_config("grpo", None, list(found.fixes))


def test_one_step_of_disagreement_is_averaged_out() -> None:
    assert examine("grpo", train_token_mult_prob_error=lambda step: 1.03 if step == 30 else 1.0) == {}


def test_stale_answers_are_off_policy_and_no_mismatch_of_the_sampler() -> None:
    found = only(
        examine(
            "grpo",
            settings={"grpo.async_grpo.max_trajectory_age_steps": 8},
            train_stale_token_fraction=lambda step: 0.8,
            train_token_mult_prob_error=lambda step: 1.6,
            train_sampling_effective_sample_size=lambda step: 0.2,
        )
    )
    assert (found.rule, found.severity) == ("off-policy", "error")
    assert found.fixes[0] == "grpo.async_grpo.max_trajectory_age_steps=4"


def test_equal_rewards_in_every_group_are_an_error_after_three_steps() -> None:
    equal: dict[str, Curve] = {
        "train_groups_with_signal": lambda step: 0.0,
        "train_reward": lambda step: 1.0,
        "train_reward_min": lambda step: 1.0,
    }
    assert only(examine("grpo", steps=1, **equal)).severity == "warning"
    found = only(examine("grpo", steps=3, **equal))
    assert (found.rule, found.severity, found.step) == ("no-signal", "error", 3)
    assert "posttrain rewards test" in found.fixes[0]


def test_answers_that_are_all_the_same_text_are_blamed_on_the_temperature() -> None:
    found = examine(
        "grpo",
        settings={"policy.generation.temperature": 0.0},
        train_groups_with_signal=lambda step: 0.0,
        train_distinct_answers=lambda step: 1 / 8,
    )["no-signal"]
    assert found.severity == "error"
    assert found.fixes == ("policy.generation.temperature=1.0",)


def test_signal_that_was_there_and_went_away_is_blamed_on_the_learning_rate() -> None:
    found = examine(
        "grpo",
        steps=20,
        train_groups_with_signal=lambda step: 0.7 if step == 1 else 0.05,
        train_reward=lambda step: 0.2 if step == 1 else 0.01,
    )["no-signal"]
    assert found.fixes == (f"{LR}=1e-6",)


def test_a_solved_dataset_is_a_note() -> None:
    found = examine(
        "grpo",
        train_reward=lambda step: min(1.0, step / 30),
        train_groups_with_signal=lambda step: 0.7 if step < 30 else 0.05,
    )
    assert only(found).severity == "note"


def test_a_chat_template_that_the_model_was_not_trained_with() -> None:
    found = examine(
        "grpo",
        steps=3,
        settings={"policy.tokenizer.chat_template": "other.jinja"},
        train_truncation_rate=lambda step: 1.0,
        train_reward=lambda step: 0.0,
        train_reward_max=lambda step: 0.0,
        train_groups_with_signal=lambda step: 0.0,
    )
    assert found["wrong-template"].severity == "error"
    assert found["wrong-template"].fixes == ("policy.tokenizer.chat_template=default",)


@pytest.mark.parametrize(("rate", "severity"), [(0.3, "warning"), (0.8, "error")])
def test_truncated_answers(rate: float, severity: str) -> None:
    found = only(examine("grpo", train_truncation_rate=lambda step: rate))
    assert (found.rule, found.severity) == ("truncated", severity)
    assert found.fixes[0] == "policy.generation.max_new_tokens=512"


def test_truncation_that_the_policy_has_learnt_is_not_mended_by_a_higher_limit() -> None:
    found = examine("grpo", train_truncation_rate=lambda step: 0.02 if step < 20 else 0.9)["truncated"]
    assert found.fixes[0] == f"{LR}=1e-6"


def test_answers_that_grow_are_a_warning_and_short_ones_may_double() -> None:
    found = only(examine("grpo", train_mean_generation_length=lambda step: 100.0 if step < 20 else 300.0))
    assert (found.rule, found.severity) == ("length-explosion", "warning")
    assert examine("grpo", train_mean_generation_length=lambda step: 4.0 if step < 20 else 10.0) == {}


def test_clipped_tokens() -> None:
    assert only(examine("grpo", train_clip_fraction=lambda step: 0.4)).rule == "clip-fraction"


def test_a_policy_that_breaks_at_once_is_blamed_on_the_learning_rate_not_on_the_length() -> None:
    """As with a learning rate that is a hundred times too high: after the first update no answer ends or earns
    anything."""

    def broken(before: float, after: float) -> Curve:
        return lambda step: before if step == 1 else after

    found = examine(
        "grpo",
        steps=10,
        train_groups_with_signal=broken(0.9, 0.0),
        train_reward=broken(0.3, 0.0),
        train_reward_max=broken(1.0, 0.0),
        train_truncation_rate=broken(0.0, 1.0),
    )
    assert found["no-signal"].severity == "error"
    assert found["no-signal"].fixes == (f"{LR}=1e-7",)
    assert found["truncated"].fixes[0] == f"{LR}=1e-6"


def test_answers_cut_off_from_the_start_under_another_template_are_blamed_on_it_first() -> None:
    template = {"policy.tokenizer.chat_template": "other.jinja"}
    found = examine("grpo", settings=template, steps=10, train_truncation_rate=lambda step: 1.0)
    assert found["truncated"].fixes[0] == "policy.tokenizer.chat_template=default"


def test_answers_that_are_the_same_from_the_start_are_blamed_on_the_temperature() -> None:
    cold = {"policy.generation.temperature": 0.01}
    curves: dict[str, Curve] = {
        "train_groups_with_signal": lambda step: 0.05,
        "train_distinct_answers": lambda step: 0.14,
        "train_approx_entropy": lambda step: 0.014 if step < 6 else 0.0,
    }
    found = only(examine("grpo", settings=cold, steps=20, **curves))
    assert (found.rule, found.fixes) == ("no-signal", ("policy.generation.temperature=1.0",))


def test_stale_answers_show_in_how_far_the_policy_has_moved() -> None:
    """Without correction their weights are 1, so the effective sample size says nothing."""
    stale: dict[str, Curve] = {
        "train_stale_token_fraction": lambda step: 0.8,
        "train_trajectory_age_mean": lambda step: 4.0,
    }
    age = {"grpo.async_grpo.max_trajectory_age_steps": 8}
    assert examine("grpo", settings=age, train_policy_shift_kl=lambda step: 0.002, **stale) == {}
    slow = only(examine("grpo", settings=age, train_policy_shift_kl=lambda step: 0.05, **stale))
    assert (slow.rule, slow.severity) == ("off-policy", "warning")
    assert slow.fixes[0] == "grpo.async_grpo.max_trajectory_age_steps=4"
    fast = only(examine("grpo", settings=age, train_policy_shift_kl=lambda step: 0.5, **stale))
    assert (fast.severity, fast.fixes[0]) == ("error", f"{LR}=1e-6")
    del stale["train_stale_token_fraction"]  # several updates per step move the policy as well, and that is allowed
    assert examine("grpo", train_policy_shift_kl=lambda step: 0.5, **stale) == {}


def test_a_reward_that_does_not_rise_is_found_when_the_run_is_over() -> None:
    flat = examine("grpo", train_reward=lambda step: 0.3 + 0.01 * (step % 2))
    assert only(flat).rule == "reward-flat"
    assert only(flat).severity == "warning"
    assert examine("grpo", steps=40, train_reward=lambda step: 0.3 + 0.01 * (step % 2)) == {}  # too early to tell


def test_a_reward_that_falls_to_less_than_half() -> None:
    found = examine("grpo", steps=40, train_reward=lambda step: 0.6 if step < 20 else 0.1)
    assert found["reward-collapse"].severity == "error"
    assert found["reward-collapse"].fixes[0] == f"{LR}=1e-6"


def test_sampling_that_slows_down_at_equal_length() -> None:
    slow = examine("grpo", timing_train_generation=lambda step: 4.0)
    assert slow == {}
    doctor = Doctor("grpo", SETTINGS)
    for step in range(1, 41):
        doctor.observe({"step": step, **healthy_grpo(step), "timing/train/generation": 4.0 if step < 20 else 8.0})
    assert [(found.rule, found.severity) for found in doctor.findings] == [("generation-slowing", "note")]


def test_a_busy_machine_which_slows_training_as_well_is_no_finding() -> None:
    doctor = Doctor("grpo", SETTINGS)
    for step in range(1, 41):
        factor = 1.0 if step < 20 else 2.0
        rate = {"performance/policy_training_tokens_per_sec_per_gpu": 3000.0 / factor}
        doctor.observe({"step": step, **healthy_grpo(step), "timing/train/generation": 4.0 * factor, **rate})
    assert doctor.findings == []


def test_steps_in_which_no_answer_has_a_gradient_have_no_metrics_of_tokens() -> None:
    """Rules that read them wait for the next step that has them."""
    doctor, of_tokens = (
        Doctor("grpo", SETTINGS),
        ("entropy", "prob_error", "gen_kl_error", "sampling_", "clip_fraction"),
    )
    for step in range(1, 61):
        row = healthy_grpo(step)
        if step % 3:
            row = {key: value for key, value in row.items() if not any(name in key for name in of_tokens)}
            row |= {"train/groups_with_signal": 0.0, "train/grad_norm": 0.0, "train/loss": 0.0}
        doctor.observe({"step": step, **row})
    assert {found.rule for found in doctor.findings} <= {"no-signal"}


def test_a_rising_reward_with_two_bad_signs_is_called_hacking() -> None:
    found = examine(
        "grpo",
        train_reward=lambda step: step / 20,
        train_reward_max=lambda step: step / 10,
        train_kl_penalty=lambda step: 0.02 if step < 20 else 6.8,
        train_truncation_rate=lambda step: 0.0 if step < 20 else 1.0,
        train_approx_entropy=lambda step: 0.42 if step < 20 else 0.001,
    )
    assert found["reward-hacking"].severity == "error"
    assert "KL and entropy and truncation" in found["reward-hacking"].text
    assert {"kl-runaway", "entropy-collapse", "truncated"} <= set(found)


def test_a_rising_reward_with_answers_that_repeat_themselves() -> None:
    found = only(examine("grpo", train_repetition=lambda step: 0.05 if step < 20 else 0.8))
    assert (found.rule, found.metric) == ("reward-hacking", "train/repetition")


def test_a_rising_reward_with_a_falling_validation() -> None:
    def falling(step: int) -> float | None:
        return {10: 0.5, 20: 0.6, 30: 0.45, 40: 0.3, 50: 0.2}.get(step)

    found = only(examine("grpo", validation_accuracy=falling))
    assert (found.rule, found.severity, found.metric) == ("reward-hacking", "warning", "validation/accuracy")


def test_a_validation_that_falls_by_chance_is_no_finding() -> None:
    def noisy(step: int) -> float | None:  # as 64 answers give it, at a constant 0.33
        return {0: 0.27, 10: 0.33, 20: 0.41, 30: 0.27, 40: 0.25}.get(step)

    def at_validations(value: float) -> Curve:
        return lambda step: value if noisy(step) is not None else None

    few = {"validation_reward_std": at_validations(0.47), "validation_num_samples": at_validations(64.0)}
    assert examine("grpo", steps=40, validation_accuracy=noisy, **few) == {}
    many = {**few, "validation_num_samples": at_validations(2000.0)}
    assert only(examine("grpo", steps=40, validation_accuracy=noisy, **many)).rule == "reward-hacking"


def test_rewards_that_fail() -> None:
    some = only(examine("grpo", settings={"env.mine.timeout_s": 5}, train_unscored=lambda step: 8.0))
    assert (some.rule, some.severity) == ("unscored", "warning")
    assert "env.mine.timeout_s=10" in some.fixes
    assert only(examine("grpo", train_unscored=lambda step: 40.0)).severity == "error"
    assert examine("grpo", train_unscored=lambda step: 1.0) == {}


# ---------------------------------------------------------------------------------------------------- all kinds


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_loss_that_is_not_finite(kind: str) -> None:
    found = examine(kind, steps=30, train_loss=lambda step: None if step == 20 else 0.5)
    assert found["not-finite"].severity == "warning"
    for_long = examine(kind, steps=30, train_update_skipped=lambda step: float(step > 20))
    assert for_long["not-finite"].severity == "error"


@pytest.mark.parametrize("kind", HEALTHY)
def test_spikes_of_the_gradient_are_relative_to_its_usual_size(kind: str) -> None:
    assert examine(kind, train_grad_norm=lambda step: 40.0) == {}  # large throughout: the scale of this model
    assert only(examine(kind, train_grad_norm=lambda step: 7.0 if step == 30 else 1.0)).severity == "note"
    assert only(examine(kind, train_grad_norm=lambda step: 30.0 if step == 30 else 1.0)).severity == "warning"
    found = only(examine(kind, train_grad_norm=lambda step: 30.0 if step in (30, 33, 36) else 1.0))
    assert (found.rule, found.severity, found.step) == ("grad-spike", "error", 36)


def test_a_gradient_of_zero_is_an_error_unless_no_group_has_a_signal() -> None:
    assert only(examine("sft", train_grad_norm=lambda step: 1e-7)).rule == "grad-dead"
    no_signal = examine("grpo", train_grad_norm=lambda step: 0.0, train_groups_with_signal=lambda step: 0.0)
    assert "grad-dead" not in no_signal


def test_a_supervised_loss_that_rises() -> None:
    found = only(examine("sft", train_loss=lambda step: 2.0 if step < 20 else 5.0))
    assert (found.rule, found.severity, found.fixes) == ("loss-diverges", "error", (f"{LR}=1e-6",))


def test_a_validation_loss_that_rises_names_the_step_to_stop_at() -> None:
    def u_shaped(step: int) -> float | None:
        return {10: 1.0, 20: 0.8, 30: 0.9, 40: 1.0, 50: 1.2}.get(step)

    found = only(examine("sft", validation_loss=u_shaped))
    assert (found.rule, found.severity) == ("overfit", "warning")
    assert found.fixes[0] == "sft.max_num_steps=20"


def test_routers_that_prefer_ever_fewer_experts() -> None:
    found = only(examine("grpo", train_expert_load_max=lambda step: 2.0 if step < 20 else 5.0))
    assert (found.rule, found.severity, found.fixes) == ("experts-unbalanced", "warning", (f"{LR}=1e-6",))
    assert examine("grpo", train_expert_load_max=lambda step: 6.0) == {}  # as it began
    assert only(examine("sft", train_router_entropy=lambda step: 0.8 if step < 20 else 0.3)).value == 0.3


# ---------------------------------------------------------------------------------------------------- pairs


def test_chosen_answers_that_lose_more_probability_than_the_gap_gains() -> None:
    found = only(
        examine(
            "dpo",
            train_rewards_chosen_mean=lambda step: -0.5 * step,
            train_rewards_rejected_mean=lambda step: -0.6 * step,
        )
    )
    assert (found.rule, found.severity) == ("both-fall", "warning")
    assert found.fixes[0] == "dpo.sft_loss_weight=0.1"


def test_pairs_that_are_all_ranked_rightly_after_a_few_steps() -> None:
    found = only(examine("dpo", train_accuracy=lambda step: 1.0 if step > 3 else 0.6))
    assert (found.rule, found.severity) == ("too-easy", "warning")


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_memorised_training_pairs(kind: str) -> None:
    def held_out(step: int) -> float | None:
        return 0.55 if step % 10 == 0 else None

    found = examine(kind, train_accuracy=lambda step: 0.5 if step < 25 else 1.0, validation_accuracy=held_out)
    assert only(found).rule == "memorised"
    assert only(found).severity == "error"


def test_a_reward_that_scores_nothing_is_found_in_the_first_step() -> None:
    found = examine("grpo", steps=1, train_unscored=lambda step: 64, train_num_samples=lambda step: 64)
    assert found["unscored"].severity == "error"
    assert "unscored" not in examine("grpo", steps=1, train_unscored=lambda step: 32, train_num_samples=lambda step: 64)


def test_ties_of_updates_too_small_to_show_are_no_finding() -> None:
    still = {f"train_rewards_{name}_mean": lambda step: 1e-5 for name in ("chosen", "rejected")}
    assert examine("dpo", steps=10, train_tie_rate=lambda step: 0.4, **still) == {}
    equal = examine("dpo", steps=10, train_tie_rate=lambda step: 1.0, train_grad_norm=lambda step: 0.0, **still)
    assert equal["equal-pairs"].severity == "error"


def test_ties_that_become_fewer_as_the_policy_moves_are_no_finding() -> None:
    shrinking = {"train_tie_rate": lambda step: 1 / step**2}
    assert "equal-pairs" not in examine("dpo", steps=3, **shrinking)
    assert "equal-pairs" not in examine("dpo", steps=12, **shrinking)


def test_pairs_whose_two_answers_are_equal_stay_tied() -> None:
    found = only(examine("dpo", train_tie_rate=lambda step: 0.5))
    assert (found.rule, found.severity) == ("equal-pairs", "error")


def test_a_preference_loss_above_that_of_guessing() -> None:
    found = examine("dpo", train_preference_loss=lambda step: 12.0)
    assert found["worse-than-chance"].fixes == (f"{LR}=1e-7",)


def test_a_reward_model_at_chance_accuracy_at_the_end() -> None:
    assert only(examine("rm", train_accuracy=lambda step: 0.5)).rule == "not-learning"


# ---------------------------------------------------------------------------------------------------- the doctor


def test_a_finding_is_given_once_and_again_when_it_gets_worse() -> None:
    doctor = Doctor("grpo", SETTINGS)
    given = []
    for step in range(1, 41):
        kl = 0.02 if step < 10 else 0.2 if step < 20 else 0.9
        given += doctor.observe({"step": step, **healthy_grpo(step), "train/kl_penalty": kl})
    assert [(found.step, found.severity) for found in given] == [(12, "warning"), (22, "error")]
    assert doctor.findings[0].last_step == 40


def test_findings_are_a_function_of_the_rows() -> None:
    rows = [{"step": step, **healthy_grpo(step), "train/kl_penalty": 0.03 * step} for step in range(1, 41)]
    whole, resumed = Doctor("grpo", SETTINGS), Doctor("grpo", SETTINGS)
    given = [found for row in rows for found in whole.observe(row)]
    resumed.replay(rows[:15])
    given_after = [found for row in rows[15:] for found in resumed.observe(row)]
    assert [found for found in given if found.step > 15] == given_after
    assert whole.findings == resumed.findings


def test_a_finding_survives_json() -> None:
    doctor = Doctor("grpo", SETTINGS)
    doctor.replay([{"step": step, **healthy_grpo(step), "train/kl_penalty": 2.0} for step in range(1, 5)])
    found = doctor.findings[0]
    assert Finding.from_json(found.to_json()) == found


def test_the_names_of_another_system_are_used_in_fixes() -> None:
    doctor = Doctor("grpo", {LR: 1e-5}, {LR: "learning_rate", "loss_fn.reference_policy_kl_penalty": "beta"})
    doctor.replay([{"step": step, **healthy_grpo(step), "train/kl_penalty": 0.9} for step in range(1, 5)])
    assert doctor.findings[0].fixes == ("learning_rate=1e-6", "beta=five times as much")


def test_rules_have_distinct_names_and_a_source() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.source and rule.condition and rule.kinds for rule in RULES)


def test_theil_sen_ignores_an_outlier() -> None:
    assert theil_sen([0.0, 1.0, 2.0, 100.0, 4.0, 5.0]) == pytest.approx(1.0)
    assert theil_sen([3.0]) == 0.0


@pytest.mark.parametrize(("value", "text"), [(5e-7, "5e-7"), (0.05, "0.05"), (1.5e-6, "1.5e-6"), (0, "0"), (10, "10")])
def test_numbers_are_written_as_one_would_type_them(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize("kind", HEALTHY)
def test_no_rule_needs_a_metric_that_a_run_may_not_have(kind: str) -> None:
    for left_out in [None, *HEALTHY[kind](1)]:
        doctor = Doctor(kind)
        for step in range(1, 61):
            kept = {key: value for key, value in HEALTHY[kind](step).items() if left_out and key != left_out}
            doctor.observe({"step": step, "train/lr": 1e-5, **kept})
        doctor.finish()


# -- a recorded run of a real model
# -------------------------------------------------------------------------------------


def recorded(lr: str) -> list[Finding]:
    """What the doctor says of SmolLM2 on GSM8K; tests/recorded_runs/README.md."""
    settings = {
        **SETTINGS,
        LR: float(lr),
        "policy.generation.max_new_tokens": 200,
        "loss_fn.reference_policy_kl_penalty": 0.0,
    }
    doctor = Doctor("grpo", settings)
    lines = gzip.decompress((RECORDED / f"smollm2_gsm8k_lr_{lr}.jsonl.gz").read_bytes()).splitlines()
    doctor.replay([json.loads(line) for line in lines])
    doctor.finish()
    return doctor.findings


@pytest.mark.parametrize("lr", ["1e-5", "3e-5"])
def test_real_runs_that_learn_slowly_have_one_note(lr: str) -> None:
    (found,) = recorded(lr)
    assert (found.rule, found.severity) == ("no-signal", "note")
    assert found.fixes == ("grpo.use_dynamic_sampling=true", "or screen the prompts: posttrain data screen")


def test_a_real_run_that_collapsed_has_errors_that_name_the_learning_rate() -> None:
    errors = {finding.rule: finding for finding in recorded("1e-4") if finding.severity == "error"}
    assert {"entropy-collapse", "truncated", "reward-hacking", "no-signal"} <= errors.keys()
    assert errors["no-signal"].step == 16, "long before the answers are useless"
    for rule in ("no-signal", "truncated", "entropy-collapse"):
        assert errors[rule].fixes[0] == f"{LR}=1e-5"


def test_few_groups_with_signal_are_a_warning_where_they_are_too_few_to_learn_from() -> None:
    few = examine("grpo", train_groups_with_signal=lambda step: 0.2)["no-signal"]  # 8 groups a step
    many = examine("grpo", train_groups_with_signal=lambda step: 0.2, train_num_samples=lambda step: 512)["no-signal"]
    assert (few.severity, many.severity) == ("warning", "note")


def test_a_signal_that_falls_is_no_matter_of_hard_prompts() -> None:
    found = examine(
        "grpo",
        steps=20,
        train_groups_with_signal=lambda step: 0.28 if step < 8 else 0.12,
        train_num_samples=lambda step: 512,
    )["no-signal"]
    assert (found.severity, found.fixes) == ("warning", (f"{LR}=1e-6",))


def test_a_single_step_with_few_cut_off_answers_does_not_blame_the_policy() -> None:
    found = examine("grpo", steps=40, train_truncation_rate=lambda step: 0.08 if step == 3 else 0.3)["truncated"]
    assert found.fixes[0] == "policy.generation.max_new_tokens=512"


def test_cut_off_answers_are_a_warning_once_they_persist() -> None:
    assert "truncated" not in examine("grpo", steps=19, train_truncation_rate=lambda step: 0.25)
    assert examine("grpo", steps=20, train_truncation_rate=lambda step: 0.25)["truncated"].severity == "warning"


# -------------------------------------------------------------------------------------------- tools and agents


def test_tools_that_are_never_called() -> None:
    found = only(examine("grpo", train_tool_calls=lambda step: 0.0))
    assert (found.rule, found.severity, found.step) == ("tools-unused", "warning", 5)
    assert examine("grpo", train_tool_calls=lambda step: 0.1 if step % 5 == 0 else 0.0) == {}
    assert examine("grpo", train_tool_calls=lambda step: 0.0, train_agent_calls=lambda step: 3.0) == {}
    offered = examine(
        "grpo",
        train_tool_calls=lambda step: 0.0,
        train_agent_calls=lambda step: 3.0,
        train_calls_with_tools=lambda step: 2.0,
    )
    assert only(offered).rule == "tools-unused"


@pytest.mark.parametrize(("failed", "severity"), [(0.5, "warning"), (0.9, "error")])
def test_tool_calls_that_fail(failed: float, severity: str) -> None:
    found = only(examine("grpo", train_tool_calls=lambda step: 1.0, train_failed_tool_calls=lambda step: failed))
    assert (found.rule, found.severity) == ("tool-errors", severity)
    assert "refused by the tool" in found.text
    found = only(examine("grpo", train_tool_calls=lambda step: 0.5, train_malformed_tool_calls=lambda step: 0.5))
    assert found.fixes[0] == 'policy.generation.stop_strings=["</tool_call>"]'
    assert examine("grpo", train_tool_calls=lambda step: 1.0, train_failed_tool_calls=lambda step: 0.2) == {}


@pytest.mark.parametrize(
    ("name", "fix"),
    [("turns", "grpo.max_rollout_turns=16"), ("tokens", "policy.max_total_sequence_length=200")],
)
def test_episodes_that_a_limit_cuts(name: str, fix: str) -> None:
    limits = {"grpo.max_rollout_turns": 8, "policy.max_total_sequence_length": 100}
    curves = {f"train_out_of_{name}": lambda step: 0.4}
    found = only(examine("grpo", settings=limits, **curves))
    assert (found.rule, found.severity, found.fixes[0]) == ("episodes-cut", "warning", fix)
    assert only(examine("grpo", settings=limits, **{f"train_out_of_{name}": lambda step: 0.8})).severity == "error"
    assert examine("grpo", settings=limits, **{f"train_out_of_{name}": lambda step: 0.1}) == {}


def test_agents_that_die() -> None:
    found = only(examine("grpo", train_agent_calls=lambda step: 2.0, train_unscored=lambda step: 10.0))
    assert (found.rule, found.severity) == ("agents-die", "warning")
    assert examine("grpo", train_agent_calls=lambda step: 2.0, train_unscored=lambda step: 1.0) == {}
