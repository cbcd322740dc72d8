"""From rollouts, pairs and examples to the batches a policy trains on, and the order of calls of a step. No model."""

import math

import pytest
from fakes import ScriptedPolicy, ScriptedRollouts

from posttrain.algorithms.advantages import GroupAdvantages
from posttrain.algorithms.batches import example_batch, pair_batch
from posttrain.algorithms.credit import Credit
from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.config import LossFnConfig
from posttrain.orchestration.sharded import SharedWeights
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.types import Completion, Example, Group, Pair, Rollout, Score, Task


def make_group(
    draw: int, rewards: list[float | None], prompt: tuple[int, ...] = (1, 2), cut: int | None = None
) -> Group:
    """Sample i answers with i + 1 tokens; sample `cut` was cut off."""
    rollouts = []
    for i, reward in enumerate(rewards):
        tokens = tuple(100 * draw + 10 * i + t for t in range(i + 1))
        reason = "length" if i == cut else "stop"
        completion = Completion(tokens, tuple(-0.1 * (t + 1) for t in range(i + 1)), "", reason)
        rollouts.append(Rollout(completion, Score(reward)))
    return Group(Task(draw, f"set:{draw}", "same text", prompt), tuple(rollouts))


def run(
    groups: list[Group],
    *,
    updates: int = 1,
    kl: float = 0.0,
    overlong_filtering: bool = False,
    kl_period: int = 0,
    step: int = 1,
) -> tuple[ScriptedPolicy, dict[str, float]]:
    policy = ScriptedPolicy()
    settings = GrpoSettings(
        len(groups), num_updates_per_step=updates, overlong_filtering=overlong_filtering, kl_period=kl_period
    )
    objective = ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=kl))
    credit = Credit(GroupAdvantages(normalize_rewards=False))
    grpo = Grpo(settings, objective, credit, policy, ScriptedRollouts(groups), SharedWeights())
    return policy, dict(grpo.step(step).metrics)


@pytest.mark.parametrize(
    ("updates", "kl", "calls", "scored"),
    [
        (1, 0.0, ["update"], {}),
        (2, 0.0, ["logprobs", "logprobs", "update", "update"], {"prev_logprobs": -1}),
        (1, 0.1, ["reference_logprobs", "update"], {"reference_logprobs": -2}),
    ],
    ids=["one update", "several updates", "KL penalty"],
)
def test_only_what_the_loss_needs_is_scored_and_the_schedule_moves_once(
    updates: int, kl: float, calls: list[str], scored: dict[str, int]
) -> None:
    policy, _ = run([make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0])], updates=updates, kl=kl)
    assert policy.calls == [*calls, "end_step"]
    for batch in policy.batches:
        for name in ("prev_logprobs", "reference_logprobs"):
            assert (name in batch.columns) is (name in scored)
        assert all((batch.columns[name] == value).all() for name, value in scored.items())


def test_a_kl_without_price_is_estimated_every_few_steps_and_is_not_trained_on() -> None:
    groups = [make_group(0, [1.0, 0.0])]
    policy, metrics = run(groups, kl_period=10, step=9)
    assert policy.calls == ["update", "end_step"]
    assert "kl_to_start" not in metrics
    policy, metrics = run(groups, kl_period=10, step=10)
    assert policy.calls == ["reference_logprobs", "update", "end_step"]
    assert "reference_logprobs" not in policy.batches[0].columns
    ratios = [-2 + 0.1, -2 + 0.1, -2 + 0.2]  # reference minus sampler, of one token and of two
    expected = math.fsum(math.exp(ratio) - 1 - ratio for ratio in ratios) / 3
    assert metrics["kl_to_start"] == pytest.approx(expected, rel=1e-6)


def test_columns_line_up_with_the_tokens_of_their_rollout() -> None:
    policy, _ = run([make_group(0, [1.0, 0.0, 0.0]), make_group(1, [0.0, 1.0, 0.25])])
    batch = policy.batches[0]
    advantages = [[1.0, -0.5, -0.5], [-0.625, 0.875, -0.25]]
    assert batch.columns["advantages"].tolist() == pytest.approx(
        [advantages[g][i] for g in range(2) for i in range(3) for _ in range(i + 1)]
    )
    assert batch.columns["generation_logprobs"].tolist() == pytest.approx(
        [-0.1 * (t + 1) for _ in range(2) for i in range(3) for t in range(i + 1)]
    )
    assert [response.tolist() for response in batch.responses[3:]] == [[100], [110, 111], [120, 121, 122]]
    assert (batch.num_tokens, batch.num_sequences) == (12.0, 6.0)


