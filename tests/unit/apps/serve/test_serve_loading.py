"""Names on the command line: what is loaded, the arguments of vLLM, and rollbacks in the registry."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer
from tiny_server import options_for, save_adapter, save_model
from tiny_vision import image_ref, save_vision_model
from transformers import AutoTokenizer

import posttrain.apps.ship.registry
from posttrain.apps.serve import loading
from posttrain.apps.serve.adapters import AdapterSwitch
from posttrain.apps.serve.options import EngineOptions
from posttrain.apps.serve.sessions import name_of
from posttrain.apps.serve.vllm_backend import vllm_arguments
from posttrain.cli.main import build_parser
from posttrain.cli.serve_command import options_of
from posttrain.engines.native import NativeEngine
from posttrain.errors import InputError
from posttrain.models.accepted_names import ModelReferenceError, resolve_model, resolve_registered_model
from posttrain.models.loading import load_model
from posttrain.models.vision import tower_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "mine")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("lora") / "polite", model, seed=1)


def ignore(line: str) -> None:
    pass


def test_default_served_names(model: Path, tmp_path: Path) -> None:
    assert name_of(resolve_registered_model(str(model))) == "mine"
    assert name_of(resolve_model("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    weights = tmp_path / "grpo" / "step_60" / "policy" / "weights"
    weights.mkdir(parents=True)
    save_model(weights / "model")
    assert name_of(resolve_registered_model(str(tmp_path / "grpo" / "step_60"))) == "grpo-step_60"


def test_registry_names_are_looked_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def resolve(text: str, *, registry: str | None) -> Any:
        asked.append((text, registry))
        return SimpleNamespace(name="maths", version=3, path=model)

    monkeypatch.setattr(posttrain.apps.ship.registry, "resolve_version", resolve)
    found = resolve_registered_model("registry:maths@production", registry="there")
    assert asked == [("registry:maths@production", "there")]
    assert (found.text, found.registered, name_of(found)) == ("registry:maths@3", ("maths", 3), "maths")


@dataclass
class FakeRegistry:
    stage: str
    calls: list[dict[str, Any]]

    def get(self, name: str, number: int) -> Any:
        return SimpleNamespace(stage=self.stage)

    def rollback(self, name: str, **given: Any) -> None:
        self.calls.append({"name": name, **given})


@pytest.mark.parametrize("stage", ["canary", "production"])
def test_rollback_is_written_to_the_registry_if_still_canary(
    model: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, printed = FakeRegistry(stage, []), []
    monkeypatch.setattr(posttrain.apps.ship.registry, "Registry", lambda where: registry)
    loading._on_rollback(replace(resolve_model(model), registered=("maths", 3)), None, printed.append)(
        "too many errors"
    )
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon and "write" in thread.name:
            thread.join(10)
    assert printed[0] == "canary rolled back: too many errors"
    assert [call["stage"] for call in registry.calls] == (["canary"] if stage == "canary" else [])
    assert all("too many errors" in call["why"] for call in registry.calls)


@pytest.fixture
def registered_adapter(model: Path, tmp_path: Path) -> tuple[str, str]:
    """Where the registry is, and the name of an adapter in it whose base model is no longer where it was."""
    store = posttrain.apps.ship.registry.Registry(tmp_path / "registry")
    store.add(
        "polite-lora",
        save_adapter(tmp_path / "polite", tmp_path / "gone", seed=1),
        posttrain.apps.ship.registry.Lineage(),
    )
    return str(tmp_path / "registry"), "registry:polite-lora@1"


def test_adapter_from_the_registry(model: Path, registered_adapter: tuple[str, str]) -> None:
    registry, name = registered_adapter
    options = options_for(model, adapters={"polite": name}, registry=registry, canary="polite")
    assert loading.build_service(options).models["polite"].source == name

    arguments, _ = vllm_arguments(replace(options, canary=None, engine=EngineOptions()), "h", 1, ignore)
    (given,) = [argument for argument in arguments if argument.startswith("polite=")]
    assert (Path(given.removeprefix("polite=")) / "adapter_config.json").is_file()
    assert registry in given


def test_registry_adapter_as_canary_is_removed_from_its_stage(
    model: Path, registered_adapter: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(loading, "_on_rollback", lambda canary, registry, say: told.append((canary, registry)))
    registry, name = registered_adapter
    loading.build_service(options_for(model, adapters={"polite": name}, registry=registry, canary="polite"))
    assert [(canary.registered, where) for canary, where in told] == [(("polite-lora", 1), registry)]


def test_vllm_gets_equivalent_arguments(model: Path, adapter: Path) -> None:
    engine = replace(options_for(model).engine, device="auto", kv_cache_gib=None, precision="bfloat16")
    options = options_for(model, engine=engine, api_keys=("sk-1",), adapters={"polite": str(adapter)})
    arguments, environment = vllm_arguments(options, "0.0.0.0", 9, ignore)
    pairs = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    assert arguments[0] == str(model)
    assert pairs["--served-model-name"] == "tiny"
    assert (pairs["--host"], pairs["--port"], pairs["--dtype"]) == ("0.0.0.0", "9", "bfloat16")
    assert f"polite={adapter}" in arguments
    for option, value in (("--max-model-len", "256"), ("--max-num-seqs", "8"), ("--max-lora-rank", "8")):
        assert arguments[arguments.index(option) + 1] == value
    assert arguments[-2:] == ["--logprobs-mode", "processed_logprobs"]
    assert "--tool-call-parser" not in arguments, "vLLM describes no tools to a template that does not write them"
    assert environment == {"VLLM_API_KEY": "sk-1"}
    assert "sk-1" not in arguments


def test_vllm_gets_the_parsers_of_the_chat_template(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in "
        "m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "copy")
    arguments, _ = vllm_arguments(options_for(tmp_path / "copy", engine=EngineOptions()), "h", 1, ignore)
    parsers = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    assert arguments[-5:] == ["--enable-auto-tool-choice", *parsers]


def test_vllm_serves_an_adapter_by_its_name(model: Path, adapter: Path) -> None:
    engine = replace(options_for(model).engine, device="auto", kv_cache_gib=None)
    arguments, _ = vllm_arguments(options_for(adapter, engine=engine), "h", 1, ignore)
    assert arguments[0] == str(model)
    assert f"tiny={adapter}" in arguments
    assert "--served-model-name" not in arguments


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}>"])
def test_vllm_warns_of_an_unused_chat_template(model: Path, tmp_path: Path, template: str | None) -> None:
    adapter = save_adapter(tmp_path / "polite", model, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(adapter)
    printed: list[str] = []
    options = options_for(model, adapters={"polite": str(adapter)}, engine=EngineOptions())
    vllm_arguments(options, "h", 1, printed.append)
    assert [("polite" in line and "chat template" in line) for line in printed] == ([True] if template else [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": EngineOptions(device="cpu")}, "--device cpu"),
        ({"api_keys": ("a", "b")}, "more than one API key"),
    ],
)
def test_options_without_vllm_counterpart_are_refused(model: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        vllm_arguments(options_for(model, **{"engine": EngineOptions(), **changes}), "h", 1, ignore)


def test_adapters_that_do_not_fit_are_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from posttrain.engines.choose_engine import load_for_sampling

    biased, alien = (tmp_path / name for name in ("biased", "alien"))
    for folder in (biased, alien):
        save_adapter(folder, model, seed=2)
    config = biased / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias": "none"', '"bias": "all"'))
    weights = load_file(alien / "adapter_model.safetensors")
    first = sorted(weights)[0]
    save_file({**{k: v for k, v in weights.items() if k != first}, "no.such.lora_A.weight": weights[first]},
              alien / "adapter_model.safetensors")  # fmt: skip
    bare = load_for_sampling(str(model), device="cpu")[0].model
    with pytest.raises(ModelReferenceError, match="cannot be switched off exactly"):
        AdapterSwitch({"b": biased}).add_to(bare)
    with pytest.raises(ModelReferenceError, match="no counterpart"):
        AdapterSwitch({"fine": adapter, "alien": alien}).add_to(bare)


def test_what_is_kept_of_an_image_belongs_to_the_adapter_of_its_tower(tmp_path: Path) -> None:
    import peft

    folder, cpu = str(save_vision_model(tmp_path / "model")), torch.device("cpu")
    config = peft.LoraConfig(r=2, target_modules=r".*visual.*\.qkv", init_lora_weights=False)
    peft.get_peft_model(load_model(folder, torch.float32, cpu), config).save_pretrained(tmp_path / "adapter")
    model = load_model(folder, torch.float32, cpu)
    tower, image = tower_of(model), image_ref(8, 8, 1)
    assert tower is not None
    expected = tower._compute(image, cpu).values
    switch = AdapterSwitch({"own": tmp_path / "adapter"})
    switch.add_to(model)
    seen = []
    for name in ("own", "", "own"):
        switch.activate(name)
        seen.append(tower._embed(image, cpu).values)
    assert torch.equal(seen[1], expected)
    assert not torch.allclose(seen[0], expected)
    assert torch.equal(seen[2], seen[0])


def test_adapters_are_added_before_the_engine_is_built(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the engine joins the weights of projections: adapters that came later would be passed over silently."""
    seen: list[bool] = []
    make = NativeEngine.__init__

    def watched(self: NativeEngine, given: Any, *rest: Any) -> None:
        seen.append(any("lora_A" in name for name, _ in given.named_modules()))
        make(self, given, *rest)

    monkeypatch.setattr(NativeEngine, "__init__", watched)
    loading.build_service(options_for(model, adapters={"polite": str(adapter), "again": str(adapter)}))
    assert seen == [True]


