"""Config files: inheritance, replacing and merging, lines in messages, unknown keys."""

from pathlib import Path

import pytest

from posttrain.config import ConfigError, guess_kind, load_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_value_remembers_its_file_and_line(folder: Path) -> None:
    write(folder / "run.yaml", "# one\ngrpo:\n  seed: 7\npolicy:\n  optimizer:\n    kwargs: {lr: 1e-5}\n")
    loaded = load_config("grpo", Path("run.yaml"), ["grpo.val_period=3"])
    assert loaded.config.policy.optimizer.kwargs["lr"] == 1e-5
    assert loaded.origins["grpo.seed"] == "run.yaml:3"
    assert loaded.origins["policy.optimizer.kwargs.lr"] == "run.yaml:6"
    assert loaded.origins["grpo.val_period"] == "command line"
    assert loaded.origins["grpo.max_num_steps"] == "default"


def test_defaults_are_read_depth_first_and_later_ones_win(folder: Path) -> None:
    write(folder / "base/a.yaml", "grpo: {seed: 1, val_period: 1, max_num_steps: 1}\n")
    write(folder / "base/b.yaml", "defaults: a.yaml\ngrpo: {val_period: 2, max_num_steps: 2}\n")
    write(folder / "base/c.yaml", "grpo: {max_num_steps: 3}\n")
    write(folder / "run.yaml", "defaults: [base/b.yaml, base/c.yaml]\nloss_fn: {ratio_clip_max: 0.3}\n")
    loaded = load_config("grpo", Path("run.yaml"), [])
    grpo = loaded.config.grpo
    assert (grpo.seed, grpo.val_period, grpo.max_num_steps) == (1, 2, 3)
    assert loaded.origins["grpo.seed"] == "base/a.yaml:1"
    assert loaded.config.loss_fn.ratio_clip_max == 0.3


def test_a_circle_of_defaults_is_an_error(folder: Path) -> None:
    write(folder / "a.yaml", "defaults: b.yaml\n")
    write(folder / "b.yaml", "defaults: a.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_config("grpo", Path("a.yaml"), [])


def test_missing_files_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such config file"):
        load_config("grpo", Path("nowhere.yaml"), [])
    write(folder / "run.yaml", "defaults: other.yaml\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: defaults: no file other\.yaml"):
        load_config("grpo", Path("run.yaml"), [])


def test_recipes_that_inherit_nemo_rls_exemplars_use_the_built_in_defaults(folder: Path) -> None:
    write(folder / "recipe.yaml", "defaults: ../../grpo_math_1B.yaml\ngrpo: {seed: 3}\n")
    loaded = load_config("grpo", Path("recipe.yaml"), [])
    assert loaded.config.grpo.seed == 3
    assert loaded.config.grpo.num_prompts_per_step == 32
    assert "grpo_math_1B.yaml is not here" in loaded.warnings[0]


def test_override_mark_replaces_the_section_of_parent_and_built_in(folder: Path) -> None:
    write(folder / "base.yaml", "policy: {optimizer: {kwargs: {lr: 1.0, momentum: 0.9}}}\n")
    write(
        folder / "run.yaml",
        "defaults: base.yaml\npolicy: {optimizer: {kwargs: {_override_: true, lr: 2.0}}}\n",
    )
    assert load_config("grpo", Path("run.yaml"), []).config.policy.optimizer.kwargs == {"lr": 2.0}
    write(folder / "merged.yaml", "defaults: base.yaml\npolicy: {optimizer: {kwargs: {lr: 2.0}}}\n")
    merged = load_config("grpo", Path("merged.yaml"), []).config.policy.optimizer.kwargs
    assert merged["momentum"] == 0.9
    assert merged["eps"] == 1e-8


def test_another_optimizer_in_a_file_has_only_its_own_arguments(folder: Path) -> None:
    write(folder / "run.yaml", "policy: {optimizer: {name: torch.optim.SGD, kwargs: {lr: 0.1, momentum: 0.9}}}\n")
    assert load_config("grpo", Path("run.yaml"), []).config.policy.optimizer.kwargs == {"lr": 0.1, "momentum": 0.9}


def test_a_scheduler_replaces_the_default_list_as_a_list_a_map_or_nothing(folder: Path) -> None:
    schedule = "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}"
    write(folder / "map.yaml", f"policy: {{scheduler: {schedule}}}\n")
    write(folder / "list.yaml", f"policy: {{scheduler: [{schedule}]}}\n")
    write(folder / "none.yaml", "policy: {scheduler: null}\n")
    expected = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}}
    assert load_config("grpo", Path("map.yaml"), []).config.policy.scheduler == expected
    assert load_config("grpo", Path("list.yaml"), []).config.policy.scheduler == [expected]
    assert load_config("grpo", Path("none.yaml"), []).config.policy.scheduler is None


