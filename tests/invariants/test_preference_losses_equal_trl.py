"""Every preference loss that TRL has too: loss and gradients are TRL's, computed by its own trainers on the same
weights.

The trainers' own `compute_loss` is called; nothing of their formulas is repeated here. What TRL calls by another name,
or defines with another average, is configured here as docs/dpo.md says.

Two kinds of model. A table of bigrams gives both sides the same log-probability of each token, which isolates the loss.
A small Llama runs padded there and packed here. Both are compared in float64.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from float64 import approx, assert_same_gradients
from tiny_models import byte_tokenizer, gradients, packed_logprobs, tiny_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from trl_options import TRL_OPTIONS

from posttrain.algorithms.batches import judged_batch, pair_batch
from posttrain.algorithms.kto import Kto
from posttrain.algorithms.step_reports import StageClock
from posttrain.config import DpoConfig
from posttrain.policy.objectives import KtoLoss, PreferenceLoss
from posttrain.roles import Objective
from posttrain.types import Judged, Pair, TokenBatch

pytest.importorskip("trl", reason="the bench extra is not installed")
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

pytestmark = pytest.mark.usefixtures("in_float64")

TOKENIZER = byte_tokenizer()
ROWS = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])


class Bigrams(nn.Module):
    """A language model that looks one token back: answers like the models that TRL's trainers call."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.raw = nn.Parameter(torch.randn(len(TOKENIZER), len(TOKENIZER), generator=generator))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        logits = self.raw[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        chosen = self.raw.log_softmax(-1)[input_ids[:, :-1], input_ids[:, 1:]]
        counted = chosen * (labels[:, 1:] != -100)
        nothing = torch.zeros_like(chosen)  # for metrics that are not compared
        return SimpleNamespace(log_probs=counted, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    def logprobs(self, batch: TokenBatch) -> Tensor:
        table = self.raw.log_softmax(-1)
        pieces = []
        for prompt, response in zip(batch.prompt_of, batch.responses, strict=True):
            before = torch.cat([batch.prompts[prompt][-1:], response[:-1]])
            pieces.append(table[before, response])
        return torch.cat(pieces)


@dataclass(frozen=True)
class Kind:
    """A kind of model, on both sides."""

    name: str

    def theirs(self, prepared: Any, seed: int = 0) -> Any:
        """The model that TRL calls. Its trainers are built around a Llama, which they prepare for their own use."""
        return Bigrams(seed) if self.name == "bigrams" else prepared

    def ours(self, seed: int = 0) -> Any:
        return Bigrams(seed) if self.name == "bigrams" else llama(seed)

    def logprobs(self, model: Any, batch: TokenBatch) -> Tensor:
        return model.logprobs(batch) if self.name == "bigrams" else packed_logprobs(model, batch)


@pytest.fixture(params=[Kind("bigrams"), Kind("llama")], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def llama(seed: int = 0, **options: Any) -> Any:
    return tiny_model(
        vocab_size=len(TOKENIZER), pad_token_id=TOKENIZER.pad_token_id, seed=seed, dtype=torch.float64, **options
    )


def random_ids(count: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (count,), generator=generator).tolist())


def random_pairs(prompt_lengths: list[int], lengths: list[tuple[int, int]], seed: int = 0) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Pair(i, str(i), random_ids(p, generator), random_ids(c, generator), random_ids(r, generator))
        for i, (p, (c, r)) in enumerate(zip(prompt_lengths, lengths, strict=True))
    ]


PAIRS = random_pairs([7, 3, 12, 1], [(5, 9), (1, 7), (6, 6), (3, 8)])


Outcome = tuple[float, dict[str, Tensor], dict[str, float]]  # loss, gradients, metrics


def ours(kind: Kind, objective: Objective, batch: TokenBatch) -> Outcome:
    model = kind.ours()
    loss, metrics = objective(kind.logprobs(model, batch), batch)
    loss.backward()
    return float(loss.detach()), gradients(model), {name: float(value) for name, value in metrics.items()}


def with_reference(kind: Kind, batch: TokenBatch) -> TokenBatch:
    with torch.no_grad():
        return batch.with_columns(reference_logprobs=kind.logprobs(kind.ours(seed=1), batch))


