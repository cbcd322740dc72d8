"""Is the final answer right? Against math-verify's own test vectors and the references of real datasets."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.rewards import parse_reward
from posttrain.environments import build_environments
from posttrain.environments.item import ScoringItem, Unscored
from posttrain.environments.math_answers import dapo_score, last_boxed, math_scorer, normalised
from posttrain.environments.reward_types import MEMORY_LIMIT_BYTES
from posttrain.types import Completion, Task

Scorer = Callable[[ScoringItem], Any]
SHARED_DATA = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.fixture(scope="module")
def hf_score() -> Scorer:
    return math_scorer(setup_of("math"))


def item(response: str, reference: Any) -> ScoringItem:
    return ScoringItem(prompt="", response=response, reference=reference)


def setup_of(kind: str, **keys: Any) -> dict[str, Any]:
    """What a worker gets for these keys of the config."""
    return parse_reward({"type": kind, **keys}).model_dump(mode="json", by_alias=True)


def read_jsonl(name: str) -> list[dict[str, Any]]:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"the shared data file {name} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_agrees_with_math_verify_on_all_its_own_cases(hf_score: Scorer) -> None:
    cases = read_jsonl("math_verify_cases.jsonl")
    different = [case["id"] for case in cases if hf_score(item(case["answer"], case["gold"])) != case["tool_default"]]
    assert len(cases) == 132
    assert different == []


def test_gives_what_the_upstream_tests_demand_on_all_their_cases_with_their_settings() -> None:
    keys = ("match_types", "precision", "strict", "allow_set_relation_comp", "boxed_match_priority")
    cases = read_jsonl("math_verify_cases.jsonl")
    different = []
    for case in cases:
        settings = {key: case[key] for key in keys}
        score = math_scorer(setup_of("math", reference_as="written", **settings))
        if score(item(case["answer"], case["gold"])) != case["expected"]:
            different.append(case["id"])
    assert len(cases) == 132
    assert sum(case["expected"] == 0 for case in cases) == 18
    assert different == []


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        ("so 240 * 0.15 = 36\nThe answer is 36.", "36", 1.0),
        (r"\boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"First I found \boxed{3}. Checking gave \boxed{4}.", "4", 1.0),
        (r"First I found \boxed{4}. Checking gave \boxed{3}.", "4", 0.0),
        (r"\boxed{1} and \boxed{2}", r"\{1, 2\}", 1.0),
        (r"The final answer is 7. I mean \boxed{8}", "8", 1.0),
        (r"\boxed{8}. The final answer is 7", "8", 1.0),
        ("#### 18", "18", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("She has 12 eggs and sells 7 of them", "7", 1.0),
        ("#### 18", "19", 0.0),
        ("Give the answer as a percentage: 33.3 %\n#### 33", "33", 1.0),
        ("\\boxed{33.3}\n#### 33", "33", 0.0),
        ("#### Step 1\nThe answer is 7.", "7", 1.0),
        ("The answer is 7.\n#### Done", "7", 1.0),
        ("I do not know", "18", 0.0),
        ("", "18", 0.0),
        (r"\boxed{\frac{1}{", r"\frac12", 0.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
        (r"\boxed{5}", 5, 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2,1\}", 1.0),
    ],
)
def test_math_verify(hf_score: Scorer, response: str, reference: Any, reward: float) -> None:
    assert hf_score(item(response, reference)) == reward


@pytest.mark.parametrize(
    ("keys", "response", "reference", "reward", "usual"),
    [
        ({"precision": 2}, r"\boxed{0.333}", "1/3", 1.0, 0.0),
        ({"strict": False}, "$f(y)$", "$f(x)$", 1.0, 0.0),
        ({"allow_set_relation_comp": True}, "$x > 3$", r"$(3, \infty)$", 1.0, 0.0),
        ({"match_types": ["latex"]}, "it is 7", "7", 0.0, 1.0),
        ({"match_types": ["expr"]}, r"it is $\frac{14}{2}$", "7", 0.0, 1.0),
        ({"boxed_match_priority": 100}, r"So \boxed{8}. The final answer is 7.", "7", 1.0, 0.0),
        ({"reference_as": "written"}, "7", "so 7 apples", 1.0, 0.0),
        ({"as_math_verify": True}, r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 1.0, 0.0),
        ({"math_verify_impl": "dapo_math_verify"}, "Answer: 0.5", "1/2", 0.0, 1.0),
        ({"verifier_type": "english_multichoice"}, "The answer is (b).", "B", 1.0, 0.0),
    ],
)
def test_each_key_changes_what_is_right(
    keys: dict[str, Any], response: str, reference: str, reward: float, usual: float, hf_score: Scorer
) -> None:
    assert math_scorer(setup_of("math", **keys))(item(response, reference)) == reward
    assert hf_score(item(response, reference)) == usual


@pytest.mark.parametrize("impl", ["hf_math_verify", "dapo_math_verify"])
@pytest.mark.parametrize("reference", [None, "", "  "])
def test_without_a_reference_the_completion_is_unscored(hf_score: Scorer, impl: str, reference: Any) -> None:
    score = hf_score if impl == "hf_math_verify" else dapo_score
    with pytest.raises(Unscored, match="no reference answer"):
        score(item(r"\boxed{5}", reference))


def test_a_reference_that_is_no_mathematics_is_unscored(hf_score: Scorer) -> None:
    with pytest.raises(Unscored, match="cannot be read as mathematics"):
        hf_score(item(r"\boxed{5}", r"\boxed{}"))


def test_an_error_in_the_verifier_is_raised_unless_another_reading_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    def verify(truth: Any, answer: Any, **_: Any) -> bool:
        if not isinstance(answer, str):
            raise TypeError("cannot compare")
        return bool(truth == answer)

    monkeypatch.setattr(math_verify, "verify", verify)
    score = math_scorer(setup_of("math"))
    assert score(item(r"\boxed{5}", "5")) == 1.0  # equal as text
    with pytest.raises(TypeError, match="cannot compare"):
        score(item(r"\boxed{5.0}", "5"))


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        # math-verify says equal: nothing is left of either.
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", 0.0),
        (r"\frac{1}{3^{50}} \cdot \sqrt{2}", r"\frac{\sqrt{2}}{3^{49}}", 0.0),
        ("0.0000002", "0.0000001", 0.0),
        ("0.0000002", r"\frac{1}{10^7}", 0.0),
        # equal indeed, or equal to `precision` decimals
        (r"\frac{2}{2^{100}}", r"\frac{1}{2^{99}}", 1.0),
        (r"\sqrt{6}", r"\sqrt{2} \cdot \sqrt{3}", 1.0),
        ("0.0000001", r"\frac{1}{10^7}", 1.0),
        ("0.33333334", r"\frac{1}{3}", 1.0),
        (r"9\%", "9", 1.0),
        (r"\infty", r"\infty", 1.0),
    ],
)
def test_numbers_that_differ_are_not_equal_because_both_are_cut_off(
    hf_score: Scorer, response: str, reference: str, reward: float
) -> None:
    assert hf_score(item(f"\\boxed{{{response}}}", reference)) == reward


@pytest.mark.parametrize("answer", ["The answer is \u07c4", "\\boxed{\u07c4}"])
def test_digits_of_another_script_are_a_wrong_answer(hf_score: Scorer, answer: str) -> None:
    assert hf_score(item(answer, "4")) == 0.0


@pytest.mark.parametrize("reference", ["5", "x<2", "[0,1]", r"\{1,2\}", r"(-\infty,3)"])
@pytest.mark.parametrize(
    "response",
    [r"[0,\frac{0}{0}]", r"\frac{1}{0}", r"\{1,\frac{0}{0}\}", r"x=\frac{1}{0}", r"\log(0)", r"\infty-\infty"],
)
def test_an_answer_without_a_value_is_wrong(hf_score: Scorer, response: str, reference: str) -> None:
    assert hf_score(item(f"\\boxed{{{response}}}", reference)) == 0.0


@pytest.mark.parametrize("form", ["\\boxed{%s}", "#### %s", "The answer is %s."])
def test_the_gold_answer_of_every_gsm8k_problem_scores_one(hf_score: Scorer, form: str) -> None:
    rows = read_jsonl("gsm8k/test.jsonl")
    assert len(rows) == 1055
    answers = {row["final_answer"] for row in rows}  # many problems have the same
    assert [answer for answer in answers if hf_score(item(form % answer, answer)) != 1.0] == []


def test_the_gold_answer_of_math500_scores_one_and_another_rows_does_not(hf_score: Scorer) -> None:
    answers = [row["answer"] for row in read_jsonl("math/math500_test.jsonl")][:200]
    assert [a for a in answers if hf_score(item(f"\\boxed{{{a}}}", a)) != 1.0] == []
    shifted = zip(answers, answers[1:] + answers[:1], strict=True)
    taken_for_right = [pair for pair in shifted if hf_score(item(f"\\boxed{{{pair[0]}}}", pair[1])) != 0.0]
    assert all(normalised(one) == normalised(other) for one, other in taken_for_right)


def test_an_answer_too_large_to_compute_is_unscored_and_the_next_is_judged() -> None:
    responses = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{1}"]
    tasks = [Task(n, str(n), "", (), "1", "math") for n in range(2)]
    with build_environments({"math": {"timeout_s": 2, "num_workers": 1}}) as environment:
        scores = environment.score(tasks, [Completion((), (), text, "stop") for text in responses])
    assert scores[0].reward is None
    assert scores[0].error in ("timeout after 2 s", "MemoryError")
    assert scores[1].reward == 1.0


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        ("Answer: 34", "34", 1.0),
        ("Answer: 12\nNo wait.\nanswer: $34$.", "34", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        (r"**Answer:** 34", "34", 1.0),
        (r"so \boxed{1,234}", "1234", 1.0),
        (r"so \boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{\frac{a_{1}}{2}}", r"\frac{a_{1}}{2}", 1.0),
        (r"\boxed{5}. Answer: 6", "6", 1.0),
        (r"Answer: 5, or rather \boxed{6}", "6", 1.0),
        ("Answer: 0.5", "1/2", 0.0),  # text, not mathematics
        ("34", "34", 0.0),
        ("Answer: 34" + " and so on" * 40, "34", 0.0),  # not among the last 300 characters
        (r"\boxed{x = 5}", "5", 1.0),
        ("Answer: 30^\\circ", "30", 1.0),
        ("Answer: 12 dollars", "12", 1.0),
        ("Answer: 7.0", "7", 1.0),
        ("Answer: -7", "7", 0.0),
    ],
)
def test_dapo_verifier(response: str, reference: str, reward: float) -> None:
    assert dapo_score(item(response, reference)) == reward


def test_last_box_has_balanced_braces() -> None:
    assert last_boxed(r"\boxed{1} \boxed{\frac{a}{b}} \boxed{open") == r"\frac{a}{b}"
    assert last_boxed("none") is None


def test_only_the_worker_process_has_a_limit_of_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    math_scorer(setup_of("math"))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    program = (
        "import resource; from posttrain.environments.worker import build_scorer; "
        f"build_scorer({setup_of('math')!r}); print(resource.getrlimit(resource.RLIMIT_AS)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == MEMORY_LIMIT_BYTES["math"]
