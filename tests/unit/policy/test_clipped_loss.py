"""The clipped policy-gradient loss, value and gradient, against the slow reference, option by option."""

import math
import pickle
from collections.abc import Mapping

import pytest
import torch
from float64 import TOLERANCE, approx, float64
from slow_reference import Case, random_case, slow_policy_gradient
from torch import Tensor

from posttrain.config import LossFnConfig
from posttrain.policy.objectives import ClippedPolicyGradient, clipped
from posttrain.types import TokenBatch

GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
SEQUENCE = {"token_level_loss": False}
CORRECTED = {"use_importance_sampling_correction": True}
KL = {"reference_policy_kl_penalty": 0.3}

ACTORS = {
    "defaults": {},
    "sequence level": SEQUENCE,
    "wide upper clip": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.5},
    "narrow clips": {"ratio_clip_min": 0.01, "ratio_clip_max": 0.02},
    "lower clip of 1": {"ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
    "dual clip": {"ratio_clip_c": 1.4},
    "dual clip, sequence level": {"ratio_clip_c": 1.4, **SEQUENCE},
    "dual clip below the upper clip": {"ratio_clip_c": 1.1, "ratio_clip_max": 0.6},
    "gspo": GSPO,
    "gspo with dual clip": {**GSPO, "ratio_clip_c": 1.3, "ratio_clip_min": 0.05, "ratio_clip_max": 0.08},
    "cispo": {"use_cispo": True, "ratio_clip_max": 0.4},
    "a ceiling above the upper clip": {"ratio_ceiling": 1.4},
    "a ceiling below the upper clip": {"ratio_ceiling": 1.1, "ratio_clip_max": 0.6},
    "log-ratio clamp": {"log_ratio_clamp_value": 0.3, "ratio_clip_min": 0.9, "ratio_clip_max": 0.9},
    "log-ratio clamp of sequences": {**GSPO, "log_ratio_clamp_value": 0.1, "ratio_clip_min": 0.3},
    "constant length": {"loss_normalizer": "max_tokens", "max_response_tokens": 11},
    "sequences, by its other name": {"loss_normalizer": "sequences"},
    "product ratio": {**GSPO, "sequence_ratio_type": "product"},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce, sequence level": {"disable_ppo_ratio": True, **SEQUENCE},
}


def truncated(kind: str, ratio: float, floor: float | None = None) -> dict[str, object]:
    names = ("type", "ratio", "ratio_min")
    given = {f"truncated_importance_sampling_{name}": v for name, v in zip(names, (kind, ratio, floor), strict=True)}
    return {**CORRECTED, **{name: value for name, value in given.items() if value is not None}}


CORRECTIONS = {
    "untruncated": CORRECTED,
    "tis": truncated("tis", 1.1),
    "tis with a floor": truncated("tis", 1.1, 0.95),
    "icepop": truncated("icepop", 1.2, 0.85),
    "seq-mask-tis": truncated("seq-mask-tis", 1.05, 0.95),
}
PENALTIES = {
    **{f"{kind}{where}": {**KL, "reference_policy_kl_type": kind, **level}
       for kind in ("k1", "k2", "k3") for where, level in (("", {}), (", sequence level", SEQUENCE))},
    **{f"{kind} clamped before": {**KL, "reference_policy_kl_type": kind, "kl_input_clamp_value": 0.4}
       for kind in ("k1", "k2", "k3")},
    **{f"{kind} clamped after": {**KL, "reference_policy_kl_type": kind, "kl_output_clamp_value": 0.1}
       for kind in ("k1", "k2", "k3")},
    **{f"{kind} never clamped": {**KL, "reference_policy_kl_type": kind, "kl_input_clamp_value": None,
                                 "kl_output_clamp_value": None} for kind in ("k1", "k2", "k3")},
    **{f"{kind} weighted by the sampler": {**KL, "reference_policy_kl_type": kind,
                                           "use_on_policy_kl_approximation": True} for kind in ("k1", "k2", "k3")},
    "k3 weighted and clamped twice": {**KL, "use_on_policy_kl_approximation": True, "kl_input_clamp_value": 0.5,
                                      "kl_output_clamp_value": 0.2},
    **{f"{kind} weighted by {weight}": {**KL, "reference_policy_kl_type": kind, "kl_importance_weight": weight}
       for kind in ("k1", "k3") for weight in ("on_policy", "sampler", "previous", "none")},
    "k3 weighted by the ratio of sequences": {**KL, **GSPO, "kl_importance_weight": "previous"},
    "k3 by a constant length": {**KL, "loss_normalizer": "max_tokens", "max_response_tokens": 9},
    "k3 with gspo": {**KL, **GSPO},
    "k3 with cispo": {**KL, "use_cispo": True},
    "k3 with reinforce and correction": {**KL, "disable_ppo_ratio": True, **CORRECTED},
}  # fmt: skip


