"""The tokens of one answer with the numbers behind them, from `rollouts/step_N.tokens.npz`."""

from __future__ import annotations

import io
import math

import numpy as np

from posttrain.json_files import JsonObject
from posttrain.reporting.run_files import ROLLOUTS_FOLDER
from posttrain.reporting.token_files import TokenFile, read_tokens
from posttrain.ui.places import Place

MAX_FILE_BYTES = 512 * 2**20


def token_table(place: Place, step: int, draw: int, sample: int) -> JsonObject | None:
    """None if the file or the answer is missing."""
    name = f"{ROLLOUTS_FOLDER}/step_{step}.tokens.npz"
    stamp = place.stamp(name)
    if stamp is None or stamp.size > MAX_FILE_BYTES:
        return None
    found = read_tokens(io.BytesIO(place.read(name)))
    return None if found is None else _columns(found, draw, sample)


def _columns(file: TokenFile, draw: int, sample: int) -> JsonObject | None:
    part = file.answer(draw, sample)
    if part is None:
        return None
    sampler, trainer = file.sampler_logprobs[part], file.trainer_logprobs[part]
    columns = {
        "logprob": sampler,
        "difference": sampler - trainer,
        "advantage": file.advantages[part],
    }
    if file.reference_logprobs is not None:
        gap = file.reference_logprobs[part] - trainer
        columns["kl"] = np.expm1(np.clip(gap, -20, 20)) - gap  # k3, per token
    return {
        "pieces": file.pieces(part),
        "ids": file.token_ids[part].tolist(),
        "trained": file.trained[part].tolist(),
        **{name: _numbers(values) for name, values in columns.items()},
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
