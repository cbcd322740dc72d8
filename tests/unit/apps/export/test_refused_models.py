"""Folders, configs and weight files that no model can be made of: each is named in one line, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, tiny_model
from tiny_runs import save_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from posttrain.apps.export.conversion_input import read_model_config
from posttrain.apps.export.verification import loaded_logits
from posttrain.apps.export.weight_names import WeightShapes
from posttrain.cli.main import main
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.errors import InputError
from posttrain.models.accepted_names import resolve_model
from posttrain.models.loading import load_model, load_tokenizer

CONFIGS = Path(__file__).parents[4] / "configs"
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs convert, which has to fail as bad input, and returns its one-line message."""

    def run(source: Path, *options: str, to: tuple[str, ...] | None = None) -> str:
        before = sorted(path.name for path in tmp_path.iterdir())
        capsys.readouterr()
        code = main(["convert", str(source), *(to or ("--to", str(tmp_path / "hf"))), *options])
        error = capsys.readouterr().err.strip()
        assert (code, "Traceback" in error) == (64, False), error
        assert error.startswith("posttrain: error: "), error
        assert "\n" not in error
        assert sorted(path.name for path in tmp_path.iterdir()) == before, "something half-written was left"
        return error

    return run


def copy_with(model: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["", "notes.txt", "config.json"])
def test_model_in_a_subfolder_is_not_taken(model: Path, tmp_path: Path, refused: Refused, own: str) -> None:
    shutil.copytree(model, tmp_path / "demo/model")
    if own:
        (tmp_path / "demo" / own).write_text((model / "config.json").read_text())
    error = refused(tmp_path / "demo")
    if own != "config.json":
        with pytest.raises(InputError) as of_eval_and_serve:
            resolve_model(tmp_path / "demo")
        assert error == f"posttrain: error: {of_eval_and_serve.value}"
    else:
        assert f"{tmp_path / 'demo'} holds no weights" in error


@pytest.mark.parametrize(
    "named", ["step_3", "step_3/policy", "step_3/policy/weights", "copy/policy", "copy/policy/weights"]
)
def test_a_checkpoint_may_have_its_weights_in_model(model: Path, tmp_path: Path, named: str) -> None:
    shutil.copytree(model, tmp_path / named.partition("/")[0] / "policy/weights/model")
    assert main(["convert", str(tmp_path / named), "--to", str(tmp_path / "hf"), "--no-verify"]) == 0
    assert load_file(tmp_path / "hf/model.safetensors").keys() == load_file(model / "model.safetensors").keys()


# -- config.json -------------------------------------------------------------------------------------------------------


def test_architectures_of_another_family_are_refused(tmp_path: Path, refused: Refused) -> None:
    tiny_model("llama", vocab_size=260).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    mixed = copy_with(tmp_path / "llama", tmp_path / "mixed", model_type="qwen2")
    for options in ((), ("--no-verify",)):
        error = refused(mixed, *options)
        assert all(words in error for words in (f"{mixed}/config.json: ", "LlamaForCausalLM", "'qwen2'"))


