"""Checkpoints of several formats become folders that plain transformers loads, with equal logits; bad ones become
nothing."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sharded_checkpoint import RANK, lora_weights
from tiny_models import byte_tokenizer, randomise, tiny_model
from tiny_runs import save_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.apps.export import verification
from posttrain.apps.export.convert import ConversionSettings, convert, plan_shards
from posttrain.checkpointing.integrity import find_damage
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.models.tensor_files import TensorFacts

PROMPT = torch.tensor([[5, 9, 200, 17, 3, 3, 90]])
NO_VERIFY = ConversionSettings(verify=False)


@torch.no_grad()
def logits_of(folder: Path, adapter: Path | None = None) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    logits: Tensor = model.eval()(PROMPT).logits
    return logits


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def sharded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote of a model that training has changed; see sharded_checkpoint.py."""
    folder = tmp_path_factory.mktemp("sharded")
    shutil.copytree(model, folder / "trained")
    weights = load_file(model / "model.safetensors")
    changed = {name: tensor + 0.05 for name, tensor in weights.items()}
    save_file(changed, folder / "trained/model.safetensors", metadata={"format": "pt"})
    script = Path(__file__).with_name("sharded_checkpoint.py")
    subprocess.run([sys.executable, script, folder / "trained", folder], check=True, capture_output=True, timeout=120)
    return folder


def nemo_tree(place: Path, weights: Path, model: Path, *, inner: str = "weights", lora: bool = False) -> Path:
    """step_N of NeMo RL with the given weights."""
    step = place / "step_60"
    shutil.copytree(weights, step / "policy" / inner)
    AutoTokenizer.from_pretrained(model).save_pretrained(step / "policy/tokenizer")
    policy: dict[str, Any] = {"model_name": str(model), "tokenizer": {"name": "${..model_name}"}}
    if lora:
        policy["dtensor_cfg"] = {"lora_cfg": {"enabled": True, "dim": RANK, "alpha": 6}}
    (step / "config.yaml").write_text(
        yaml.safe_dump({"policy": policy, "grpo": {}, "data": {"dataset_name": "DeepScaler"}})
    )
    return step


@pytest.mark.parametrize(
    ("weights", "inner"),
    [("dcp", "weights"), ("safetensors", "weights/model")],
    ids=["torch DCP", "safetensors of each rank"],
)
def test_checkpoint_of_two_ranks_gives_equal_logits(
    model: Path, sharded: Path, tmp_path: Path, weights: str, inner: str
) -> None:
    step = nemo_tree(tmp_path, sharded / weights, model, inner=inner)
    done = convert(str(step / "policy/weights"), tmp_path / "hf", config=step / "config.yaml", say=quiet)
    assert torch.equal(logits_of(tmp_path / "hf"), logits_of(sharded / "trained"))
    assert not torch.allclose(logits_of(tmp_path / "hf"), logits_of(model), atol=0.1), "not those of the base model"
    assert done.verification is not None
    assert done.verification.how == "loaded"
    assert done.verification.max_difference < 1e-3 * done.verification.spread
    assert load_file(tmp_path / "hf/model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    convert(str(tmp_path), tmp_path / "again", say=quiet)  # the run's folder: its newest checkpoint
    assert load_file(tmp_path / "again/model.safetensors").keys() == load_file(tmp_path / "hf/model.safetensors").keys()
    card = (tmp_path / "hf/README.md").read_text()
    assert all(words in card for words in ("DeepScaler", "GRPO", str(model), "60"))


def test_lora_weights_of_two_ranks_are_merged_or_kept(model: Path, sharded: Path, tmp_path: Path) -> None:
    step = nemo_tree(tmp_path, sharded / "lora", model, lora=True)
    convert(str(step), tmp_path / "merged", ConversionSettings(merge_lora=True), say=quiet)
    convert(str(step), tmp_path / "adapter", say=quiet)
    expected = load_file(model / "model.safetensors")
    factors = lora_weights(load_file(sharded / "trained/model.safetensors"))
    for name in list(expected):
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in factors:
            expected[name] += factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"] * (6 / RANK)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits_of(model, tmp_path / "adapter"), logits_of(tmp_path / "merged"), rtol=5e-4, atol=5e-4
    )