def computed(
    case: Case, batch: TokenBatch | None = None, **options: object
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """Loss, gradient by the log-probabilities, metrics."""
    logprobs = case.logprobs
    objective = ClippedPolicyGradient(LossFnConfig(**{"reference_policy_kl_penalty": 0.0, **options}))
    loss, metrics = objective(logprobs, batch or case.batch)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def assert_equals_reference(case: Case, **options: object) -> None:
    with float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipped, "EPS", 1e-30)  # on the denominators, where the reference has none
        loss, gradient, metrics = computed(case, **options)
        expected_loss, expected_gradient, expected_metrics = slow_policy_gradient(case, **options)
    assert float(loss) == approx(expected_loss)
    torch.testing.assert_close(gradient, expected_gradient, rtol=TOLERANCE, atol=TOLERANCE)
    for name, value in expected_metrics.items():
        if name == "kl_penalty" and not options.get("reference_policy_kl_penalty"):
            continue
        assert float(metrics[name]) == approx(value), name


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", ACTORS.values(), ids=ACTORS.keys())
def test_actor_equals_the_slow_reference(options: dict[str, object], seed: int) -> None:
    assert_equals_reference(random_case(seed), **options)


@pytest.mark.parametrize("options", ACTORS.values(), ids=ACTORS.keys())
def test_without_old_logprobs_the_old_policy_is_the_current_one_without_gradient(options: dict[str, object]) -> None:
    assert_equals_reference(random_case(3, previous=False), **options)


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("actor", ["defaults", "sequence level", "dual clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("options", CORRECTIONS.values(), ids=CORRECTIONS.keys())
def test_importance_correction_equals_the_slow_reference(options: dict[str, object], actor: str, seed: int) -> None:
    assert_equals_reference(random_case(seed), **{**ACTORS[actor], **options})


@pytest.mark.parametrize("options", CORRECTIONS.values(), ids=CORRECTIONS.keys())
def test_importance_weights_have_no_gradient_when_the_old_policy_is_the_current_one(options: dict[str, object]) -> None:
    assert_equals_reference(random_case(6, previous=False), **options)


@pytest.mark.parametrize("previous", [True, False], ids=["old logprobs", "on policy"])
@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES.keys())
def test_kl_penalty_equals_the_slow_reference(options: dict[str, object], previous: bool) -> None:
    assert_equals_reference(random_case(7, previous=previous), **options)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [-35.0, -25.0, 15.0, 25.0, 40.0])
def test_default_clamps_hold_far_from_the_reference(kind: str, distance: float) -> None:
    case = random_case(8)
    case.reference = [[c + distance for c in row] for row in case.current]
    assert_equals_reference(case, **KL, reference_policy_kl_type=kind)


def test_the_options_that_are_compared_really_come_into_play() -> None:
    """Guards the cases above: each clip, clamp and truncation fires for some token and not for another."""
    case = random_case(7)
    counted = [
        (c, p, g, r, a)
        for i, a in enumerate(case.advantages)
        for c, p, g, r, m in zip(
            case.current[i], case.previous[i], case.sampler[i], case.reference[i], case.mask[i], strict=True
        )
        if m
    ]
    ratios = [math.exp(c - p) for c, p, *_ in counted]
    assert min(ratios) < 0.8 < 1.2 < max(ratios)
    assert any(0.8 < ratio < 1.2 for ratio in ratios)
    assert any(a < 0 and ratio > 1.4 for ratio, (*_, a) in zip(ratios, counted, strict=True))
    weights = [math.exp(p - g) for _, p, g, *_ in counted]
    assert min(weights) < 0.85 < 1.2 < max(weights)
    gaps = [abs(r - c) for c, _, _, r, _ in counted]
    assert min(gaps) < 0.4 < max(gaps)


@pytest.mark.parametrize("options", [{}, SEQUENCE, KL], ids=["token level", "sequence level", "with KL"])
def test_the_likelihood_of_rewarded_answers_is_a_mean_over_all_of_their_tokens(options: dict[str, object]) -> None:
    case = random_case(15)
    case.is_rewarded = [True, False, True, True, False, True]  # the last one is masked
    assert_equals_reference(case, **options, positive_example_nll_weight=0.4)
    case.is_rewarded = [False] * 6
    assert_equals_reference(case, **options, positive_example_nll_weight=0.4)


