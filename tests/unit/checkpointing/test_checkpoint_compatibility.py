"""A checkpoint of another model is refused with what differs; one of the same model is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import Gemma3Config, GPT2Config, LlamaConfig

from posttrain.checkpointing import CheckpointError, check_same_model, describe_model

LORA = {"enabled": True, "dim": 8, "alpha": 32, "target_modules": ["q_proj", "v_proj"], "dropout": 0.0}
VOCABULARY = {"<pad>": 0, "a": 1, "b": 2}


def llama(**changes: object) -> dict[str, object]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 4}
    return LlamaConfig(**{**sizes, **changes}).to_dict()


def stored(description: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(description))


def accepts(saved: dict[str, object], now: dict[str, object]) -> bool:
    """Whether a run with the model `now` may load a checkpoint of the model `saved`."""
    try:
        check_same_model(saved, now)
    except CheckpointError:
        return False
    return True


def test_a_description_survives_json_and_fits_itself() -> None:
    for config in (llama(), GPT2Config().to_dict(), Gemma3Config().to_dict()):
        for lora in (None, LORA):
            description = describe_model(config, lora, VOCABULARY)
            assert stored(description) == description
            assert accepts(stored(description), description)


def test_dtype_cache_and_lora_order_do_not_make_another_model() -> None:
    saved = describe_model(llama(use_cache=True, dtype="float32", architectures=["LlamaForCausalLM"]), LORA, VOCABULARY)
    now = {**llama(use_cache=False, dtype="bfloat16"), "_name_or_path": "elsewhere", "transformers_version": "9"}
    other_order = {**LORA, "target_modules": ["v_proj", "q_proj"], "dropout": 0.1, "exclude_modules": []}
    assert accepts(stored(saved), describe_model(now, other_order, VOCABULARY))


def test_lora_that_is_not_enabled_is_full_tuning() -> None:
    full = describe_model(llama(), None)
    assert accepts(full, describe_model(llama(), {**LORA, "enabled": False}))
    assert not accepts(full, describe_model(llama(), LORA))


def test_peft_and_nemo_rl_names_of_lora_settings_are_equivalent() -> None:
    peft = {"r": 8, "lora_alpha": 32, "target_modules": {"v_proj", "q_proj"}, "use_dora": False}
    assert accepts(describe_model(llama(), LORA), describe_model(llama(), peft))
    assert not accepts(describe_model(llama(), LORA), describe_model(llama(), {**peft, "r": 4}))


@pytest.mark.parametrize(
    ("config", "lora", "vocabulary", "lines"),
    [
        (llama(hidden_size=128, num_hidden_layers=3), LORA, VOCABULARY,
            ["sizes.hidden_size: saved 64 != this run's 128", "sizes.num_hidden_layers: saved 2 != this run's 3"]),
        (llama(vocab_size=101), LORA, VOCABULARY, ["sizes.vocab_size: saved 100 != this run's 101"]),
        (GPT2Config().to_dict(), LORA, VOCABULARY, ['architecture.model_type: saved "llama" != this run\'s "gpt2"']),
        (llama(), {**LORA, "dim": 16}, VOCABULARY, ["lora.rank: saved 8 != this run's 16"]),
        (llama(), {**LORA, "target_modules": ["q_proj"]}, VOCABULARY,
            ['lora.target_modules: saved ["q_proj", "v_proj"] != this run\'s ["q_proj"]']),
        (llama(), {**LORA, "target_modules": None}, VOCABULARY,
            ['lora.target_modules: saved ["q_proj", "v_proj"] != this run\'s none']),
        (llama(), None, VOCABULARY, ["lora: saved {", "!= this run's none"]),
        (llama(), LORA, {**VOCABULARY, "c": 3}, ["vocabulary_sha256: saved"]),
        (llama(), LORA, {"<pad>": 0, "b": 1, "a": 2}, ["vocabulary_sha256: saved"]),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_every_difference(
    config: dict[str, object], lora: dict[str, object] | None, vocabulary: dict[str, int], lines: list[str]
) -> None:
    saved = stored(describe_model(llama(), LORA, VOCABULARY))
    with pytest.raises(CheckpointError) as caught:
        check_same_model(saved, describe_model(config, lora, vocabulary))
    for line in lines:
        assert line in str(caught.value)


def test_adapters_are_refused_by_a_run_that_tunes_everything_and_the_other_way_round() -> None:
    full, adapters = describe_model(llama(), None), describe_model(llama(), LORA)
    with pytest.raises(CheckpointError, match=r"lora: saved none != this run's \{"):
        check_same_model(full, adapters)
    with pytest.raises(CheckpointError, match="this run's none"):
        check_same_model(adapters, full)


def test_sizes_of_a_decoder_inside_a_larger_model_count() -> None:
    wide = Gemma3Config(text_config={"hidden_size": 512}).to_dict()
    narrow = Gemma3Config(text_config={"hidden_size": 256}).to_dict()
    with pytest.raises(CheckpointError, match=r"sizes\.hidden_size: saved 512 != this run's 256"):
        check_same_model(describe_model(wide, None), describe_model(narrow, None))


@pytest.mark.parametrize(
    "content", [[], {}, {"architecture": {"$ref": 1}}, {"architecture": {"model_type": "llama"}, "sizes": 5}]
)
def test_a_file_that_describes_no_model_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model.json of the checkpoint does not describe a model"):
        check_same_model(content, describe_model(llama(), None))