def peft_adapter(model: Path, folder: Path, *, scale: float = 1.0) -> Path:
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear"))
    randomise(nn.ParameterList(p for n, p in adapted.named_parameters() if "lora_" in n), seed=5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(scale)
    adapted.save_pretrained(str(folder))
    return folder


def test_an_adapter_is_kept_or_merged(model: Path, tmp_path: Path) -> None:
    adapter = peft_adapter(model, tmp_path / "adapter")
    kept = convert(str(adapter), tmp_path / "kept", say=quiet)
    merged = convert(str(adapter), tmp_path / "merged", ConversionSettings(merge_lora=True), say=quiet)
    assert kept.is_adapter
    assert not merged.is_adapter
    assert torch.equal(logits_of(model, tmp_path / "kept"), logits_of(model, adapter))
    torch.testing.assert_close(logits_of(tmp_path / "merged"), logits_of(model, adapter), rtol=5e-4, atol=5e-4)
    assert merged.verification is not None
    effect = merged.verification.adapter_effect
    assert effect is not None
    assert effect > 100 * merged.verification.max_difference


def test_wrong_merge_scale_is_detected(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = peft_adapter(model, tmp_path / "adapter")
    right = verification.Adapter.delta
    monkeypatch.setattr(verification.Adapter, "delta", lambda self, module: 1.05 * right(self, module))
    with pytest.raises(InputError, match="logits differ from the source's"):
        convert(str(adapter), tmp_path / "merged", ConversionSettings(merge_lora=True), say=quiet)
    assert not (tmp_path / "merged").exists()


def test_rounding_that_loses_the_adapter_is_warned_of(model: Path, tmp_path: Path) -> None:
    adapter = peft_adapter(model, tmp_path / "adapter", scale=1e-5)
    lines: list[str] = []
    settings = ConversionSettings(merge_lora=True, dtype="bfloat16")
    convert(str(adapter), tmp_path / "merged", settings, say=lines.append)
    assert [line for line in lines if "much of the training is lost" in line]


def test_converted_folder_is_complete(model: Path, sharded: Path, tmp_path: Path) -> None:
    step = nemo_tree(tmp_path, sharded / "dcp", model)
    template = "{{ 'mine' }}"
    (step / "policy/tokenizer/chat_template.jinja").write_text(template)
    settings = ConversionSettings(max_shard_bytes=20_000, dtype="bfloat16")
    done = convert(str(tmp_path), tmp_path / "hf", settings, say=quiet)
    assert find_damage(tmp_path / "hf") == []
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == done.num_files > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        held = load_file(tmp_path / "hf" / file)
        assert sum(t.nbytes for t in held.values()) <= 20_000 or len(held) == 1
        assert {t.dtype for t in held.values()} == {torch.bfloat16}
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for f in files for t in load_file(tmp_path / "hf" / f).values()
    )
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.dtype, config.use_cache, config.architectures) == (torch.bfloat16, True, ["LlamaForCausalLM"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template == template
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "mistral", "granite"])
def test_streamed_logits_equal_loaded_logits(family: str, tmp_path: Path) -> None:
    tiny_model(family, vocab_size=260).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    done = convert(str(tmp_path / "model"), tmp_path / "hf", say=quiet)
    assert done.verification is not None
    assert done.verification.max_difference < 1e-4 * done.verification.spread


def test_models_with_one_file_tensor_per_expert_are_converted(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    done = convert(str(tmp_path / "model"), tmp_path / "hf", say=quiet)
    assert done.verification is not None
    assert torch.equal(logits_of(tmp_path / "hf"), logits_of(tmp_path / "model"))


def test_large_model_is_compared_streamed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "available_bytes", lambda: 1000)
    done = convert(str(model), tmp_path / "hf", say=quiet)
    assert done.verification is not None
    assert (done.verification.how, done.verification.max_difference) == ("streamed", 0.0)