def test_weights_that_transformers_misses_fail_the_verification(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=260).save_pretrained(tmp_path / "llama")
    config = AutoConfig.from_pretrained(tmp_path / "llama")
    shape = WeightShapes.of(config, "llama")
    assert loaded_logits(tmp_path / "llama", shape).shape[-1] == 260
    weights = load_file(tmp_path / "llama/model.safetensors")

    save_file({**weights, "stranger": torch.zeros(2)}, tmp_path / "llama/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"finds 1 weights of the converted folder .* among them stranger"):
        loaded_logits(tmp_path / "llama", shape)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "llama/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"finds 1 weights .* among them model\.norm\.weight"):
        loaded_logits(tmp_path / "llama", shape)


def test_the_verification_loads_by_model_type_as_users_do(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=260).save_pretrained(tmp_path / "llama")
    mixed = copy_with(tmp_path / "llama", tmp_path / "mixed", model_type="qwen2")
    llama = WeightShapes.of(AutoConfig.from_pretrained(tmp_path / "llama"), "llama")
    shape = WeightShapes(AutoConfig.from_pretrained(mixed), LlamaForCausalLM, "mixed", llama.shapes, llama.tied, False)
    with pytest.raises(InputError, match=r"missing.* among them model\.layers\.0\.self_attn\..*bias"):
        loaded_logits(mixed, shape)


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float, got str (value: 'x')"),
    ({"hidden_act": "zork"}, "hidden_act 'zork' is not known to transformers"),
    ({"num_attention_heads": 3}, "hidden size (32) is not a multiple of the number of attention heads (3)"),
    ({"hidden_size": "128"}, "hidden_size is '128'; a whole number from 1 to"),
    ({"rope_theta": "a", "rope_parameters": None}, "unsupported operand"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0; a whole number from 1 to"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_VALUES, ids=[next(iter(changes)) for changes, _ in BAD_VALUES])
def test_impossible_config_value_is_quoted(
    model: Path, tmp_path: Path, refused: Refused, changes: dict[str, Any], words: str
) -> None:
    folder = copy_with(model, tmp_path / "bad", **changes)
    error = refused(folder)
    assert error.startswith("posttrain: error: ")
    assert f"{folder}/config.json: " in error
    assert words in error
    with pytest.raises(InputError) as of_eval_and_serve:
        load_for_sampling(str(folder), device="cpu")
    assert words in str(of_eval_and_serve.value)
    assert str(folder) in str(of_eval_and_serve.value)
    assert "hf_config_overrides" not in str(of_eval_and_serve.value)


def test_impossible_config_value_is_quoted_for_gguf(model: Path, tmp_path: Path, refused: Refused) -> None:
    pytest.importorskip("gguf")
    folder = copy_with(model, tmp_path / "bad", rms_norm_eps="x")
    assert f"{folder}/config.json: " in refused(folder, to=("--gguf", str(tmp_path / "model.gguf")))


# -- --config and --base -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gate.yaml", "eval.yaml", "pipelines/demo.yaml"])
def test_other_yaml_files_are_refused_as_run_config(model: Path, refused: Refused, name: str) -> None:
    error = refused(model, "--config", str(CONFIGS / name))
    assert f"{CONFIGS / name} is not a config of a training run" in error


def test_a_config_that_names_no_model_is_refused_unless_base_does(
    model: Path, tmp_path: Path, refused: Refused
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"policy": {"precision": "float32"}}))
    assert "has no policy.model_name" in refused(model, "--config", str(file))
    file.write_text("policy: 5\n")
    assert "its policy is not a section" in refused(model, "--config", str(file))
    file.write_text("policy: {}\n")
    options = ["--config", str(file), "--base", str(model), "--no-verify"]
    assert main(["convert", str(model), "--to", str(tmp_path / "hf"), *options]) == 0


def test_base_must_be_a_folder_or_a_hub_name(
    model: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "models").mkdir()
    assert "--base: no folder 'models/mistyped'" in refused(model, "--base", "models/mistyped")
    assert "--base: no folder '/no/such/model'" in refused(model, "--base", "/no/such/model")
    assert "--base models is a folder without config.json" in refused(model, "--base", "models")
    assert main(["convert", str(model), "--to", str(tmp_path / "hf"), "--base", "nope/nope", "--no-verify"]) == 0
    assert json.loads((tmp_path / "hf/conversion.json").read_text())["base_model"] == "nope/nope"


# -- damaged files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept_bytes", [100, -200])
def test_a_truncated_shard_is_named_when_it_is_loaded(model: Path, tmp_path: Path, kept_bytes: int) -> None:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    byte_tokenizer().save_pretrained(tmp_path / "sharded")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 1
    shards[1].write_bytes(shards[1].read_bytes()[:kept_bytes])
    with pytest.raises(InputError) as error:
        load_for_sampling(str(tmp_path / "sharded"), device="cpu")
    assert f"{shards[1]} is damaged: " in str(error.value)
    assert "hf_config_overrides" not in str(error.value)


