"""The draw of `sampler.py` without top-k and top-p, with one pass over the logits.

The first kernel reads every logit once and keeps, for each of the blocks of about sqrt(V) tokens, its maximum score and
its mass relative to that maximum. The second, one program per row, takes the argmax of the blocks with their noise,
reads the members of that block again and takes their argmax; the sum of all masses is the denominator of the
log-probability. Noise has the bits of `noise.py` up to its logarithms, which are float64 here too. So a token differs
from `TokenSampler`'s only where two candidates are equal to rounding (a block's mass is summed in another order).

Columns from `vocab_size` on are padding of the output head: never drawn, but part of the softmax's denominator.

Every row has its own temperature, so one captured step serves rows with different settings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.engines.native.kernels.paged import runs_here
from posttrain.engines.native.kernels.shapes import next_power_of_two
from posttrain.engines.native.sampler import block_size

# Logits that one program of the first kernel reads.
_LOGITS_PER_PROGRAM = 4096
# As in noise.py and sampler.py; a test compares them.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
_BLOCK_INDEX = tl.constexpr(1 << 40)
_TWO_TO_MINUS_52 = tl.constexpr(2.0**-52)


@triton.jit
def _hash(key, index):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser of key ^ ((index + 1) * golden), on unsigned 64-bit integers that wrap."""
    value = key.to(tl.uint64) ^ ((index + 1).to(tl.uint64) * _GOLDEN)
    value = (value ^ (value >> 30)) * _FIRST_FACTOR
    value = (value ^ (value >> 27)) * _SECOND_FACTOR
    return value ^ (value >> 31)


@triton.jit
def _gumbel(key, index):  # type: ignore[no-untyped-def]
    uniform = ((_hash(key, index) >> 12).to(tl.int64).to(tl.float64) + 0.5) * _TWO_TO_MINUS_52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _factor(inverse_temperature):  # type: ignore[no-untyped-def]
    """Of the logits. Greedy rows have the log-probabilities of temperature 1."""
    return tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)


@triton.jit
def _best_and_mass(scores):  # type: ignore[no-untyped-def]
    """Per block: the maximum score and the sum of exponentials relative to it; NaN if any score is NaN."""
    best = tl.max(scores, 1)
    reference = tl.where(best == float("-inf"), 0.0, best)
    return best, tl.sum(tl.exp(scores - reference[:, None]), 1)


