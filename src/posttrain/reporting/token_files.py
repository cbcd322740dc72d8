"""`rollouts/step_N.tokens.npz`: the tokens of some answers of a step, with the numbers that training used.

draws, samples           of each answer: the draw of its task, and which sample it is
ends                     where the tokens of each answer begin, and where the last one ends
token_ids, trained       of each token; trained: the model wrote it, so it has a gradient
text, text_ends          the text of all tokens in UTF-8, and where that of each begins
sampler_logprobs         as the sampler gave them
trainer_logprobs         under the weights before the step's first update
reference_logprobs       under the frozen reference; absent if the step did not compute them
advantages               as the loss used them
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from posttrain.files import durable
from posttrain.files.redaction import redact_values

if TYPE_CHECKING:
    from posttrain.types import TokenTrace

_MAX_TOKENS_PER_CHARACTER = 4
MAX_BYTES = 512 * 2**20  # of all arrays, unpacked: a small file may unpack to any size

Pieces = Callable[[Sequence[int]], list[str]]  # the text of each token


def token_pieces(decode: Callable[[Sequence[int]], str]) -> Pieces:
    """The text of each token, from a tokenizer that decodes several. A character of several belongs to the last."""

    def pieces(token_ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        before: list[int] = []  # the token before, which tells whether a space belongs between the two
        pending: list[int] = []
        for place, token in enumerate(token_ids, start=1):
            pending.append(token)
            text = decode([*before, *pending])[len(decode(before)) if before else 0 :]
            may_go_on = place < len(token_ids) and len(pending) < _MAX_TOKENS_PER_CHARACTER
            is_part = may_go_on and text.endswith("\ufffd")
            found.append("" if is_part else text)
            if not is_part:
                before, pending = [token], []
        return found

    return pieces


@dataclass(frozen=True)
class TokenFile:
    draws: np.ndarray
    samples: np.ndarray
    ends: np.ndarray
    token_ids: np.ndarray
    trained: np.ndarray
    text: np.ndarray
    text_ends: np.ndarray
    sampler_logprobs: np.ndarray
    trainer_logprobs: np.ndarray
    advantages: np.ndarray
    reference_logprobs: np.ndarray | None = None

    def answer(self, draw: int, sample: int) -> slice | None:
        """Where the tokens of an answer are."""
        (rows,) = np.nonzero((self.draws == draw) & (self.samples == sample))
        return slice(int(self.ends[rows[0]]), int(self.ends[rows[0] + 1])) if len(rows) else None

    def pieces(self, part: slice) -> list[str]:
        content, ends = self.text.tobytes(), self.text_ends.tolist()
        return [content[ends[i] : ends[i + 1]].decode("utf-8", "replace") for i in range(part.start, part.stop)]


def write_tokens(path: Path, traces: Sequence[TokenTrace], pieces: Pieces) -> None:
    decoded = [(trace, pieces(trace.token_ids)) for trace in traces]
    # A credential may lie across tokens, so an answer with one is left out as a whole.
    shown = [(trace, own) for trace, own in decoded if redact_values("".join(own)) == "".join(own)]
    if not shown:
        return
    traces = [trace for trace, _ in shown]
    path.parent.mkdir(exist_ok=True)
    texts = [piece.encode("utf-8", "replace") for _, own in shown for piece in own]

    def column(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(trace, name), dtype=np.float32) for trace in traces])

    arrays: dict[str, np.ndarray] = {
        "draws": np.array([trace.draw for trace in traces], dtype=np.int64),
        "samples": np.array([trace.sample for trace in traces], dtype=np.int32),
        "ends": np.cumsum([0, *(len(trace.token_ids) for trace in traces)]).astype(np.int64),
        "token_ids": np.concatenate([np.asarray(trace.token_ids, dtype=np.int32) for trace in traces]),
        "trained": np.concatenate([np.asarray(trace.trained, dtype=np.bool_) for trace in traces]),
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
        "text_ends": np.cumsum([0, *map(len, texts)]).astype(np.int64),
        **{name: column(name) for name in ("sampler_logprobs", "trainer_logprobs", "advantages")},
    }
    if all(trace.reference_logprobs for trace in traces):
        arrays["reference_logprobs"] = column("reference_logprobs")
    durable.write_bytes(path, _npz(arrays))


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    """As `numpy.savez_compressed` writes it, but without the time: equal numbers give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, values in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, values, allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, content.getvalue())
    return buffer.getvalue()


def read_tokens(source: BinaryIO | Path) -> TokenFile | None:
    """None if the file cannot be read, or its arrays do not fit each other."""
    try:
        with np.load(source, allow_pickle=False) as found:
            if sum(entry.file_size for entry in found.zip.infolist()) > MAX_BYTES:
                return None
            file = TokenFile(**{name: found[name] for name in found.files})
        return file if _fits(file) else None
    except Exception:  # numpy, zipfile, zlib, ast and tokenize each have their own for damage
        return None


def _fits(file: TokenFile) -> bool:
    """Whether all arrays are of one dimension and numbers, and the ends are places in what they divide."""
    arrays = [value for value in vars(file).values() if value is not None]
    if any(array.ndim != 1 or array.dtype.kind not in "iufb" for array in arrays):
        return False
    num_tokens = len(file.token_ids)
    of_tokens = (file.trained, file.sampler_logprobs, file.trainer_logprobs, file.advantages, file.reference_logprobs)
    return (
        all(len(array) == num_tokens for array in of_tokens if array is not None)
        and len(file.draws) == len(file.samples) == len(file.ends) - 1
        and len(file.text_ends) == num_tokens + 1
        and file.text.dtype == np.uint8
        and all(_divide(ends, size) for ends, size in ((file.ends, num_tokens), (file.text_ends, len(file.text))))
    )


def _divide(ends: np.ndarray, size: int) -> bool:
    return bool(ends.dtype.kind == "i" and ends[0] == 0 and ends[-1] == size and (np.diff(ends) >= 0).all())
