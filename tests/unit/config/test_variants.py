"""`ppo` and `distill` are names for settings of grpo, and every command takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.config import ConfigError, load_config
from posttrain.config.loader import load_words, presets

TEACHER = "teacher.model_name=models/large"


def test_a_variant_is_its_kind_with_settings() -> None:
    ppo, distill = load_config("ppo").config, load_config("distill", None, [TEACHER]).config
    assert (ppo.kind, ppo.called, ppo.grpo.adv_estimator.name) == ("grpo", "ppo", "gae")
    assert (distill.kind, distill.called, distill.teacher_name) == ("grpo", "distill", "models/large")
    both = load_config("ppo", None, [TEACHER, "teacher.reward_weight=1", "vf_coeff=0.5"]).config
    assert (both.called, both.value_loss_fn.scale) == ("ppo", 0.5)
    assert load_config("grpo", None, [TEACHER, "teacher.reward_weight=1"]).config.called == "grpo"
    assert presets("ppo") == presets("grpo") != []


def test_a_warm_up_of_the_critic_that_lasts_the_whole_run_is_mentioned() -> None:
    warm_up = [f"grpo.policy_training_start_step={steps}" for steps in (9, 10)]
    assert load_config("ppo", None, ["steps=10", warm_up[0]]).warnings == []
    (warning,) = load_config("ppo", None, ["steps=10", warm_up[1]]).warnings
    assert warning.endswith("but grpo.max_num_steps = 10: no policy is trained")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["ppo", "grpo.adv_estimator.name=rloo"], "grpo.adv_estimator.name = rloo has no critic"),
        (["distill"], "teacher.model_name is not set"),
        (["ppo", "dpo.beta=1"], "unknown key `dpo`"),
    ],
)
def test_what_a_variant_needs_is_asked_for(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_words(words, None)


def test_the_file_of_a_variant_tells_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("grpo: {adv_estimator: {name: gae}}\n")
    assert load_words([], file).config.called == "ppo"
    assert load_words(["grpo"], file).config.called == "ppo"


@pytest.mark.parametrize("variant", [["ppo"], ["distill", TEACHER]])
def test_every_command_takes_it(variant: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", *variant]) == 0
    assert f"valid {variant[0]} config" in capsys.readouterr().out
    assert main(["config", "show", variant[0]]) == 0
    assert main(["config", "presets", variant[0]]) == 0
    profile = ["--on", "local", "--to", str(tmp_path / "manifests")]
    assert main(["launch", "render", *profile, *variant, "folder=/shared/run"]) == 0
    text = "".join(path.read_text() for path in (tmp_path / "manifests").iterdir())
    assert ("gae" if variant[0] == "ppo" else "models/large") in text


def test_a_teacher_needs_one_answer() -> None:
    loaded = load_config("distill", None, [TEACHER, "generations=1"])
    assert not [line for line in loaded.warnings if "num_generations_per_prompt" in line]
    with pytest.raises(ConfigError, match="num_generations_per_prompt = 1"):
        load_config("distill", None, [TEACHER, "generations=1", "teacher.reward_weight=1"])
