"""The proof of a family at load: what passes, what is refused and with which words, and what it leaves as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from every_family import rank_of, save_tiny
from generated_pages import FAMILIES as PUBLISHED
from tiny_models import FAMILIES, byte_tokenizer, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from posttrain.engines.choose_engine import load_for_sampling
from posttrain.engines.native import proof
from posttrain.engines.native.proof import prove
from posttrain.errors import InputError
from posttrain.models.attention_interface import ATTENTION
from posttrain.models.loading import TESTED_FAMILIES, SettingsError, check_model_exists
from posttrain.policy.head import UnsupportedModelError
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.reward_head import SequenceScores

Change = Callable[[nn.Module, Tensor], Tensor]


def change_layer(model: PreTrainedModel, number: int, change: Change) -> None:
    model.get_decoder().layers[number].register_forward_hook(lambda layer, _args, states: change(layer, states))


def by_place_in_row(_layer: nn.Module, states: Tensor) -> Tensor:
    """The place in the row is the position only where a sequence is alone in it."""
    return states + torch.arange(states.shape[1])[:, None].sin().to(states.dtype) * states.roll(1, dims=2)


def random_in_training(layer: nn.Module, states: Tensor) -> Tensor:
    return states + 0.05 * torch.randn_like(states) if layer.training else states


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_whose_passes_agree_are_proved(family: str, dtype: torch.dtype) -> None:
    prove(TokenLogprobs(tiny_model(family, dtype=dtype)), byte_tokenizer(), in_training_too=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_layer_that_disagrees_is_named(dtype: torch.dtype) -> None:
    model = tiny_model("gemma3", dtype=dtype)  # three layers
    change_layer(model, 1, by_place_in_row)
    with pytest.raises(
        UnsupportedModelError, match=r"gemma3_text: it did not pass .* packed .* by up to .*layer 1 \(Gemma3Dec"
    ):
        prove(TokenLogprobs(model), byte_tokenizer(), in_training_too=False)


def test_what_is_random_in_training_is_found() -> None:
    model = tiny_model()
    change_layer(model, 0, random_in_training)
    prove(TokenLogprobs(model), byte_tokenizer(), in_training_too=False)
    with pytest.raises(UnsupportedModelError, match="in training mode, with dropout that cannot be turned off"):
        prove(TokenLogprobs(model), byte_tokenizer(), in_training_too=True)


def test_nan_is_no_agreement() -> None:
    model = tiny_model()
    change_layer(model, 1, lambda layer, states: states * float("nan"))
    with pytest.raises((UnsupportedModelError, FloatingPointError)):
        prove(TokenLogprobs(model), byte_tokenizer(), in_training_too=False)


def test_reward_models_are_proved_by_their_states() -> None:
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=ATTENTION).eval()
    prove(SequenceScores(model), byte_tokenizer(), in_training_too=True)
    model.base_model.layers[1].register_forward_hook(lambda layer, _args, states: by_place_in_row(layer, states))
    with pytest.raises(UnsupportedModelError, match=r"has other states than alone.*layer 1"):
        prove(SequenceScores(model), byte_tokenizer(), in_training_too=True)


def test_the_proof_leaves_modes_attention_and_random_numbers() -> None:
    model = tiny_model().train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    prove(TokenLogprobs(model), byte_tokenizer(), in_training_too=True)
    assert torch.equal(torch.rand(1), expected)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == ATTENTION


def test_tested_families_are_those_of_the_tests() -> None:
    """Every tiny model of the tests, and every row of docs/models.md, has a `model_type` that is not proved."""
    named = {tiny_model(family).config.model_type for family in FAMILIES} | {each.model_type for each in PUBLISHED}
    named |= {tiny_model(family).config.get_text_config().model_type for family in FAMILIES}
    assert named == TESTED_FAMILIES


def test_model_proof_forces_and_skips_it(tmp_path: Path) -> None:
    folder = save_tiny("diffllama", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"diffllama.*decoded token by token.*layer 0 \(DiffLlamaDecoder"):
        rank_of(folder)
    with pytest.raises(UnsupportedModelError, match="diffllama"):
        load_for_sampling(str(folder), device="cpu")
    rank_of(folder, "policy.model_proof=never")


def test_always_proves_a_tested_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("posttrain.engines.native.proof.prove", lambda *_args, **_options: asked.append(1))
    folder = save_tiny("llama", tmp_path)
    rank_of(folder)
    assert not asked
    rank_of(folder, "policy.model_proof=always")
    assert asked


def test_kernels_of_a_tested_family_are_proved_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two chunks of tokens; a disagreement is a warning, a refusal if the proof was asked for."""
    monkeypatch.setattr(proof, "_runs_kernels", lambda model: True)
    lengths: list[tuple[int, ...]] = []
    right = proof._Proof.alone

    def noted(own: proof._Proof) -> proof.TracedPass:
        lengths.append(own.lengths)
        return right(own)

    monkeypatch.setattr(proof._Proof, "alone", noted)
    config = tiny_model("qwen3.5").config
    config.max_position_embeddings = 512
    torch.manual_seed(0)
    type(tiny_model("qwen3.5"))(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    rank_of(tmp_path)
    assert lengths == [(140, 5, 9)]
    monkeypatch.setattr(proof, "_LOGPROB_TOLERANCE", {torch.float32: -1.0})
    with pytest.warns(UserWarning, match=r"qwen3_5_text: it did not pass.*model_proof: always"):
        rank_of(tmp_path)
    rank_of(tmp_path, "policy.model_proof=never")
    assert len(lengths) == 2
    with pytest.raises(UnsupportedModelError, match="did not pass"):
        rank_of(tmp_path, "policy.model_proof=always")


def test_a_sequence_alone_is_computed_without_kernels() -> None:
    class Replaced:
        def __init__(self, module: nn.Module) -> None:
            self.own_forward, self.calls = module.forward, 0

        def __call__(self, *args: object, **options: object) -> object:
            self.calls += 1
            return self.own_forward(*args, **options)

    model = tiny_model()
    layer = model.get_decoder().layers[0]
    layer.forward = replaced = Replaced(layer)  # type: ignore[assignment]
    own = proof._Proof(TokenLogprobs(model), model, model.config, byte_tokenizer())
    own.packed("packed")
    assert replaced.calls == 1
    own.alone()
    assert replaced.calls == 1
    assert layer.forward is replaced


def test_decoder_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("bart", tmp_path)
    with pytest.raises(SettingsError, match="bart, an encoder and a decoder"):
        check_model_exists(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": False}))
    with pytest.raises(UnsupportedModelError, match=r"bart: .*what comes before the layers"):
        rank_of(folder)


def test_noise_of_the_config_is_off_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("opt", tmp_path)
    layer = rank_of(folder).trainer.model.get_decoder().layers[0]  # type: ignore[operator, union-attr, index]
    said = capsys.readouterr().err
    assert said.count("trained without the noise of the model's config: dropout 0.1") == 1
    assert "policy.hf_config_overrides.dropout=0.1 turns it on" in said
    assert layer.dropout == 0.0
    asked = rank_of(folder, "policy.hf_config_overrides={dropout: 0.2}")
    assert asked.trainer.model.get_decoder().layers[0].dropout == 0.2  # type: ignore[operator, union-attr, index]
    assert "noise" not in capsys.readouterr().err


def test_dropout_of_attention_is_said_not_to_be_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("gpt2", tmp_path)
    model = rank_of(folder).trainer.model
    assert "attn_pdrop 0.1" in capsys.readouterr().err
    assert all(module.p == 0.0 for module in model.modules() if isinstance(module, nn.Dropout))
    assert model.config.attn_pdrop == 0.1, "the checkpoint keeps the config of the model"  # type: ignore[union-attr]
    with pytest.raises(InputError, match="drops nothing"):
        rank_of(folder, "policy.hf_config_overrides={attn_pdrop: 0.2}")