@triton.jit
def _block_masses_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [rows, WIDTH]
    best_ptr,  # [rows, 2, BLOCKS]: candidates, then padding
    mass_ptr,
    inverse_temperature_ptr,  # [rows], float32
    row_stride,
    vocab_size,
    width,
    blocks,
    SIZE: tl.constexpr,  # tokens per block
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < width, other=float("-inf"))
    scores = logits.to(tl.float32) * _factor(tl.load(inverse_temperature_ptr + row))
    best, mass = _best_and_mass(tl.where(column < vocab_size, scores, float("-inf")))
    at = row * 2 * blocks + block
    tl.store(best_ptr + at, best, mask=block < blocks)
    tl.store(mass_ptr + at, mass, mask=block < blocks)
    if (tl.program_id(0) + 1) * BLOCKS_PER_PROGRAM * SIZE > vocab_size:
        best, mass = _best_and_mass(tl.where(column >= vocab_size, scores, float("-inf")))
        tl.store(best_ptr + at + blocks, best, mask=block < blocks)
        tl.store(mass_ptr + at + blocks, mass, mask=block < blocks)


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    best_ptr,
    mass_ptr,
    sequence_key_ptr,  # [rows], int64
    token_index_ptr,  # [rows], int64
    token_ptr,  # [rows], int64
    logprob_ptr,  # [rows], float32
    inverse_temperature_ptr,  # [rows], float32
    row_stride,
    vocab_size,
    blocks,
    first_padding_block,
    SIZE: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS_PADDED)
    at = row * 2 * blocks + block
    best = tl.load(best_ptr + at, mask=block < blocks, other=float("-inf"))
    mass = tl.load(mass_ptr + at, mask=block < blocks, other=0.0)
    top = tl.max(best, 0)
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    is_greedy, factor = inverse_temperature == 0.0, _factor(inverse_temperature)
    key = _hash(tl.load(sequence_key_ptr + row), tl.load(token_index_ptr + row)).to(tl.int64)
    log_mass = tl.log(tl.where(mass > 0.0, mass, 1.0).to(tl.float64)) + best.to(tl.float64)
    # Blocks with mass 0 or NaN are excluded.
    log_mass = tl.where(mass > 0.0, log_mass, float("-inf"))
    log_mass += _gumbel(key, block.to(tl.int64) + _BLOCK_INDEX)
    chosen = tl.argmax(tl.where(is_greedy, best.to(tl.float64), log_mass), 0)

    member = chosen.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    logits = tl.load(logits_ptr + row * row_stride + member, mask=member < vocab_size, other=float("-inf"))
    scores = (logits.to(tl.float32) * factor).to(tl.float64)
    winner = tl.argmax(tl.where(is_greedy, scores, scores + _gumbel(key, member)), 0)
    token = tl.minimum(chosen.to(tl.int64) * SIZE + winner, vocab_size - 1)
    score = tl.load(logits_ptr + row * row_stride + token).to(tl.float32) * factor

    # Relative to the maximum score: large logits would lose precision.
    reference = top
    if HAS_PADDING:
        has_padding = (block >= first_padding_block) & (block < blocks)
        padding_best = tl.load(best_ptr + at + blocks, mask=has_padding, other=float("-inf"))
        padding_mass = tl.load(mass_ptr + at + blocks, mask=has_padding, other=0.0)
        reference = tl.maximum(top, tl.max(padding_best, 0))
        total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(best - reference)), 0)
        total += tl.sum(tl.where(padding_mass == 0.0, 0.0, padding_mass * tl.exp(padding_best - reference)), 0)
    else:
        total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(best - reference)), 0)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, score - reference - tl.log(total))


def sample_rows(
    logits: Tensor,  # [rows, head's vocabulary], bf16, fp16 or fp32; rows may be strided
    sequence_keys: Tensor,  # [rows], int64
    token_index: Tensor,  # [rows], int64
    inverse_temperature: Tensor,  # [rows], float32; 0: greedy
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Token ids (int64) and log-probabilities (float32), both [rows]: `TokenSampler.draw` without top-k and top-p."""
    assert runs_here(logits), "the kernel runs on a GPU, or in Triton's interpreter"
    rows, width = logits.shape
    assert 0 < vocab_size <= width, f"a vocabulary of {vocab_size} in {width} columns"
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    assert rows < 2**16, f"{rows} rows are more than a launch can have"
    for name, numbers, dtype in (
        ("sequence_keys", sequence_keys, torch.int64),
        ("token_index", token_index, torch.int64),
        ("inverse_temperature", inverse_temperature, torch.float32),
    ):
        assert numbers.shape == (rows,), f"{name} has the shape {tuple(numbers.shape)} for {rows} rows"
        assert numbers.dtype == dtype, f"{name} is {numbers.dtype}, {dtype} is expected"
        assert numbers.stride(0) == 1 or rows == 1, f"{name} must be contiguous"
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, logprobs
    size = block_size(vocab_size)
    blocks = -(-width // size)
    per_program = max(1, _LOGITS_PER_PROGRAM // size)
    best = torch.empty((rows, 2, blocks), dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(best)
    _block_masses_kernel[(-(-blocks // per_program), rows)](
        logits, best, mass, inverse_temperature, logits.stride(0), vocab_size, width, blocks,
        SIZE=size, BLOCKS_PER_PROGRAM=per_program, num_warps=4, num_stages=1,
    )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, best, mass, sequence_keys, token_index, tokens, logprobs, inverse_temperature, logits.stride(0),
        vocab_size, blocks, vocab_size // size, SIZE=size, BLOCKS_PADDED=next_power_of_two(blocks),
        HAS_PADDING=vocab_size < width, num_warps=4, num_stages=1,
    )  # fmt: skip
    return tokens, logprobs
