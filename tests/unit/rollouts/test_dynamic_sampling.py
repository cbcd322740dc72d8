"""Dynamic sampling: whole groups, exactly so many batches, a surplus that survives a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ScriptedPolicy, ScriptedRollouts
from made_groups import Reward, group
from tiny_vision import image_ref

from posttrain.algorithms.advantages import GroupAdvantages
from posttrain.algorithms.credit import Credit, RewardScaling
from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.checkpointing.state import TrainingState, load_training_state, save_training_state
from posttrain.config import LossFnConfig
from posttrain.errors import InputError
from posttrain.orchestration.sharded import SharedWeights
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.roles import RolloutSource
from posttrain.rollouts.dynamic_sampling import (
    SURPLUS,
    WORKING,
    DynamicSampling,
    StreamAndSurplus,
    from_plain,
    to_plain,
)
from posttrain.types import Completion, Conversation, Group, Rollout, Score, StepReport, Task, Utterance

GOOD, BAD = [1.0, 0.0], [1.0, 1.0]


def groups_of(*rewards: Sequence[Reward]) -> list[Group]:
    return [group(draw, own, lengths=[2] * len(own)) for draw, own in enumerate(rewards)]


def source_of(*rewards: Sequence[Reward]) -> ScriptedRollouts:
    return ScriptedRollouts(groups_of(*rewards))


def dynamic(source: ScriptedRollouts, *, num_per_batch: int, max_batches: int, **settings: Any) -> DynamicSampling:
    return DynamicSampling(source, StreamAndSurplus(source), num_per_batch, max_batches, **settings)


def algorithm(source: RolloutSource, num_groups: int, updates: int = 1, **settings: Any) -> Grpo:
    return Grpo(
        GrpoSettings(num_groups, num_updates_per_step=updates, **settings),
        ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.0)),
        Credit(GroupAdvantages()),
        ScriptedPolicy(-7.0, -9.0),  # type: ignore[arg-type]
        source,
        SharedWeights(),
    )


def policy_of(grpo: Grpo) -> ScriptedPolicy:
    assert isinstance(grpo.policy, ScriptedPolicy)
    return grpo.policy


def trained(report: StepReport) -> list[int]:
    return [g.task.draw for g in report.groups]


def test_batches_are_sampled_until_enough_groups_have_signal() -> None:
    source = source_of(BAD, GOOD, BAD, BAD, [0.0, 0.0], GOOD, GOOD, BAD)
    grpo = algorithm(dynamic(source, num_per_batch=2, max_batches=10), 2)
    report = grpo.step(1)
    assert trained(report) == [1, 5]
    assert source.asked == [2, 2, 2]
    assert report.metrics["dynamic_sampling_num_gen_batches"] == 3
    assert report.metrics["groups_with_signal"] == pytest.approx(2 / 6)
    assert report.metrics["num_generated_tokens"] == 6 * 2 * 2
    assert report.metrics["reward"] == pytest.approx((3 * 1 + 2 * 0.5 + 0) / 6), "of all six groups"
    assert report.metrics["filtered_reward"] == 0.5
    assert report.num_samples == 4


def test_reward_covers_all_groups_and_filtered_reward_the_kept_ones() -> None:
    grpo = algorithm(dynamic(source_of(BAD, [1.0, 0.5]), num_per_batch=2, max_batches=1), 1)
    metrics = grpo.step(1).metrics
    assert metrics["reward"] == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    assert metrics["filtered_reward"] == pytest.approx(0.75)


def test_surplus_groups_are_the_first_of_the_next_step() -> None:
    source = source_of(GOOD, GOOD, GOOD, BAD, GOOD, GOOD)
    grpo = algorithm(dynamic(source, num_per_batch=3, max_batches=10), 2)
    first, second = grpo.step(1), grpo.step(2)
    assert trained(first) == [0, 1]
    assert first.metrics["dynamic_sampling_num_surplus_groups"] == 1
    assert trained(second) == [2, 4]
    assert second.metrics["dynamic_sampling_num_earlier_groups"] == 1
    assert second.metrics["dynamic_sampling_num_surplus_groups"] == 1


def test_sufficient_surplus_needs_no_sampling() -> None:
    source = source_of(GOOD, [1.0, 0.5], GOOD, GOOD)
    grpo = algorithm(dynamic(source, num_per_batch=2, max_batches=10), 1)
    grpo.step(1)
    report = grpo.step(2)
    assert (trained(report), source.asked) == ([1], [2])
    assert report.metrics["dynamic_sampling_num_gen_batches"] == 0
    assert report.metrics["reward"] == 0.75, "of what was trained on, where nothing was sampled"
    assert report.metrics["num_generated_tokens"] == 0, "they were counted when they were generated"


def test_surplus_groups_may_be_discarded() -> None:
    source = source_of(GOOD, GOOD, GOOD, BAD, GOOD, GOOD)
    grpo = algorithm(dynamic(source, num_per_batch=3, max_batches=10, keeps_surplus=False), 2)
    assert [trained(grpo.step(1)), trained(grpo.step(2))] == [[0, 1], [4, 5]]


def test_ratios_of_kept_groups_are_taken_against_the_policy_that_sampled_them() -> None:
    grpo = algorithm(dynamic(source_of(*[GOOD] * 6), num_per_batch=3, max_batches=1), 2)
    grpo.step(1)
    grpo.step(2)
    fresh, mixed = policy_of(grpo).batches
    assert "prev_logprobs" not in fresh.columns
    anchor = mixed.columns["prev_logprobs"]
    assert anchor[:4].tolist() == mixed.columns["generation_logprobs"][:4].tolist()
    assert mixed.columns["prev_is_current"].tolist() == [0.0] * 4 + [1.0] * 4, "no forward pass is made for it"
    assert set(policy_of(grpo).calls) == {"update", "end_step"}


def test_with_several_updates_fresh_rows_have_the_policy_before_the_first() -> None:
    grpo = algorithm(dynamic(source_of(*[GOOD] * 6), num_per_batch=3, max_batches=1), 2, updates=2)
    grpo.step(1)
    grpo.step(2)
    earlier, fresh = policy_of(grpo).batches[2:]
    assert earlier.columns["prev_logprobs"].tolist() == earlier.columns["generation_logprobs"].tolist()
    assert fresh.columns["prev_logprobs"].tolist() == [-7.0] * 4


def test_recorded_answers_have_the_starting_policy_as_their_sampler() -> None:
    source = source_of(GOOD, GOOD)
    recorded = source.groups[0].rollouts[0]
    unknown = Rollout(Completion((1, 2, 3), (), "", "stop"), recorded.score)
    source.groups[0] = Group(source.groups[0].task, (unknown, source.groups[0].rollouts[1]))
    grpo = algorithm(source, 2)
    assert grpo.step(1).metrics["num_generated_tokens"] == 3 * 2, "the recorded answer was not generated here"
    (batch,) = policy_of(grpo).batches
    assert batch.columns["generation_logprobs"][:3].tolist() == [-9.0] * 3
    assert batch.columns["prev_logprobs"][:3].tolist() == [-9.0] * 3
    assert batch.columns["prev_is_current"].tolist() == [0.0] * 3 + [1.0] * (len(batch.columns["mask"]) - 3)
    assert policy_of(grpo).calls == ["reference_logprobs", "update", "end_step"]


def test_answers_on_which_sampler_and_trainer_disagree_are_not_trained_on() -> None:
    source = source_of(GOOD, GOOD)
    odd = source.groups[0].rollouts[0]
    far = Rollout(Completion(odd.completion.token_ids, (-7.0, -5.0), "", "stop"), odd.score)
    same = [Rollout(Completion((1, 2), (-7.0, -7.0), "", "stop"), Score(reward)) for reward in (0.0, 1.0, 0.0)]
    source.groups = [Group(source.groups[0].task, (far, same[0])), Group(source.groups[1].task, tuple(same[1:]))]
    grpo = algorithm(source, 2, seq_logprob_error_threshold=2.0)
    metrics = grpo.step(1).metrics
    (batch,) = policy_of(grpo).batches
    assert batch.columns["mask"].tolist() == [1, 1, 1, 1, 1, 1], "the masked answer is not computed"
    assert batch.num_tokens == 6
    signs = batch.columns["advantages"] / 2**0.5  # of two answers, 1 apart, the deviation is 1 / sqrt(2)
    assert signs.tolist() == pytest.approx([-1, -1, 1, 1, -1, -1], rel=1e-5), "it still counts in the baseline"
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert metrics["max_seq_mult_prob_error"] == pytest.approx((1 + torch.tensor(2.0).exp()) / 2)


def test_error_with_remedies_after_the_allowed_number_of_batches() -> None:
    source = source_of(*[BAD] * 3, [0.0, 0.0], GOOD, [None, None], *[GOOD] * 4)
    grpo = algorithm(dynamic(source, num_per_batch=2, max_batches=3), 2)
    with pytest.raises(InputError) as caught:
        grpo.step(7)
    assert source.asked == [2, 2, 2]
    facts = ("step 7", "3 batches", "1 of 6 groups (17%)", "3 had reward 1", "1 could not be scored")
    for part in (*facts, "grpo.dynamic_sampling_max_gen_batches", "grpo.num_generations_per_prompt"):
        assert part in str(caught.value)
    enough = algorithm(dynamic(source_of(*[BAD] * 4, GOOD, GOOD), num_per_batch=2, max_batches=3), 2)
    assert trained(enough.step(1)) == [4, 5], "the last batch that is allowed may bring what is missing"


@pytest.mark.parametrize(
    ("without", "settings"),
    [
        pytest.param([0.3, 0.1 + 0.2], {}, id="they differ by rounding alone"),
        pytest.param([3.0, 2.0], {"scaling": RewardScaling(0.0, 1.0, -1.0, 1.0)}, id="scaling makes them equal"),
        pytest.param([None, 1.0], {}, id="one is unscored"),
        pytest.param([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], {}, id="parts are not credited"),
    ],
)
def test_rewards_without_signal(without: Sequence[Reward], settings: dict[str, Any]) -> None:
    source = dynamic(source_of(without, GOOD), num_per_batch=1, max_batches=2, **settings)
    assert trained(algorithm(source, 1).step(1)) == [1]


def test_parts_that_differ_are_a_signal_where_parts_are_credited() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    source = dynamic(source_of(parts, GOOD), num_per_batch=1, max_batches=2, looks_at_parts=True)
    assert trained(algorithm(source, 1).step(1)) == [0]


def test_validation_leaves_prompts_without_any_reward_out_of_pass_k() -> None:
    source = source_of([None, None], [None, 1.0], [0.0, 0.0])
    grpo = replace(algorithm(source, 1), validation=source, settings=GrpoSettings(1, num_validation_prompts=3))
    report = grpo.validate(1)
    assert report is not None
    assert report.metrics["pass_2"] == 0.5
    unscored = replace(grpo, validation=source_of([None, None]), settings=GrpoSettings(1, num_validation_prompts=1))
    report = unscored.validate(1)
    assert report is not None
    assert "pass_2" not in report.metrics


def test_resumed_run_trains_on_the_same_groups(tmp_path: Path) -> None:
    rewards = [GOOD, GOOD, [1.0, 0.5], BAD, GOOD, BAD, GOOD, GOOD, GOOD]

    def run() -> tuple[Grpo, DynamicSampling]:
        source = dynamic(source_of(*rewards), num_per_batch=3, max_batches=3)
        return algorithm(source, 2), source

    whole, _ = run()
    expected = [whole.step(step).groups for step in (1, 2, 3)]
    before, source = run()
    before.step(1)
    save_training_state(tmp_path, TrainingState(1, source.position.state_dict(), {}, {}))
    after, source = run()
    source.position.load_state_dict(load_training_state(tmp_path).stream_state)
    resumed = [after.step(step).groups for step in (2, 3)]
    assert resumed == expected[1:]
    assert [r.completion.versions for r in resumed[0][0].rollouts] == [((0, 0),)] * 2, "sampled in step 1"
    assert policy_of(after).batches[0].columns["prev_is_current"].tolist() == [0.0] * 4 + [1.0] * 4


def test_a_surplus_saved_without_versions_is_off_policy() -> None:
    """Checkpoints of older versions hold neither versions nor today's conversations."""
    source = dynamic(source_of(*[GOOD] * 4), num_per_batch=2, max_batches=1)
    talk = Conversation((Utterance("assistant", "hi", 2),), {"tool_calls": 1.0})
    kept = group(9, GOOD, [2, 2])
    first = replace(kept.rollouts[0], completion=replace(kept.rollouts[0].completion, conversation=talk))
    kept = replace(kept, rollouts=(first, kept.rollouts[1]))
    row = to_plain(kept)
    for rollout in row["rollouts"]:
        del rollout["completion"]["versions"], rollout["completion"]["error"]
    old = row["rollouts"][0]["completion"]["conversation"]
    old |= {"score": {"class": "Score", "reward": 1.0}, "to_judge": None}
    source.position.load_state_dict({"position": 1, SURPLUS: {"surplus": [row]}})
    grpo = algorithm(source, 2)
    report = grpo.step(3)
    assert trained(report) == [9, 1]
    assert report.groups[0].rollouts[0].completion.conversation == talk
    assert policy_of(grpo).batches[0].columns["prev_is_current"].tolist() == [0.0] * 4 + [1.0] * 4


