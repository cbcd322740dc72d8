"""Receives the trainer's weights in vLLM's worker processes, through vLLM's registry of weight-transfer engines (0.25
and newer).

vLLM imports `worker_extension_cls` in every worker before it loads the model; importing this module registers the
receiver. Tensors have their names in the model's files; vLLM's layerwise reload fuses, splits and converts them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from posttrain_weights import WeightBucket, digest, open_handle, views
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import base, factory
from vllm.model_executor.model_loader import reload

NAME = "posttrain"


@dataclasses.dataclass
class Names(base.WeightTransferInitInfo):
    shapes: dict[str, list[int]]  # all tensors of one version


class Receiver(base.WeightTransferEngine):
    """Does not raise during an update: vLLM reads only the first worker's exception, and the next call would get the
    answers of the other workers. It stores the error; `WorkerExtension` returns it.
    """

    init_info_cls, update_info_cls, supports_draft_weight_update = Names, WeightBucket, False
    version: int | None = None  # version of the loaded weights; None: a mix of versions
    error: str | None = None

    def init_transfer_engine(self, init_info: Names) -> None:
        self.names = init_info

    def start_weight_update(self) -> None:
        self.due, self.next, self.coming = set(self.names.shapes), 0, -1
        self.version = self.error = None
        self.memory: tuple[str, Tensor] | None = None  # the sender's memory, and its handle
        with set_current_vllm_config(self.vllm_config):  # the worker of 0.25 does not set it
            reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:  # the base class synchronises: a CPU cannot
        try:
            if self.error is None:
                self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightBucket) -> None:
        bucket = update_info
        flat = self._bytes(bucket)
        if bucket.index != self.next:
            raise ValueError(f"bucket {bucket.index} came where bucket {self.next} was due")
        if digest(flat) != bucket.digest:
            raise ValueError(f"bucket {bucket.index} has another digest than the trainer's")
        wrong = [n for n, _, shape, _ in bucket.tensors if n not in self.due or self.names.shapes[n] != list(shape)]
        if wrong:
            raise ValueError(f"unknown, repeated or of another shape: {', '.join(wrong[:3])}")
        with set_current_vllm_config(self.vllm_config):
            self.model.load_weights(list(views(bucket, flat)))
        self.due -= {name for name, *_ in bucket.tensors}
        self.next, self.coming = bucket.index + 1, bucket.version

    def _bytes(self, bucket: WeightBucket) -> Tensor:
        """Memory that stays unchanged until the update is finished: vLLM holds views until a layer is complete."""
        if bucket.file:
            return torch.from_file(bucket.file, shared=False, size=bucket.size, dtype=torch.uint8).to(self.device)
        if self.memory is None or self.memory[0] != bucket.handle:
            self.memory = bucket.handle, open_handle(bucket.handle, self.device.index)
        return self.memory[1][: bucket.size].to(self.device, copy=True)

    def finish_weight_update(self) -> None:
        """Restores layers from the meta device even after an error; they then hold a mix of two versions."""
        with set_current_vllm_config(self.vllm_config):
            reload.finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                self._repack_tied_heads()
        self.memory = None
        if self.device.type != "cpu":
            torch.cuda.ipc_collect()
            torch.accelerator.empty_cache()  # the trainer shares this GPU
        if self.due and self.error is None:  # vLLM itself only warns
            self.error = f"{len(self.due)} tensors did not come, the first is {min(self.due)}"
        self.version = None if self.error else self.coming

    def _repack_tied_heads(self) -> None:
        """On a CPU, a tied output head is a packed copy, which the reload does not update."""
        seen: set[int] = set()
        for layer in self.model.modules():
            weight = layer._parameters.get("weight")
            if id(weight) in seen and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            seen.add(id(weight))

    def shutdown(self) -> None:
        pass

    def trainer_send_weights(self, *arguments: object) -> None:  # abstract in 0.25, gone later
        raise NotImplementedError


class WorkerExtension:
    """Additional methods of every vLLM worker."""

    weight_transfer_engine: Receiver

    def posttrain_state(self) -> tuple[int | None, str | None]:
        """Version of the loaded weights, and the error of the last update."""
        return self.weight_transfer_engine.version, self.weight_transfer_engine.error


factory.WeightTransferEngineFactory.register_engine(NAME, Receiver)
