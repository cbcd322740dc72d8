"""What may be named as a model, and what the engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import randomise
from tiny_runs import save_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.checkpointing.integrity import seal
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.errors import InputError
from posttrain.models import accepted_names
from posttrain.models.accepted_names import connect_registry, resolve_model, resolve_registered_model
from posttrain.types import NoiseKey, Sampling, Task


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    randomise(nn.ParameterList(p for n, p in adapted.named_parameters() if "lora_" in n), seed=5)
    adapted.save_pretrained(str(folder))
    return folder


def checkpoint(run: Path, step: int, weights: Path) -> Path:
    """A step of a run with the weights, or adapter, of a folder."""
    folder = run / f"step_{step}"
    for place in ("weights/model", "tokenizer"):
        (folder / "policy" / place).mkdir(parents=True)
    for file in weights.iterdir():
        (folder / "policy/weights/model" / file.name).write_bytes(file.read_bytes())
    (folder / "policy" / "model.json").write_text("{}")
    seal(folder)
    return folder


def test_a_hugging_face_folder(model: Path) -> None:
    found = resolve_model(str(model))
    assert (found.kind, found.model, found.tokenizer, found.adapter) == ("folder", str(model), str(model), None)
    assert found.files == model


def test_an_adapter_names_its_base_model(model: Path, adapter: Path) -> None:
    found = resolve_model(str(adapter))
    assert (found.kind, found.model, found.tokenizer, found.adapter) == ("adapter", str(model), str(model), adapter)
    assert found.files == adapter
    assert resolve_model(str(adapter), base="elsewhere/model").model == "elsewhere/model"


def test_a_hub_name() -> None:
    found = resolve_model("Qwen/Qwen3-0.6B")
    assert (found.kind, found.model, found.tokenizer) == ("hub", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert found.files is None


@pytest.mark.parametrize("inner", ["", "policy", "policy/weights", "policy/weights/model"])
def test_checkpoint_and_its_subfolders_resolve_alike(model: Path, tmp_path: Path, inner: str) -> None:
    folder = checkpoint(tmp_path, 4, model)
    found = resolve_model(folder / inner)
    assert (found.kind, found.step, found.checkpoint, found.run_folder) == ("checkpoint", 4, folder, tmp_path)
    assert found.model == str(folder / "policy/weights/model")
    assert found.tokenizer == str(folder / "policy/tokenizer")


def test_a_lora_checkpoint_is_its_base_with_an_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2, adapter)
    found = resolve_model(folder)
    assert (found.kind, found.model, found.adapter) == ("checkpoint", str(model), folder / "policy/weights/model")


def test_run_resolves_to_its_newest_complete_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 10, 12):
        checkpoint(tmp_path, step, model)
    assert resolve_model(tmp_path).step == 12
    (tmp_path / "step_12/policy/weights/model/config.json").write_text("{}")
    assert resolve_model(tmp_path).step == 10
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_12" in line


def test_a_damaged_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2, model)
    (folder / "policy/weights/model/model.safetensors").unlink()
    with pytest.raises(InputError, match=r"step_2 is damaged: .*model\.safetensors is missing"):
        resolve_model(folder)


def test_weights_in_other_formats_suggest_convert(tmp_path: Path) -> None:
    (tmp_path / "step_3/policy/weights").mkdir(parents=True)
    with pytest.raises(InputError, match="posttrain convert"):
        resolve_model(tmp_path / "step_3")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "is empty"),
        ("http://localhost:8000/v1", "not a model that can be loaded here"),
        ("registry:mine@production", "not a model that can be loaded here"),
        ("/no/such/folder", "no folder"),
        ("a/b/c", "no folder"),
        ("no-such-name", "no folder"),
        (__file__, "is a file"),
        ("/models/sft.nemo", "a .nemo archive, which is not read: convert it"),
        (str(Path(__file__).parent), "without config.json"),
    ],
)
def test_other_names_list_what_is_accepted(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        resolve_model(name)
    assert "accepted: a Hugging Face folder" in str(error.value)


def test_missing_base_model_is_named(adapter: Path, tmp_path: Path) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "/gone/model"}))
    with pytest.raises(InputError, match="'/gone/model' does not exist"):
        resolve_model(tmp_path)


def greedy(folder_or_reference: str, prompt: str, num_tokens: int) -> tuple[int, ...]:
    engine, tokenizer = load_for_sampling(folder_or_reference, device="cpu", max_total_tokens=64)
    task = Task(0, "t", prompt, tuple(tokenizer(prompt).input_ids))
    sampling = Sampling(num_tokens, temperature=0.0, ignore_eos=True)
    return engine.generate([task], 1, sampling, NoiseKey(0, 0))[0][0].token_ids


@torch.no_grad()
def transformers_greedy(model: nn.Module, tokenizer: object, prompt: str, num_tokens: int) -> tuple[int, ...]:
    ids = tokenizer(prompt, return_tensors="pt").input_ids  # type: ignore[operator]
    for _ in range(num_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tuple(ids[0, -num_tokens:].tolist())


def test_the_engine_samples_from_the_model_and_from_its_adapter(model: Path, adapter: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    expected = transformers_greedy(plain, tokenizer, "3 + 4 = ?", 8)
    adapted = PeftModel.from_pretrained(plain, str(adapter)).eval()
    expected_adapted = transformers_greedy(adapted, tokenizer, "3 + 4 = ?", 8)
    assert expected != expected_adapted, "an adapter without effect shows nothing"
    assert greedy(str(model), "3 + 4 = ?", 8) == expected
    assert greedy(str(adapter), "3 + 4 = ?", 8) == expected_adapted


def test_sampling_model_needs_no_gradients_and_has_the_requested_precision(model: Path) -> None:
    engine, _ = load_for_sampling(str(model), device="cpu", precision="bfloat16")
    parameters = list(engine.model.parameters())
    assert not any(p.requires_grad for p in parameters)
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert engine.settings.max_total_tokens == 128  # the maximum of the model


def test_an_adapter_on_the_wrong_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    shallow = save_model(tmp_path / "shallow", num_layers=1)
    with pytest.raises(InputError, match="does not fit its base model"):
        load_for_sampling(resolve_model(str(adapter), base=str(shallow)), device="cpu")
    with pytest.raises(InputError, match="precision 'int8' is not known"):
        load_for_sampling(str(shallow), device="cpu", precision="int8")


def test_registry_names_need_a_connected_registry(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted_names, "_registry_lookup", None)
    with pytest.raises(InputError, match=r"import posttrain\.apps\.ship\.registry"):
        resolve_registered_model("registry:maths@production")
    connect_registry(lambda reference, registry: SimpleNamespace(name="maths", version=3, path=model))
    found = resolve_registered_model("registry:maths@production")
    assert (found.text, found.registered, found.model) == ("registry:maths@3", ("maths", 3), str(model))
