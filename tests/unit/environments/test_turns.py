"""Environments that take turns: what tools and tool calls are, and what the worker's side does with a user's class."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.environments import check_environments
from posttrain.environments.item import BadSetup, Unscored
from posttrain.environments.settings import read_turns
from posttrain.environments.turns import (
    MalformedCall,
    ToolCall,
    ToolError,
    Turn,
    TurnTask,
    parse_tool_calls,
)
from posttrain.environments.turns.calculator import Calculator, evaluate, shown
from posttrain.environments.turns.interface import TurnItem
from posttrain.environments.turns.pool import TurnOutcome, TurnRouter
from posttrain.environments.turns.search import Index, Search
from posttrain.environments.turns.worker_side import turn_taker
from posttrain.errors import InputError
from posttrain.types import Score

TASK = TurnTask("what is it?", [{"role": "user", "content": "what is it?"}], "42")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>'


def counted(**counts: int) -> dict[str, int]:
    """A turn says of every kind of call how many there were."""
    return {"tool_calls": 0, "malformed_tool_calls": 0, "failed_tool_calls": 0, **counts}


# -- tool calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"Let me see.\n{CALL}\n",
        CALL.removesuffix("</tool_call>"),
        '{"name": "calculator", "parameters": {"expression": "17 * 23"}}',
        '[{"name": "calculator", "arguments": {"expression": "17 * 23"}}]',
        '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"17 * 23\\"}"}</tool_call>',
    ],
)
def test_a_tool_call_is_read_in_each_of_the_ways_that_models_write_it(text: str) -> None:
    assert parse_tool_calls(text) == [ToolCall("calculator", {"expression": "17 * 23"})]


@pytest.mark.parametrize(
    "text", ["", "The answer is 391.", '{"answer": 391}', "[1, 2]", "{not json", '{"name": "Ann"}']
)
def test_an_answer_is_no_tool_call(text: str) -> None:
    assert parse_tool_calls(text) == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("17 * 23", "not valid JSON"),
        ("[]", "is an object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": "f", "arguments": [1]}', "not an object"),
        ('{"name": "f", "arguments": "{"}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_call_returns_its_error(body: str, reason: str) -> None:
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert reason in call.reason


def test_several_calls_of_one_turn_keep_their_order() -> None:
    calls = parse_tool_calls(f'{CALL} and <tool_call>oops</tool_call> <tool_call>{{"name": "b"}}</tool_call>')
    assert [type(call) for call in calls] == [ToolCall, MalformedCall, ToolCall]


# -- the calculator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("17 * 23", "391"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.3333333333"),
        ("(3 + 4) * -2", "-14"),
        ("2 ^ 10", "1024"),
        ("$1,250 × 3", "3750"),
        ("07 + 08", "15"),
        ("100.50 - 0.5", "100"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** -1", "0.5"),
    ],
)
def test_the_calculator_calculates(expression: str, result: str) -> None:
    assert shown(evaluate(expression)) == result


@settings(max_examples=60, deadline=None)
@given(a=st.integers(-999, 999), b=st.integers(-999, 999), c=st.integers(1, 99))
def test_it_agrees_with_exact_arithmetic(a: int, b: int, c: int) -> None:
    assert evaluate(f"({a} - {b}) * {c} / 7 + {a} * {b}") == Fraction((a - b) * c, 7) + a * b


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 / 0",
        "0 ** -1",
        "9 ** 9 ** 9",
        "2 ** 0.5",
        "x + 1",
        "__import__('os')",
        "1 +",
        "'a' * 3",
        "1e99999",
        "(" * 150,
    ]
    + ["9" * 201, "True + 1", "1 if 2 else 3", "9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64"]
    # At once: a call that runs out of time is unscored, which is better than what a wrong answer gets.
    + ["1e99999999", "1E-9_999_999_9", "2 * 1.5e+999999999"],
)
def test_what_is_not_arithmetic_is_refused_and_never_run(expression: str) -> None:
    with pytest.raises(ToolError):
        evaluate(expression)


def test_a_call_is_answered_and_an_answer_ends_the_conversation() -> None:
    calculator = Calculator()
    state = calculator.reset(TASK)
    turn = calculator.step(state, CALL)
    assert (turn.observation, turn.done, turn.counts) == (["391"], False, counted(tool_calls=1))
    final = calculator.step(turn.state, "It is 391.")
    assert (final.done, final.answer, final.reward) == (True, "It is 391.", None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "calculatr", "arguments": {"expression": "1"}}', "there is calculator"),
        ('{"name": "calculator", "arguments": {}}', "needs the argument 'expression'"),
        ('{"name": "calculator", "arguments": {"expression": 1}}', "must be a string"),
        ('{"name": "calculator", "arguments": {"expression": "1", "x": 2}}', "has no argument 'x'"),
    ],
)
def test_a_call_against_the_schema_is_counted_as_malformed_and_the_conversation_goes_on(call: str, words: str) -> None:
    turn = Calculator().step(TASK, f"<tool_call>{call}</tool_call>")
    assert turn.counts == counted(malformed_tool_calls=1)
    assert words in str(turn.observation)
    assert not turn.done


def test_a_call_that_the_tool_refuses_is_counted_as_failed() -> None:
    turn = Calculator(syntax="inline").step(TASK, "<calc>1/0")
    assert turn.observation == ["error: division by zero"]
    assert turn.counts == counted(tool_calls=1, failed_tool_calls=1)


def test_calls_beyond_the_limit_of_a_turn_are_not_run() -> None:
    turn = Calculator().step(TASK, CALL * 10)
    assert turn.counts == counted(tool_calls=8, malformed_tool_calls=2)


# -- the search tool ---------------------------------------------------------------------------------------------------


def test_search_ranks_the_document_that_is_about_the_words_first(tmp_path: Path) -> None:
    documents = tmp_path / "facts.jsonl"
    documents.write_text(
        '{"title": "Paris", "text": "The capital of France."}\n'
        '{"title": "Rome", "text": "The capital of Italy, on the Tiber."}\n'
        '{"text": "Nothing of the kind."}\n'
    )
    search = Search(str(documents), num_results=1)
    turn = search.step(TASK, '<tool_call>{"name": "search", "arguments": {"query": "capital Italy"}}</tool_call>')
    assert turn.observation == ["Rome: The capital of Italy, on the Tiber."]
    nothing = search.step(TASK, '<tool_call>{"name": "search", "arguments": {"query": "zebra"}}</tool_call>')
    assert nothing.observation == ["error: nothing was found"]


def test_a_rare_word_counts_more_than_a_frequent_one_and_ties_keep_the_order() -> None:
    index = Index(["the cat", "the dog", "the cat", "the the the"])
    assert index.best("the dog", 1) == [1]
    assert index.best("cat", 5) == [0, 2]
    assert index.best("", 5) == []


# -- the worker's side -------------------------------------------------------------------------------------------------


def taker(tmp_path: Path, source: str, **kwargs: Any) -> Any:
    (tmp_path / "mine.py").write_text("from posttrain.environments.turns import *\n" + textwrap.dedent(source))
    return turn_taker({"turns": "mine.py:Mine", "kwargs": kwargs, "base_folder": str(tmp_path), "timeout_s": 10.0})


def test_the_state_travels_as_a_value(tmp_path: Path) -> None:
    answer = taker(
        tmp_path,
        """
        class Mine:
            def reset(self, task): return {"left": 2, "about": task.reference}
            async def step(self, state, response):
                state["left"] -= 1
                return Turn(state, f"{response}?", reward={"tries": 1}, done=state["left"] == 0, counts={"steps": 1})
        """,
    )
    state = _state(answer(TurnItem("reset", task=TASK)).fields)
    first = answer(TurnItem("step", state=state, response="a")).fields
    again = answer(TurnItem("step", state=state, response="a")).fields
    assert first == again, "the same state gives the same turn, whatever was called before"
    assert first["observation"] == [{"role": "", "content": "a?"}]
    assert (first["reward"], first["parts"]) == (1.0, {"tries": 1.0})
    assert (first["done"], first["counts"]) == (False, {"steps": 1.0})
    assert answer(TurnItem("step", state=_state(first), response="b")).fields["done"] is True
    assert answer(TurnItem("end", state=state)).fields["reward"] == 0.0


def _state(fields: dict[str, Any]) -> bytes:
    import base64

    data = base64.b64decode(fields["state"])
    pickle.loads(data)
    return data


@pytest.mark.parametrize(
    ("schema", "fits"), [({"type": ["string", "null"]}, True), ({"type": ["integer", "null"]}, False), (True, True)]
)
def test_a_type_in_a_schema_may_be_a_list(schema: Any, fits: bool, tmp_path: Path) -> None:
    answer = taker(
        tmp_path,
        f"""
        class Mine(ToolEnvironment):
            parameters = {{"properties": {{"x": {schema}}}}}
            tools = [{{"type": "function", "function": {{"name": "say", "parameters": parameters}}}}]

            def call(self, state, name, arguments):
                return "said"
        """,
    )
    state = _state(answer(TurnItem("reset", task=TASK)).fields)
    (said,) = answer(TurnItem("step", state=state, calls=(ToolCall("say", {"x": "a"}),))).fields["observation"]
    assert said["content"] == ("said" if fits else "error: say: the argument 'x' must be a integer or null")


def test_results_that_are_too_long_for_a_turn_are_cut_with_a_note(tmp_path: Path) -> None:
    answer = taker(
        tmp_path,
        """
        class Mine(ToolEnvironment):
            def call(self, state, name, arguments):
                return arguments["letter"] * 150_000
        """,
    )
    state = _state(answer(TurnItem("reset", task=TASK)).fields)
    calls = tuple(ToolCall("say", {"letter": letter}) for letter in "ab")
    for some in (calls[:1], calls):
        said = answer(TurnItem("step", state=state, response="", calls=some)).fields["observation"]
        assert sum(len(message["content"]) for message in said) <= 100_000
        assert all("150000 characters" in message["content"] for message in said)
        assert [message["content"][:2] for message in said] == ["aa", "bb"][: len(some)]
        assert len(said[0]["content"]) > 90_000 / len(some)


def test_calls_that_the_driver_has_read_are_those_of_the_turn(tmp_path: Path) -> None:
    answer = taker(tmp_path, "from posttrain.environments.turns.calculator import Calculator as Mine")
    state = _state(answer(TurnItem("reset", task=TASK)).fields)
    calls = (ToolCall("calculator", {"expression": "2 * 3"}),)
    said = answer(TurnItem("step", state=state, response="in the words of a family", calls=calls)).fields
    assert [message["content"] for message in said["observation"]] == ["6"]
    written = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    assert answer(TurnItem("step", state=state, response=written, calls=())).fields["answer"] == written


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "NoneType: a posttrain.environments.turns.Turn is needed"),
        ("Turn(state)", "neither an observation nor done"),
        ("Turn(state, [])", "no observation in its list"),
        ("Turn(state, 7)", "an observation is 7"),
        ("Turn(state, {'role': 'assistant', 'content': 'x'})", "which is the model's"),
        ("Turn(lambda: 0, 'x')", "cannot be pickled"),
        ("Turn(b'x' * 600_000, 'x')", "600"),
        ("Turn(state, 'x' * 200_000)", "200000 characters"),
        ("Turn(state, 'x', reward=float('nan'))", "nan"),
        ("Turn(state, done=True, answer=5)", "text is needed"),
        ("Turn(state, 'x', counts={'a': 'b'})", "a number"),
    ],
)
def test_a_turn_that_cannot_be_used_is_unscored_with_the_reason(tmp_path: Path, returned: str, words: str) -> None:
    answer = taker(
        tmp_path,
        f"""
        class Mine:
            def reset(self, task): return None
            def step(self, state, response): return {returned}
        """,
    )
    with pytest.raises(Unscored) as caught:
        answer(TurnItem("step", state=pickle.dumps(0), response="a"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "kwargs", "words"),
    [
        ("mine.py:Missing", {}, "no class 'Missing'; the classes it has: Mine"),
        ("mine.py:NotTurns", {}, "needs the methods reset(task) and step(state, response)"),
        ("mine.py:Mine", {"size": 1}, "size"),
        ("elsewhere.py:Mine", {}, "there is no file"),
        ("posttrain.environments.turns.calculator:Calculator", {"syntax": "xml"}, "json or inline"),
        ("posttrain.environments.turns.search:Search", {"documents": "none.jsonl"}, "there is no file none.jsonl"),
    ],
)
def test_unusable_turn_class_is_refused_before_anything_runs(
    tmp_path: Path, spec: str, kwargs: dict[str, Any], words: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def reset(self, task): ...\n    def step(self, state, response): ...\nclass NotTurns: ...\n"
    )
    with pytest.raises(BadSetup) as caught:
        turn_taker({"turns": spec, "kwargs": kwargs, "base_folder": str(tmp_path), "timeout_s": 10.0})
    assert words in str(caught.value)


def test_chance_in_an_environment_depends_on_the_name_of_the_call_only(tmp_path: Path) -> None:
    answer = taker(
        tmp_path,
        """
        import random
        class Mine(TurnEnvironment):
            def step(self, state, response): return Turn(state, str(random.random()))
        """,
    )
    state = pickle.dumps(0)
    said = [answer(TurnItem("step", key, None, state)).fields["observation"] for key in ("a", "b", "a")]
    assert said[0] == said[2] != said[1]


# -- in worker processes -----------------------------------------------------------------------------------------------

TROUBLE = """
import os, time
from posttrain.environments.turns import Turn, TurnEnvironment

