"""Distillation as TRL computes it: loss and gradients are those of its own DistillationTrainer and GKDTrainer, on the
same weights and answers.

TRL pads and scores each prompt with each answer, we pack. TRL's `beta` is 0 for our forward divergence, 1 for the
reverse one, and 0.5 for `jsd`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from float64 import approx, assert_same_gradients
from tiny_models import VOCAB_SIZE, byte_tokenizer, gradients, tiny_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl_options import TRL_OPTIONS

from posttrain.config import LossFnConfig
from posttrain.models.attention_interface import attention_context
from posttrain.policy.logprobs import TeacherStates, Teaching, TokenLogprobs
from posttrain.policy.objectives.distillation import Distillation, TeacherDivergence
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch

pytest.importorskip("trl", reason="the bench extra is not installed")
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation import server_distillation_trainer as with_tail

pytestmark = pytest.mark.usefixtures("in_float64", "no_epsilon")

Kind = Literal["reverse", "forward", "jsd"]
BETA: dict[Kind, float] = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}
PROMPTS, ANSWERS = ([5, 9, 7], [4, 6, 8, 3, 11]), ([10, 4, 12], [7, 7, 5, 13, 6], [9], [14, 3, 8, 10])
PROMPT_OF = (0, 0, 1, 1)
TEMPERATURE = 0.7


def models(attention: str) -> tuple[Any, Any]:
    student = tiny_model(dtype=torch.float64, attention=attention)
    return student, tiny_model(dtype=torch.float64, attention=attention, seed=1, hidden_size=48)


def ours(kind: Kind) -> tuple[float, dict[str, Tensor]]:
    size = sum(map(len, ANSWERS))
    columns = {"mask": torch.ones(size), "advantages": torch.zeros(size), "generation_logprobs": torch.zeros(size)}
    batch = TokenBatch.build(PROMPTS, ANSWERS, PROMPT_OF, columns)
    (student, teacher), row = models("posttrain"), PackedRow.build(batch, torch.device("cpu"))
    divergence = TeacherDivergence(kind)
    with attention_context(row.attention):
        states = TeacherStates(teacher)
        teaching = Teaching(states(row).detach(), states.head, divergence)
        logprobs, compared, estimate = TokenLogprobs(student, chunk_tokens=5)(row, TEMPERATURE, teaching)
        batch = batch.with_columns(compared=compared, divergence_estimate=estimate)
        loss, _ = Distillation(LossFnConfig(reference_policy_kl_penalty=0.0), divergence)(logprobs, batch)
        loss.backward()
    return float(loss.detach()), gradients(student)


def padded(rows: list[Tensor], side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)


@pytest.mark.parametrize("kind", BETA)
def test_the_loss_and_its_gradients_are_those_of_the_distillation_trainer(kind: Kind, tmp_path: Path) -> None:
    student, teacher = models("eager")
    trainer = DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=DistillationConfig(output_dir=str(tmp_path), beta=BETA[kind], temperature=TEMPERATURE, **TRL_OPTIONS),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=byte_tokenizer(),
    )
    prompt_ids, prompt_mask = padded([torch.tensor(PROMPTS[at]) for at in PROMPT_OF], "left")
    completion_ids, completion_mask = padded([torch.tensor(answer) for answer in ANSWERS], "right")
    inputs = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids}
    inputs |= {"completion_mask": completion_mask, "num_items_in_batch": completion_mask.sum()}
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    expected, gradient = ours(kind)
    assert float(loss.detach()) == approx(expected)
    assert_same_gradients(gradients(student), gradient)


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", BETA)
def test_the_divergence_is_that_of_gkd_and_of_top_k_that_with_its_tail(kind: Kind) -> None:
    student, teacher = logits(0), logits(1)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=BETA[kind])  # the mean of these tokens
    assert float(TeacherDivergence(kind).of_logits(student, teacher).mean()) == approx(float(theirs))
    chosen = teacher.topk(5, -1).indices
    mask = torch.ones_like(chosen, dtype=torch.bool)
    s, support = with_tail._add_tail_bucket(student.log_softmax(-1).gather(-1, chosen), mask)
    t, _ = with_tail._add_tail_bucket(teacher.log_softmax(-1).gather(-1, chosen), mask)
    theirs = with_tail._jsd_divergence(s, t, BETA[kind], support).sum(-1)
    assert TeacherDivergence(kind, "top_k", 5).of_logits(student, teacher).tolist() == approx(theirs.tolist())