def assert_same(actual: Outcome, expected: Outcome) -> None:
    assert actual[0] == approx(expected[0])
    assert_same_gradients(actual[1], expected[1])


def finished(trainer: Any, inputs: dict[str, Any], kind: Kind) -> Outcome:
    model = kind.theirs(trainer.model)
    trainer.model.train()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    stored = getattr(trainer, "_stored_metrics", None) or trainer._metrics
    return float(loss.detach()), gradients(model), {k: v[-1] for k, v in stored["train"].items()}


# -- losses with a reference -------------------------------------------------------------------------------------------


def trl_dpo(kind: Kind, folder: Path, pairs: list[Pair], **options: Any) -> Outcome:
    trainer = DPOTrainer(
        model=llama(attention="eager"),
        ref_model=llama(seed=1, attention="eager"),
        args=DPOConfig(output_dir=str(folder), max_length=None, **TRL_OPTIONS, **options),
        train_dataset=ROWS,
        processing_class=byte_tokenizer(),
    )
    rows = [
        {"prompt_ids": list(p.prompt_ids), "chosen_ids": list(p.chosen_ids), "rejected_ids": list(p.rejected_ids)}
        for p in pairs
    ]
    trainer.ref_model = kind.theirs(trainer.ref_model, seed=1)
    return finished(trainer, trainer.data_collator(rows), kind)


# name -> (TRL's options, ours)
WITH_REFERENCE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({"loss_type": "sigmoid"}, {"preference_loss": "dpo"}),
    "sigmoid_norm": (
        {"loss_type": "sigmoid_norm"},
        {"preference_loss": "dpo", "preference_average_log_probs": True},
    ),
    "hinge": ({"loss_type": "hinge"}, {"preference_loss": "hinge"}),
    "ipo, which TRL averages over tokens": (
        {"loss_type": "ipo"},
        {"preference_loss": "ipo", "preference_average_log_probs": True},
    ),
    "robust": (
        {"loss_type": "robust", "label_smoothing": 0.2},
        {"preference_loss": "robust", "label_smoothing": 0.2},
    ),
    "sft term, which TRL averages over all chosen tokens": (
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.25]},
        {"preference_loss_weight": 0.8, "sft_loss_weight": 0.25, "sft_token_level_loss": True},
    ),
    "hinge and sft": (
        {"loss_type": ["hinge", "sft"], "loss_weights": [1.0, 1.0]},
        {"preference_loss": "hinge", "sft_loss_weight": 1.0, "sft_token_level_loss": True},
    ),
}


@pytest.mark.parametrize(("theirs", "options"), WITH_REFERENCE.values(), ids=WITH_REFERENCE.keys())
def test_losses_with_a_reference(kind: Kind, tmp_path: Path, theirs: dict[str, Any], options: dict[str, Any]) -> None:
    beta = 0.3
    expected = trl_dpo(kind, tmp_path, PAIRS, beta=beta, **theirs)
    objective = PreferenceLoss(DpoConfig(reference_policy_kl_penalty=beta, **options))
    actual = ours(kind, objective, with_reference(kind, pair_batch(PAIRS)))
    assert_same(actual, expected)
    if not options.get("preference_average_log_probs"):
        # TRL multiplies rewards by beta and counts a tie as wrong; ours are the bare log-ratios.
        metrics, shown = actual[2], expected[2]
        assert metrics["num_ranked_right"] / len(PAIRS) == approx(shown["rewards/accuracies"])
        assert beta * metrics["rewards_chosen_mean"] == approx(shown["rewards/chosen"])
        assert beta * metrics["rewards_margin_mean"] == approx(shown["rewards/margins"])


def test_default_ipo_differs_from_trl(kind: Kind, tmp_path: Path) -> None:
    """Guards the table in the docs: summed, as in NeMo-Aligner and OpenRLHF, it is another loss."""
    loss, _, _ = trl_dpo(kind, tmp_path, PAIRS, beta=0.3, loss_type="ipo")
    objective = PreferenceLoss(DpoConfig(preference_loss="ipo", reference_policy_kl_penalty=0.3))
    assert ours(kind, objective, with_reference(kind, pair_batch(PAIRS)))[0] != pytest.approx(loss, rel=0.1)


