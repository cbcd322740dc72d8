"""The kernels of recurrent layers against float64, in Triton's interpreter on a CPU. Run by
`test_recurrence_interpreted.py`, in a process of its own: whether kernels are interpreted is decided when Triton is
imported. bf16 is tested on a GPU (`gpu/test_recurrence_cuda.py`).
"""

from __future__ import annotations

import pytest
import torch
from kernel_references import mend_interpreter
from recurrence_references import Heads, assert_convolves, assert_decodes, assert_recurs

mend_interpreter()
DELTA = Heads(2, 4, 16, 16)
ODD = Heads(1, 3, 20, 12)
MAMBA = Heads(2, 4, 8, 24, corrects=False)


@pytest.mark.parametrize("heads", [DELTA, ODD, MAMBA], ids=str)
def test_a_token_of_each_sequence(heads: Heads) -> None:
    assert_decodes(heads, torch.float32, 1e-5)


LENGTHS, FOLLOWS = [70, 1, 30, 64, 3], [None, None, None, 2, 2]


@pytest.mark.parametrize("heads", [DELTA, ODD, MAMBA], ids=str)
def test_a_packed_row(heads: Heads) -> None:
    assert_recurs(LENGTHS, FOLLOWS, heads, torch.float32, 2e-5, unit=heads.corrects)


def test_several_blocks_of_columns() -> None:
    assert_recurs([66], [None], Heads(1, 1, 72, 80), torch.float32, 2e-5, unit=True)


@pytest.mark.parametrize(("bias", "silu", "width"), [(True, True, 4), (False, False, 3)])
def test_a_convolution_of_a_packed_row(*, bias: bool, silu: bool, width: int) -> None:
    assert_convolves([9, 1, 3, 14, 2], FOLLOWS, 40, torch.float32, 1e-5, bias=bias, silu=silu, width=width)
