"""A run's policy and generator around a model that is already in memory: the real worker, without a folder to load
from.

Everything else is as in a training run: the config with its checks, `Rank`, micro-batches, the engine. Calls are
watched on their way to the worker: how long each took until the device was done, and the most memory it held meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, Literal

import torch
from machine import GIB, peak_bytes, reset_peak, synchronise
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config import load_config
from posttrain.data.packing import MicroBatching
from posttrain.models.lora import add_lora
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.sharded import ShardedTrainer
from posttrain.orchestration.workers import LocalWorker, P, T
from posttrain.policy.trainer import PolicyTrainer, RankSetup

SEED = 0


class TrainerAroundModel(PolicyTrainer):
    """A trainer whose model was made elsewhere. Its tokenizer is read from the folder that the config names."""

    def __init__(self, setup: RankSetup, model: PreTrainedModel) -> None:
        self._given = model
        super().__init__(setup)
        del self._given

    def _load_model(self, setup: RankSetup) -> nn.Module:
        lora = setup.policy.dtensor_cfg.lora_cfg
        return add_lora(self._given, lora, setup.seed) if lora.enabled else self._given


class WatchedWorker(LocalWorker):
    """Remembers of each method what its calls took in all, and the most memory during one of them."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        method = operation.__name__
        reset_peak()
        start = time.perf_counter()
        result = super().submit(operation, *args, **kwargs)
        # The optimizer's last kernels belong to the update, not to whatever waits for them next.
        synchronise()
        self.seconds[method] = self.seconds.get(method, 0.0) + time.perf_counter() - start
        peak = peak_bytes(self.rank.trainer.device.type) / GIB
        self.peak_gib[method] = max(self.peak_gib.get(method, 0.0), peak)
        return result


def run_config(kind: Literal["grpo", "dpo", "sft"], settings: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """The config of a run: `settings` are dotted keys, `overrides` what the user said, which has the last word."""
    words = [f"{key}={_value(value)}" for key, value in settings.items()]
    return load_config(kind, None, [*words, *overrides]).config


def _value(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def common_settings(model: str, device: str, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """What every training benchmark says. The learning rate is small: the weights shall stay what they are."""
    return {
        "policy.model_name": model,
        "policy.tokenizer.name": folder,
        "policy.tokenizer.chat_template": None,
        "policy.device": device,
        "policy.precision": str(dtype).removeprefix("torch."),
        "policy.sequence_packing.enabled": True,
        "policy.optimizer.kwargs.lr": 1e-6,
        "policy.scheduler": None,
        "checkpointing.enabled": False,
    }


def policy_around(
    model: PreTrainedModel, policy_config: Any, *, needs_reference: bool
) -> tuple[ShardedTrainer, WatchedWorker]:
    setup = RankSetup(policy_config, SEED, needs_reference)
    trainer = TrainerAroundModel(setup, model)
    worker = WatchedWorker(Rank(trainer))
    packing = policy_config.sequence_packing
    batching = {
        name: MicroBatching(max_tokens=budget, algorithm=packing.algorithm, seed=SEED)
        for name, budget in (("train", packing.train_mb_tokens), ("score", packing.logprob_mb_tokens))
    }
    return ShardedTrainer(worker, train=batching["train"], score=batching["score"], seed=SEED), worker


def tokenizer_folder(tokenizer: PreTrainedTokenizerBase) -> tempfile.TemporaryDirectory[str]:
    """The worker reads its tokenizer from a folder."""
    folder = tempfile.TemporaryDirectory(prefix="bench-tokenizer-")
    tokenizer.save_pretrained(folder.name)
    return folder
