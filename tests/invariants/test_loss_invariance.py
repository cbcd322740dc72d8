"""How an optimizer batch is split changes speed and memory, never the loss, the metrics or the gradients.

One batch goes through one model as a single row, one response at a time, packed by every algorithm, and distributed to
several ranks whose shares are added up. The results must be equal. This is algebra, so it is tested in float64: sums of
float32 differ with the order of their terms, by an amount that depends on the vector width of the CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from float64 import approx, assert_same_gradients, float64
from tiny_models import VOCAB_SIZE, gradients, packed_logprobs, tiny_model
from torch import Tensor

from posttrain.config import DpoConfig, LossFnConfig
from posttrain.config.dpo import LOSSES
from posttrain.data.packing import MicroBatching, plan_micro_batches
from posttrain.policy.objectives import ClippedPolicyGradient, KtoLoss, NegativeLogLikelihood, PreferenceLoss
from posttrain.policy.objectives.reduce import combine_metrics
from posttrain.roles import Objective
from posttrain.types import TokenBatch

TEMPERATURE = 0.8
pytestmark = pytest.mark.usefixtures("in_float64")


@dataclass
class Outcome:
    loss: float
    metrics: Mapping[str, float]
    gradients: Mapping[str, Tensor]


def random_batch(lengths: list[int], prompt_of: list[int], seed: int = 0) -> TokenBatch:
    """Ids, and a value near the model's own in every column that some loss reads."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()

    batch = TokenBatch.build(
        [ids(2 + 3 * index) for index in range(max(prompt_of) + 1)],
        [ids(n) for n in lengths],
        prompt_of,
        {"mask": torch.ones(sum(lengths))},
    )
    current = packed_logprobs(tiny_model(dtype=torch.float64), batch, TEMPERATURE).detach()
    near = [current + 0.3 * torch.randn(len(current), generator=generator) for _ in range(3)]
    advantages = torch.randn(len(lengths), generator=generator).repeat_interleave(torch.tensor(lengths))
    return batch.with_columns(
        advantages=advantages, prev_logprobs=near[0], generation_logprobs=near[1], reference_logprobs=near[2]
    )


def masked(batch: TokenBatch, tokens: list[int]) -> TokenBatch:
    mask = torch.ones(sum(batch.response_lengths))
    mask[tokens] = 0.0
    return TokenBatch.build(batch.prompts, batch.responses, batch.prompt_of, {**batch.columns, "mask": mask})


def with_constants(batch: TokenBatch, **values: list[float]) -> TokenBatch:
    """Columns with one value for each response."""
    lengths = torch.tensor(batch.response_lengths)
    return batch.with_columns(**{name: torch.tensor(v).repeat_interleave(lengths) for name, v in values.items()})


def train(batch: TokenBatch, objective: Objective, batching: MicroBatching, ranks: int = 1) -> Outcome:
    """What the ranks would hand to one optimizer step, added up."""
    plan = plan_micro_batches(batch, batching, ranks, keep_groups_whole=objective.keeps_groups_whole)
    loss, shares, total = 0.0, [], None
    for micro_batches in plan:
        model = tiny_model(dtype=torch.float64)  # every rank has the same weights
        measured = []
        for rows in micro_batches:
            if rows:
                part = batch.select(rows)
                share, metrics = objective(packed_logprobs(model, part, TEMPERATURE), part)
                share.backward()
                loss += float(share.detach())
                measured.append({name: float(value) for name, value in metrics.items()})
        shares.append(combine_metrics(measured))
        mine = gradients(model)
        total = mine if total is None else {name: total[name] + mine[name] for name in total}
    assert total is not None
    return Outcome(loss, combine_metrics(shares), total)


