"""`preset: NAME`: laid over the defaults, under everything that the user sets."""

from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.config import ConfigError, load_config
from posttrain.config.loader import PRESETS_DIR, presets
from posttrain.config.schema import schema_of, unknown_keys
from posttrain.config.yaml_files import parse_document

EVERY = [(preset.kind, preset.name) for kind in ("grpo", "dpo", "rm", "sft") for preset in presets(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_preset_loads_without_a_warning_and_has_a_summary(kind: str, name: str) -> None:
    loaded = load_config(kind, None, [f"preset={name}"])
    assert loaded.warnings == []
    assert loaded.config.preset == name
    assert f"preset {name}" in loaded.origins.values()
    assert loaded.origins["policy.model_name"] == "default"
    values = parse_document((PRESETS_DIR / kind / f"{name}.yaml").read_text(), name).values
    values_of_policy = values.pop("policy", {})
    assert set(values) <= {kind, "loss_fn"}, "a preset says nothing of models, data and sizes"
    assert set(values_of_policy) == ({"scheduler"} if name.startswith("nemo") else set())
    assert list(unknown_keys(schema_of(kind), values)) == []


def test_nemo_is_the_default_but_for_the_deviation_the_surplus_of_dynamic_sampling_and_the_warm_up() -> None:
    plain, preset = load_config("grpo", None, []).flat(), load_config("grpo", None, ["preset=nemo-grpo"]).flat()
    different = {key for key in plain if plain[key] != preset.get(key)}
    written_out = {f"grpo.adv_estimator.std_{key}" for key in ("ddof", "epsilon", "epsilon_form", "over")}
    assert different == {"preset", "grpo.dynamic_sampling_surplus", "policy.scheduler", *written_out}
    dpo, nemo = load_config("dpo", None, []).flat(), load_config("dpo", None, ["preset=nemo-dpo"]).flat()
    assert {key for key in dpo if dpo[key] != nemo.get(key)} == {"preset", "policy.scheduler"}


def test_the_users_own_settings_win_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: trl-dapo\ngrpo: {normalize_rewards: false}\nloss_fn: {ratio_clip_max: 0.28}\n")
    loaded = load_config("grpo", file, ["loss_fn.ratio_clip_min=0.1"])
    assert not loaded.config.grpo.adv_estimator.normalize_rewards, "the estimator follows grpo.normalize_rewards"
    assert (loaded.config.loss_fn.ratio_clip_min, loaded.config.loss_fn.ratio_clip_max) == (0.1, 0.28)
    assert loaded.config.loss_fn.reference_policy_kl_penalty == 0.0
    assert loaded.origins["loss_fn.reference_policy_kl_penalty"] == "preset trl-dapo"
    assert loaded.origins["loss_fn.ratio_clip_max"].endswith("run.yaml:3")


def test_the_command_line_chooses_another_preset_than_the_file_or_none(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: trl-dapo\ngrpo: {}\n")
    assert load_config("grpo", file, ["preset=verl-grpo"]).config.loss_fn.ratio_clip_c == 3.0
    for none in ("preset=null", "~preset"):
        assert load_config("grpo", file, [none]).config.loss_fn.reference_policy_kl_penalty == 0.01


def test_a_runs_own_config_file_loads_to_the_same_config(tmp_path: Path) -> None:
    loaded = load_config("grpo", None, ["preset=openrlhf-rfpp", "loss_fn.ratio_clip_max=0.3"])
    file = tmp_path / "config.yaml"
    file.write_text(loaded.to_yaml())
    again = load_config("grpo", file, [])
    assert again.config == loaded.config
    assert again.warnings == []


def test_an_unknown_preset_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(ConfigError, match=r"command line: `preset` = 'trl-dap'.*did you mean trl-dapo.*verl-grpo"):
        load_config("grpo", None, ["preset=trl-dap"])
    with pytest.raises(ConfigError, match="no presets for sft"):
        load_config("sft", None, ["preset=trl-dapo"])


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for _, name in EVERY)
    assert main(["config", "presets", "dpo"]) == 0
    assert "trl-grpo" not in capsys.readouterr().out
    assert main(["config", "show", "grpo", "preset=trl-dapo"]) == 0
    shown = capsys.readouterr().out
    assert "preset: trl-dapo" in shown.splitlines()[0]
    assert any("token_level_loss" in line and "from preset trl-dapo" in line for line in shown.splitlines())
