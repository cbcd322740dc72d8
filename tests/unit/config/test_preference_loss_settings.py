"""Settings of the preference losses that contradict each other: told when the config is loaded, with the remedy."""

import pytest

from posttrain.config import ConfigError, load_config

ORPO = ["dpo.preference_loss=orpo", "dpo.sft_loss_weight=1"]
REFUSED = [
    (["dpo.preference_loss=dop"], ["dpo.preference_loss", "'simpo'"]),
    (["dpo.preference_loss_weight=0"], ["preference_loss_weight", "sft_loss_weight", "both 0"]),
    (["dpo.label_smoothing=0.1"], ["label_smoothing = 0.1", "cdpo, robust, simpo", "preference_loss is dpo"]),
    (["dpo.label_smoothing=0.5", "dpo.preference_loss=robust"], ["dpo.label_smoothing", "less than 0.5"]),
    (["dpo.preference_loss=cdpo"], ["cdpo", "label_smoothing", "plain dpo"]),
    (["dpo.preference_loss=robust"], ["robust", "label_smoothing", "plain dpo"]),
    (["dpo.gt_reward_scale=2"], ["gt_reward_scale = 2", "rpo_sq, rpo_bwd_kl, rpo_fwd_kl"]),
    (["dpo.simpo_gamma=1"], ["simpo_gamma = 1", "simpo only"]),
    (["dpo.desirable_weight=2"], ["desirable_weight = 2", "kto only"]),
    (["dpo.undesirable_weight=2"], ["undesirable_weight = 2", "kto only"]),
    (["dpo.preference_loss=orpo"], ["orpo", "dpo.sft_loss_weight=1", "lambda"]),
    ([*ORPO, "dpo.reference_policy_kl_penalty=0.1"], ["reference_policy_kl_penalty", "preference_loss_weight"]),
    (["dpo.preference_loss=kto", "dpo.preference_average_log_probs=true"], ["preference_average_log_probs", "kto"]),
    (
        ["dpo.preference_loss=kto", "policy.train_global_batch_size=1", "policy.train_micro_batch_size=1"],
        ["kto", "policy.train_global_batch_size", "2 or more"],
    ),
    (
        ["dpo.sft_token_level_loss=true", "dpo.sft_average_log_probs=true"],
        ["sft_token_level_loss", "sft_average_log_probs"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictions_name_the_setting_and_the_remedy(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("dpo", None, overrides)
    for part in parts:
        assert part in str(caught.value)


ACCEPTED = [
    *(
        [f"dpo.preference_loss={name}"]
        for name in ("dpo", "hinge", "ipo", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl", "simpo", "kto")
    ),
    ["dpo.preference_loss=cdpo", "dpo.label_smoothing=0.1"],
    ["dpo.preference_loss=robust", "dpo.label_smoothing=0.1"],
    ["dpo.preference_loss=simpo", "dpo.label_smoothing=0.1", "dpo.simpo_gamma=1.6"],
    ["dpo.preference_loss=simpo", "dpo.preference_average_log_probs=true"],
    [*ORPO, "dpo.preference_loss_weight=0.1"],
    ["dpo.preference_average_log_probs=true", "dpo.sft_token_level_loss=true", "dpo.sft_loss_weight=1"],
    ["dpo.preference_loss_weight=0", "dpo.sft_loss_weight=1"],
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=lambda value: " ".join(value)[:60])
def test_what_fits_is_accepted_and_so_is_the_config_that_a_run_writes(overrides: list[str], tmp_path) -> None:
    loaded = load_config("dpo", None, overrides)
    written = tmp_path / "config.yaml"
    written.write_text(loaded.to_yaml())
    assert load_config("dpo", written).config == loaded.config


def test_ipo_without_a_setting_of_averages_warns_which_form_it_is() -> None:
    (warning,) = [w for w in load_config("dpo", None, ["dpo.preference_loss=ipo"]).warnings if "ipo" in w]
    assert "TRL" in warning
    for choice in ("true", "false"):
        said = ["dpo.preference_loss=ipo", f"dpo.preference_average_log_probs={choice}"]
        assert not [w for w in load_config("dpo", None, said).warnings if "ipo" in w]