def test_a_checkpoint_from_before_dynamic_sampling_has_no_surplus() -> None:
    inner = source_of(GOOD)
    position = StreamAndSurplus(inner, [group(0, GOOD)])
    position.load_state_dict({"position": 1})
    assert (inner.position, position.surplus) == (1, [])


def test_timings_and_samples_of_all_batches_are_returned() -> None:
    """Times of batches add up; a mean over rollouts stays one, over the batches that have it."""
    source = source_of(BAD, GOOD, GOOD)
    take, means = source.take, iter(({WORKING: 1.0}, {}, {WORKING: 5.0}))
    source.take = lambda *given: replace(told := take(*given), timings_s={**told.timings_s, **next(means)})  # type: ignore[method-assign]
    taken = dynamic(source, num_per_batch=1, max_batches=3).take(2, step=1)
    assert taken.timings_s == {"generation": 3.0, "reward_calculation": 1.5, WORKING: 3.0}
    assert [g.task.draw for g in taken.sampled] == [0, 1, 2]
    assert [g.task.draw for g in taken.groups] == [1, 2]


def test_group_survives_conversion_to_plain_values() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    conversation = Conversation((Utterance("assistant", "hi", 2),), {"tool_calls": 1.0})
    completion = Completion((1, 2), (-0.1, 0.1 + 0.2), "hi", "length", (True, False), conversation, ((0, 3), (1, 4)))
    reference, messages = {"answer": [1, 2.5, None], 4: (True,)}, ({"role": "user", "content": "p"},)
    task = Task(3, "s:1", "p", (7,), reference, "env", messages, {"a": 1})
    whole = Group(task, (Rollout(completion, Score(None, {"b": 1e-17}, "why", "trace"), 0.25, 1.5),))
    assert from_plain(to_plain(whole)) == whole
    assert from_plain(to_plain(Group(Task(0, "", "", (), Odd()), ()))).task.reference == "odd"
    with pytest.raises(InputError, match="another version of posttrain: Score has no mood"):
        from_plain({"class": "Score", "reward": 1.0, "mood": "good"})


@pytest.mark.invariant
def test_groups_with_images_are_in_a_checkpoint(tmp_path: Path) -> None:
    said = ({"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]},)
    task = Task(0, "a", "p", (1, 2), messages=said, images=(image_ref(8, 8, 1), image_ref(9, 8, 2)))
    torch.save(to_plain(Group(task, ())), tmp_path / "state.pt")
    read = from_plain(torch.load(tmp_path / "state.pt", weights_only=True))
    assert isinstance(read, Group)
    assert read.task == task
    assert [image.data for image in read.task.images] == [image.data for image in task.images]
