"""GPUs, and the share of their limits that posttrain reaches: the measured constants of the planner.

A prediction is a count (floating-point operations, bytes) divided by a limit of the GPU and by the share of that limit
which the code reaches. Counts are made in the other files, from the code that does the work. Limits and shares are
here.

Measured 2026-11-15 on NVIDIA H200 (torch 2.11, triton 3.6, bf16), on the one that reached 806 TFLOP/s unless noted:

| what | measured | which constant it gives |
|---|---|---|
| product of 8192 x 8192 matrices, on four H200 | 806, 795 (732 when hot), 792, 752 | `matrix_flops`: their mean |
| copy on the device, bytes read and written | 4.29 TB/s | `copy_bytes_per_s` |
| Llama 8B, 512 rows: matrix products of a decode step | 10.85 ms (659 TFLOP/s) | `matrix_share` |
| the same: output head | 0.87 ms | (check) |
| the same: whole step, mean context 256 | 18.8 ms | (check) |
| on another H200, 752 TFLOP/s: mean contexts 256 and 578 | 18.45 and 22.82 ms | `decode_attention_share` |
| there: 512 answers of 50 to 2,000 tokens | 22.6 s | `decode_layer_s`, with the next |
| Llama 1.5B, 64 rows, groups of 16 with prompts of 512 | 2.18 ms | `decode_layer_s`, `decode_row_s` |
| there: 512 rows, groups of 16 with prompts of 1,024 | 5.55 ms | `decode_row_s` |
| Llama 8B, prompts | 43,700 tokens/s | (check) |
| Llama 8B, log-probabilities, sequences of 900 | 40,363 tokens/s | (check) |
| Llama 8B, forward and backward, 8,100 tokens at a time | 12,487 tokens/s, 58 GiB | (check) |
| the same, 16,200 tokens at a time | 12,616 tokens/s, 87 GiB | (check) |
| Llama 8B in FP8, products of 8,192 rows, and of 512 | 2.02 and 1.79 times bf16 | `fp8_speedup` |
| the same, of 16 rows | 70 us a layer, 3.1 TB/s | `fp8_weight_read_share` |
| attention over a cache in FP8, 512 rows of 256 and 700 tokens | 3.4 and 3.9 TB/s | `fp8_decode_attention_share` |
| Llama 8B in FP8, 512 rows, mean contexts 256 and 578 | 11.68 and 14.31 ms | (check) |
| the same, 512 answers of 50 to 2,000 tokens | 14.9 s | (check) |
| the same with plain modules, eager | 10,132 tokens/s, 88 GiB | `unfused_time`, `UNFUSED_ACTIVATIONS` |

"Check" rows were not used to choose a constant; a test compares the prediction with them. The other shares are
estimates, marked as such below.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.policy.hardware import PEAK_TFLOPS
from posttrain.policy.memory.peak_memory import GIB

TERA = 1e12
MEASURED_ON = "H200, 2026-11-15, torch 2.11, bf16"


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int  # as torch reports it
    matrix_flops: float  # bf16 products per second that a large square product reaches
    copy_bytes_per_s: float  # read and written
    host_bytes_per_s: float  # from pinned host memory, each way
    is_measured: bool
    has_fp8: bool = True  # matrix units for FP8: Ada, Hopper and newer


@dataclass(frozen=True)
class Calibration:
    """Shares of a GPU's limits that posttrain reaches, and costs that depend on neither operations nor bytes."""

    matrix_share: float = 0.82  # of matrix_flops, in training, scoring, prompts and large decode batches
    attention_share: float = 0.45  # of matrix_flops, packed attention with grouped heads; estimate
    elementwise_share: float = 0.90  # of copy_bytes_per_s, fused kernels; estimate
    weight_read_share: float = 0.85  # of copy_bytes_per_s, products of few rows; estimate
    decode_attention_share: float = 1.1  # of copy_bytes_per_s, paged attention: reading alone is faster than copying
    fp8_speedup: float = 2.0  # of products in FP8 over those in bf16, many rows; in training an estimate
    fp8_weight_read_share: float = 0.75  # of copy_bytes_per_s, products of few rows in FP8
    fp8_decode_attention_share: float = 0.85  # of copy_bytes_per_s, keys and values in FP8
    unfused_time: float = 1.23  # families whose layers are not fused (policy/fused): time of their passes
    forward_host_s: float = 0.35e-3  # per layer: launching a forward pass; small models wait for it; estimate
    backward_host_s: float = 0.55e-3  # per layer; estimate
    row_host_s: float = 0.5e-6  # per token: laying out a packed row; estimate
    decode_layer_s: float = 50e-6  # a layer of a decode step in a CUDA graph: start and end of ten kernels
    decode_row_s: float = 40e-9  # of that layer, for each row
    drafted_tokens_per_step: float = 1.5  # of an answer, where tokens are drafted; depends on the texts; estimate
    foreach_bytes: float = 84.0  # moved per weight by torch's foreach AdamW, counted from its operations


CALIBRATION = Calibration()

# TB/s by the vendors' data sheets. The shares that the H200 reaches are assumed for the others.
_H200_SHEET_TBYTES = 4.8
_H200_TFLOPS, _H200_TBYTES = 775.0, 4.29


def _by_data_sheet(name: str, memory_gib: float, tbytes: float, host_gbytes: float) -> Gpu:
    tflops = PEAK_TFLOPS[name.partition("-")[0].upper()]
    return Gpu(
        name,
        int(memory_gib * GIB),
        tflops * _H200_TFLOPS / PEAK_TFLOPS["H200"] * TERA,
        tbytes * _H200_TBYTES / _H200_SHEET_TBYTES * TERA,
        host_gbytes * 1e9,
        is_measured=False,
        has_fp8=not name.startswith("a100"),
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", int(139.8 * GIB), _H200_TFLOPS * TERA, _H200_TBYTES * TERA, 50e9, is_measured=True),
        _by_data_sheet("h100", 79.1, 3.35, 50),
        _by_data_sheet("a100-80gb", 79.2, 2.04, 24),
        _by_data_sheet("a100-40gb", 39.4, 1.555, 24),
        _by_data_sheet("b200", 178.3, 8.0, 50),
        _by_data_sheet("l40s", 44.4, 0.864, 24),
    )
}
