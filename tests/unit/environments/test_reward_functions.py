"""Finding a user's reward function, calling it with what it asks for, and reading what it returns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config import EnvironmentConfig
from posttrain.environments import build_environments, check_environments
from posttrain.environments.item import ScoringItem, Unscored, to_reward
from posttrain.environments.python_function import FunctionLoadError, load_function, load_scorer
from posttrain.environments.settings import read_settings
from posttrain.errors import InputError
from posttrain.types import Completion, Task

ITEM = ScoringItem(
    prompt="<user>2+2?",
    response="four",
    reference="4",
    messages=[{"role": "user", "content": "2+2?"}],
    metadata={"level": 3},
    noise_key="0",
    token_ids=(7, 8),
    finish_reason="length",
)


def scorer_of(tmp_path: Path, source: str, name: str = "f") -> Callable[[ScoringItem], Any]:
    (tmp_path / "rewards.py").write_text(textwrap.dedent(source))
    return load_scorer(f"rewards.py:{name}", tmp_path)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("prompt, response, reference", ("<user>2+2?", "four", "4")),
        ("reference, response, prompt", ("4", "four", "<user>2+2?")),
        ("prompt, response, reference_answer", ("<user>2+2?", "four", "4")),
        ("completion", ("four",)),
        ("question, text, gold", ("<user>2+2?", "four", "4")),
        ("prompt, response, gold", ("<user>2+2?", "four", "4")),
        ("a, b, c, /", ("<user>2+2?", "four", "4")),
        ("response, *, reference, weight=2", ("four", "4", 2)),
        ("response, messages", ("four", [{"role": "user", "content": "2+2?"}])),
        ("response, task_metadata", ("four", {"level": 3})),
        ("response, metadata=None", ("four", {"level": 3})),
        ("response, num_tokens, finish_reason", ("four", 2, "length")),
    ],
)
def test_arguments_go_by_name_and_else_by_position(tmp_path: Path, parameters: str, expected: tuple[Any, ...]) -> None:
    names = ", ".join(part.split("=")[0] for part in parameters.replace("*, ", "").replace(", /", "").split(", "))
    score = scorer_of(tmp_path, f"def f({parameters}): return ({names},)")
    assert score(ITEM) == expected


def test_keyword_arguments_receive_everything_that_is_not_asked_for_by_name(tmp_path: Path) -> None:
    score = scorer_of(tmp_path, "def f(completion, **rest): return completion, rest")
    told = {"messages": ITEM.messages, "task_metadata": ITEM.metadata, "num_tokens": 2, "finish_reason": "length"}
    assert score(ITEM) == ("four", {"prompt": ITEM.prompt, "reference": "4", **told})
    score = scorer_of(tmp_path, "def f(*args): return args")
    assert score(ITEM) == ("<user>2+2?", "four", "4")


@pytest.mark.parametrize("parameters", ["", "response, gold", "a, b, c, d", "response, x, y"])
def test_a_signature_that_cannot_be_served_is_refused(tmp_path: Path, parameters: str) -> None:
    with pytest.raises(FunctionLoadError, match="parameters must be some of prompt, response"):
        scorer_of(tmp_path, f"def f({parameters}): return 1")


def test_async_functions_methods_and_callable_objects_work(tmp_path: Path) -> None:
    source = """
        import asyncio
        class Judge:
            def __init__(self, value): self.value = value
            def __call__(self, response): return self.value
            def method(self, response): return self.value + 1
        judge = Judge(2)
        async def slow(response):
            await asyncio.sleep(0)
            return len(response)
    """
    assert scorer_of(tmp_path, source, "judge")(ITEM) == 2
    assert scorer_of(tmp_path, source, "judge.method")(ITEM) == 3
    slow = scorer_of(tmp_path, source, "slow")
    assert [slow(ITEM), slow(ITEM)] == [4, 4]


def test_functions_are_found_by_file_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_rewards_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(
        "from my_rewards_package import neighbour\ndef f(response): return neighbour.VALUE"
    )
    (package / "neighbour.py").write_text("VALUE = 5")
    (package / "script.py").write_text("import neighbour\ndef f(response): return neighbour.VALUE + 1")
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    for spec, value in [
        ("my_rewards_package.inner.f", 5),
        ("my_rewards_package.inner:f", 5),
        ("my_rewards_package/script.py:f", 6),
        (f"{package}/script.py:f", 6),
    ]:
        assert load_function(spec, tmp_path)("x") == value


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array([3.0]), 3.0),
        (torch.tensor(0.5), 0.5),
    ],
)
def test_anything_that_is_one_number_is_a_reward(value: Any, reward: float) -> None:
    result, parts = to_reward(value)
    assert result == reward
    assert type(result) is float
    assert parts == {}


def test_a_dict_is_named_parts() -> None:
    assert to_reward({"format": 0.25, "answer": np.float32(0.5)}) == (0.75, {"format": 0.25, "answer": 0.5})
    assert to_reward({"reward": 2, "format": True}) == (2.0, {"format": 1.0})


@pytest.mark.parametrize(
    "value",
    ["1", b"1", None, [1.0], (1.0,), 1j, float("nan"), float("-inf"), 10**400, np.zeros(2), {}, {"a": "b"}, {"a": None},
     {"a": 1e308, "b": 1e308}, object()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_unscored(value: Any) -> None:
    with pytest.raises((Unscored, OverflowError)):
        to_reward(value)


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "absent.py:f", "there is no file .*absent.py"),
        ("import no_such_module_here", "rewards.py:f", "(?s)does not import:.*line 1.*No module named 'no_such"),
        ("def f(:", "rewards.py:f", "(?s)does not import:.*SyntaxError"),
        ("import sys; sys.exit(1)", "rewards.py:f", "(?s)does not import:.*SystemExit"),
        ("import os; os._exit(3)", "rewards.py:f", "exited with code 3 while importing"),
        ("def one(response): pass\ndef two(response): pass", "rewards.py:f", "has no 'f'; .* one, two"),
        ("", "rewards.py:f", "has no 'f'; it has no functions"),
        ("f = 3", "rewards.py:f", r"is 3 \(int\), not a function"),
        ("class f: pass", "rewards.py:f", "is a class"),
        ("def f(reward): pass", "rewards.py:f", r"rewards.py:f\(reward\) cannot be called"),
        ("", "rewards.py", "names a file and no function: write 'rewards.py:name_of_the_function'"),
        ("", "no_such_package.module:f", "(?s)module 'no_such_package.module' does not import"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, source: str | None, function: str, message: str
) -> None:
    if source is not None:
        (tmp_path / "rewards.py").write_text(source)
    with pytest.raises(InputError, match=message) as caught:
        check_environments({"mine": {"function": function}}, tmp_path)
    assert str(caught.value).startswith(f"env.mine.function is {function!r}: ")


def test_a_math_verify_that_does_not_import_is_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('built for another version')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"env\.math cannot start: ImportError: built for another version"):
        check_environments({"math": {}})
    check_environments({"math": {"math_verify_impl": "dapo_math_verify"}})


def test_check_environments_accepts_what_can_be_built(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def f(prompt, response, reference): return 1")
    blocks = {"math": {"num_workers": 8}, "mine": {"function": "rewards.py:f"}}
    check_environments(blocks, tmp_path)
    assert read_settings(blocks, tmp_path).keys() == blocks.keys()
    for nothing in ({}, None):
        check_environments(nothing, tmp_path)
        assert not read_settings(nothing, tmp_path)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"math": {"num_workers": 0}}, "env.math.num_workers is 0: must be greater than or equal to 1"),
        ({"math": {"num_workers": 2.5}}, "env.math.num_workers is 2.5"),
        ({"math": {"timeout_s": -1}}, "env.math.timeout_s is -1: must be greater than 0"),
        ({"math": {"timeout_s": "soon"}}, "env.math.timeout_s is 'soon'"),
        ({"math": {"math_verify_impl": "sympy"}}, "'hf_math_verify' or 'dapo_math_verify'"),
        ({"math": {"verifier_type": "essay"}}, "'math', 'english_multichoice' or 'multilingual_multichoice'"),
        ({"math": {"num_worker": 2}}, "env.math.num_worker: is not a key .* did you mean 'num_workers'"),
        ({"mine": {"timeout_s": 2}}, "env.mine does not say how to judge"),
        ({"mine": {"function": 3}}, "env.mine.function is 3"),
        ({"mine": {"function": "reward"}}, "env.mine.function is 'reward'"),
        ({"mine": "rewards.py:f"}, "a mapping of settings is needed"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_do(blocks: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_environments(blocks)


def test_sections_of_a_config_are_taken_as_they_are(tmp_path: Path) -> None:
    math_block = EnvironmentConfig(num_workers=3)
    blocks = {"math": math_block, "mine": EnvironmentConfig(function="a.py:f", num_workers=3, timeout_s=2)}
    settings = read_settings(blocks, tmp_path)
    math, mine = settings["math"].rewards[""], settings["mine"].rewards[""]
    assert (math.path, math.config.type, math.num_workers, math.timeout_s) == ("env.math", "math", 3, 10.0)
    assert (mine.path, mine.config.type, mine.num_workers, mine.timeout_s) == ("env.mine", "python", 3, 2.0)
    assert mine.worker_setup()["function"] == "a.py:f"
    assert mine.base_folder == tmp_path


def test_a_task_for_an_unknown_environment_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    environment = build_environments({"math": {}, "mine": {"function": "a.py:f"}}, tmp_path)
    with pytest.raises(InputError, match="task 'gsm8k:7' names environment 'maths'; under env: there is math, mine"):
        environment.score([Task(0, "gsm8k:7", "", (), "1", "maths")], [Completion((), (), "", "stop")])


# -- TRL's signature: lists in, a list out, columns under their names --------------------------------------------------

TRL_ITEM = ScoringItem(
    prompt="<user>2 + 2<end>",
    response="4",
    reference=None,
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}],
    metadata={"answer": "4", "level": 3},
    token_ids=(7, 8),
)


def trl_scorer(tmp_path: Path, source: str, *, as_messages: bool = False) -> Any:
    (tmp_path / "rewards.py").write_text(source)
    return load_scorer("rewards.py:reward", tmp_path, as_messages=as_messages)


def test_texts_columns_and_tokens_come_as_lists_of_one(tmp_path: Path) -> None:
    source = (
        "def reward(prompts, completions, completion_ids, answer, **columns):\n"
        "    assert (prompts, completions, completion_ids) == (['2 + 2'], ['4'], [[7, 8]])\n"
        "    assert columns == {'level': [3]}\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert trl_scorer(tmp_path, source)(TRL_ITEM) == 1.0


def test_messages_come_as_lists_of_messages_when_the_prompts_are_messages(tmp_path: Path) -> None:
    source = "async def reward(completions, prompts): return [len(prompts[0]) + len(completions[0][0]['content'])]\n"
    assert trl_scorer(tmp_path, source, as_messages=True)(TRL_ITEM) == 3, "it may be async"


@pytest.mark.parametrize("returned", ["0.5", "[]", "[1.0, 2.0]", "'a'"])
def test_a_result_that_is_no_list_of_one_leaves_the_answer_unscored(tmp_path: Path, returned: str) -> None:
    with pytest.raises(Unscored, match="one number per completion"):
        trl_scorer(tmp_path, f"def reward(completions): return {returned}\n")(TRL_ITEM)


def test_a_missing_column_and_arguments_of_trls_trainer_are_named(tmp_path: Path) -> None:
    with pytest.raises(Unscored, match=r"column 'solution'; the row has the columns answer, level"):
        trl_scorer(tmp_path, "def reward(completions, solution): return [1.0]\n")(TRL_ITEM)
    with pytest.raises(FunctionLoadError, match="trainer_state, which only TRL's trainer has"):
        trl_scorer(tmp_path, "def reward(completions, trainer_state): return [1.0]\n")


def test_a_pickle_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(FunctionLoadError, match=r"there is no file .*gone\.pkl"):
        load_scorer("gone.pkl:mine", tmp_path)
    (tmp_path / "bad.pkl").write_bytes(b"not a pickle")
    with pytest.raises(FunctionLoadError, match=r"bad\.pkl cannot be loaded"):
        load_scorer("bad.pkl:mine", tmp_path)