def test_adapter_uses_its_own_chat_template(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "polite", model, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]"
    tokenizer.save_pretrained(adapter)
    service = loading.build_service(options_for(model, adapters={"polite": str(adapter)}, canary="polite"))
    messages = [{"role": "user", "content": "hi"}]
    polite, canary = service.models["polite"], service.canary_version
    assert canary is not None
    assert polite.chat.render(messages) == canary.chat.render(messages) == "[user] hi[answer]"
    assert service.models["tiny"].chat.render(messages) != polite.chat.render(messages)


def test_adapter_trained_on_another_base_gives_a_warning(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Also where its own base is no more: the main model takes its place."""
    gone = save_adapter(tmp_path / "gone", tmp_path / "no longer here", seed=1)
    for folder, trained_on in ((adapter, None), (gone, "no longer here")):
        printed: list[str] = []
        service = loading.build_service(options_for(model, adapters={"polite": str(folder)}), printed.append)
        assert "polite" in service.models
        warnings = [line for line in printed if "warning" in line]
        assert len(warnings) == (trained_on is not None)
        assert all(f"was trained on {tmp_path / str(trained_on)}" in line for line in warnings)


def test_production_and_canary_take_the_same_length(model: Path, tmp_path: Path) -> None:
    shorter = save_model(tmp_path / "shorter", seed=3)
    config = shorter / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 128'))
    engine = replace(options_for(model).engine, max_model_len=None, kv_cache_gib=0.05)
    printed: list[str] = []
    service = loading.build_service(options_for(model, engine=engine, canary=str(shorter)), printed.append)
    assert [session.limits.max_total_tokens for session in service.engine.sessions] == [128, 128]
    assert any("production takes 1024 tokens and the canary 128: both get 128" in line for line in printed)


@pytest.mark.parametrize(
    ("has_gpu", "options", "expected"),
    [
        (False, {}, "EngineThread"),
        (False, {"processes": 2}, "EngineProcess"),
        (True, {}, "EngineProcess"),
        (True, {"processes": 1}, "EngineThread"),
    ],
)
def test_engine_has_a_process_of_its_own_on_a_gpu_or_on_request(
    model: Path, has_gpu: bool, options: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise LookupError(name)

    for name in ("EngineProcess", "EngineThread"):
        monkeypatch.setattr(loading, name, partial(refuse, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    engine = replace(options_for(model).engine, device="auto")
    with pytest.raises(LookupError, match=expected):
        loading.build_service(options_for(model, engine=engine, **options))


def test_command_line_leaves_the_number_of_processes_open() -> None:
    def processes(*words: str) -> int | None:
        return options_of(build_parser().parse_args(["serve", "model", *words])).processes

    assert (processes(), processes("--processes", "2")) == (None, 2)


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "", "日本語", "\ud800", "a" * 201])
def test_adapter_names_that_no_header_can_hold_are_refused(model: Path, adapter: Path, name: str) -> None:
    with pytest.raises(InputError, match="a name has 1 to 200 printable ASCII characters"):
        loading.build_service(options_for(model, adapters={name: str(adapter)}))