def test_shards_are_planned_in_order_and_within_the_limit() -> None:
    plan = {f"w{n}": TensorFacts((size,), torch.float32) for n, size in enumerate([10, 10, 30, 5, 5, 5])}
    shards = plan_shards(plan, 80)
    assert [list(shard) for shard in shards.values()] == [["w0", "w1"], ["w2"], ["w3", "w4", "w5"]]
    assert list(plan_shards(plan, 10**9)) == ["model.safetensors"]


# -- bad input ---------------------------------------------------------------------------------------------------------


def fails(words: str, source: Path, target: Path, settings: ConversionSettings = NO_VERIFY, **arguments: Any) -> None:
    before = sorted(path.name for path in target.parent.iterdir())
    with pytest.raises(InputError, match=words):
        convert(str(source), target, settings, say=quiet, **arguments)
    assert sorted(path.name for path in target.parent.iterdir()) == before, "something half-written was left"


def test_a_missing_shard_is_named(model: Path, sharded: Path, tmp_path: Path) -> None:
    step = nemo_tree(tmp_path / "a", sharded / "dcp", model)
    (step / "policy/weights/__1_0.distcp").unlink()
    fails(r"__1_0\.distcp is missing: it is one of the 2 shards", step, tmp_path / "hf")
    step = nemo_tree(tmp_path / "b", sharded / "safetensors", model, inner="weights/model")
    (step / "policy/weights/model/shard-00002-model-00001-of-00001.safetensors").unlink()
    fails("has shape .* Is it the config of another model, or is a shard missing", step, tmp_path / "hf")
    step = nemo_tree(tmp_path / "c", sharded / "dcp", model)
    (step / "policy/weights/.metadata").unlink()
    fails(r"\.metadata is missing", step, tmp_path / "hf")
    file = nemo_tree(tmp_path / "d", sharded / "dcp", model) / "policy/weights/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])
    fails(r"__0_0\.distcp was cut short", tmp_path / "d/step_60", tmp_path / "hf")


def test_nan_weight_is_named(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    fails(
        r"model\.layers\.1\.mlp\.up_proj\.weight of .*model\.safetensors holds 1 numbers that are not finite, the "
        r"first at "
        r"\[3, 4\]: nan",
        tmp_path / "model",
        tmp_path / "hf",
    )
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e30
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    settings = ConversionSettings(verify=False, dtype="float16")
    fails(r"\[3, 4\] of .* is 1e\+30, too large for torch\.float16", tmp_path / "model", tmp_path / "hf", settings)


def test_a_config_of_another_model_is_refused(model: Path, sharded: Path, tmp_path: Path) -> None:
    wide = save_model(tmp_path / "wide", hidden_size=64)
    deep = save_model(tmp_path / "deep", num_layers=3)
    shallow = save_model(tmp_path / "shallow", num_layers=1)
    step = nemo_tree(tmp_path, sharded / "dcp", model)
    fails(r"has shape \[261, 32\] in .*, but \[261, 64\] by .*wide\. Is it", step, tmp_path / "hf", base=str(wide))
    fails(
        r"no weights for \d+ of the \d+ parameters .* among them model\.layers\.2",
        step,
        tmp_path / "hf",
        base=str(deep),
    )
    fails(r"holds \d+ weights that .*shallow.* does not describe", step, tmp_path / "hf", base=str(shallow))
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({"policy": {"model_name": str(wide)}}))
    fails("hidden_size is 32 by .*, but 64 by .*wide", model, tmp_path / "hf", config=other)
    other.write_text(yaml.safe_dump({"policy": {}}))
    fails(r"other\.yaml has no policy\.model_name", sharded / "dcp", tmp_path / "hf", config=other)
    fails("Give the run's config.yaml with --config", sharded / "dcp", tmp_path / "hf")
    other.write_text("- 1\n")
    fails("expected a map of sections", step, tmp_path / "hf", config=other)


