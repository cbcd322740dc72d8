"""A reward model gives a packed row the scores that `transformers` gives each sequence on its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float64 import TOLERANCE
from tiny_models import byte_tokenizer, tiny_model
from tiny_reward_models import PAD, random_pairs, score_tokens, tiny_reward_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from posttrain.models.loading import SettingsError, load_model
from posttrain.models.lora import add_lora
from posttrain.policy.head import UnsupportedModelError
from posttrain.policy.model_support import observe_layers
from posttrain.policy.reward_head import RewardHead, load_reward_model, padding_for_scores, use_padding
from posttrain.types import TokenBatch

PAIRS = random_pairs([5, 9, 1, 7, 4, 6], [7, 3, 12])
CPU = torch.device("cpu")


def sequences(batch: TokenBatch) -> list[Tensor]:
    return [torch.cat([batch.prompts[p], r]) for p, r in zip(batch.prompt_of, batch.responses, strict=True)]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "qwen3", "gemma2", "gemma3"])
def test_packed_scores_are_those_of_transformers(family: str) -> None:
    own = tiny_reward_model(family, attention="eager")
    padded = pad_sequence(sequences(PAIRS), batch_first=True, padding_value=PAD)
    with torch.no_grad():
        expected = own(padded, attention_mask=(padded != PAD).long()).logits[:, 0]
        tokens = score_tokens(tiny_reward_model(family), PAIRS)
    parts = tokens.split(PAIRS.response_lengths)
    assert all(float(part[:-1].abs().sum()) == 0 for part in parts), "a score stands at the last token alone"
    torch.testing.assert_close(torch.stack([part[-1] for part in parts]), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert float(expected.std()) > 0.1, "scores that are all alike show nothing"


def test_a_model_whose_own_score_is_another_is_refused() -> None:
    model = tiny_reward_model()
    observe_layers(model, RewardHead(model))
    model.score.register_forward_hook(lambda _module, _args, out: out * 2)
    with pytest.raises(UnsupportedModelError, match="own score"):
        observe_layers(model, RewardHead(model))
    with pytest.raises(UnsupportedModelError, match="'score'"):
        RewardHead(tiny_model())


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language_model")
    tiny_model(attention="eager").save_pretrained(folder)
    return folder


def load(folder: Path, seed: int | None = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_reward_model(str(folder), dtype, CPU, seed=seed, pad_token_id=PAD)


def test_the_scoring_layer_of_a_language_model_depends_on_the_seed_alone(language_model: Path) -> None:
    first = load(language_model, seed=1)
    torch.manual_seed(99)
    torch.randn(7)
    again, other = load(language_model, seed=1), load(language_model, seed=2)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    body = load_model(str(language_model), torch.float32, CPU)
    for name, parameter in body.model.named_parameters():
        assert torch.equal(parameter, first.model.get_parameter(name)), name


def test_the_scoring_layer_of_a_reward_model_is_kept(tmp_path: Path) -> None:
    saved = tiny_reward_model(attention="eager", seed=3)
    saved.save_pretrained(tmp_path)
    for seed in (None, 0):
        assert torch.equal(load(tmp_path, seed=seed).score.weight, saved.score.weight)


def test_a_language_model_cannot_be_used_as_a_trained_reward_model(language_model: Path) -> None:
    with pytest.raises(SettingsError, match=r"not a reward model.*posttrain rm"):
        load(language_model, seed=None)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    config = tiny_reward_model().config
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"score\.weight.*one label"):
        load(tmp_path)


def test_missing_folder_error_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"policy\.model_name: no folder"):
        load(tmp_path / "nowhere")


def test_with_adapters_the_scoring_layer_is_trained_whole() -> None:
    class Lora:
        match_all_linear, target_modules, exclude_modules = True, (), ()
        dim, alpha, dropout, lora_A_init = 2, 4, 0.0, "xavier"

    adapted = add_lora(tiny_reward_model(), Lora, 0, task_type="SEQ_CLS")
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name}
    assert trained == {"base_model.model.score.modules_to_save.default.weight"}
    torch.testing.assert_close(score_tokens(adapted, PAIRS), score_tokens(tiny_reward_model(), PAIRS))
    score_tokens(adapted, PAIRS).sum().backward()
    gradient = adapted.get_parameter(next(iter(trained))).grad
    assert gradient is not None
    assert float(gradient.abs().max()) > 0


# -- padding -----------------------------------------------------------------------------------------------------------


def test_padding_is_never_a_token_that_an_answer_ends_with() -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    assert padding_for_scores(tokenizer, [end]) == tokenizer.pad_token_id, "a token of its own is kept"
    tokenizer.pad_token = tokenizer.eos_token  # as many tokenizers of chat models have it
    padding = padding_for_scores(tokenizer, [end])
    assert padding == tokenizer.unk_token_id
    use_padding(tokenizer, padding)
    assert tokenizer.pad_token_id == padding
    assert tokenizer.padding_side == "right"
    assert padding_for_scores(tokenizer, range(len(tokenizer))) is None
