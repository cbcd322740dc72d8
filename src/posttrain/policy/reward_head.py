"""A model that gives an answer one number: the body of a language model and a linear layer on the last token.

`RewardHead` is to a reward model what `OutputHead` is to a language model, `SequenceScores` what `TokenLogprobs` is.
The score is at the position of the answer's last token, and every other token has 0, so that batches, packing, shared
prompts, sharding and "the sum over an answer" work as they do for log-probabilities.

The modules are those of `AutoModelForSequenceClassification` with one label, so what is saved loads there, in peft, in
TRL and in vLLM. Those find the last token as the last one that is not padding; see `padding_for_scores`.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import reason_of
from posttrain.models.attention_interface import ATTENTION
from posttrain.models.loading import (
    SettingsError,
    check_available,
    checked_config,
    explain_missing,
    unsafe_pickle,
)
from posttrain.models.recurrence_interface import route_recurrent_layers
from posttrain.policy.head import Head, UnsupportedModelError, without_adapter_wrapper
from posttrain.policy.packed import PackedRow
from posttrain.policy.parallel.fsdp import local_part

HEAD = "score"  # what `transformers` calls the linear layer


class RewardHead(Head):
    """The decoder body of a reward model, and the way from its hidden states to scores. peft may wrap `model`."""

    is_vocabulary = False

    def __init__(self, model: nn.Module) -> None:
        base = without_adapter_wrapper(model)
        route_recurrent_layers(base)
        self.decoder, self.embedding = base.base_model, base.get_input_embeddings()
        self.module = getattr(base, HEAD, None)
        if self.module is None or not hasattr(self.decoder, "layers"):
            raise UnsupportedModelError(
                f"{type(base).__name__} is not a decoder with a linear layer called {HEAD!r} on it, "
                "which is what a reward model is here"
            )

    def scores(self, hidden: Tensor) -> Tensor:
        """[..., hidden size] -> [...], in fp32 or more: margins are small against the scores."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(dtype), local_part(self.module.weight).to(dtype)).squeeze(-1)

    @torch.no_grad()
    def check_logits(self, hidden: Tensor, expected: Tensor) -> None:
        ours, theirs = self.scores(hidden).flatten(), expected.float().flatten()
        tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
        if float((ours - theirs).abs().max()) > tolerance * max(float(hidden.abs().max()), 1.0):
            raise UnsupportedModelError(
                f"this model's own score of a token is {float(theirs[0]):.4g}, where the last hidden state and its "
                f"linear layer give {float(ours[0]):.4g}: it does something in between that posttrain does not support"
            )


class SequenceScores(nn.Module):
    """The reward model for training: a packed row in, the score of each response at its last token out.

    Call it, and its backward pass, inside `attention_context(row.attention)`.
    """

    reads_own_token = True  # the last token must be an input, not only a prediction target

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = RewardHead(model)

    def forward(self, row: PackedRow, temperature: float = 1.0) -> Tensor:
        """`temperature` has no effect on scores."""
        states = self.head.hidden(row.input_ids, row.position_ids, row.images).index_select(0, row.source[row.last])
        scores = self.head.scores(states)
        own = torch.zeros(len(row.targets), device=scores.device).index_copy(0, row.last, scores)
        return own if row.share is None else row.share.gathered(own)


class TokenValues(SequenceScores):
    """A critic: a packed row in, for each response token a number from the state *before* it out."""

    reads_own_token = False

    def forward(self, row: PackedRow, temperature: float = 1.0) -> Tensor:
        """`temperature` has no effect on values."""
        states = self.head.hidden(row.input_ids, row.position_ids, row.images).index_select(0, row.source)
        values = self.head.scores(states)
        return values if row.share is None else row.share.gathered(values)


def load_reward_model(
    name: str,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    overrides: Mapping[str, object] | None = None,
    *,
    seed: int | None,
    pad_token_id: int | None,
    field: str = "policy.model_name",
    starts_at_zero: bool = False,
) -> PreTrainedModel:
    """A language model with a fresh linear layer, drawn from `seed` or zero; or a reward model, whose layer is kept.

    Without a seed only the latter is accepted.
    """
    check_available(name, field)
    try:
        checked_config(name, field)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=1,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **{**(overrides or {}), "trust_remote_code": False},
        )
    except SettingsError:
        raise
    except pickle.UnpicklingError as error:
        raise SettingsError(f"{field}: {unsafe_pickle(Path(name))}") from error
    except OSError as error:
        raise explain_missing(name, field, error) from error
    except (TypeError, ValueError, SafetensorError) as error:
        raise SettingsError(f"{field}: {name!r} cannot be loaded as a reward model: {reason_of(error)}") from error
    missing = set(report["missing_keys"])
    wrong = [str(key) for key in report["mismatched_keys"]]
    fresh = f"{HEAD}.weight" in missing
    if fresh and seed is None:
        raise SettingsError(
            f"{field}: {name!r} is not a reward model: it has no {HEAD}.weight. Train one with `posttrain rm` and give "
            "its checkpoint (the folder policy/weights/model in it)"
        )
    if lacking := sorted([*(missing - {f"{HEAD}.weight"}), *wrong]):
        raise SettingsError(
            f"{field}: {name!r} has no fitting weights for {len(lacking)} parameters ({', '.join(lacking[:3])}). A "
            "reward model has one label; a classifier of several cannot be used as one"
        )
    if fresh:
        weight, spread = getattr(model, HEAD).weight, float(getattr(model.config, "initializer_range", 0.02))
        # The same numbers on every rank and device, whatever ran before.
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed or 0))
        with torch.no_grad():
            weight.copy_(noise * (0.0 if starts_at_zero else spread))
    model.config.architectures = [type(model).__name__]  # as it is saved: a checkpoint is compared with it
    model.config.get_text_config().pad_token_id = pad_token_id
    model.config.use_cache = False
    return model.to(device)


def padding_for_scores(tokenizer: PreTrainedTokenizerBase, answer_ends: Collection[int]) -> int | None:
    """A token to pad with that no answer ends with; None if there is none: then others can score one at a time.

    `transformers` scores the last token that is not padding. Where the end of a turn is used as padding too, that is
    the token before it, which is not the one that was trained.
    """
    extra = [tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens]
    usual = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    for token in [*usual, *extra]:
        if isinstance(token, int) and token not in answer_ends:
            return token
    return None


def use_padding(tokenizer: PreTrainedTokenizerBase, pad_token_id: int | None) -> None:
    """Give the tokenizer, which is saved beside the model, the model's padding; it pads on the right, as TRL does."""
    if pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_token_id)
    tokenizer.padding_side = "right"