def test_settings_of_generation_are_written_as_they_were(model: Path, tmp_path: Path) -> None:
    """Many models name a temperature without do_sample, which transformers loads and refuses to save."""
    shutil.copytree(model, tmp_path / "model")
    file = tmp_path / "model/generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "eos_token_id": [256, 3]}))
    convert(str(tmp_path / "model"), tmp_path / "hf", NO_VERIFY, say=quiet)
    written = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert (written["temperature"], written["eos_token_id"], "do_sample" in written) == (0.6, [256, 3], False)
    for broken in ("{", "[]"):
        file.write_text(broken)
        fails(r"generation_config\.json cannot be read: .*; fix or remove it", tmp_path / "model", tmp_path / "other")


@pytest.mark.parametrize("broken", ["[]", "{"])
def test_a_tokenizer_that_cannot_be_read_is_named(model: Path, tmp_path: Path, broken: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").write_text(broken)
    fails("the tokenizer '.*model' cannot be read: ", tmp_path / "model", tmp_path / "hf")


def test_existing_target_is_kept_unless_forced(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    convert(str(model), target, NO_VERIFY, say=quiet)  # an empty folder is fine
    first = (target / "model.safetensors").stat().st_ino
    fails("is not empty; name another folder, or replace it with --force", model, target)
    assert (target / "model.safetensors").stat().st_ino == first
    convert(str(model), target, ConversionSettings(verify=False, force=True), say=quiet)
    assert (target / "model.safetensors").stat().st_ino != first
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    fails("is a file", model, target / "config.json")
    precious = tmp_path / "precious"
    (precious / "work").mkdir(parents=True)
    fails("holds something else than a model", model, precious, ConversionSettings(verify=False, force=True))
    assert (precious / "work").is_dir()


def test_link_is_kept_and_its_target_is_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "disk/place").mkdir(parents=True)
    link = tmp_path / "hf"
    link.symlink_to("disk/place")
    convert(str(model), link, NO_VERIFY, say=quiet)
    convert(str(model), link, ConversionSettings(verify=False, force=True), say=quiet)
    assert link.is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["place"]
    assert logits_of(tmp_path / "disk/place").isfinite().all()


def test_target_is_restored_after_a_conversion_killed_while_replacing(model: Path, tmp_path: Path) -> None:
    target, force = tmp_path / "hf", ConversionSettings(verify=False, force=True)
    aside = tmp_path / f".hf.replaced-unfinished-{socket.gethostname()}-999999999"
    shutil.copytree(model, aside)
    with pytest.raises(InputError, match="cannot be read"), durable.new_folder(target, lambda _: None):
        raise InputError("cannot be read")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    shutil.copytree(model, aside)
    convert(str(model), target, force, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_remains_of_a_killed_conversion_are_removed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f".hf.unfinished-{socket.gethostname()}-999999999"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    convert(str(model), tmp_path / "hf", NO_VERIFY, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def growth_of_memory(work: Callable[[], object]) -> int:
    """How much more memory than before the process had at any moment of `work`, in bytes."""

    def status(field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """67 MB of weights in 16 layers; reading, writing and comparing them streamed takes a fraction of that."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=260,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    size = (tmp_path / "model/model.safetensors").stat().st_size
    assert size > 60e6
    monkeypatch.setattr(verification, "available_bytes", lambda: 1000)
    settings = ConversionSettings(max_shard_bytes=8_000_000)
    convert(str(tmp_path / "model"), tmp_path / "first", settings, say=quiet)  # caches of the libraries fill once
    grown = growth_of_memory(lambda: convert(str(tmp_path / "model"), tmp_path / "second", settings, say=quiet))
    assert grown < 0.25 * size
    assert growth_of_memory(lambda: logits_of(tmp_path / "second")) > 0.75 * size, "a whole model would have been seen"


@pytest.mark.parametrize("named", [None, "mit"])
def test_the_card_has_the_licence_of_the_base_model_or_the_given_one(
    named: str | None, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# base\n")
    measured = {"license": named} if named else {}
    convert(str(tmp_path / "base"), tmp_path / "mine", NO_VERIFY, measured=measured, say=quiet)
    _, front, _ = (tmp_path / "mine/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["license"] == (named or "apache-2.0")
