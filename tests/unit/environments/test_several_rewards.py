"""Several rewards for one environment: the weighted sum, the named breakdown, and one of them failing."""

from __future__ import annotations

import json
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain.algorithms.advantages import has_signal, part_names
from posttrain.algorithms.step_reports import rollout_metrics
from posttrain.environments import ScoringRouter, build_environments, check_environments
from posttrain.environments.pool import ScoringInterrupted
from posttrain.environments.router import WeightedRewards, build_environment, scoring_item
from posttrain.environments.settings import read_settings
from posttrain.errors import InputError
from posttrain.reporting.rows import group_row
from posttrain.types import Completion, Group, Rollout, Score, Task

REWARDS = """
    import os, time

    def fickle(response):
        if "raise" in response: raise ValueError("bad input")
        if "hang" in response: time.sleep(600)
        if "die" in response: os._exit(3)
        return {"wit": 0.5, "wisdom": 0.25}

    def process_id(response):
        return os.getpid()

    def told(num_tokens, finish_reason, response):
        return {"reward": 0, "num_tokens": num_tokens, "cut": finish_reason == "length"}

    def meet(mine, other):
        open(os.path.join(os.path.dirname(__file__), mine), "w").close()
        while not os.path.exists(os.path.join(os.path.dirname(__file__), other)):
            time.sleep(0.01)
        return 1

    def first(response): return meet("first", "second")

    def second(response): return meet("second", "first")
"""

