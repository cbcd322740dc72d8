"""One rank: a trainer and an engine on one device. Operations that the driver calls, in-process or through an actor.

A critic is a second trainer beside the policy's.

A dedicated engine is a rank whose trainer has no optimizer: it only samples, with weights that it receives.

Arguments and results are picklable, except for `progress`, which is for ranks in the driver's process. The rank decides
whether trainer or engine holds the device's memory; `engines/choose_engine.py` selects the engine.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from posttrain.engines.choose_engine import engine_for_training
from posttrain.engines.native.engine import NativeEngine, check_states
from posttrain.engines.native.proof import prove_for_training
from posttrain.engines.weights import Handover, SentWeights, WeightReceiver, WeightSender
from posttrain.policy.checkpoint.writer import write_in_thread
from posttrain.policy.trainer import ModelFacts, PolicyTrainer, RankSetup
from posttrain.roles import UNKNOWN_VERSION, Objective, Progress, RankEngine
from posttrain.types import Completion, NoiseKey, OpenGroup, PrefillTokens, Quota, Sampling, Task, TokenBatch

# Arguments of `roles.RoundEngine`.
GenerateCall = tuple[Sequence[Task], int, Sampling, NoiseKey, Progress | None]
RoundCall = tuple[Sequence[OpenGroup], Sampling, int, Quota | None, Progress | None]
MicroBatches = Sequence[TokenBatch | None]  # None: no micro-batch for this rank, while others have one


def process_status(device: torch.device) -> dict[str, object]:
    """This process and its memory, for `workers.jsonl`."""
    if device.type == "cuda":
        memory = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        used = psutil.Process().memory_info().rss
        memory, total = (used, used), psutil.virtual_memory().total
    names = ("allocated_bytes", "reserved_bytes", "total_bytes")
    found = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(device)}
    return {**found, **dict(zip(names, (*memory, total), strict=True))}


def build_rank(setup: RankSetup) -> Rank:
    critic = setup.for_critic()
    rank = Rank(PolicyTrainer(setup), None if critic is None else PolicyTrainer(critic))
    if setup.tells_whole_groups and isinstance(rank.engine, NativeEngine):
        rank.engine.when_whole = rank.whole_groups.append
    return rank


class Rank:
    def __init__(self, trainer: PolicyTrainer, critic: PolicyTrainer | None = None) -> None:
        self.trainer, self._critic = trainer, critic
        self._writers = [each.checkpoints for each in (trainer, critic) if each is not None]
        prove_for_training(trainer)
        self.engine = engine_for_training(trainer.model, trainer.tokenizer, trainer.config, trainer.device)
        if isinstance(self.engine, NativeEngine):  # now, not when the first prompts are sampled
            check_states(trainer.device, self.engine.settings, trainer.shapes.state_bytes)
        self.whole_groups: deque[OpenGroup] = deque()  # of the current sampling call, until they are taken
        self._is_asked_to_stop = False
        if self.engine is not None:
            agreed = trainer.agreed if self.engine.shares_tensors else lambda is_so: is_so
            self.engine.should_stop = agreed(lambda: self._is_asked_to_stop)
        self._sender, self._receiver = WeightSender(trainer.model), WeightReceiver(trainer.model)
        if trainer.optimizer is not None:
            trainer.optimizer.before_change = self._wait_until_copied

    def facts(self) -> ModelFacts:
        return self.trainer.facts()

    def status(self) -> dict[str, object]:
        return process_status(self.trainer.device)

    # -- training ------------------------------------------------------------------------------------------------------

    def update(
        self, parts: MicroBatches, objective: Objective, seed: int, progress: Progress | None
    ) -> dict[str, float]:
        self._make_room()
        return self.trainer.update(parts, objective, seed, progress)

    def evaluate(self, parts: MicroBatches, objective: Objective, progress: Progress | None) -> dict[str, float]:
        self._make_room()
        return self.trainer.evaluate(parts, objective, progress)

    def logprobs(self, parts: MicroBatches) -> list[Tensor | None]:
        self._make_room()
        return self.trainer.logprobs(parts)

    def reference_logprobs(self, parts: MicroBatches) -> list[Tensor | None]:
        self._make_room()
        return self.trainer.reference_logprobs(parts)

    @property
    def critic(self) -> PolicyTrainer:
        assert self._critic is not None, "this rank was built without a critic"
        return self._critic

    def update_critic(
        self, parts: MicroBatches, objective: Objective, seed: int, progress: Progress | None
    ) -> dict[str, float]:
        self._make_room()
        return self.critic.update(parts, objective, seed, progress)

    def values(self, parts: MicroBatches) -> list[Tensor | None]:
        self._make_room()
        return self.critic.logprobs(parts)

    def end_critic_step(self) -> None:
        self.critic.end_step()

    def reference_fingerprint(self) -> str:
        return self.trainer.reference_fingerprint()

    def end_step(self) -> None:
        self.trainer.end_step()

    def _make_room(self) -> None:
        """Trainer and engine share the memory of the device: before the trainer computes."""
        if self.engine is not None:
            self.engine.make_room()

    def _wait_until_copied(self) -> None:
        """Running copies of the weights are complete before they change."""
        self.trainer.checkpoints.wait_until_copied()
        self._sender.wait_until_copied()

    # -- sampling ------------------------------------------------------------------------------------------------------

    def generate(self, *call: *GenerateCall) -> list[list[Completion]]:
        with self._sampling() as engine:
            return engine.generate(*call)

    def sample_round(self, *call: *RoundCall) -> list[OpenGroup]:
        with self._sampling() as engine:
            return engine.sample_round(*call)

    def take_whole_groups(self) -> list[OpenGroup]:
        """Called from another thread, while others are sampled."""
        return [self.whole_groups.popleft() for _ in range(len(self.whole_groups))]

    def keep_prefixes(self, wanted: bool) -> PrefillTokens | None:
        assert self.engine is not None, "this rank was built without policy.generation"
        return self.engine.keep_prefixes(wanted)

    @contextmanager
    def _sampling(self) -> Iterator[RankEngine]:
        assert self.engine is not None, "this rank was built without policy.generation"
        if not self.engine.has_weights:  # the first time, and after loading a checkpoint or releasing memory
            self.engine.take_weights(UNKNOWN_VERSION)
        self.whole_groups.clear()
        with self.trainer.sampling() if self.engine.shares_tensors else nullcontext():
            yield self.engine

    def publish(self, version: int) -> None:
        """Make the engine sample with the trainer's current weights."""
        if self.engine is not None:
            self.engine.make_room()
            self.engine.take_weights(version)

    def release(self) -> None:
        if self.engine is not None:
            self.engine.release()

    def request_stop(self) -> None:
        """Called from another thread: current and later sampling ends with StopRequested."""
        self._is_asked_to_stop = True

    def close(self) -> None:
        """Stop processes that the rank has started."""
        if self.engine is not None:
            self.engine.close()

    # -- weights of engines on devices of their own --------------------------------------------------------------------

    def send_weights(self, to: Handover) -> SentWeights:
        return self._sender.send(to)

    def fill_bucket(self, lot: int) -> None:
        self._sender.fill(lot)

    def receive_weights(self, sent: Sequence[SentWeights], lot: int | None = None) -> str:
        """`sent` by rank. Reads everything from files, or a batch from buckets; returns why those cannot be opened."""
        if lot is not None and (why := self._receiver.open_buckets(sent)):
            return why
        if self._receiver.receive(sent, lot) and self.engine is not None:
            self.engine.take_weights(UNKNOWN_VERSION)
        return ""

    def remove_weights(self) -> None:
        self._sender.remove_file()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path, optimizer: bool) -> None:
        for writer in self._writers:
            writer.save(folder, optimizer=optimizer)

    def load(self, folder: Path) -> None:
        self._sender.wait_until_copied()
        self.trainer.load(folder)
        if self._critic is not None:
            self._critic.load(folder)
        if self.engine is not None:
            self.engine.forget_weights()

    def save_obstacle(self, optimizer: bool) -> str:
        others = sum(writer.bytes_to_allocate(optimizer=optimizer) for writer in self._writers[1:])
        return self._writers[0].obstacle(optimizer=optimizer, others=others)

    def prepare_save(self, optimizer: bool) -> bool:
        are_ready = [writer.prepare(optimizer=optimizer) for writer in self._writers]
        return all(are_ready)

    def begin_save(self, folder: Path, optimizer: bool) -> None:
        for writer in self._writers:
            writer.begin(folder, optimizer=optimizer)

    def write_save(self) -> None:
        for writer in self._writers:
            writer.write()

    def write_save_in_thread(self) -> None:
        write_in_thread(self._writers)

    def take_save_wait_s(self) -> float:
        return sum(writer.take_waited_s() for writer in self._writers)