def test_groups_with_the_same_prompt_stay_two_groups() -> None:
    """Credit goes by draw, never by equal text: merged, the rewards 1 and 0 would be compared with each other."""
    policy, _ = run([make_group(0, [1.0, 1.0]), make_group(1, [0.0, 0.0])], kl=0.1)
    batch = policy.batches[0]
    assert (batch.columns["advantages"] == 0).all()
    assert batch.prompt_of == (0, 0, 1, 1)


def test_rows_without_gradient_are_left_out_and_still_count_in_the_denominators() -> None:
    policy, metrics = run([make_group(0, [1.0, 1.0]), make_group(1, [1.0, 0.0]), make_group(2, [0.0, 1.0, 0.5])])
    batch = policy.batches[0]
    assert [response.tolist() for response in batch.responses] == [[100], [110, 111], [200], [210, 211]]
    assert batch.prompt_of == (0, 0, 1, 1)
    assert (batch.num_tokens, batch.num_sequences, batch.num_computed_tokens) == (12.0, 7.0, 6.0)
    assert metrics["samples_with_gradient"] == pytest.approx(4 / 7)


def test_update_without_gradient_is_made_all_the_same() -> None:
    """Weight decay and momentum act in it."""
    policy, metrics = run([make_group(0, [1.0, 1.0]), make_group(1, [1.0, 0.0])], updates=2)
    assert policy.calls == ["logprobs", "update", "update", "end_step"]
    assert [len(batch.responses) for batch in policy.batches] == [0, 2]
    assert policy.batches[0].num_tokens == 3.0
    assert metrics["num_updates"] == 2.0


def test_an_unscored_rollout_is_neither_credited_nor_trained_on() -> None:
    policy, metrics = run([make_group(0, [1.0, None, 0.0])])
    batch = policy.batches[0]
    assert [response.tolist() for response in batch.responses] == [[0], [20, 21, 22]]
    assert batch.columns["advantages"].tolist() == [1.0, -1.0, -1.0, -1.0]
    assert (batch.num_tokens, batch.num_sequences) == (4.0, 2.0)
    assert metrics["unscored"] == 1.0
    assert metrics["reward"] == 0.5


def test_step_without_scores_makes_no_update() -> None:
    policy, metrics = run([make_group(0, [None, None])])
    assert "update" not in policy.calls
    assert "end_step" in policy.calls
    assert metrics["unscored"] == 2.0


def test_overlong_filtering_masks_the_loss_but_keeps_the_reward_in_the_baseline() -> None:
    policy, _ = run([make_group(0, [1.0, 0.0, 1.0], cut=2)], overlong_filtering=True)
    batch = policy.batches[0]
    assert [response.tolist() for response in batch.responses] == [[0], [10, 11]]
    assert batch.columns["advantages"].tolist() == pytest.approx([0.5, -1, -1])
    assert (batch.num_tokens, batch.num_sequences) == (3.0, 2.0)


def test_step_of_filtered_answers_alone_makes_no_update() -> None:
    """Weight decay and momentum would move the weights without anything to learn from."""
    groups = [make_group(0, [1.0], cut=0), make_group(1, [0.0])]
    policy, metrics = run(groups, updates=2, overlong_filtering=True)
    assert policy.calls == ["update", "end_step"]
    assert metrics["num_updates"] == 1.0


def test_updates_split_the_rollouts_in_their_order() -> None:
    policy, metrics = run([make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0])], updates=4)
    assert [[r.tolist() for r in batch.responses] for batch in policy.batches] == [
        [[0]], [[10, 11]], [[100]], [[110, 111]]
    ]  # fmt: skip
    assert [batch.num_tokens for batch in policy.batches] == [1, 2, 1, 2]
    assert metrics["loss"] == 2.5
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == (1.0, 4.0)


def test_pairs_come_chosen_first_and_share_their_prompt() -> None:
    batch = pair_batch([Pair(0, "a", (1, 2), (3,), (4, 5)), Pair(1, "b", (6,), (7, 8), (9,))])
    assert [response.tolist() for response in batch.responses] == [[3], [4, 5], [7, 8], [9]]
    assert batch.prompt_of == (0, 0, 1, 1)
    assert (batch.num_tokens, batch.num_sequences) == (6.0, 4.0)


def test_examples_train_on_the_tokens_they_mark() -> None:
    batch = example_batch([Example(0, "a", (1,), (2, 3, 4), (False, True, True)), Example(1, "b", (1,), (5, 6))])
    assert batch.columns["mask"].tolist() == [0, 1, 1, 1, 1]
    assert (batch.num_tokens, batch.num_sequences) == (4.0, 2.0)
