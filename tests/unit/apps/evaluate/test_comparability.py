"""Which differences between two evaluations are refused, which are reported, and which do not matter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from gate_folders import write_evaluation

from posttrain.apps.evaluate.comparison import compare
from posttrain.apps.evaluate.identity import judge_of
from posttrain.apps.evaluate.results import Evaluation, EvaluationError
from posttrain.apps.ship.gate import judge
from posttrain.config.gate import GateConfig
from posttrain.errors import InputError

REWARDS = [[float(index % 2)] for index in range(60)]


def judged_by(**settings: Any) -> dict[str, Any]:
    """The identity of an evaluation with this judge, files as they are now."""
    return {"judge": judge_of(settings)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one, with a file of rewards, a copy of it, another one, and a reward model."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("r.py", "def f(): 1"), ("copies/r.py", "def f(): 1"), ("rm/model.safetensors", "weights")):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


def pair(folder: Path, *sides: dict[str, Any]) -> list[Evaluation]:
    return [write_evaluation(folder / str(place), REWARDS, **side) for place, side in enumerate(sides)]


def gated(ours: Evaluation, theirs: Evaluation, metric: str) -> str:
    config = GateConfig.model_validate({"checks": {"a": {"metric": metric, "worse_by_at_most": 1.0}}})
    found = judge(config, {"main": ours}, {"main": theirs})
    return found.verdict if not found.notes else f"{found.verdict}: {'; '.join(found.notes)}"


@pytest.mark.parametrize(
    ("setting", "file"),
    [
        ({"function": "r.py:f"}, "r.py"),
        ({"function": "r:f"}, "r.py"),
        ({"rewards": {"a": {"function": "r.f"}}}, "r.py"),
        ({"rewards": {"a": {"model_name": "rm"}}}, "rm/model.safetensors"),
    ],
)
def test_scores_of_an_edited_judge_are_refused(tmp_path: Path, setting: dict[str, Any], file: str) -> None:
    before = judged_by(**setting)
    Path(file).write_text("another")
    one, other = pair(tmp_path / "pair", {"identity": before}, {"identity": judged_by(**setting)})
    content = r"'[a-z.:]+ \(content \w{{8}}\)' in {}"
    said = rf"different judges: env\.[a-z._]+ is {content} and {content}"
    with pytest.raises(EvaluationError, match=said.format("A", "B")):
        compare(one, other)
    for metric in ("pass@1", "reward"):
        with pytest.raises(InputError, match=f"checks.a: {metric} .*{said.format('the candidate', 'production')}"):
            gated(one, other, metric)
    assert gated(one, other, "mean_length_tokens").startswith("promote: main: evaluated under different settings: env.")


def test_judge_is_identified_by_file_content_not_by_path_or_speed(tmp_path: Path) -> None:
    model = {"model": "m", "base_url": "http://a/v1"}
    shutil.copytree("rm", "copies/rm")
    one, other, elsewhere = pair(
        tmp_path / "pair",
        {"identity": judged_by(function="r.py:f", model_name="rm", **model)},
        {
            "identity": judged_by(
                function="copies/r.py:f", model_name="copies/rm", **model, max_retries=9, cache_path="c.sqlite"
            )
        },
        {"identity": judged_by(function="r.py:f", model_name="rm", **model | {"base_url": "http://b/v1"})},
    )
    assert compare(one, other).cautions == ()
    assert gated(one, other, "pass@1") == "promote"
    assert compare(one, elsewhere).cautions == ("env.base_url is 'http://a/v1' in A and 'http://b/v1' in B",)
    (another,) = pair(tmp_path / "g", {"identity": judged_by(function="r.py:g", model_name="rm", **model)})
    with pytest.raises(EvaluationError, match="different judges"):
        compare(one, another)


def test_without_stored_identity_judges_are_compared_by_settings(tmp_path: Path) -> None:
    one, faster, other = pair(
        tmp_path,
        {"config": {"env": {"mine": {"function": "a.py:f", "num_workers": 1}}}},
        {"config": {"env": {"mine": {"function": "a.py:f", "num_workers": 8}}}},
        {"config": {"env": {"mine": {"function": "b.py:f", "num_workers": 1}}}},
    )
    assert compare(one, faster).cautions == ()
    with pytest.raises(EvaluationError, match=r"env.mine.function is 'a.py:f' in A and 'b.py:f' in B"):
        compare(one, other)
    with pytest.raises(InputError, match="different judges"):
        gated(one, other, "pass@1")


def test_passing_from_another_reward_is_another_metric(tmp_path: Path) -> None:
    one, other = pair(tmp_path, {"pass_threshold": -1.0}, {})
    with pytest.raises(EvaluationError, match="passes from a reward of -1 in A and of 1 in B"):
        compare(one, other)
    with pytest.raises(InputError, match="passes from a reward of -1 in the candidate and of 1 in production"):
        gated(one, other, "pass@1")
    assert compare(one, other, "avg@1").difference == 0
    assert gated(one, other, "reward") == "promote"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"tokenizer": {"chat_template_kwargs": {"enable_thinking": False}}}, "enable_thinking"),
        ({"generation": {"vllm_cfg": {"max_model_len": 512}}}, "generation.vllm_cfg.max_model_len"),
        ({"generation": {"openai_cfg": {"extra_body": {"effort": "low"}}}}, "extra_body.effort"),
        ({"generation": {"vllm_cfg": {"tensor_parallel_size": 2}}}, ""),
        ({"eval": {"metric": "cons@k", "k_value": 4}}, ""),
    ],
)
def test_settings_that_change_answers_are_reported(tmp_path: Path, setting: dict[str, Any], told: str) -> None:
    one, other = pair(tmp_path, {"config": setting}, {"config": {}})
    cautions, verdict = compare(one, other).cautions, gated(one, other, "pass@1")
    assert len(cautions) == bool(told)
    assert told in "".join(cautions)
    assert told in verdict
    assert (verdict == "promote") == (not told)


def test_same_file_name_with_other_content_is_reported(tmp_path: Path) -> None:
    asked = {"config": {"data": {"prompt_file": "p.txt"}, "tokenizer": {"chat_template": "t.jinja"}}}
    one, other, same = pair(
        tmp_path,
        {**asked, "identity": {"prompts_hash": "11", "chat_template": ["t.jinja", None, {"t.jinja": "22"}]}},
        {**asked, "identity": {"prompts_hash": "33", "chat_template": ["t.jinja", None, {"t.jinja": "44"}]}},
        {"config": {"data": {"prompt_file": "/here/p.txt"}, "tokenizer": {"chat_template": "t.jinja"}}}
        | {"identity": {"prompts_hash": "11", "chat_template": ["t.jinja", None, {"t.jinja": "22"}]}},
    )
    prompts, template = compare(one, other).cautions
    assert prompts == "prompts_hash is '11' in A and '33' in B"
    assert template.startswith("chat_template is ['t.jinja', None, {'t.jinja': '22'}] in A")
    assert compare(one, same).cautions == (), "the same prompts from a file that has another name"


@pytest.mark.parametrize("content", ["[]", "null", '"x"'])
def test_an_identity_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    one, other = pair(tmp_path, {"identity": judged_by(function="r.py:f")}, {"identity": judged_by(function="r.py:f")})
    (one.folder / "identity.json").write_text(content)
    with pytest.raises(EvaluationError, match=r"identity.json: holds a JSON .*, not an object"):
        compare(one, other)
