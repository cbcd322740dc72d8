"""Log-probabilities under the frozen reference, computed once per answer: in later epochs, and in every validation
after the first, they are looked up.

An answer is identified by the tokens of its prompt and its own; the file by the fingerprint of the reference, which
covers its weights, precision and temperature. A lookup returns the bits that were computed.

Exact resumption. The last bits of a log-probability depend on what else was in its micro-batch, so the resumed run must
find exactly the entries of the interrupted one. Hence every record has the step of its creation; a run that resumes
after step k drops later records, because it computes them again, and a fresh run starts empty. When the memory limit is
reached nothing is added, and entries are never replaced: the content depends only on the steps made.

File: `reference_logprobs.bin` beside the checkpoints; a header, then a record for each call that computed something. A
record that was only partly written fails its checksum and ends the file.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.files.digests import running_sha256
from posttrain.policy.parallel.fsdp import is_first_rank
from posttrain.roles import ReferencePolicy
from posttrain.types import TokenBatch

FILE_NAME = "reference_logprobs.bin"
_MAGIC = b"posttrain reference logprobs 1\n"
_RECORD = struct.Struct("<qqqI")  # step, answers, tokens, CRC-32 of what follows: keys, lengths, log-probabilities
_KEY_BYTES = 16
_OVERHEAD_BYTES = 200  # of an entry in memory, beside its numbers

Logprobs = NDArray[np.float32]


class CachedReference:
    """`folder` None: the cache is in memory only; `max_bytes` 0: no cache. `warn` is told when the file fails."""

    def __init__(
        self,
        policy: ReferencePolicy,
        max_bytes: int,
        folder: Path | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._policy, self._max_bytes, self._warn = policy, max_bytes, warn
        self._path = folder / FILE_NAME if folder is not None and max_bytes > 0 else None
        self._known: dict[bytes, Logprobs] = {}
        self._num_bytes = 0
        self._is_open = False
        self._is_full = max_bytes == 0

    def logprobs(self, batch: TokenBatch, step: int, *, keep: bool = True) -> tuple[Tensor, float]:
        """One value per response token, and the share of the tokens whose value was known already."""
        if not self._is_open:
            self._open(step)
        keys = answer_keys(batch)
        missing = [row for row, key in enumerate(keys) if key not in self._known]
        fresh: dict[int, Tensor] = {}
        if missing:
            part = batch.select(missing)
            scores = self._policy.reference_logprobs(part)
            assert scores.dtype == torch.float32
            fresh = dict(zip(missing, scores.split(part.response_lengths), strict=True))
        pieces = [fresh[row] if row in fresh else torch.from_numpy(self._known[key]) for row, key in enumerate(keys)]
        if fresh and keep:
            self._keep({keys[row]: scores.numpy() for row, scores in reversed(fresh.items())}, step)
        num_tokens = sum(batch.response_lengths)
        num_fresh = sum(len(scores) for scores in fresh.values())
        return torch.cat(pieces), 1 - num_fresh / max(num_tokens, 1)

    def _keep(self, entries: dict[bytes, Logprobs], step: int) -> None:
        size = sum(values.nbytes + _OVERHEAD_BYTES for values in entries.values())
        if self._is_full:
            return
        if self._num_bytes + size > self._max_bytes:
            self._is_full = True
            entries, size = {}, 0  # an empty record marks this for a run that resumes
        self._num_bytes += size
        # Copies: a slice would keep the whole batch alive, and the caller may change it.
        self._known.update({key: values.copy() for key, values in entries.items()})
        if self._path is not None:
            self._append(entries, step)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _open(self, step: int) -> None:
        """Read what was made before `step`, the first one of this process; cut off the rest."""
        self._is_open = True
        if self._path is None:
            return
        header = _MAGIC + bytes.fromhex(self._policy.reference_fingerprint())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            end = self._load(header, step) if step > 1 else 0  # a run that resumes makes step 2 or a later one first
            # A record from before `step` after the whole ones is damaged; a partly written one is from a later step.
            rest = self._path.read_bytes()[end : end + _RECORD.size] if end else b""
            is_damaged = len(rest) == _RECORD.size and _RECORD.unpack(rest)[0] < step
            if step > 1 and (not end or is_damaged):
                self._warn(
                    f"{self._path} is missing, damaged or of another reference: log-probabilities of the reference are "
                    "computed again, so this run may differ from an uninterrupted one in the last bits"
                )
            with open(self._path, "r+b" if end else "wb") as file:
                file.truncate(end)
                if not end:
                    file.write(header)
        except OSError as error:
            self._give_up(error)

    def _load(self, header: bytes, step: int) -> int:
        """Take in the records made before `step`; where they end, 0 if there are none of this reference."""
        assert self._path is not None
        if not self._path.exists():
            return 0
        content = memoryview(self._path.read_bytes())
        if bytes(content[: len(header)]) != header:
            return 0
        end = len(header)
        for record_step, entries, record_end in _records(content, end):
            if record_step >= step:
                break
            self._is_full |= not entries
            self._known.update(entries)
            self._num_bytes += sum(values.nbytes + _OVERHEAD_BYTES for values in entries.values())
            end = record_end
        return end

    def _append(self, entries: dict[bytes, Logprobs], step: int) -> None:
        assert self._path is not None
        lengths = np.array([len(values) for values in entries.values()], dtype="<i8")
        payload = b"".join([*entries, lengths.tobytes(), *(values.tobytes() for values in entries.values())])
        record = _RECORD.pack(step, len(entries), int(lengths.sum()), zlib.crc32(payload)) + payload
        try:
            with open(self._path, "ab") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._warn(
            f"{self._path}: {error.strerror or error}; the reference's log-probabilities are kept in memory alone, so "
            "a resumed run computes them again and may differ from this one in the last bit"
        )
        self._path = None


def answer_keys(batch: TokenBatch) -> list[bytes]:
    """The key of each answer: a digest of its prompt's tokens and images, and of its own tokens."""
    prompts = [_digest(prompt) for prompt in batch.prompts]
    for index, images in enumerate(batch.prompt_images):  # which have the same tokens whatever they show
        prompts[index] += "".join(image.digest for image in images).encode()
    return [
        running_sha256(prompts[prompt] + _digest(response)).digest()[:_KEY_BYTES]
        for prompt, response in zip(batch.prompt_of, batch.responses, strict=True)
    ]


