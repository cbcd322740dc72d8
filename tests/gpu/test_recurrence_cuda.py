"""The kernels of recurrent layers on a GPU: against float64, and in models that sample and train.

Packed rows with widths for which the kernels are used (`KERNEL_WIDTHS`), and others in processes of their own
(`UNPROVEN`): a fault of one ends its process. A width whose cases pass may join `KERNEL_WIDTHS`.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from recurrence_references import Heads, assert_convolves, assert_decodes, assert_recurs
from tiny_models import VOCAB_SIZE, byte_tokenizer, gradients, tiny_model
from torch import Tensor, nn

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.attention_interface import attention_context
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch

BF16, FP32 = torch.bfloat16, torch.float32
QWEN = Heads(2, 4, 128, 128)  # widths of Qwen3.5
NEMOTRON = Heads(2, 8, 128, 64, corrects=False)
GRANITE = Heads(1, 4, 256, 64, corrects=False)
SMALL = Heads(2, 4, 8, 8)
ODD = Heads(1, 3, 72, 40)
HEADS = [QWEN, NEMOTRON, GRANITE]
UNPROVEN = [SMALL, ODD, Heads(2, 4, 32, 32), Heads(2, 4, 96, 96)]
WRONG = Heads(1, 4, 16, 64, corrects=False)  # gradients of queries, on an H200 with Triton 3.6
# Lengths of pieces, and what they follow: several answers to a prompt, and a turn that goes on.
ROWS = [([1, 63, 64, 65, 130], [None] * 5), ([900], [None]), ([100, 200, 1, 64, 70], [None, 0, 0, 0, 1])]
# Largest and mean error of a tensor, in parts of its largest and its mean number.
TOLERANCE = {BF16: 3e-2, FP32: 1e-4}
SETTINGS = NativeSettings(page_size=4, max_batch_size=7, max_prefill_tokens=64)
SAMPLING = Sampling(90, temperature=0.9)
KEY = NoiseKey(2, 3)
# Small models with heads as wide as those that the kernels are used for.
WIDE: dict[str, dict[str, int]] = {
    "qwen3.5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "nemotron-h": {"mamba_head_dim": 64, "ssm_state_size": 64},
    "granite-hybrid": {
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_heads": 2,
        "mamba_n_groups": 1,
        "mamba_expand": 4,
    },
    "lfm2": {},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, SMALL, ODD], ids=str)
def test_a_token_of_each_sequence(heads: Heads, dtype: torch.dtype) -> None:
    assert_decodes(heads, dtype, 1e-5 if dtype == FP32 else 1e-2, "cuda", rows=37)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("lengths", "follows"), ROWS, ids=str)
def test_a_packed_row_and_its_gradients(
    lengths: list[int], follows: list[int | None], heads: Heads, dtype: torch.dtype
) -> None:
    assert_recurs(lengths, follows, heads, dtype, TOLERANCE[dtype], unit=heads.corrects, device="cuda", steps=False)


def case_by_itself(heads: Heads) -> None:
    """In a process of its own. Both types, all rows."""
    for dtype, tolerance in TOLERANCE.items():
        for lengths, follows in ROWS:
            assert_recurs(lengths, follows, heads, dtype, tolerance, unit=heads.corrects, device="cuda", steps=False)


@pytest.mark.parametrize("heads", [*HEADS, *UNPROVEN, pytest.param(WRONG, marks=pytest.mark.xfail)], ids=str)
def test_every_width(heads: Heads) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(case_by_itself, heads).result(timeout=300)


def test_keys_that_repeat() -> None:
    """The same key over and over, and hardly any decay: powers of A would reach 1e17, its inverse stays small."""
    from posttrain.policy.fused import recurrence
    from posttrain.policy.recurrence import PackedRecurrence, RowPiece

    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 2, 64, generator=generator).expand(128, -1, -1)
    query, value = (torch.randn(128, n, 64, generator=generator) for n in (2, 4))
    given = [x.cuda() for x in (query, key, value, torch.full((128, 4), -1e-4), torch.full((128, 4), 0.99))]
    packed = PackedRecurrence([RowPiece(0, 128)], torch.device("cuda"))
    out, _ = recurrence.recur(packed.chunks, *given, None, unit=True)
    expected, _ = packed.recur(*(x.double() for x in given), None, unit=True)
    assert (out - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("bias", "silu", "width"), [(True, True, 4), (False, False, 3)])
def test_a_convolution_of_a_packed_row(dtype: torch.dtype, *, bias: bool, silu: bool, width: int) -> None:
    follows = [None, 0, 0, None, 3]
    for channels in (40, 512):
        assert_convolves([300, 65, 1, 2, 90], follows, channels, dtype, TOLERANCE[dtype], "cuda", bias=bias, silu=silu,
                         width=width)  # fmt: skip


def make_tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (6, 70, 8, 1)]
    return [Task(draw, f"t:{draw}", "", tuple(prompt.tolist())) for draw, prompt in enumerate(prompts)]


def logprobs_of(model: nn.Module, completions: list[list[Completion]]) -> Tensor:
    responses = [completion.token_ids for group in completions for completion in group]
    mask = torch.ones(sum(len(response) for response in responses))
    prompt_of = [prompt for prompt, group in enumerate(completions) for _ in group]
    batch = TokenBatch.build([task.prompt_ids for task in make_tasks()], responses, prompt_of, {"mask": mask})
    row = PackedRow.build(batch, next(model.parameters()).device)
    with attention_context(row.attention):
        logprobs: Tensor = TokenLogprobs(model)(row, SAMPLING.temperature).float()
        logprobs.sum().backward()
    return logprobs.detach().cpu()


def sampled(completions: list[list[Completion]]) -> Tensor:
    return torch.tensor([logprob for group in completions for c in group for logprob in c.logprobs])


@pytest.mark.parametrize("family", WIDE)
def test_a_model_samples_what_it_trains_on(family: str) -> None:
    """Decode steps, captured but for Granite's experts, and prompts in parts against the trainer, in fp32; gradients
    against a CPU."""
    model = tiny_model(family, **WIDE[family]).cuda()
    engine = NativeEngine(model, byte_tokenizer(), SETTINGS)
    completions = engine.generate(make_tasks(), 5, SAMPLING, KEY)
    assert engine._use_graphs or family == "granite-hybrid", "no capture failed"
    torch.testing.assert_close(sampled(completions), logprobs_of(model, completions), atol=2e-3, rtol=1e-3)
    on_cpu = tiny_model(family, **WIDE[family])
    logprobs_of(on_cpu, completions)
    expected = gradients(on_cpu)
    for name, grad in gradients(model).items():
        error = (grad.cpu() - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-3)
        assert error <= 5e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", WIDE)
def test_bf16_logprobs_equal_the_trainers(family: str) -> None:
    model = tiny_model(family, dtype=BF16, **WIDE[family]).cuda()
    completions = NativeEngine(model, byte_tokenizer(), SETTINGS).generate(make_tasks(), 5, SAMPLING, KEY)
    bound = 1.05 if family == "granite-hybrid" else 1.02  # experts are chosen by rounded numbers; with one: 1.023
    assert (sampled(completions) - logprobs_of(model, completions)).abs().exp().mean() <= bound