with float64():
    # Three groups of four, two and two. Response 5 is masked altogether, and a few tokens of others.
    GROUPS = masked(random_batch([5, 9, 1, 7, 4, 6, 3, 8], [0, 0, 0, 0, 1, 1, 2, 2]), [1, 7, *range(26, 32), 36])
    # Of these, the tokens of responses 0, 3 and 6 are rewarded; the column is divided by all of them, as GRPO does it.
    _REWARDED = GROUPS.columns["mask"] * torch.tensor(
        [float(row in (0, 3, 6)) for row, n in enumerate(GROUPS.response_lengths) for _ in range(n)]
    )
    REWARDED = GROUPS.with_columns(rewarded=_REWARDED / _REWARDED.sum())
    PAIRS = masked(random_batch([5, 9, 1, 7, 4, 6, 3, 8], [0, 0, 1, 1, 2, 2, 3, 3], seed=1), [2, 20])
    EXAMPLES = masked(random_batch([5, 9, 1, 7, 4, 6, 3, 8], list(range(8)), seed=2), [0, 1, 2, 15, 30])

    PAIRS = with_constants(
        PAIRS, given_rewards=[1.0, 0.2, 0.5, 0.4, 0.9, 0.0, 0.3, 0.6], num_class_tokens=[13.0, 28.0] * 4
    )
    GOOD = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    JUDGED = with_constants(
        EXAMPLES,
        desirable=GOOD,
        kl_baseline=[0.2] * 8,
        num_class_sequences=[5.0 if good else 3.0 for good in GOOD],
        num_class_tokens=[27.0 if good else 16.0 for good in GOOD],
    )
PREFERENCES = {
    f"{name}, with token-level sft": PreferenceLoss(
        DpoConfig(
            preference_loss=name,
            reference_policy_kl_penalty=0.3,
            label_smoothing=0.1,
            sft_loss_weight=0.2,
            sft_token_level_loss=True,
        )
    )
    for name, traits in LOSSES.items()
    if traits.is_paired
}

CASES: Mapping[str, tuple[TokenBatch, Objective]] = {
    "grpo, token level": (
        GROUPS,
        ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.1, ratio_clip_c=3.0)),
    ),
    "grpo, sequence level": (
        GROUPS,
        ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.1, token_level_loss=False)),
    ),
    "gspo, corrected": (
        GROUPS,
        ClippedPolicyGradient(
            LossFnConfig(
                reference_policy_kl_penalty=0.0,
                sequence_level_importance_ratios=True,
                token_level_loss=False,
                use_importance_sampling_correction=True,
                truncated_importance_sampling_type="seq-mask-tis",
                truncated_importance_sampling_ratio=1.1,
                truncated_importance_sampling_ratio_min=0.9,
            )
        ),
    ),
    "a constant length, bounded ratios": (
        GROUPS,
        ClippedPolicyGradient(
            LossFnConfig(
                loss_normalizer="max_tokens",
                max_response_tokens=12,
                ratio_ceiling=1.3,
                log_ratio_clamp_value=0.25,
                reference_policy_kl_penalty=0.1,
                kl_importance_weight="previous",
            )
        ),
    ),
    "rloo": (
        GROUPS,
        ClippedPolicyGradient(
            LossFnConfig(
                reference_policy_kl_penalty=0.0,
                sequence_level_importance_ratios=True,
                sequence_ratio_type="product",
                token_level_loss=False,
            )
        ),
    ),
    "grpo with the likelihood of rewarded answers": (
        REWARDED,
        ClippedPolicyGradient(LossFnConfig(positive_example_nll_weight=0.3, reference_policy_kl_penalty=0.1)),
    ),
    "dpo": (PAIRS, PreferenceLoss(DpoConfig(reference_policy_kl_penalty=0.3))),
    "dpo, averaged, with sft": (
        PAIRS,
        PreferenceLoss(DpoConfig(preference_average_log_probs=True, sft_average_log_probs=True, sft_loss_weight=0.2)),
    ),
    **{name: (PAIRS, objective) for name, objective in PREFERENCES.items()},
    "kto": (JUDGED, KtoLoss(DpoConfig(reference_policy_kl_penalty=0.3, undesirable_weight=0.5, sft_loss_weight=0.2))),
    "kto, token-level sft": (JUDGED, KtoLoss(DpoConfig(sft_loss_weight=0.2, sft_token_level_loss=True))),
    "sft": (EXAMPLES, NegativeLogLikelihood()),
}
every_case = pytest.mark.parametrize(("batch", "objective"), CASES.values(), ids=CASES.keys())

