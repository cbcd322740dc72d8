"""Orders that are a function of a seed and nothing else, in any version of numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def keyed_order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `length` things that (seed, epoch) decides.

    Only the raw words of Philox are used: numpy promises those for ever, and does not promise `Generator.permutation`.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(length)
    return np.argsort(words, kind="stable")