def test_a_truncated_adapter_is_named_when_it_is_loaded(model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")).save_pretrained(
        str(tmp_path / "adapter")
    )
    file = tmp_path / "adapter/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(InputError, match=r"adapter_model\.safetensors is damaged: "):
        load_for_sampling(str(tmp_path / "adapter"), device="cpu")


@pytest.mark.parametrize(
    "weight_map",
    [None, [], {}, {"model.norm.weight": 3}, {"model.norm.weight": "../a"}],
    ids=["none", "list", "empty", "number", "elsewhere"],
)
def test_an_index_that_names_no_files_is_refused(
    model: Path, tmp_path: Path, refused: Refused, weight_map: Any
) -> None:
    shutil.copytree(model, tmp_path / "model")
    index = tmp_path / "model/model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert f"{index}: weight_map is {weight_map!r}; an object" in refused(tmp_path / "model")
    with pytest.raises(InputError, match="an object with the file of every weight is needed"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer_config.json", "[]", "the tokenizer in .* cannot be read: AttributeError: .*; see tokenizer.json"),
        ("tokenizer.json", "{}", "the tokenizer in .* cannot be read: KeyError: 'added_tokens'; see tokenizer.json"),
    ],
)
def test_invalid_tokenizer_file_is_named(model: Path, tmp_path: Path, file: str, content: str, words: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    with pytest.raises(InputError, match=words):
        load_for_sampling(str(tmp_path / "model"), device="cpu")


def test_quantized_weights_without_their_package_are_bad_input(model: Path, tmp_path: Path) -> None:
    copy_with(model, tmp_path / "model", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(InputError, match="model' cannot be loaded here: Loading a GPTQ quantized model requires"):
        load_for_sampling(str(tmp_path / "model"), device="cpu")


def test_unexpected_weights_are_warned_of(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_for_sampling(str(model), device="cpu")
    assert "warning" not in capsys.readouterr().err
    copy_with(model, tmp_path / "model", num_hidden_layers=1)
    load_for_sampling(str(tmp_path / "model"), device="cpu")
    said = capsys.readouterr().err
    assert "holds 9 weights that its config.json does not describe (model.layers.1.input_layernorm.weight, " in said


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    base = AutoModelForCausalLM.from_pretrained(model)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules="all-linear")
    get_peft_model(base, lora).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 4}, "_proj has rank 2, and 4 by its config (r and rank_pattern, or lora_cfg.dim of a run)"),
        ({"rank_pattern": {"up_proj": 8}}, "up_proj has rank 2, and 8 by its config"),
        ({"rank_pattern": [1]}, "the adapter's rank_pattern is [1]; positive numbers by names are needed"),
        ({"alpha_pattern": {"up_proj": "x"}}, "the adapter's alpha_pattern is {'up_proj': 'x'}; positive numbers"),
    ],
)
def test_the_config_of_another_adapter_is_refused(
    adapter: Path, refused: Refused, changes: dict[str, Any], words: str
) -> None:
    """The scale depends on the rank: merging with another one would give a wrong model silently."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert words in refused(adapter, "--merge-lora")
    assert words in refused(adapter)


def test_unfitting_adapter_is_explained(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    right = json.loads(file.read_text())
    file.write_text(json.dumps({**right, "r": 4}))
    with pytest.raises(InputError, match=r"does not fit its base model: .*size mismatch for "):
        load_for_sampling(str(adapter), device="cpu")
    file.write_text(json.dumps(right))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has an adapter_config\.json but no weights"):
        load_for_sampling(str(adapter), device="cpu")


@pytest.mark.parametrize("overrides", [{}, {"trust_remote_code": True}])
def test_code_in_a_model_folder_never_runs(tmp_path: Path, overrides: dict[str, bool]) -> None:
    """Also not where the config of a checkpoint asks for it."""
    folder = tmp_path / "model"
    folder.mkdir()
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": auto_map}))
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    with pytest.raises(InputError):
        read_model_config(str(folder), overrides, "the model")
    with pytest.raises(InputError):
        load_model(str(folder), torch.float32, torch.device("cpu"), overrides)
    with pytest.raises(InputError):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()