# -- losses without one ------------------------------------------------------------------------------------------------


def padded(rows: list[list[int]], fill: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def paired_inputs(pairs: list[Pair]) -> dict[str, Tensor]:
    """As TRL's collator for CPO and ORPO would hand them over."""
    inputs = {}
    for side in ("chosen", "rejected"):
        answers = [list(getattr(pair, f"{side}_ids")) for pair in pairs]
        prompts = [list(pair.prompt_ids) for pair in pairs]
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        labels = [[-100] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
        inputs[f"{side}_input_ids"] = padded(whole, TOKENIZER.pad_token_id)
        inputs[f"{side}_attention_mask"] = padded([[1] * len(row) for row in whole], 0)
        inputs[f"{side}_labels"] = padded(labels, -100)
    return inputs


def trl_without_reference(which: str, kind: Kind, folder: Path, pairs: list[Pair], **options: Any) -> Outcome:
    config, trainer = {"cpo": (CPOConfig, CPOTrainer), "orpo": (ORPOConfig, ORPOTrainer)}[which]
    made = trainer(
        model=llama(attention="eager"),
        args=config(output_dir=str(folder), max_length=64, **TRL_OPTIONS, **options),
        train_dataset=ROWS,
        processing_class=byte_tokenizer(),
    )
    return finished(made, paired_inputs(pairs), kind)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo(kind: Kind, tmp_path: Path, smoothing: float) -> None:
    expected = trl_without_reference(
        "cpo",
        kind,
        tmp_path,
        PAIRS,
        loss_type="simpo",
        beta=2.0,
        simpo_gamma=0.8,
        cpo_alpha=0.0,
        label_smoothing=smoothing,
    )
    objective = PreferenceLoss(
        DpoConfig(preference_loss="simpo", reference_policy_kl_penalty=2.0, simpo_gamma=0.8, label_smoothing=smoothing)
    )
    actual = ours(kind, objective, pair_batch(PAIRS))
    assert_same(actual, expected)
    assert 2.0 * actual[2]["rewards_chosen_mean"] == approx(expected[2]["rewards/chosen"])


def test_simpo_with_the_likelihood_term_that_trl_adds_by_default(kind: Kind, tmp_path: Path) -> None:
    expected = trl_without_reference("cpo", kind, tmp_path, PAIRS, loss_type="simpo", beta=2.0)
    objective = PreferenceLoss(
        DpoConfig(
            preference_loss="simpo", reference_policy_kl_penalty=2.0, sft_loss_weight=1.0, sft_token_level_loss=True
        )
    )
    assert_same(ours(kind, objective, pair_batch(PAIRS)), expected)


def test_label_smoothing(kind: Kind, tmp_path: Path) -> None:
    """TRL smooths in its trainer without a reference. With a reference that gives probability 1, cdpo is that loss."""
    expected = trl_without_reference(
        "cpo", kind, tmp_path, PAIRS, loss_type="sigmoid", beta=0.3, cpo_alpha=0.0, label_smoothing=0.15
    )
    batch = pair_batch(PAIRS)
    certain = batch.with_columns(reference_logprobs=torch.zeros_like(batch.columns["mask"]))
    objective = PreferenceLoss(DpoConfig(preference_loss="cdpo", reference_policy_kl_penalty=0.3, label_smoothing=0.15))
    assert_same(ours(kind, objective, certain), expected)


def test_orpo(kind: Kind, tmp_path: Path) -> None:
    """TRL's likelihood term covers the prompt as well, ours the answer alone: the same when the prompt is one token."""
    pairs = random_pairs([1, 1, 1, 1], [(5, 9), (1, 7), (6, 6), (3, 8)], seed=5)
    expected = trl_without_reference("orpo", kind, tmp_path, pairs, beta=0.25)
    objective = PreferenceLoss(
        DpoConfig(preference_loss="orpo", preference_loss_weight=0.25, sft_loss_weight=1.0, sft_token_level_loss=True)
    )
    assert_same(ours(kind, objective, pair_batch(pairs)), expected)


def test_the_odds_ratio_term_of_orpo_after_prompts_of_any_length(kind: Kind, tmp_path: Path) -> None:
    _, _, theirs = trl_without_reference("orpo", kind, tmp_path, PAIRS, beta=0.25)
    _, _, metrics = ours(kind, PreferenceLoss(DpoConfig(preference_loss="orpo")), pair_batch(PAIRS))
    assert metrics["preference_loss"] == approx(-theirs["log_odds_ratio"])


# -- KTO ---------------------------------------------------------------------------------------------------------------


def random_answers(seed: int) -> list[Judged]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5, True), (3, 9, False), (12, 1, True), (1, 7, True), (4, 6, False), (6, 3, True)]
    return [
        Judged(i, str(i), random_ids(p, generator), random_ids(r, generator), desirable)
        for i, (p, r, desirable) in enumerate(shapes)
    ]


