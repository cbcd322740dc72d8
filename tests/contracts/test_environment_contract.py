"""What every environment must do, whatever it judges by. One suite, run over each kind that a config can name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain.environments import build_environments
from posttrain.roles import Environment
from posttrain.types import Completion, Task


@dataclass(frozen=True)
class Case:
    """A config block, and for a reference: a right answer, a wrong one, a reference that cannot be judged."""

    block: dict[str, Any]
    reference: Any
    right: str
    wrong: str
    unusable_reference: Any


CASES = {
    "math_verify": Case({"math_verify_impl": "hf_math_verify"}, "1/2", r"\boxed{0.5}", r"\boxed{3}", None),
    "dapo": Case({"math_verify_impl": "dapo_math_verify"}, "34", "Answer: 34", "Answer: 35", ""),
    "multiple_choice": Case({"verifier_type": "english_multichoice"}, "B", "Answer: B", "Answer: C", "Paris"),
    "multilingual": Case({"verifier_type": "multilingual_multichoice"}, "B", "答案：B", "答案：C", None),
    "function": Case({"function": "equal.py:equal"}, "yes", "yes", "no", None),
    "choice": Case({"type": "multiple_choice", "language": "multilingual"}, "B", "Antwort: B", "Antwort: C", "Paris"),
    "exact": Case({"type": "exact", "extract": r"#### (\S+)"}, "34", "so #### 34", "so #### 35", None),
    "single of several": Case({"rewards": {"only": {"type": "exact"}}}, "34", "34", "35", None),
    "several": Case(
        {
            "rewards": {
                "correct": {"type": "exact", "weight": 0.5},
                "format": {"type": "regex", "pattern": r"\d{2}", "match": "full", "weight": 0.25},
                "shape": {"type": "json_schema", "schema": {"const": 34}, "weight": 0.25},
            }
        },
        "34",
        "34",
        "x",
        None,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def environment(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder: Path = tmp_path_factory.mktemp("contract")
    (folder / "equal.py").write_text(
        "def equal(response, reference):\n"
        "    if reference is None: raise ValueError('no reference')\n"
        "    return response == reference\n"
    )
    environment: Environment = build_environments({"judge": {**case.block, "timeout_s": 60, "num_workers": 2}}, folder)
    yield environment
    environment.close()


def task(reference: Any, draw: int = 0) -> Task:
    return Task(draw=draw, id=f"t:{draw}", prompt="q", prompt_ids=(1,), reference=reference, environment="judge")


def answer(text: str) -> Completion:
    return Completion((1,), (-0.5,), text, "stop")


def test_the_right_answer_scores_one_and_a_wrong_one_zero(environment: Environment, case: Case) -> None:
    scores = environment.score([task(case.reference)] * 2, [answer(case.right), answer(case.wrong)])
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert all(score.scored and score.error is None for score in scores)


def test_scores_come_in_the_order_of_the_completions(environment: Environment, case: Case) -> None:
    pattern = [n % 3 == 0 for n in range(30)]
    tasks = [task(case.reference, draw) for draw in range(len(pattern))]
    scores = environment.score(tasks, [answer(case.right if right else case.wrong) for right in pattern])
    assert [score.reward for score in scores] == [float(right) for right in pattern]


def test_what_cannot_be_judged_is_unscored_with_one_line_and_the_others_are_scored(
    environment: Environment, case: Case
) -> None:
    tasks = [task(case.reference), task(case.unusable_reference), task(case.reference)]
    scores = environment.score(tasks, [answer(case.right)] * 3)
    assert [score.reward for score in scores] == [1.0, None, 1.0]
    assert scores[1].error
    assert "\n" not in scores[1].error
    assert not scores[1].scored


def test_any_text_gets_a_score_and_no_exception(environment: Environment, case: Case) -> None:
    texts = ["", " \n", "\\boxed{", "}{$$\\frac", "\x00\ud800", "🙂" * 500, "Answer:", "(" * 500, "a" * 20_000]
    scores = environment.score([task(case.reference)] * len(texts), [answer(text) for text in texts])
    assert [score.reward for score in scores] == [0.0] * len(texts)


def test_progress_counts_every_completion_once(environment: Environment, case: Case) -> None:
    finished: list[int] = []
    environment.score([task(case.reference)] * 5, [answer(case.wrong)] * 5, finished.append)
    assert sum(finished) == 5


def test_nothing_to_score_is_no_problem(environment: Environment) -> None:
    assert environment.score([], []) == []