@pytest.mark.parametrize("options", [{}, SEQUENCE, GSPO, {**KL, "kl_importance_weight": "previous"}])
def test_a_marked_old_logprob_is_the_current_one_and_the_others_stay(options: dict[str, object]) -> None:
    """Rows sampled by earlier weights have their sampler's log-probabilities; those sampled just now are marked."""
    mixed, spelt_out = random_case(16), random_case(16)
    assert mixed.previous is not None
    assert spelt_out.previous is not None
    is_current = [[float(row in (1, 3))] * len(tokens) for row, tokens in enumerate(mixed.previous)]
    for row in (1, 3):
        spelt_out.previous[row] = list(spelt_out.current[row])
    marked = mixed.batch.with_columns(prev_is_current=torch.tensor([flag for row in is_current for flag in row]))
    results = [computed(mixed, marked, **options)[:2], computed(spelt_out, **options)[:2]]
    torch.testing.assert_close(results[0], results[1])


# -- what the definition implies --------------------------------------------------------------------------------------


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """With ratio 1 everywhere, d loss / d logprob = -advantage / number of tokens."""
    case = random_case(9, previous=False)
    _, gradient, metrics = computed(case)
    batch = case.batch
    expected = -batch.columns["advantages"] * batch.columns["mask"] / case.num_tokens
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
    assert float(metrics["probs_ratio"]) == pytest.approx(1.0)
    assert float(metrics["probs_ratio_min"]) == float(metrics["probs_ratio_max"]) == 1.0


def test_kl_at_the_reference_is_zero_and_so_is_its_gradient() -> None:
    case = random_case(10, previous=False)
    case.reference = [list(row) for row in case.current]
    case.advantages = [0.0] * len(case.advantages)
    loss, gradient, metrics = computed(case, reference_policy_kl_penalty=1.0)
    assert float(loss) == 0.0
    assert float(metrics["kl_penalty"]) == 0.0
    assert gradient.abs().max() == 0.0


def test_the_kl_factor_adds_the_score_function_gradient() -> None:
    """exp(lc - stop(lc)) is 1, but contributes kl * d lc: the gradient of a k1 penalty is (k1 + 1) / tokens, not 1."""
    case = random_case(11, previous=False)
    case.advantages = [0.0] * len(case.advantages)
    _, gradient, _ = computed(case, reference_policy_kl_penalty=1.0, reference_policy_kl_type="k1")
    batch = case.batch
    k1 = case.logprobs.detach() - batch.columns["reference_logprobs"]
    torch.testing.assert_close(gradient, (k1 + 1) * batch.columns["mask"] / case.num_tokens, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, SEQUENCE, GSPO, {**KL}, {**CORRECTED}, {**KL, **SEQUENCE}])
def test_masked_tokens_have_no_influence(options: dict[str, object]) -> None:
    case = random_case(12)
    garbled = random_case(12)
    for i, mask in enumerate(case.mask):
        for t, counted in enumerate(mask):
            if not counted:
                garbled.current[i][t], garbled.previous[i][t] = -9.0, -0.5
                garbled.sampler[i][t], garbled.reference[i][t] = -3.0, -6.0
    torch.testing.assert_close(computed(case, **options), computed(garbled, **options))


@pytest.mark.parametrize("options", [{}, SEQUENCE, GSPO, {**KL}])
def test_a_batch_with_nothing_to_train_on_has_loss_zero(options: dict[str, object]) -> None:
    case = random_case(13)
    case.mask = [[0.0] * len(row) for row in case.mask]
    loss, gradient, _ = computed(case, **options)
    assert float(loss) == 0.0
    assert gradient.abs().max() == 0.0


def test_a_sampler_logprob_of_minus_infinity_gets_weight_zero() -> None:
    case = random_case(14)
    case.sampler[1][2] = -math.inf
    loss, gradient, _ = computed(case, **CORRECTED)
    assert math.isfinite(float(loss))
    assert gradient[len(case.current[0]) + 2] == 0.0
    assert gradient.isfinite().all()


def test_objective_can_be_pickled() -> None:
    objective = ClippedPolicyGradient(LossFnConfig(ratio_clip_c=3.0, reference_policy_kl_penalty=0.01))
    assert pickle.loads(pickle.dumps(objective)) == objective