PARTS = {
    "correct": {"type": "exact", "extract": r"\d+", "weight": 1.0},
    "format": {"type": "regex", "pattern": "^<a>", "weight": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    (folder / "rewards.py").write_text(textwrap.dedent(REWARDS))
    return folder


def score(environment: ScoringRouter, responses: list[str], reference: Any = "4", **more: Any) -> list[Score]:
    tasks = [Task(n, f"t:{n}", "p", (), reference, "several") for n in range(len(responses))]
    return environment.score(tasks, [Completion((1, 2), (0.0, 0.0), text, "stop") for text in responses], **more)


def several(rewards: dict[str, Any], folder: Path | None = None, **keys: Any) -> ScoringRouter:
    return build_environments({"several": {"rewards": rewards, "num_workers": 1, **keys}}, folder)


def test_the_reward_is_the_weighted_sum_and_the_parts_are_unweighted() -> None:
    with several(PARTS) as environment:
        scores = score(environment, ["<a>4", "4", "<a>5", "5"])
    assert [s.reward for s in scores] == pytest.approx([1.1, 1.0, 0.1, 0.0])
    assert [s.parts for s in scores] == [
        {"correct": 1.0, "format": 1.0},
        {"correct": 1.0, "format": 0.0},
        {"correct": 0.0, "format": 1.0},
        {"correct": 0.0, "format": 0.0},
    ]


def test_a_negative_weight_punishes_and_a_weight_of_zero_only_records() -> None:
    parts = {
        **PARTS,
        "format": {**PARTS["format"], "weight": -2.0},
        "short": {"type": "length", "limit": 1, "weight": 0},
    }
    with several(parts) as environment:
        (found,) = score(environment, ["<a>4"])
    assert found.reward == pytest.approx(-1.0)
    assert found.parts == {"correct": 1.0, "format": 1.0, "short": 0.0}


def test_named_numbers_of_a_function_are_parts_of_its_part(folder: Path) -> None:
    parts = {**PARTS, "mine": {"type": "python", "function": "rewards.py:fickle", "weight": 2}}
    with several(parts, folder) as environment:
        (found,) = score(environment, ["<a>4"])
    assert found.reward == pytest.approx(1.1 + 2 * 0.75)
    assert found.parts == {"correct": 1.0, "format": 1.0, "mine": 0.75, "mine/wit": 0.5, "mine/wisdom": 0.25}


def test_failing_reward_leaves_the_answer_unscored_and_is_named(folder: Path) -> None:
    parts = {**PARTS, "mine": {"type": "python", "function": "rewards.py:fickle", "timeout_s": 3}}
    with several(parts, folder, timeout_s=60) as environment:
        found = score(environment, ["<a>4 raise", "<a>4", "<a>4 hang", "<a>5 die"])
    assert [s.reward for s in found] == [None, pytest.approx(1.85), None, None]
    assert found[0].error == "mine: ValueError: bad input"
    assert found[2].error == "mine: timeout after 3 s"
    assert found[3].error == "mine: the worker process exited with code 3"
    parts = [{"correct": 1.0, "format": 1.0}, {"correct": 1.0, "format": 1.0}, {"correct": 0.0, "format": 1.0}]
    assert [s.parts for s in found if not s.scored] == parts
    assert "ValueError" in (found[0].traceback or "")


def test_when_several_rewards_fail_all_are_named(folder: Path) -> None:
    parts = {**PARTS, "mine": {"type": "python", "function": "rewards.py:fickle"}}
    with several(parts, folder) as environment:
        (found,) = score(environment, ["raise"], reference=None)
    assert found.error == "correct: the task has no reference answer; mine: ValueError: bad input"
    assert found.parts == {"format": 0.0}


def test_every_reward_has_its_own_processes_and_limits(folder: Path) -> None:
    function = {"type": "python", "function": "rewards.py:process_id"}
    blocks = {
        "several": {"rewards": {"a": function, "b": {**function, "num_workers": 3, "timeout_s": 7}}, "timeout_s": 5}
    }
    settings = read_settings(blocks, folder)["several"].rewards
    assert (settings["a"].num_workers, settings["a"].timeout_s) == (None, 5.0)
    assert (settings["b"].num_workers, settings["b"].timeout_s) == (3, 7.0)
    assert settings["b"].path == "env.several.rewards.b"
    with build_environments(blocks, folder) as environment:
        found = score(environment, ["x"] * 8)
    assert not {s.parts["a"] for s in found} & {s.parts["b"] for s in found}


def test_rewards_score_side_by_side(folder: Path) -> None:
    parts = {name: {"type": "python", "function": f"rewards.py:{name}"} for name in ("first", "second")}
    with several(parts, folder, timeout_s=60) as environment:
        (found,) = score(environment, ["x"])
    assert found.parts == {"first": 1.0, "second": 1.0}


def test_progress_counts_a_completion_when_all_rewards_have_it() -> None:
    counted: list[int] = []
    with several(PARTS) as environment:
        score(environment, ["4"] * 7, progress=counted.append)
    assert sum(counted) == 7
    assert all(count > 0 for count in counted)


def test_rewards_receive_tokens_and_finish_reason(folder: Path) -> None:
    task = Task(0, "t", "p", (), None, "several")
    whole = Completion((1, 2, 3), (0.0,) * 3, "abc", "stop")
    cut = Completion((1, 2, 3, 4), (0.0,) * 4, "abcd", "length", mask=(True, False, False, True))
    with build_environments({"several": {"function": "rewards.py:told"}}, folder) as environment:
        found = environment.score([task, task], [whole, cut])
    # What the environment said in a conversation is no token of the model's.
    assert [s.parts for s in found] == [{"num_tokens": 3, "cut": 0}, {"num_tokens": 2, "cut": 1}]
    assert scoring_item(task, Completion((), (), "stored text", "stop")).num_tokens is None


class Failing:
    def score(self, *_: Any) -> list[Score]:
        raise RuntimeError("out of memory")

    def close(self) -> None: ...


def test_an_error_in_one_reward_ends_the_others_at_once(folder: Path) -> None:
    part = {"type": "python", "function": "rewards.py:fickle", "timeout_s": 3600}
    slow = build_environment(read_settings({"e": {"rewards": {"h": part}}}, folder)["e"])
    assert isinstance(slow, WeightedRewards)
    both = WeightedRewards({"slow": slow.environments["h"], "model": Failing()}, {"slow": 1, "model": 1})
    task = Task(0, "t", "p", (), None)
    with pytest.raises(RuntimeError, match="out of memory"):
        both.score([task], [Completion((), (), "hang", "stop")])  # would take an hour
    with pytest.raises(ScoringInterrupted):
        slow.environments["h"].score([task], [Completion((), (), "fine", "stop")])
    both.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scoring")]


def test_the_breakdown_is_in_the_rollouts_and_in_the_metrics() -> None:
    task = Task(0, "t", "p", (), "4", "several")
    answers = [Completion((1,), (0.0,), text, "stop") for text in ("<a>4", "5")]
    with several(PARTS) as environment:
        found = environment.score([task, task], answers)
    group = Group(task, tuple(Rollout(a, s) for a, s in zip(answers, found, strict=True)))
    metrics = rollout_metrics([group])
    assert metrics["reward"] == pytest.approx(0.55)
    assert (metrics["reward/correct"], metrics["reward/format"]) == (0.5, 0.5)
    row = json.loads(json.dumps(group_row(group)))
    assert row["completions"][0]["parts"] == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"rewards": {}}, "env.several: `rewards` is empty"),
        ({"rewards": {"a/b": {"type": "math"}}}, "'a/b': a name without a slash is needed"),
        ({"rewards": {"": {"type": "math"}}}, "'': a name without a slash is needed"),
        ({"rewards": {"a": {}}}, r"env.several.rewards.a.type is None: is missing; one of math, "),
        ({"rewards": {"a": {"type": "regx"}}}, r"rewards.a.type is 'regx'.*'regex'"),
        ({"rewards": {"a": {"type": "regex"}}}, r"env.several.rewards.a.pattern is missing"),
        ({"rewards": {"a": {"type": "regex", "pattern": "("}}}, r"a.pattern is '\(': not a regular expression"),
        ({"rewards": {"a": {"type": "regex", "patern": "x"}}}, r"a.patern: .* 'regex'; did you mean 'pattern'"),
        ({"rewards": {"a": {"type": "math", "weight": "big"}}}, r"a.weight is 'big'"),
        ({"rewards": {"a": {"type": "math", "weight": float("nan")}}}, r"a.weight is nan"),
        ({"rewards": {"a": {"type": "length"}}}, "one of limit and target is needed"),
        ({"rewards": {"a": {"type": "length", "limit": 3, "target": 3}}}, "one of limit and target is needed"),
        ({"rewards": {"a": {"type": "length", "target": 3, "shape": "cosine"}}}, "it takes limit, and no target"),
        ({"rewards": {"a": {"type": "json_schema", "schema": {}, "schema_file": "x"}}}, "both given"),
        ({"rewards": {"a": {"type": "exact", "extract": "[a"}}}, "not a regular expression"),
        ({"rewards": {"a": {"type": "math"}}, "type": "math"}, "`type` is for a single reward"),
        ({"rewards": {"a": {"type": "math"}}, "function": "a.py:f"}, "`function` is for a single reward"),
        ({"rewards": {"a": {"type": "math"}}, "pattern": "x"}, "`pattern` is for a single reward"),
        ({"rewards": {"a": "math"}}, r"env.several.rewards.a is 'math'"),
        ({"type": "regex", "pattern": "x", "weight": 2}, r"env.several.weight: is not a key"),
        ({"type": "regex", "pattern": "x", "function": "a.py:f"}, r"function: is not a key"),
        ({"patern": "x"}, "env.several.patern: is not a key of an environment without `type`"),
        ({"precision": 3}, "env.several.precision: is not a key of an environment without `type`"),
    ],
)
def test_a_wrong_block_is_refused_and_named(block: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_environments({"several": block})


def test_a_reward_that_cannot_start_is_named_before_anything_is_scored(folder: Path) -> None:
    bad_schema = {"rewards": {**PARTS, "shape": {"type": "json_schema", "schema": {"type": 3}}}}
    with pytest.raises(InputError, match=r"env.several.rewards.shape cannot start: the schema is not a JSON schema"):
        check_environments({"several": bad_schema}, folder)
    no_function = {"rewards": {**PARTS, "mine": {"type": "python", "function": "rewards.py:absent"}}}
    with pytest.raises(InputError, match=r"env.several.rewards.mine.function is 'rewards.py:absent': .* has no"):
        check_environments({"several": no_function}, folder)


def test_settings_of_the_environment_hold_for_its_rewards_of_type_math() -> None:
    block = {
        "math_verify_impl": "dapo_math_verify",
        "num_workers": 3,
        "rewards": {
            "text": {"type": "math"},
            "value": {"type": "math", "math_verify_impl": "hf_math_verify"},
            "format": {"type": "regex", "pattern": "x"},
        },
    }
    rewards = read_settings({"math": block}, None)["math"].rewards
    assert rewards["text"].worker_setup()["math_verify_impl"] == "dapo_math_verify"
    assert rewards["value"].worker_setup()["math_verify_impl"] == "hf_math_verify"
    assert "math_verify_impl" not in rewards["format"].worker_setup()
    assert {reward.num_workers for reward in rewards.values()} == {3}


def test_details_of_a_part_are_no_rewards_of_their_own() -> None:
    group = Group(
        Task(0, "t", "p", ()),
        tuple(
            Rollout(
                Completion((1,), (0.0,), "x", "stop"), Score(1.5, {"right": 1.0, "format": 0.5, "right/num_tests": n})
            )
            for n in (3.0, 4.0)
        ),
    )
    assert part_names(group.rollouts[0].score) == ["right", "format"]
    assert not has_signal(group, in_parts=True)
