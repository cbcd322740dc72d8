"""Divergences from a teacher against their definitions in float64, and the packed form against one token at a time."""

from typing import Literal

import pytest
import torch
from float64 import assert_same_gradients
from tiny_models import VOCAB_SIZE, gradients, tiny_model
from torch import Tensor

from posttrain.config import LossFnConfig
from posttrain.models.attention_interface import attention_context
from posttrain.policy.logprobs import TeacherStates, Teaching, TokenLogprobs
from posttrain.policy.objectives.clipped import EPS
from posttrain.policy.objectives.distillation import Distillation, TeacherDivergence
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch

Kind = Literal["reverse", "forward", "jsd"]
UNBOUNDED = {"kl_output_clamp_value": None}
KINDS: tuple[Kind, ...] = ("reverse", "forward", "jsd")
pytestmark = pytest.mark.usefixtures("in_float64")


def by_definition(kind: Kind, s: Tensor, t: Tensor) -> Tensor:
    if kind == "reverse":
        return sum(a * (a / b).log() for a, b in zip(s, t, strict=True))
    if kind == "forward":
        return by_definition("reverse", t, s)
    middle = (s + t) / 2
    return (by_definition("reverse", t, middle) + by_definition("reverse", s, middle)) / 2


def logits(seed: int, width: int = 11) -> Tensor:
    return 2 * torch.randn(width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_its_definition_and_of_top_k_a_lower_bound(kind: Kind) -> None:
    student, teacher = logits(0), logits(1)
    whole = by_definition(kind, student.softmax(0), teacher.softmax(0))
    assert TeacherDivergence(kind).of_logits(student, teacher) == pytest.approx(float(whole), abs=1e-12)
    bounds = [float(TeacherDivergence(kind, "top_k", k).of_logits(student, teacher)) for k in (1, 4, 9, 11)]
    assert bounds == sorted(bounds)
    assert 0 < bounds[0] < float(whole)
    assert bounds[-1] == pytest.approx(float(whole), abs=1e-12)
    assert float(TeacherDivergence(kind).of_logits(teacher, teacher)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_at_the_sampled_token_is_in_expectation_that_of_the_divergence(kind: Kind) -> None:
    student, teacher = logits(2).requires_grad_(), logits(3)
    (whole,) = torch.autograd.grad(TeacherDivergence(kind).of_logits(student, teacher), student)
    chosen = student.log_softmax(0)
    advantages, estimates = TeacherDivergence(kind, "sampled").of_sampled(chosen, teacher.log_softmax(0))
    (expected,) = torch.autograd.grad((-advantages * chosen * chosen.detach().exp()).sum(), student)
    torch.testing.assert_close(expected, whole, rtol=1e-10, atol=1e-12)
    divergence = TeacherDivergence(kind).of_logits(student, teacher)
    assert float((estimates * chosen.exp()).sum().detach()) == pytest.approx(float(divergence.detach()), abs=1e-12)


def of_every_token(kind: Kind, student: Tensor, behind: Tensor, teacher: Tensor, **loss: float | None) -> Tensor:
    """The loss of answers of one token, one for each token, which the policy `behind` sampled."""
    chosen = student.log_softmax(0)
    divergence = TeacherDivergence(kind, "sampled")
    advantages, estimates = divergence.of_sampled(chosen, teacher.log_softmax(0))
    columns = {"mask": torch.ones(len(student)), "advantages": torch.zeros(len(student))}
    of_policy = {name: behind.log_softmax(0) for name in ("generation_logprobs", "prev_logprobs")}
    batch = TokenBatch.build(
        [[1]], [[token] for token in range(len(student))], [0] * len(student), {**columns, **of_policy}
    )
    config = LossFnConfig(reference_policy_kl_penalty=0.0, **loss)
    # A mean over all tokens; expected is a sum with the probabilities of the policy that samples.
    shares = [batch.select([row], recount=True) for row in range(len(student))]
    losses = [
        Distillation(config, divergence)(
            chosen[row : row + 1],
            share.with_columns(compared=advantages[row : row + 1], divergence_estimate=estimates[row : row + 1]),
        )[0]
        for row, share in enumerate(shares)
    ]
    return (torch.stack(losses) * behind.softmax(0)).sum() * (1 + EPS)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_an_earlier_policy_sampled_are_weighted(kind: Kind) -> None:
    student, teacher, behind = logits(2).requires_grad_(), logits(3), logits(2) + 0.3 * logits(4)
    (whole,) = torch.autograd.grad(TeacherDivergence(kind).of_logits(student, teacher), student)
    loss = of_every_token(kind, student, behind, teacher, ratio_clip_min=1.0, ratio_clip_max=1e6, **UNBOUNDED)
    (expected,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(expected, whole, rtol=1e-7, atol=1e-9)
    clipped = of_every_token(kind, student, behind, teacher, **UNBOUNDED)
    assert not torch.allclose(torch.autograd.grad(clipped, student)[0], whole, rtol=1e-3), "by default it is clipped"


def test_an_unlikely_token_that_the_teacher_prefers_has_a_bounded_weight() -> None:
    student, teacher = torch.tensor([0.0, 30.0]).requires_grad_(), torch.tensor([30.0, 0.0])
    advantages, _ = TeacherDivergence("forward", "sampled").of_sampled(student.log_softmax(0), teacher.log_softmax(0))
    assert float(advantages[0]) > 1e12
    for bound, weight in ((10.0, 10.0), (None, float(advantages[0]))):
        loss = of_every_token("forward", student, student.detach(), teacher, kl_output_clamp_value=bound)
        (gradient,) = torch.autograd.grad(loss / student.softmax(0)[0].detach(), student)
        assert float(-gradient[0]) == pytest.approx(weight, rel=1e-6)


def test_columns_that_pad_one_of_the_models_are_left_out() -> None:
    student, teacher = logits(0), logits(1)
    padded = torch.cat([teacher, torch.full((3,), 9.0)])
    assert TeacherDivergence().of_logits(student, padded) == TeacherDivergence().of_logits(student, teacher)


def test_a_distribution_on_one_token_has_a_finite_divergence() -> None:
    sure = torch.tensor([80.0, 0.0, 0.0, 0.0])
    for kind in KINDS:
        assert torch.isfinite(TeacherDivergence(kind, "top_k", 2).of_logits(sure, sure))


@pytest.mark.parametrize("over", ["vocabulary", "top_k", "sampled"])
def test_packed_rows_equal_one_token_at_a_time(over: Literal["vocabulary", "top_k", "sampled"]) -> None:
    """Three answers of two prompts, a masked token, chunks of two tokens: loss and gradients of the plain form."""
    chance = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, VOCAB_SIZE, (n,), generator=chance).tolist() for n in (4, 3, 5, 2, 6)]
    mask = torch.ones(13)
    mask[6] = 0
    columns = {"mask": mask, "advantages": torch.zeros(13), "generation_logprobs": torch.zeros(13)}
    batch = TokenBatch.build(ids[:2], ids[2:], [0, 0, 1], columns)
    divergence = TeacherDivergence("reverse", over, 5)
    objective = Distillation(LossFnConfig(reference_policy_kl_penalty=0.0), divergence)
    student, teacher = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64, seed=1)

    row = PackedRow.build(batch, torch.device("cpu"))
    with attention_context(row.attention):
        states = TeacherStates(teacher)
        teaching = Teaching(states(row).detach(), states.head, divergence)
        logprobs, loss, estimate = TokenLogprobs(student, chunk_tokens=2)(row, 0.8, teaching)
        total, _ = objective(logprobs, batch.with_columns(compared=loss, divergence_estimate=estimate))
        total.backward()
    packed = gradients(student)

    alone = tiny_model(dtype=torch.float64, attention="eager")
    theirs = tiny_model(dtype=torch.float64, seed=1, attention="eager")
    sums, at = torch.zeros(()), 0
    for prompt, answer in ((0, 2), (0, 3), (1, 4)):
        for place, token in enumerate(ids[answer]):
            before = torch.tensor([[*ids[prompt], *ids[answer][:place]]])
            s = alone(before).logits[0, -1] / 0.8
            t = theirs(before).logits[0, -1].detach() / 0.8
            if over == "sampled":
                chosen = s.log_softmax(0)[token]
                value = -divergence.of_sampled(chosen, t.log_softmax(0)[token])[0] * (chosen - chosen.detach()).exp()
            else:
                value = divergence.of_logits(s, t)
            sums = sums + value * mask[at]
            at += 1
    mean = sums / (mask.sum() + EPS)
    mean.backward()
    assert float(total.detach()) == pytest.approx(float(mean.detach()), rel=1e-10)
    assert_same_gradients(packed, gradients(alone))