class Trouble(TurnEnvironment):
    def step(self, state, response):
        if response == "die": os._exit(3)
        if response == "hang": time.sleep(60)
        if response == "raise": raise ValueError("no such thing")
        return Turn(state, str(os.getpid()))
"""


def test_failing_turn_does_not_affect_other_turns(tmp_path: Path) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    block = {"turns": "trouble.py:Trouble", "num_workers": 2, "timeout_s": 3}
    router = TurnRouter(read_turns({"mine": block}, tmp_path))
    try:
        (begun,) = router.ask([("mine", TurnItem("reset", task=TASK))])
        assert isinstance(begun, TurnOutcome)
        responses = ["fine", "die", "hang", "raise", "fine"]
        calls = [("mine", TurnItem("step", "", None, begun.state, response)) for response in responses]
        outcomes = router.ask(calls)
    finally:
        router.close()
    assert [isinstance(outcome, TurnOutcome) for outcome in outcomes] == [True, False, False, False, True]
    errors = [outcome.error for outcome in outcomes if type(outcome) is Score]
    assert errors == ["the worker process exited with code 3", "timeout after 3 s", "ValueError: no such thing"]
    pids = [int(outcome.observation[0]["content"]) for outcome in outcomes if isinstance(outcome, TurnOutcome)]
    assert all(pid != os.getpid() for pid in pids)


def test_check_environments_starts_the_class_too(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nonexistent_module_of_mine\n")
    with pytest.raises(InputError, match=r"env\.mine\.turns cannot start: .*broken\.py does not import"):
        check_environments({"mine": {"turns": "broken.py:Mine"}}, tmp_path)
    check_environments({"math": {"turns": "calculator", "num_workers": 1}}, tmp_path)


def documented(name: str) -> Any:
    """A class of docs/multi-turn.md."""
    page = (Path(__file__).parents[3] / "docs" / "multi-turn.md").read_text()
    block = next(part.partition("```")[0] for part in page.split("```python\n") if f"class {name}(" in part)
    names: dict[str, Any] = {}
    exec(block, names)
    return names[name]()


def test_the_environments_of_the_documentation_work() -> None:
    guess = documented("Guess")
    state = guess.reset(TASK)
    assert guess.step(state, "what?").reward == -0.1
    assert guess.step(state, "40").observation == "higher"
    assert guess.step(state, "42") == Turn(reward=1.0, done=True)
    doubler = documented("Doubler")
    answered = doubler.step(TASK, '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>')
    assert (answered.observation, answered.counts) == (["42"], counted(tool_calls=1))
    refused = doubler.step(TASK, '<tool_call>{"name": "double", "arguments": {"x": 1e9}}</tool_call>')
    assert refused.observation == ["error: too large"]


# -- GSM8K as conversations --------------------------------------------------------------------------------------------


def gsm8k_example() -> Any:
    path = Path(__file__).parents[3] / "examples" / "gsm8k_calculator.py"
    location = importlib.util.spec_from_file_location("gsm8k_calculator", path)
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


def test_a_worked_answer_becomes_a_conversation_that_the_calculator_would_have_held() -> None:
    answer = "She sold 48/2 = <<48/2=24>>24 in May.\nThat is 48+24 = <<48+24=72>>72.\n#### 72"
    messages = gsm8k_example().conversation("How many?", answer)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    calculator = Calculator()
    for said, result in zip(messages[1::2], messages[2::2], strict=False):
        assert calculator.step(TASK, said["content"]).observation == [result["content"]]
    assert messages[-1]["content"] == "72.\n#### 72"
    assert calculator.step(TASK, messages[-1]["content"]).done
    assert gsm8k_example().conversation("?", "1+1 = <<1+1=3>>3\n#### 3") is None


def test_nearly_all_of_gsm8ks_own_calculations_hold() -> None:
    file = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
    if not file.exists():
        pytest.skip("GSM8K is not beside this repository (../shared/data/gsm8k/test.jsonl)")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    convert = gsm8k_example().conversation
    held = sum(convert(row["question"], row["answer"]) is not None for row in rows)
    assert held / len(rows) > 0.97