def test_a_dataset_replaces_the_built_in_one_and_its_validation_set(folder: Path) -> None:
    write(folder / "run.yaml", "data: {train: {dataset_name: PreferenceDataset, data_path: pairs.jsonl}}\n")
    data = load_config("dpo", Path("run.yaml"), []).config.data
    assert data.train_sets()[0].model_dump(exclude_unset=True) == {
        "dataset_name": "PreferenceDataset",
        "data_path": "pairs.jsonl",
    }
    assert data.validation is None
    assert load_config("dpo", None, []).config.data.validation_sets()[0].dataset_name == "HelpSteer3"
    write(folder / "grpo.yaml", "data: {train: {dataset_name: gsm8k}}\n")
    train = load_config("grpo", Path("grpo.yaml"), []).config.data.train_sets()[0]
    assert train.split_validation_size is None
    assert train.env_name == "math"  # from data.default


def test_a_dataset_in_a_child_file_merges_with_that_of_its_parent(folder: Path) -> None:
    write(folder / "base.yaml", "data: {train: {dataset_name: gsm8k, input_key: question}}\n")
    write(folder / "run.yaml", "defaults: base.yaml\ndata: {train: {data_path: x.jsonl}}\n")
    entry = load_config("grpo", Path("run.yaml"), []).config.data.train_sets()[0]
    assert (entry.dataset_name, entry.input_key, entry.data_path) == ("gsm8k", "question", "x.jsonl")


def test_a_null_that_was_written_beats_the_default_of_datasets(folder: Path) -> None:
    write(
        folder / "run.yaml",
        "data:\n  default: {prompt_file: cot.txt}\n"
        "  train: [{dataset_name: gsm8k}, {dataset_name: gsm8k, prompt_file: null}]\n",
    )
    files = [entry.prompt_file for entry in load_config("grpo", Path("run.yaml"), []).config.data.train_sets()]
    assert files == ["cot.txt", None]


def test_an_empty_section_changes_nothing(folder: Path) -> None:
    write(folder / "run.yaml", "grpo:\nloss_fn:\npolicy:\n  generation:\n  optimizer:\n")
    loaded = load_config("grpo", Path("run.yaml"), [])
    assert loaded.config == load_config("grpo", None, []).config


def test_a_question_mark_value_must_be_given(folder: Path) -> None:
    write(folder / "run.yaml", "policy:\n  model_name: ???\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: `policy\.model_name` is `\?\?\?`"):
        load_config("grpo", Path("run.yaml"), [])
    assert load_config("grpo", Path("run.yaml"), ["policy.model_name=m"]).config.policy.tokenizer.name == "m"