def _digest(tokens: Tensor) -> bytes:
    return running_sha256(tokens.numpy().astype("<i8").tobytes()).digest()


def _records(content: memoryview, start: int) -> Iterator[tuple[int, dict[bytes, Logprobs], int]]:
    """(step, entries, where it ends) of each record that is whole."""
    while start + _RECORD.size <= len(content):
        step, count, num_values, checksum = _RECORD.unpack_from(content, start)
        start += _RECORD.size
        if count < 0 or num_values < 0:
            return
        end = start + count * (_KEY_BYTES + 8) + num_values * 4
        if end > len(content) or zlib.crc32(content[start:end]) != checksum:
            return
        yield step, _entries(content[start:end], count), end
        start = end


def _entries(payload: memoryview, count: int) -> dict[bytes, Logprobs]:
    if count == 0:
        return {}
    keys: Sequence[bytes] = [bytes(payload[i * _KEY_BYTES : (i + 1) * _KEY_BYTES]) for i in range(count)]
    values_at = count * (_KEY_BYTES + 8)
    lengths = np.frombuffer(payload[count * _KEY_BYTES : values_at], dtype="<i8")
    values = np.frombuffer(payload[values_at:], dtype="<f4")
    parts = np.split(values, np.cumsum(lengths)[:-1])
    return {key: part.copy() for key, part in zip(keys, parts, strict=True)}


# Where a config came from and how it was read; none of it changes a number.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_CHUNK_BYTES = 2**24  # hashed in parallel; part of the definition


def model_fingerprint(model: nn.Module, config: Mapping[str, object], temperature: float) -> str:
    """SHA-256 of the weights under any adapters, their precision, the architecture and the temperature.

    A collective when the weights are sharded: every rank calls it. The answer is that of rank 0; the others return "".
    """
    settings = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    digest = running_sha256(json.dumps([settings, temperature], sort_keys=True, default=str).encode())
    is_first = is_first_rank()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                continue
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if is_first:
                content = whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                starts = range(0, len(content), _CHUNK_BYTES)
                chunks = pool.map(running_sha256, [content[start : start + _CHUNK_BYTES] for start in starts])
                digest.update(f"{name}:{tuple(whole.shape)}:{whole.dtype};".encode())
                digest.update(b"".join(chunk.digest() for chunk in chunks))
    return digest.hexdigest() if is_first else ""
