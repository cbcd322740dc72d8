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
