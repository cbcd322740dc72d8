"""Settings that differ between a run's config.yaml and the config given now."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from posttrain.config import LoadedConfig, load_config
from posttrain.config.base import ConfigError
from posttrain.config.changes import FREE_TO_CHANGE, ConfigChange, changes_since, same_but_for_the_version
from posttrain.config.policy import automatic_schedule


def load(*overrides: str, kind: str = "grpo") -> LoadedConfig:
    return load_config(kind, None, overrides)


def changes(old: LoadedConfig, new: LoadedConfig) -> dict[str, ConfigChange]:
    return {change.key: change for change in changes_since(old.to_yaml(), new)}


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_equal_settings_have_no_changes(kind: str) -> None:
    assert changes(load(kind=kind), load(kind=kind)) == {}


def test_a_deviation_that_had_another_meaning_is_a_change() -> None:
    old = load().to_yaml()
    before = old.replace("\nteacher:", "\nformer_teacher:", 1)
    assert before != old
    (change,) = changes_since(before, load())
    assert (change.key, change.old, change.is_training) == ("grpo.adv_estimator.std_over", '"others"', True)


def test_a_run_keeps_the_warm_up_that_it_began_with() -> None:
    def began_with(schedule: object) -> str:
        return load(f"policy.scheduler={json.dumps(schedule)}").to_yaml()

    fifty = automatic_schedule(1_000)  # the default of earlier versions
    assert all(changes_since(began_with(automatic_schedule(n)), load()) == () for n in (1, 20, 1_000))
    (change,) = changes_since(began_with([*fifty[:2], {"milestones": [49]}]), load())
    assert change.is_training
    (change,) = changes_since(began_with(fifty), load("policy.scheduler=null"))
    assert change.is_training


def test_config_loaded_from_the_run_folder_has_no_changes(tmp_path: Path) -> None:
    old = load("policy.optimizer.kwargs.lr=1e-5", "data.validation={dataset_name: ResponseDataset, data_path: a.jsonl}")
    (tmp_path / "config.yaml").write_text(old.to_yaml())
    assert changes(old, load_config("grpo", tmp_path / "config.yaml")) == {}


def test_change_of_training_has_key_old_and_new_value() -> None:
    found = changes(load("policy.optimizer.kwargs.lr=1e-5"), load("policy.optimizer.kwargs.lr=2e-5"))
    assert list(found.values()) == [ConfigChange("policy.optimizer.kwargs.lr", "1e-05", "2e-05", is_training=True)]
    assert str(found["policy.optimizer.kwargs.lr"]) == "policy.optimizer.kwargs.lr: 1e-05 -> 2e-05"


@pytest.mark.parametrize(
    ("setting", "is_training"),
    [
        ("grpo.max_num_steps=7", False),
        ("grpo.max_num_epochs=7", False),
        ("grpo.val_period=7", False),
        ("checkpointing.save_period=7", False),
        ("checkpointing.checkpoint_dir=elsewhere", False),
        ("logger.log_dir=elsewhere", False),
        ("policy.device=cpu", False),
        ("policy.num_threads=7", False),
        ("policy.train_micro_batch_size=2", False),
        ("env.math.num_workers=2", False),
        ("grpo.seed=7", True),
        ("grpo.max_val_samples=7", True),
        ("policy.precision=float32", True),
        ("policy.fp8=true", True),
        ("policy.generation.native_cfg.max_batch_size=3", False),
        ("policy.generation.native_cfg.num_speculative_tokens=4", False),
        ("policy.generation.native_cfg.precision=fp8", True),
        ("policy.generation.native_cfg.num_first_layers_in_bf16=1", True),
        ("policy.scheduler=null", True),
        ("loss_fn.ratio_clip_max=0.3", True),
        ("data.shuffle=false", True),
    ],
)
def test_which_settings_count_as_training(setting: str, is_training: bool) -> None:
    found = changes(load(), load(setting))
    assert found[setting.partition("=")[0]].is_training is is_training
    assert any(change.is_training for change in found.values()) is is_training, "what follows from it counts as it does"


def test_settings_computed_from_a_named_one_are_not_named_again() -> None:
    assert list(changes(load(), load("policy.model_name=other/model"))) == ["policy.model_name"]


def test_schedule_computed_from_the_number_of_steps_counts_as_training() -> None:
    schedule = (
        "policy.scheduler={name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: '${grpo.max_num_steps}'}}"
    )
    found = changes(load(schedule, "grpo.max_num_steps=10"), load(schedule, "grpo.max_num_steps=20"))
    assert {key: change.is_training for key, change in found.items()} == {
        "grpo.max_num_steps": False,
        "policy.scheduler.kwargs.T_max": True,
    }


def test_relative_and_absolute_path_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = load("data.train={dataset_name: ResponseDataset, data_path: data/a.jsonl}")
    new = load(f"data.train={{dataset_name: ResponseDataset, data_path: {tmp_path}/data/a.jsonl}}")
    assert changes(old, new) == {}


def test_file_that_moved_is_named_and_does_not_count_as_training(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    old = load("data.train={dataset_name: ResponseDataset, data_path: /gone/a.jsonl}")
    new = load(f"data.train={{dataset_name: ResponseDataset, data_path: {tmp_path}/a.jsonl}}")
    assert {key: change.is_training for key, change in changes(old, new).items()} == {"data.train.data_path": False}
    missing = load("data.train={dataset_name: ResponseDataset, data_path: /gone/too/a.jsonl}")
    assert changes(old, missing)["data.train.data_path"].is_training, "no file with that name"


def test_default_of_a_newer_version_is_no_change() -> None:
    old = "\n".join(line for line in load().to_yaml().splitlines() if "kl_input_clamp_value" not in line)
    assert changes_since(old, load()) == ()
    assert changes_since(old, load("loss_fn.kl_input_clamp_value=20.0")) == ()
    (change,) = changes_since(old, load("loss_fn.kl_input_clamp_value=5.0"))
    assert change == ConfigChange("loss_fn.kl_input_clamp_value", "not set", "5.0", is_training=True)


def test_key_that_this_version_does_not_have_is_no_change() -> None:
    old = load().to_yaml().replace("loss_fn:\n", "loss_fn:\n  of_an_older_version: 3\n")
    assert changes_since(old, load()) == ()


def test_argument_that_was_removed_is_a_change() -> None:
    old = load("policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1, momentum: 0.9}}")
    new = load("policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1}}")
    assert changes(old, new)["policy.optimizer.kwargs.momentum"].new == "not set"


def test_config_of_another_kind_of_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="config of a dpo run, and this is a grpo run"):
        changes_since(load(kind="dpo").to_yaml(), load())


def test_every_pattern_of_free_settings_matches_a_setting() -> None:
    keys = {key for kind in ("grpo", "dpo", "rm", "sft") for key in load(kind=kind).flat()}
    keys |= load("env.rm={type: reward_model, model_name: a, resources: {gpus_per_node: 1}}").flat().keys()
    unused = [pattern for pattern in FREE_TO_CHANGE if not any(fnmatchcase(key, pattern) for key in keys)]
    assert unused == []


def test_another_model_with_the_same_folder_name_counts_as_training(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version / "model").mkdir(parents=True)
    old, new = (load(f"policy.model_name={tmp_path / version / 'model'}") for version in ("v1", "v2"))
    assert changes(old, new)["policy.model_name"].is_training
    (tmp_path / "v1" / "model").rmdir()
    assert not changes(old, new)["policy.model_name"].is_training, "it moved: nothing is left at the old place"


def test_settings_of_another_version_are_equal_without_the_keys_it_had_more() -> None:
    loaded = load("policy.optimizer.kwargs.lr=1e-5")
    now = loaded.flat()
    assert same_but_for_the_version({**now, "policy.megatron_cfg.enabled": False}, now, loaded)
    without_a_default = {key: value for key, value in now.items() if key != "grpo.val_period"}
    assert same_but_for_the_version(without_a_default, now, loaded)
    assert not same_but_for_the_version({**now, "policy.optimizer.kwargs.lr": 2e-5}, now, loaded)
    assert not same_but_for_the_version({**now, "env.other.num_workers": 3}, now, loaded), "a key that exists today"
    without_rate = {key: value for key, value in now.items() if key != "policy.optimizer.kwargs.lr"}
    assert not same_but_for_the_version(without_rate, now, loaded), "set today, and not a default"