def test_all_unknown_keys_are_reported_at_once_with_the_nearest_known_one(folder: Path) -> None:
    write(
        folder / "run.yaml",
        "grpo:\n  num_promts_per_step: 8\npolicy:\n  generaton: {temperature: 1}\n  lora_cfg: {enabled: true}\n"
        "data:\n  train:\n    - {dataset_name: gsm8k, data_pth: x}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", Path("run.yaml"), ["grpo.temperature=1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "run.yaml:2: unknown key `grpo.num_promts_per_step`; did you mean `grpo.num_prompts_per_step`?" in lines
    assert "run.yaml:4: unknown key `policy.generaton`; did you mean `policy.generation`?" in lines
    assert "run.yaml:5: unknown key `policy.lora_cfg`; did you mean `policy.dtensor_cfg.lora_cfg`?" in lines
    assert "run.yaml:8: unknown key `data.train.0.data_pth`; did you mean `data.train.0.data_path`?" in lines
    assert "command line: unknown key `grpo.temperature`; did you mean `policy.generation.temperature`?" in lines


def test_section_of_another_kind_of_run_is_refused_with_its_command(folder: Path) -> None:
    write(folder / "run.yaml", "dpo: {seed: 3}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: unknown key `dpo` in a grpo config.*`posttrain dpo`"):
        load_config("grpo", Path("run.yaml"), [])


def test_wrong_types_and_ranges_are_reported_at_once_with_their_lines(folder: Path) -> None:
    write(
        folder / "run.yaml",
        "grpo:\n  seed: x\n  num_prompts_per_step: 0\npolicy:\n  precision: bf16\n  max_grad_norm: -1\n"
        "checkpointing:\n  save_period: 0\n  metric_name: accuracy\n  checkpoint_must_save_by: 3h\n"
        "loss_fn:\n  ratio_clip_c: 1\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", Path("run.yaml"), [])
    message = str(caught.value)
    for place in (
        "run.yaml:2: `grpo.seed` = 'x': must be a valid integer",
        "run.yaml:3: `grpo.num_prompts_per_step` = 0: must be greater than or equal to 1",
        "run.yaml:5: `policy.precision` = 'bf16': must be 'float32', 'bfloat16' or 'float16'",
        "run.yaml:6: `policy.max_grad_norm` = -1: must be greater than 0",
        "run.yaml:8: `checkpointing.save_period` = 0",
        "run.yaml:9: `checkpointing.metric_name` = 'accuracy': must be `val:` or `train:`",
        "run.yaml:10: `checkpointing.checkpoint_must_save_by` = '3h': must be days:hours:minutes:seconds",
        "run.yaml:12: `loss_fn.ratio_clip_c` = 1: must be greater than 1",
    ):
        assert place in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grpo: [", "not valid YAML"),
        ("- 1\n- 2\n", "expected a map of sections"),
        ("grpo: {seed: 1, seed: 2}\n", "`seed` is set twice"),
        ("defaults: {a: b}\n", "must be a file name"),
        ("grpo: 3\n", "`grpo` = 3"),
    ],
)
def test_what_is_not_a_config_is_refused_with_its_name(folder: Path, text: str, expected: str) -> None:
    write(folder / "run.yaml", text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        load_config("grpo", Path("run.yaml"), [])
    assert expected in str(caught.value)


def test_an_empty_file_is_the_defaults(folder: Path) -> None:
    write(folder / "run.yaml", "# nothing\n")
    assert load_config("sft", Path("run.yaml"), []).config == load_config("sft", None, []).config


def test_anchors_and_merge_keys_work(folder: Path) -> None:
    write(
        folder / "run.yaml", "env:\n  a: &judge {function: 'r.py:f', timeout_s: 2}\n  b: {<<: *judge, timeout_s: 3}\n"
    )
    loaded = load_config("grpo", Path("run.yaml"), [])
    env = loaded.config.env
    assert (env["a"].timeout_s, env["b"].timeout_s, env["b"].function) == (2.0, 3.0, "r.py:f")
    assert (loaded.origins["env.b.function"], loaded.origins["env.b.timeout_s"]) == ("run.yaml:2", "run.yaml:3")


def test_the_kind_of_run_is_guessed_from_the_sections(folder: Path) -> None:
    assert guess_kind(write(folder / "a.yaml", "dpo: {seed: 1}\n")) == "dpo"
    assert guess_kind(write(folder / "b.yaml", "defaults: a.yaml\npolicy: {}\n")) == "dpo"
    assert guess_kind(write(folder / "c.yaml", "loss_fn: {use_cispo: true}\n")) == "grpo"
    with pytest.raises(ConfigError, match="cannot tell the kind of run"):
        guess_kind(write(folder / "d.yaml", "policy: {}\n"))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of grpo, ppo, distill, dpo, rm, sft"):
        load_config("ppa", None, [])