def trl_kto(kind: Kind, folder: Path, answers: list[Judged], seed: int, **options: Any) -> Outcome:
    trainer = KTOTrainer(
        model=llama(attention="eager"),
        ref_model=llama(seed=seed, attention="eager"),
        args=KTOConfig(
            output_dir=str(folder), max_length=None, per_device_train_batch_size=len(answers), **TRL_OPTIONS, **options
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "label": True}] * len(answers)),
        processing_class=byte_tokenizer(),
    )
    rotated = [answers[-1], *answers[:-1]]
    rows = [
        {
            "prompt_ids": list(answer.prompt_ids),
            "completion_ids": list(answer.response_ids),
            "KL_completion_ids": list(other.response_ids),
            "label": answer.desirable,
        }
        for answer, other in zip(answers, rotated, strict=True)
    ]
    trainer.ref_model = kind.theirs(trainer.ref_model, seed)
    return finished(trainer, trainer.data_collator(rows), kind)


class TwoModels:
    """The policy and the frozen reference of a KTO step, as plain models."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.current, self.frozen = kind, kind.ours(), kind.ours(seed)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, step: int | None = None, *, keep: bool = True) -> Any:
        """As the policy's when asked for a batch, as the reference's when a step is named."""
        model = self.current if step is None else self.frozen
        logprobs = self.kind.logprobs(model, batch)
        return logprobs if step is None else (logprobs, 0.0)


def prepared(kind: Kind, answers: list[Judged], seed: int) -> tuple[TokenBatch, dict[str, float]]:
    """The batch as the algorithm hands it to the policy's update."""
    models: Any = TwoModels(kind, seed)
    step = Kto(len(answers), KtoLoss(DpoConfig()), models, models, reference=models, max_total_tokens=64)
    return step._prepared(judged_batch(answers), 1, StageClock(), validates=False)


@pytest.mark.parametrize(("seed", "good", "bad"), [(1, 1.0, 1.0), (2, 1.3, 0.6), (3, 0.6, 1.3)])
def test_kto(kind: Kind, tmp_path: Path, seed: int, good: float, bad: float) -> None:
    answers = random_answers(seed)
    expected = trl_kto(kind, tmp_path, answers, seed, beta=0.2, desirable_weight=good, undesirable_weight=bad)
    batch, measured = prepared(kind, answers, seed)
    objective = KtoLoss(DpoConfig(reference_policy_kl_penalty=0.2, desirable_weight=good, undesirable_weight=bad))
    actual = ours(kind, objective, batch)
    assert_same(actual, expected)
    assert measured["kl"] == approx(expected[2]["kl"])
    for name in ("chosen", "rejected"):
        shown = expected[2][f"rewards/{name}"]
        assert 0.2 * actual[2][f"rewards_{name}_mean"] == approx(shown)


def test_kto_baseline_is_positive_in_some_batch(kind: Kind) -> None:
    """Guards the test above: a baseline that is always cut off at 0 would leave half of the definition untested."""
    baselines = [prepared(kind, random_answers(seed), seed)[1]["kl"] for seed in (1, 2, 3)]
    assert max(baselines) > 0.1