WAYS: Mapping[str, tuple[MicroBatching, int]] = {
    "1 response x 8": (MicroBatching(num_responses=1), 1),
    "3 responses": (MicroBatching(num_responses=3), 1),
    **{
        f"packed, {name}": (MicroBatching(max_tokens=26, algorithm=name), 1)
        for name in ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")
    },
    "packed so tightly that groups split": (MicroBatching(max_tokens=8), 1),
    "2 ranks": (MicroBatching(num_responses=2), 2),
    "3 ranks, packed": (MicroBatching(max_tokens=30), 3),
    "5 ranks, some idle": (MicroBatching(num_responses=4), 5),
}


def whole(batch: TokenBatch, objective: Objective) -> Outcome:
    """All eight responses in one row: 8 x 1."""
    return train(batch, objective, MicroBatching(num_responses=8))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    with float64():
        return {name: whole(batch, objective) for name, (batch, objective) in CASES.items()}


@pytest.mark.parametrize(("batching", "ranks"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("case", CASES)
def test_micro_batching_does_not_change_the_loss(
    outcomes: dict[str, Outcome], case: str, batching: MicroBatching, ranks: int
) -> None:
    expected, actual = outcomes[case], train(*CASES[case], batching, ranks)
    assert actual.loss == approx(expected.loss)
    assert actual.metrics == approx(expected.metrics)
    assert_same_gradients(actual.gradients, expected.gradients)


@every_case
def test_reported_loss_is_the_differentiated_loss(batch: TokenBatch, objective: Objective) -> None:
    outcome = train(batch, objective, MicroBatching(num_responses=2), 2)
    assert outcome.metrics["loss"] == approx(outcome.loss)


@every_case
def test_loss_does_not_depend_on_the_order_of_the_responses(batch: TokenBatch, objective: Objective) -> None:
    step: Callable[[int], int] = (lambda i: i ^ 2) if objective.keeps_groups_whole else (lambda i: 7 - i)
    expected, actual = whole(batch, objective), whole(batch.select([step(i) for i in range(8)]), objective)
    assert actual.loss == approx(expected.loss)
    assert_same_gradients(actual.gradients, expected.gradients)


@every_case
def test_denominators_per_micro_batch_would_give_another_loss(batch: TokenBatch, objective: Objective) -> None:
    """Guards the tests above: if each part had its own denominators, the mean of the parts would not be the whole."""
    model = tiny_model(dtype=torch.float64)
    losses = []
    for rows in ([0, 1], [2, 3], [4, 5], [6, 7]):
        part = batch.select(rows, recount=True)
        losses.append(float(objective(packed_logprobs(model, part, TEMPERATURE), part)[0].detach()))
    expected = whole(batch, objective).loss
    if isinstance(objective, PreferenceLoss) and not objective.config.sft_token_level_loss:
        # four parts with one pair each: the mean is right, the sum is not
        assert sum(losses) == approx(4 * expected)
    elif isinstance(objective, PreferenceLoss | KtoLoss):
        assert sum(losses) != pytest.approx(expected, rel=1e-6)
    else:
        assert sum(losses) / 4 != pytest.approx(expected, rel=1e-6)


def test_combine_metrics_takes_extremes_of_extremes_and_sums_the_rest() -> None:
    parts = [{"loss": 1.0, "ratio_min": 0.5, "ratio_max": 2.0}, {"loss": 0.25, "ratio_min": 0.75, "ratio_max": 3.0}]
    assert combine_metrics(parts) == {"loss": 1.25, "ratio_min": 0.5, "ratio_max": 3.0}
    assert combine_metrics([{}, parts[0]]) == parts[0]
    assert combine_metrics([]) == {}
