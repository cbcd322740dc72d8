"""The printed config is a config: loading it again gives the same run."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from posttrain.cli import config_command
from posttrain.cli.overrides_parser import OverridesParser
from posttrain.config import KINDS, ConfigError, load_config
from posttrain.config.render import to_yaml_text
from posttrain.config.tree import Tree, resolve
from posttrain.config.yaml_files import parse_document

REPOSITORY = Path(__file__).parents[3]
NO_RUNS = ("gate.yaml", "pipeline.yaml")  # files of other commands
SHIPPED = sorted(path for path in (REPOSITORY / "configs").glob("*.yaml") if path.name not in NO_RUNS)


def reload(kind: str, text: str, folder: Path):
    file = folder / "resolved.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(kind, file, [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_survive(kind: str, tmp_path: Path) -> None:
    loaded = load_config(kind, None, [])
    again = reload(kind, loaded.to_yaml(), tmp_path)
    assert again.config == loaded.config
    assert again.warnings == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_load_and_survive(path: Path, tmp_path: Path) -> None:
    kind = path.name.split("_")[0].removesuffix(".yaml")
    loaded = load_config(kind, path, [])
    assert any(f"{path.name}:" in origin for origin in loaded.origins.values())
    again = reload(kind, loaded.to_yaml(), tmp_path)
    assert again.config == loaded.config
    assert again.to_yaml() == loaded.to_yaml()


def test_what_was_removed_or_is_odd_survives(tmp_path: Path) -> None:
    loaded = load_config(
        "grpo",
        None,
        [
            "~policy.optimizer.kwargs.eps",
            "~policy.scheduler",
            "~env.math",
            "env.mine.function=r.py:f",
            "data.default.env_name=mine",
            "data.train=[{dataset_name: a, data_path: 'x: y #.jsonl', prompt_file: null}, {dataset_name: b}]",
            "policy.generation.stop_strings=['</s>', '\\n\\n', '- a', '1e-8', 'null', '???!']",
            "policy.tokenizer.chat_template='{{ m }} \\${x}'",
            "policy.optimizer.kwargs.lr=1e-05",
            "logger.wandb.name='1:30'",
            "policy.hf_config_overrides={a: [1, {b: null}], c: {}}",
            "policy.megatron_cfg.unheard_of=3",
        ],
    )
    assert loaded.config.policy.tokenizer.chat_template == "{{ m }} ${x}"
    again = reload("grpo", loaded.to_yaml(), tmp_path)
    assert again.config == loaded.config
    assert list(again.config.env) == ["mine"]
    assert reload("grpo", loaded.annotated_yaml(), tmp_path).config == loaded.config


def test_a_mark_is_written_only_where_a_key_was_removed() -> None:
    assert "_override_" not in load_config("grpo", None, ["data.train={dataset_name: gsm8k}"]).to_yaml()
    assert load_config("grpo", None, ["~policy.optimizer.kwargs.eps"]).to_yaml().count("_override_: true") == 1


# Interpolation is for values; a key with a dollar sign is not a setting.
# NUL is refused: no path can hold it.
KEYS = st.text(st.characters(exclude_characters="$\0", exclude_categories=["Cs"]), min_size=1, max_size=6)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
TEXTS = TEXTS.filter(lambda text: text != "???")  # which stands for a value that must be given
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@example({"...": "..."})
@example(
    {
        "a": "${b}",
        "c": "\\\\${b}",
        "d": "x\\\\y ${b}",
        "e": "1e-8",
        "f": "0x10",
        "g": "yes",
        "h": "~",
        "i": "=",
        "j": "<<",
    }
)
def test_any_values_survive_printing_reading_and_resolving(values: dict) -> None:
    read = parse_document(to_yaml_text(values), "x") if values else Tree()
    assert resolve(read) == values


def test_remarks_say_where_values_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("grpo:\n  seed: 3\n")
    loaded = load_config("grpo", Path("run.yaml"), ["policy.model_name=m"])
    lines = {line.split(":")[0].strip(): line for line in loaded.annotated_yaml().splitlines() if "  # " in line}
    assert lines["seed"].endswith("# from run.yaml:2") or "# ${grpo.seed}" in lines["seed"]
    assert any(
        line.strip().startswith("model_name: m ") and line.endswith("# from command line") for line in lines.values()
    )
    assert any(
        line.strip().startswith("name: m ") and line.endswith("# ${policy.model_name}") for line in lines.values()
    )
    assert yaml.safe_load(loaded.annotated_yaml())["grpo"]["seed"] == 3
    assert "max_num_steps: 1000000\n" in loaded.annotated_yaml()
    assert loaded.annotated_yaml(all_origins=True).count("from default") > 120


def command(*words: str) -> int:
    args = OverridesParser(fill=config_command.add_arguments).parse_args(words)
    return int(args.run(args))


def test_show_prints_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("show", "grpo", "grpo.seed=9", "policy.generation.backend=vllm") == 0
    printed = capsys.readouterr()
    assert "native engine samples instead" in printed.err
    assert reload("grpo", printed.out, tmp_path).config.grpo.seed == 9


def test_overrides_may_stand_before_between_and_after_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dpo: {seed: 1}\n")
    assert (
        command("show", "dpo.val_period=3", "--json", "dpo.val_batches=4", "--config", str(file), "~policy.scheduler")
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["dpo.seed"] == {"value": 1, "origin": f"{file}:1"}
    assert shown["dpo.val_period"] == {"value": 3, "origin": "command line"}
    assert shown["dpo.val_batches"] == {"value": 4, "origin": "command line"}
    assert shown["policy.scheduler"]["value"] is None
    assert shown["dpo.max_num_steps"]["origin"] == "default"


def test_check_prints_ok_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", "grpo", "data_plane.enabled=true") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("warning: data_plane.enabled")
    assert out[-1].startswith("ok")


def test_check_raises_for_a_bad_config_and_for_no_kind() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `grpo\.num_prompts_per_step`"):
        command("check", "grpo", "grpo.num_promts_per_step=8")
    with pytest.raises(ConfigError, match="give the kind of run"):
        command("check")
