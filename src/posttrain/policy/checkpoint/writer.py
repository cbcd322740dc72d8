"""One rank's part of saving: at once, or in two halves, so that training continues while files are written.

In two halves: `begin` copies everything that a checkpoint holds into host memory, asynchronously; `write` waits for the
copy and writes the files, in another thread. Between the two the next step may sample and compute gradients, but its
optimizer waits (`wait_until_copied`) before it changes weights or state. The files therefore hold the state at `begin`,
bit for bit.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from posttrain.checkpointing.background import leave_mark
from posttrain.policy.checkpoint import files
from posttrain.policy.checkpoint.background_copy import HostCopy, StagingArea
from posttrain.policy.checkpoint.files import Contents, keep_generation_config, small_files, state_of
from posttrain.policy.host_memory import available_bytes
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer
from posttrain.policy.parallel.fsdp import as_shard, is_first_rank, local_part

_SHARE_OF_MEMORY = 0.8  # fraction of free memory: files being written need some as well


@dataclass(frozen=True)
class _Begun:
    folder: Path
    contents: Contents  # in host memory, once copied
    copy: HostCopy


class CheckpointWriter:
    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: MixedPrecisionOptimizer | None,
        device: torch.device,
        name: str = files.POLICY,
    ) -> None:
        keep_generation_config(model)
        self.model, self.tokenizer, self.optimizer, self.device = model, tokenizer, optimizer, device
        self.name = name  # the folder in a checkpoint
        self._area = StagingArea(pin=device.type == "cuda")
        self._files: Mapping[str, bytes] = {}
        self._begun: _Begun | None = None
        self._last_copy: HostCopy | None = None  # freeing its memory calls CUDA: only the thread of `begin` may do that
        self._group: dist.ProcessGroup | None = None
        self._waited_s = 0.0

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Save synchronously, tensor by tensor, without a copy in host memory."""
        files.write(folder, self.model, self._contents(optimizer), None, self.name)

    def _contents(self, optimizer: bool) -> Contents:
        if not self._files and is_first_rank():
            self._files = small_files(self.model, self.tokenizer)
        return state_of(self.model, self.optimizer if optimizer else None, self._files)

    # -- in two halves -------------------------------------------------------------------------------------------------

    def bytes_to_allocate(self, *, optimizer: bool) -> int:
        """For a copy of the state; 0 once that is made."""
        staged = self._to_stage(self._contents(optimizer))
        return 0 if self._area.is_made_for(staged) else StagingArea.num_bytes(staged)

    def obstacle(self, *, optimizer: bool, others: int = 0) -> str:
        """Why saving in two halves is not possible here; empty if it is. To be called after the first update.

        `others`: bytes that are allocated beside those of this model.
        """
        own = self.bytes_to_allocate(optimizer=optimizer) + others
        if not own:
            return ""
        # Ranks on one machine share its memory. How many there are is not known here: at most all of them.
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        needed, free = own * ranks, available_bytes()
        if needed <= free * _SHARE_OF_MEMORY:
            return ""
        return (
            f"a copy of the state needs {needed / 2**30:.1f} GiB of host memory, of which {free / 2**30:.1f} are free"
        )

    def prepare(self, *, optimizer: bool) -> bool:
        """Allocate the memory ahead of the first save. True once it is ready; call again until then."""
        return self._area.prepare(self._to_stage(self._contents(optimizer)))

    def begin(self, folder: Path, *, optimizer: bool) -> None:
        assert self._begun is None, "the previous save has not been written yet"
        if dist.is_initialized() and dist.get_world_size() > 1 and self._group is None:
            # Ranks agree on what each writes. Training uses other groups meanwhile: threads must not share one.
            self._group = dist.new_group(backend="gloo")
        now = self._contents(optimizer)
        places = self._area.views(self._to_stage(now))
        self._last_copy = copy = HostCopy(self.device)
        weights = self._stage_weights(now.weights, places, copy)
        states: dict[str, Tensor] | None = None
        if now.optimizer is not None:
            states = {}
            for key, tensor in now.optimizer.items():
                place = places[f"optimizer/{key}"]
                copy.add(place, local_part(tensor))
                states[key] = as_shard(place, tensor, tuple(tensor.shape)) if isinstance(tensor, DTensor) else place
        copy.seal()
        self._begun = _Begun(folder, replace(now, weights=weights, optimizer=states), copy)

    def _stage_weights(
        self, weights: Mapping[str, Tensor], places: Mapping[str, Tensor], copy: HostCopy
    ) -> dict[str, Tensor]:
        staged: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            place = places.get(f"weights/{name}")
            if isinstance(tensor, DTensor):
                # Files hold full tensors: each is gathered and copied before the next one is gathered.
                whole = tensor.full_tensor()
                if place is not None:
                    place.copy_(whole, non_blocking=True)
            elif place is not None:
                copy.add(place, tensor)
            if place is not None:
                staged[name] = place
        return staged

    def _to_stage(self, now: Contents) -> dict[str, Tensor]:
        """The tensors that this rank copies: its shard of the optimizer, and on the first rank the full weights."""
        first = is_first_rank()
        weights = {f"weights/{name}": tensor for name, tensor in now.weights.items()} if first else {}
        states = {f"optimizer/{key}": local_part(tensor) for key, tensor in (now.optimizer or {}).items()}
        return {**weights, **states}

    def write(self) -> None:
        """The second half; in any thread."""
        assert self._begun is not None, "begin comes first"
        begun = self._begun
        try:
            begun.copy.finish()
            files.write(begun.folder, self.model, begun.contents, self._group, self.name)
        finally:
            self._begun = None

    def wait_until_copied(self) -> None:
        """Return once weights and optimizer state may change."""
        begun = self._begun
        if begun is not None:
            start = time.perf_counter()
            begun.copy.wait()
            self._waited_s += time.perf_counter() - start

    def take_waited_s(self) -> float:
        """Seconds that updates have waited for copies since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited


def write_in_thread(writers: Sequence[CheckpointWriter]) -> None:
    """Run `write` of each in a thread of this process, which writes a marker file when it ends."""
    begun = writers[0]._begun
    assert begun is not None, "begin comes first"
    rank = dist.get_rank() if dist.is_initialized() else 0

    def write() -> None:
        problem = ""
        try:
            for writer in writers:
                writer.write()
        except BaseException as error:
            problem = "".join(traceback.format_exception(error))
        leave_mark(begun.folder, rank, problem)

    threading.Thread(target=write, name="checkpoint", daemon=True).start()
