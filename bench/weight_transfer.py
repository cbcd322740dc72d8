#!/usr/bin/env python3
"""Weights from a training process to a sampling process on one GPU: seconds of a sync, by route, and memory on both
sides.

    python bench/weight_transfer.py --out transfer.json          an 8B Llama shape in bf16; under 150 s on an H200
    python bench/weight_transfer.py --skip host --cycles 50      less of it
    python bench/weight_transfer.py --tiny                       on a CPU, through shared memory: does it all run?

The trainer packs its weights into buckets that the engine has opened over CUDA IPC, and the engine copies them into its
own parameters in place. Every route must first bring weights that the engine can draw itself from the seed. Two jobs,
each a pair of processes: torch's usual memory, and `expandable_segments:True` on both sides with several ways to have
buckets that can be shared nevertheless. Section `handover` is what a run with engines of its own does, calls of Ray
excepted: over CUDA IPC, and through its file (src/posttrain/engines/weights.py). A section that fails is shown
with its error, its engine is replaced, and the others go on. See transfer_buckets.py.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # CUDA tensors can be pickled from here on
from machine import facts
from tables import table, write_json
from torch import Tensor
from transfer_buckets import (
    PLAIN,
    TINY,
    WAYS,
    Copier,
    LlamaSizes,
    allocate,
    close_shared,
    digest,
    is_expandable,
    open_shared,
    plan,
    release,
    share,
    used_bytes,
)

GIB, MIB = 2**30, 2**20
SECTIONS = ("floor", "buckets", "digests", "adapters", "direct", "cycles", "host", "handover", "expandable")
RANK = 16
_DEADLINE_S = 40.0  # of any wait for the other side
Reply = tuple[Any, ...]


# -- both sides ------------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """Weights, buckets and what the process holds."""

    device: str
    sizes: LlamaSizes
    weights: dict[str, list[Tensor]] = field(default_factory=dict)
    way: str = PLAIN
    buckets: list[Tensor] = field(default_factory=list)
    copier: Copier | None = None
    events: list[Any] = field(default_factory=list)
    others_events: list[Any] = field(default_factory=list)

    def shapes(self, what: str) -> list[tuple[int, ...]]:
        return self.sizes.weights() if what == "weights" else self.sizes.adapters(RANK)

    def make(self, what: str, seed: int | None) -> None:
        """Random with a seed; else not a number, so that what was not received shows."""
        if what not in self.weights:
            self.weights[what] = [torch.empty(s, dtype=torch.bfloat16, device=self.device) for s in self.shapes(what)]
        if seed is None:
            for weight in self.weights[what]:
                weight.fill_(float("nan"))
        else:
            for weight, values in zip(self.weights[what], self.drawn(what, seed), strict=True):
                weight.copy_(values)

    def drawn(self, what: str, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        for shape in self.shapes(what):
            yield torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0.0, 0.02, generator=generator)

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def copies(self) -> Copier:
        assert self.copier is not None
        return self.copier

    def memory(self) -> dict[str, float]:
        rss = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )
        found = {"host_gib": rss / GIB, "open_files": float(len(os.listdir("/proc/self/fd")))}
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            found |= {
                "allocated_gib": torch.cuda.memory_allocated() / GIB,
                "peak_gib": torch.cuda.max_memory_allocated() / GIB,
                "reserved_gib": torch.cuda.memory_reserved() / GIB,
                "device_used_gib": (total - free) / GIB,
            }
        return found

    def reset_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def make_events(self, count: int) -> list[bytes]:
        if self.device != "cuda":
            return []
        self.events = [torch.cuda.Event(enable_timing=False, interprocess=True) for _ in range(count)]
        for event in self.events:
            event.record()
        return [event.ipc_handle() for event in self.events]

    def open_events(self, handles: Sequence[bytes]) -> None:
        device = torch.device("cuda", 0) if handles else None
        self.others_events = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]


# -- the engine's side -----------------------------------------------------------------------------------------------


class Engine(Side):
    """Does what the trainer's messages say. Answers are ("ok", result) or ("error", traceback)."""

    def serve(self, pipe: Any) -> None:
        while True:
            command, *arguments = pipe.recv()
            if command == "quit":
                return
            try:
                result = getattr(self, f"do_{command}")(pipe, *arguments)
                pipe.send(("ok", result))
            except Exception:
                pipe.send(("error", traceback.format_exc()))

    def do_hello(self, pipe: Any) -> int:
        return os.getpid()

    def do_probe(self, pipe: Any, pid: int) -> dict[str, Any]:
        return pidfd_probe(pid)

    def do_make(self, pipe: Any, what: str) -> None:
        self.make(what, None)
        self.synchronise()

    def do_open(
        self, pipe: Any, what: str, way: str, shared: list[bytes], bucket_bytes: int, events: list[bytes]
    ) -> tuple[float, list[bytes]]:
        start = time.perf_counter()
        self.way = way
        self.buckets = [open_shared(way, each, bucket_bytes, self.device) for each in shared]
        self.synchronise()
        seconds = time.perf_counter() - start
        self.copier = Copier(self.weights[what], self.buckets, plan(self.shapes(what), bucket_bytes))
        self.open_events(events)
        return seconds, self.make_events(len(events))

    def do_close(self, pipe: Any) -> None:
        self.synchronise()
        for bucket in self.buckets:
            close_shared(self.way, bucket)
        self.buckets, self.copier, self.events, self.others_events = [], None, [], []

    def do_sync(self, pipe: Any, num_buckets: int, with_events: bool, with_digests: bool) -> float:
        """Seconds in which this side did not wait for a message."""
        copier, busy = self.copies(), 0.0
        for index in range(num_buckets):
            kind, number, wanted = pipe.recv()
            start = time.perf_counter()
            assert (kind, number) == ("ready", index)
            if with_events:
                ours, theirs = self.events[index % len(self.events)], self.others_events[index % len(self.events)]
                torch.cuda.current_stream().wait_event(theirs)
                copier.unpack(index)
                ours.record()
            else:
                found = digest(copier.bucket(index)) if with_digests else None
                copier.unpack(index)
                self.synchronise()
                if found is not None and found.item() != wanted:
                    raise ValueError(f"bucket {index} is damaged: {found.item():x} instead of {wanted:x}")
            pipe.send(("done", index))
            busy += time.perf_counter() - start
        self.synchronise()
        return busy

    def do_check(self, pipe: Any, what: str, seed: int, count: int | None = None) -> int:
        """How many weights are not those of the seed; then all are made unusable."""
        wrong = 0
        for index, values in enumerate(self.drawn(what, seed)):
            if count is None or index < count:
                wrong += not torch.equal(values, self.weights[what][index])
        self.make(what, None)
        self.synchronise()
        return wrong

    def do_memory(self, pipe: Any, reset: bool) -> dict[str, float]:
        found = self.memory()
        if reset:
            self.reset_peak()
        return found

    def do_open_direct(self, pipe: Any, shared: list[bytes]) -> float:
        start = time.perf_counter()
        self.buckets = [open_shared(PLAIN, each, 0, self.device) for each in shared]
        return time.perf_counter() - start

    def do_copy_direct(self, pipe: Any, what: str) -> None:
        torch._foreach_copy_(self.weights[what], self.buckets)
        self.synchronise()

    def do_handover(self, pipe: Any, sent: Any, lot: int | None) -> str:
        """Why the trainer's memory cannot be opened; empty: all is taken."""
        if not hasattr(self, "receiver"):
            from posttrain.engines.weights import WeightReceiver

            self.receiver = WeightReceiver(module_of(self.weights["weights"]))
        why = self.receiver.open_buckets([sent]) if lot is not None else ""
        if not why:
            self.receiver.receive([sent], lot)
        return why

    def do_host(self, pipe: Any, route: str, path: str, num_buckets: int, bucket_bytes: int) -> dict[str, float]:
        return HostRoute(self, path, num_buckets, bucket_bytes, rank=1).receive(route, pipe)


def module_of(weights: Sequence[Tensor]) -> torch.nn.Module:
    """These very tensors as parameters."""
    module = torch.nn.Module()
    for index, weight in enumerate(weights):
        module.register_parameter(f"weight_{index}", torch.nn.Parameter(weight, requires_grad=False))
    return module


def engine_main(pipe: Any, device: str, sizes: LlamaSizes) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.set_grad_enabled(False)
    torch.multiprocessing.set_sharing_strategy("file_system")
    Engine(device, sizes).serve(pipe)


# -- host memory -----------------------------------------------------------------------------------------------------


class HostRoute:
    """Part of the weights through host memory: a file in /dev/shm, shared pinned memory, or a gloo broadcast."""

    def __init__(self, side: Side, path: str, num_buckets: int, bucket_bytes: int, rank: int) -> None:
        self.side, self.path, self.count, self.size, self.rank = side, path, num_buckets, bucket_bytes, rank
        planned = plan(side.shapes("weights"), bucket_bytes)[:num_buckets]
        self.bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=side.device)
        self.copier = Copier(side.weights["weights"], [self.bucket], planned)
        self.used = [used_bytes(pieces) for pieces in planned]

    def staging(self) -> Tensor:
        return torch.empty(self.size, dtype=torch.uint8, pin_memory=self.side.device == "cuda").fill_(1)

    @contextmanager
    def pinned_file(self) -> Iterator[Tensor]:
        with open(self.path, "r+b") as file, mmap.mmap(file.fileno(), self.size * 2) as mapped:
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
            if self.side.device == "cuda":
                code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
                if code:
                    raise RuntimeError(f"cudaHostRegister failed with code {code}")
            yield memory
            if self.side.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
            del memory

    def join_gloo(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{self.path}.gloo", rank=self.rank, world_size=2, timeout=timedelta(seconds=30)
        )

    def pack_to(self, index: int, host: Tensor) -> None:
        self.copier.pack(index)
        host[: self.used[index]].copy_(self.bucket[: self.used[index]], non_blocking=True)
        self.side.synchronise()

    def unpack_from(self, index: int, host: Tensor) -> None:
        self.bucket[: self.used[index]].copy_(host[: self.used[index]], non_blocking=True)
        self.copier.unpack(index)
        self.side.synchronise()

    def send(self, route: str, pipe: Any) -> dict[str, float]:
        """On the trainer; timed from the first bucket until the engine has unpacked the last."""
        if route == "file":
            staging = self.staging()
            start = time.perf_counter()
            with open(self.path, "r+b", buffering=0) as file:
                for index in range(self.count):
                    self.pack_to(index, staging)
                    file.write(memoryview(staging.numpy())[: self.used[index]])
            written = time.perf_counter() - start
            pipe.send(("ready", 0))
            expect(pipe, "done")
            return {"seconds": time.perf_counter() - start, "write_s": written}
        if route == "pinned":
            with self.pinned_file() as memory:
                expect(pipe, "opened")
                start = time.perf_counter()
                for index in range(self.count):
                    if index >= 2:
                        expect(pipe, "done")
                    self.pack_to(index, memory[index % 2 * self.size :][: self.size])
                    pipe.send(("ready", index))
                for _ in range(min(2, self.count)):
                    expect(pipe, "done")
                return {"seconds": time.perf_counter() - start}
        staging = self.staging()
        self.join_gloo()
        try:
            start = time.perf_counter()
            for index in range(self.count):
                self.pack_to(index, staging)
                dist.broadcast(staging[: self.used[index]], 0)
            expect(pipe, "done")
            return {"seconds": time.perf_counter() - start}
        finally:
            dist.destroy_process_group()

    def receive(self, route: str, pipe: Any) -> dict[str, float]:
        if route == "file":
            staging = self.staging()
            pipe.recv()
            start = time.perf_counter()
            with open(self.path, "rb", buffering=0) as file:
                for index in range(self.count):
                    wanted, read = memoryview(staging.numpy())[: self.used[index]], 0
                    while read < len(wanted):
                        read += file.readinto(wanted[read:]) or 0
                    self.unpack_from(index, staging)
            pipe.send(("done", 0))
            return {"read_s": time.perf_counter() - start}
        if route == "pinned":
            with self.pinned_file() as memory:
                pipe.send(("opened", 0))
                for index in range(self.count):
                    pipe.recv()
                    self.unpack_from(index, memory[index % 2 * self.size :][: self.size])
                    pipe.send(("done", index))
            return {}
        staging = self.staging()
        self.join_gloo()
        try:
            for index in range(self.count):
                dist.broadcast(staging[: self.used[index]], 0)
                self.unpack_from(index, staging)
            pipe.send(("done", 0))
        finally:
            dist.destroy_process_group()
        return {}


def expect(pipe: Any, kind: str) -> Reply:
    if not pipe.poll(_DEADLINE_S):
        raise TimeoutError(f"the engine sent no {kind!r} within {_DEADLINE_S:.0f} s")
    found: Reply = pipe.recv()
    if found[0] == "error":
        raise RuntimeError(f"the engine failed:\n{found[1]}")
    if found[0] != kind:
        raise RuntimeError(f"the engine sent {found[0]!r} instead of {kind!r}")
    return found


# -- the trainer's side ----------------------------------------------------------------------------------------------


class Trainer(Side):
    """Starts the engine, and measures."""

    pipe: Any = None
    process: Any = None
    tiny: bool = False

    def start_engine(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=engine_main, args=(theirs, self.device, self.sizes), daemon=True)
        self.process.start()
        theirs.close()
        self.ask("hello")
        self.ask("make", "weights")

    def stop_engine(self) -> None:
        self.buckets, self.copier, self.events, self.others_events = [], None, [], []
        if self.process is None:
            return
        with suppress(OSError):
            self.pipe.send(("quit",))
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)
        self.process = None

    def ask(self, command: str, *arguments: Any) -> Any:
        self.pipe.send((command, *arguments))
        return expect(self.pipe, "ok")[1]

    def open(self, what: str, way: str, bucket_bytes: int, count: int, with_events: bool = False) -> float:
        """Makes buckets and has the engine open them; seconds that it took the engine."""
        self.way = way
        self.buckets = [allocate(way, bucket_bytes, self.device) for _ in range(count)]
        self.copier = Copier(self.weights[what], self.buckets, plan(self.shapes(what), bucket_bytes))
        shared = [share(way, bucket) for bucket in self.buckets]
        handles = self.make_events(count) if with_events else []
        seconds, theirs = self.ask("open", what, way, shared, bucket_bytes, handles)
        self.open_events(theirs)
        return float(seconds)

    def close(self) -> None:
        self.ask("close")
        self.copier, self.events, self.others_events = None, [], []
        for bucket in self.buckets:
            release(self.way, bucket)
        self.buckets = []
        if self.device == "cuda":
            torch.cuda.ipc_collect()

    def sync(self, with_events: bool = False, with_digests: bool = False, damage: bool = False) -> tuple[float, float]:
        """Seconds until the engine has all, and those in which it was busy."""
        copier, count = self.copies(), len(self.buckets)
        total = len(copier.planned)
        self.synchronise()
        start = time.perf_counter()
        self.pipe.send(("sync", total, with_events, with_digests))
        for index in range(total):
            if index >= count:
                expect(self.pipe, "done")
                if with_events:
                    torch.cuda.current_stream().wait_event(self.others_events[index % count])
            copier.pack(index)
            value = None
            if with_events:
                self.events[index % count].record()
            elif with_digests:
                value = int(digest(copier.bucket(index)).item())
                if damage and index == total - 1:
                    copier.bucket(index)[-1] ^= 1
                    self.synchronise()
            else:
                self.synchronise()
            self.pipe.send(("ready", index, value))
        for _ in range(min(count, total)):
            expect(self.pipe, "done")
        busy = float(expect(self.pipe, "ok")[1])
        return time.perf_counter() - start, busy

    def measured(self, what: str, repeats: int, seed: int, **options: Any) -> dict[str, Any]:
        """Checked first: new weights must arrive. Then the median."""
        self.make(what, seed)
        first, _ = self.sync(**options)
        wrong = self.ask("check", what, seed)
        if wrong:
            raise AssertionError(f"{wrong} weights did not arrive as they were sent")
        self.sync(**options)
        self.ask("memory", True)
        self.reset_peak()
        times = [self.sync(**options) for _ in range(repeats)]
        seconds = median(t for t, _ in times)
        return {
            "seconds": seconds,
            "least_s": min(t for t, _ in times),
            "most_s": max(t for t, _ in times),
            "first_s": first,
            "engine_busy_s": median(b for _, b in times),
            "gb_per_s": self.num_bytes(what) / seconds / 1e9,
            "trainer": self.memory(),
            "engine": self.ask("memory", False),
        }

    def num_bytes(self, what: str) -> int:
        return sum(weight.nbytes for weight in self.weights[what])

    def bucket_sizes(self) -> list[int]:
        return [64 * 1024, 16 * 1024] if self.tiny else [GIB, 256 * MIB]

    def name_of(self, size: int) -> str:
        return f"{size // GIB} GiB" if size >= GIB else f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"

    # sections

    def section_floor(self, options: argparse.Namespace) -> dict[str, Any]:
        """A copy of the same bytes inside one process, on the device; and packing alone."""
        weights = self.weights["weights"]
        copies = [torch.empty_like(weight) for weight in weights]
        seconds = self.device_seconds(lambda: torch._foreach_copy_(copies, weights))
        one_by_one = self.device_seconds(lambda: [a.copy_(b) for a, b in zip(copies, weights, strict=True)])
        copies.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        size = self.num_bytes("weights")
        found = {"seconds": seconds, "one_by_one_s": one_by_one, "bytes": size, "tb_per_s": 2 * size / seconds / 1e12}
        bucket = torch.empty(self.bucket_sizes()[0], dtype=torch.uint8, device=self.device)
        copier = Copier(weights, [bucket], plan(self.shapes("weights"), bucket.numel()))
        found["pack_s"] = self.device_seconds(lambda: [copier.pack(i) for i in range(len(copier.planned))])
        start = time.perf_counter()
        for _ in range(100):
            self.ask("hello")
        return {**found, "message_and_answer_us": (time.perf_counter() - start) * 1e4}

    def device_seconds(self, work: Callable[[], Any], repeats: int = 10) -> float:
        work()
        times = []
        for _ in range(repeats):
            self.synchronise()
            start = time.perf_counter()
            work()
            self.synchronise()
            times.append(time.perf_counter() - start)
        return median(times)

    def section_buckets(self, options: argparse.Namespace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for size in self.bucket_sizes():
            for count, with_events in ((1, False), (2, False), (2, True), (4, True)):
                if with_events and self.device != "cuda":
                    continue
                label = f"{count} x {self.name_of(size)}, {'events' if with_events else 'acks'}"
                opened = self.open("weights", PLAIN, size, count, with_events)
                found[label] = self.measured("weights", options.repeats, 1 + len(found), with_events=with_events)
                found[label]["open_s"] = opened
                self.close()
        return found

    def section_digests(self, options: argparse.Namespace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for size in self.bucket_sizes():
            self.open("weights", PLAIN, size, 2)
            bucket = self.buckets[0]
            bucket.random_()
            if int(digest(bucket)) != int(digest(bucket, kernel=False)):
                raise AssertionError("the kernel's digest is not that of torch's operators")
            label = f"2 x {self.name_of(size)}, acks, digests"
            found[label] = self.measured("weights", options.repeats, 21, with_digests=True)
            found[label]["digest_of_a_bucket_s"] = self.device_seconds(lambda b=bucket: digest(b))
            found[label]["digest_by_torch_s"] = self.device_seconds(lambda b=bucket: digest(b, kernel=False), 3)
            found[label]["digest_gb_per_s"] = size / found[label]["digest_of_a_bucket_s"] / 1e9
            self.close()
        self.open("weights", PLAIN, self.bucket_sizes()[0], 2)
        noticed = ""
        try:
            self.sync(with_digests=True, damage=True)
        except RuntimeError as error:
            noticed = str(error).strip().splitlines()[-1]
        found["damaged"] = {"noticed": "is damaged" in noticed, "message": noticed}
        self.close()
        if not found["damaged"]["noticed"]:
            raise AssertionError("a damaged bucket was taken")
        return found

    def section_adapters(self, options: argparse.Namespace) -> dict[str, Any]:
        self.make("adapters", 31)
        self.ask("make", "adapters")
        size = -(-sum(-(-w.nbytes // 256) * 256 for w in self.weights["adapters"]) // MIB) * MIB
        found: dict[str, Any] = {}
        for with_digests in (False, True):
            self.open("adapters", PLAIN, size, 1)
            label = f"rank {RANK}, {len(self.weights['adapters'])} weights{', digest' if with_digests else ''}"
            found[label] = self.measured("adapters", options.repeats, 32, with_digests=with_digests)
            self.close()
        return found

    def section_direct(self, options: argparse.Namespace) -> dict[str, Any]:
        """No bucket: the engine opens the trainer's weights. Only where parameters have memory of their own."""
        self.make("weights", 41)
        self.synchronise()
        if self.device == "cpu":
            self.weights["weights"] = [weight.share_memory_() for weight in self.weights["weights"]]
        opened = self.ask("open_direct", [share(PLAIN, weight) for weight in self.weights["weights"]])
        times = []
        for _ in range(options.repeats + 1):
            self.synchronise()
            start = time.perf_counter()
            self.ask("copy_direct", "weights")
            times.append(time.perf_counter() - start)
        wrong = self.ask("check", "weights", 41)
        self.ask("close")
        if wrong:
            raise AssertionError(f"{wrong} weights did not arrive as they were sent")
        seconds = median(times[1:])
        size = self.num_bytes("weights")
        return {
            "no bucket": {"seconds": seconds, "first_s": times[0], "open_s": opened, "gb_per_s": size / seconds / 1e9}
        }

    def section_cycles(self, options: argparse.Namespace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        size = self.bucket_sizes()[0]
        until = time.monotonic() + 25
        for label, fresh in (("buckets kept", False), ("buckets made and given back each time", True)):
            cycles = options.cycles if not fresh else options.cycles // 2
            readings: list[dict[str, Any]] = []
            done = 0
            if not fresh:
                self.open("weights", PLAIN, size, 2)
            for cycle in range(cycles):
                if fresh:
                    self.open("weights", PLAIN, size, 2)
                self.make("weights", 100 + cycle) if cycle in (0, cycles - 1) else None
                self.sync()
                if fresh:
                    self.close()
                    if self.device == "cuda":
                        torch.cuda.empty_cache()
                done += 1
                if cycle in (4, cycles // 2, cycles - 1) or time.monotonic() > until:
                    readings.append({"cycle": cycle, "trainer": self.memory(), "engine": self.ask("memory", False)})
                if time.monotonic() > until:
                    break
            if done == cycles and (wrong := self.ask("check", "weights", 100 + cycles - 1)):
                raise AssertionError(f"{wrong} weights did not arrive in the last cycle")
            if not fresh:
                self.close()
            found[label] = {"cycles": done, "readings": readings, "growth": growth(readings)}
            until = time.monotonic() + 15
        return found

    def section_host(self, options: argparse.Namespace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        size = self.bucket_sizes()[1]
        room = os.statvfs("/dev/shm")
        free = min(room.f_bavail * room.f_frsize, available_bytes()) // 3
        wanted = int(options.host_gib * GIB) if not self.tiny else 4 * size
        planned = plan(self.shapes("weights"), size)
        count = max(1, min(len(planned), min(wanted, free) // size))
        if free < 2 * size:
            raise RuntimeError(f"/dev/shm and host memory have too little room: {free / GIB:.2f} GiB")
        # Weights that travel as a whole: those before the first that is left out.
        whole = min((piece.weight for pieces in planned[count:] for piece in pieces), default=None)
        for seed, route in enumerate(("pinned", "file", "gloo"), start=51):
            self.make("weights", seed)
            with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="weight-transfer-") as file:
                os.truncate(file.name, size * max(2, count))
                start = time.perf_counter()
                try:
                    self.pipe.send(("host", route, file.name, count, size))
                    sent = HostRoute(self, file.name, count, size, rank=0).send(route, self.pipe)
                    received = expect(self.pipe, "ok")[1]
                finally:
                    Path(f"{file.name}.gloo").unlink(missing_ok=True)
            wrong = self.ask("check", "weights", seed, whole)
            if wrong:
                raise AssertionError(f"{route}: {wrong} weights did not arrive as they were sent")
            moved = sum(used_bytes(pieces) for pieces in planned[:count])
            found[route] = {
                **sent, **received, "bytes": moved, "gb_per_s": moved / sent["seconds"] / 1e9,
                "seconds_of_all": sent["seconds"] * self.num_bytes("weights") / moved,
                "with_setting_up_s": time.perf_counter() - start,
            }  # fmt: skip
        return found

    def section_handover(self, options: argparse.Namespace) -> dict[str, Any]:
        from posttrain.engines.weights import Handover, WeightSender

        found: dict[str, Any] = {}
        sender = WeightSender(module_of(self.weights["weights"]))
        with tempfile.TemporaryDirectory(prefix="weight-transfer-") as folder:
            for over_ipc in (True, False) if self.device == "cuda" else (False,):
                to = Handover(f"bench-{os.getpid()}", Path(folder), on_one_machine=True, over_gpu_memory=over_ipc)
                label, times, copied = ("over CUDA IPC" if over_ipc else "through the file"), [], []
                for number in range(options.repeats + 1):
                    if number == 0:
                        self.make("weights", 71 + over_ipc)
                    self.synchronise()
                    start = time.perf_counter()
                    sent = sender.send(to)
                    if over_ipc and not sent.lots:
                        raise RuntimeError(sent.why_no_bucket)
                    for lot in range(len(sent.lots)) if over_ipc else (None,):
                        if lot is not None:
                            sender.fill(lot)
                        if why := self.ask("handover", sent, lot):
                            raise RuntimeError(why)
                    times.append(time.perf_counter() - start)
                    sender.wait_until_copied()
                    copied.append(time.perf_counter() - start)
                    if number == 0 and (wrong := self.ask("check", "weights", 71 + over_ipc)):
                        raise AssertionError(f"{label}: {wrong} weights did not arrive as they were sent")
                seconds = median(times[1:])
                found[label] = {
                    "seconds": seconds, "least_s": min(times[1:]), "most_s": max(times[1:]), "first_s": times[0],
                    "file_complete_s": median(copied[1:]), "gb_per_s": self.num_bytes("weights") / seconds / 1e9,
                    "file": str(sent.file.parent), "trainer": self.memory(), "engine": self.ask("memory", False),
                }  # fmt: skip
            sender.remove_file()
        return found

    def section_expandable(self, options: argparse.Namespace) -> dict[str, Any]:
        found: dict[str, Any] = {"may this process take another's files": self.ask("probe", os.getpid())}
        for way in WAYS if self.device == "cuda" else (PLAIN,):
            try:
                opened = self.open("weights", way, self.bucket_sizes()[0], 2)
                expandable = is_expandable(self.buckets[0])
                measured = self.measured("weights", max(3, options.repeats // 2), 61)
                self.close()
                found[way] = {**measured, "open_s": opened, "expandable": expandable}
            except Exception as error:
                lines = [line for line in str(error).strip().splitlines() if line.strip()]
                found[way] = {
                    "error": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300],
                    "output": str(error)[-1500:],
                    "expandable": is_expandable(self.buckets[0]) if self.buckets else None,
                }
                self.stop_engine()
                self.start_engine()
        return found


def growth(readings: Sequence[dict[str, Any]]) -> dict[str, float]:
    """From the first reading to the last, of whatever changed."""
    if len(readings) < 2:
        return {}
    first, last = readings[0], readings[-1]
    return {
        f"{side} {key}": last[side][key] - first[side][key]
        for side in ("trainer", "engine")
        for key in first[side]
        if abs(last[side][key] - first[side][key]) > 1e-3
    }


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def pidfd_probe(pid: int) -> dict[str, Any]:
    """Expandable segments are shared as file descriptors that the receiver takes out of the sender: is that allowed?"""
    libc = ctypes.CDLL(None, use_errno=True)
    found: dict[str, Any] = {"open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    found["ptrace_scope"] = scope.read_text().strip() if scope.exists() else None
    descriptor = libc.syscall(434, pid, 0)  # pidfd_open
    taken = libc.syscall(438, descriptor, 0, 0) if descriptor >= 0 else -1  # pidfd_getfd
    found["pidfd_getfd"] = "works" if taken >= 0 else os.strerror(ctypes.get_errno())
    for each in (descriptor, taken):
        if each >= 0:
            os.close(each)
    return found


# -- jobs ------------------------------------------------------------------------------------------------------------


def do_job(options: argparse.Namespace, sections: Sequence[str], ends: float) -> dict[str, Any]:
    device = "cpu" if options.tiny else "cuda"
    trainer = Trainer(device, TINY if options.tiny else LlamaSizes())
    trainer.tiny = options.tiny
    torch.set_grad_enabled(False)
    torch.multiprocessing.set_sharing_strategy("file_system")
    report: dict[str, Any] = {"machine": machine(device), "sections": {}, "seconds": {}}
    try:
        trainer.make("weights", 0)
        for name in sections:
            start = time.monotonic()
            try:
                if time.time() > ends - 4:
                    raise TimeoutError("no time left")
                if trainer.process is None:
                    trainer.start_engine()
                report["sections"][name] = getattr(trainer, f"section_{name}")(options)
            except Exception as error:
                traceback.print_exc()
                report["sections"][name] = {"error": f"{type(error).__name__}: {error}"[-1500:]}
                try:
                    trainer.stop_engine()
                    if device == "cuda":
                        torch.cuda.empty_cache()
                except Exception:
                    traceback.print_exc()
            report["seconds"][name] = time.monotonic() - start
            print(f"[{name}: {report['seconds'][name]:.1f} s]", flush=True)
            options.result.write_text(json.dumps(report))  # what there is, should this process be stopped
    finally:
        trainer.stop_engine()
    return report


def run_job(
    options: argparse.Namespace, sections: Sequence[str], environment: dict[str, str], ends: float
) -> dict[str, Any]:
    """In a process of its own, whose allocator has these settings. What it had found counts, even if it had to be
    stopped.
    """
    with tempfile.TemporaryDirectory(prefix="weight-transfer-") as scratch:
        result = Path(scratch) / "result.json"
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--job",
            *sections,
            "--result",
            str(result),
            "--ends",
            str(ends),
            "--repeats",
            str(options.repeats),
            "--cycles",
            str(options.cycles),
            "--host-gib",
            str(options.host_gib),
        ]
        command += ["--tiny"] if options.tiny else []
        process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
        note = None
        try:
            code = process.wait(max(5.0, ends + 8 - time.time()))
            note = f"the job ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            note = "the job was stopped: no time left"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
        found = json.loads(result.read_text()) if result.exists() else {"sections": {}}
        return {**found, "note": note}


def machine(device: str) -> dict[str, Any]:
    try:
        return facts(device)
    except Exception as error:  # posttrain may not be installed where only transfers are timed
        return {"error": str(error), "torch": torch.__version__}


def show(report: dict[str, Any]) -> None:
    sections: dict[str, Any] = {}
    for job in report["jobs"].values():
        sections |= job["sections"]
    floor = sections.get("floor", {})
    if "seconds" in floor:
        print(
            f"\n{floor['bytes'] / 1e9:.2f} GB; floor, a copy on the device: {floor['seconds'] * 1e3:.1f} ms "
            f"({floor['tb_per_s']:.2f} TB/s read and written), one weight after the other "
            f"{floor['one_by_one_s'] * 1e3:.1f} ms; "
            f"packing alone {floor['pack_s'] * 1e3:.1f} ms; a message and its answer "
            f"{floor['message_and_answer_us']:.0f} us"
        )
    lines = []
    for name in ("buckets", "digests", "adapters", "direct", "handover", "expandable"):
        for label, entry in sections.get(name, {}).items():
            if isinstance(entry, dict) and "seconds" in entry:
                trainer, engine = entry.get("trainer", {}), entry.get("engine", {})
                times = [entry.get(key, entry["seconds"]) * 1e3 for key in ("seconds", "most_s", "first_s")]
                held = [trainer.get("peak_gib"), engine.get("peak_gib"), engine.get("device_used_gib")]
                lines.append([f"{name}: {label}", *times, entry["gb_per_s"], entry.get("open_s", 0.0) * 1e3, *held])
    if lines:
        header = ["route", "ms", "most", "first", "GB/s", "open ms", "trainer GiB", "engine GiB", "device GiB"]
        print("\nmilliseconds of a sync, median; peaks of what tensors held\n" + table(header, lines))
    for label, entry in sections.get("digests", {}).items():
        if "digest_of_a_bucket_s" in entry:
            ms, by_torch = entry["digest_of_a_bucket_s"] * 1e3, entry["digest_by_torch_s"] * 1e3
            print(
                f"digest of a bucket ({label}): {ms:.3f} ms, {entry['digest_gb_per_s']:.0f} GB/s; by torch "
                f"{by_torch:.1f} ms"
            )
        elif "noticed" in entry:
            print(f"a damaged byte is noticed: {entry['noticed']}")
    for label, entry in sections.get("cycles", {}).items():
        if isinstance(entry, dict):
            print(f"{entry['cycles']} cycles, {label}: growth {entry['growth'] or 'none'}")
    for label, entry in sections.get("host", {}).items():
        if isinstance(entry, dict):
            print(
                f"host, {label}: {entry['gb_per_s']:.1f} GB/s over {entry['bytes'] / 1e9:.1f} GB, "
                f"{entry['seconds_of_all']:.2f} s for all"
            )
    for label, entry in sections.get("handover", {}).items():
        if "file_complete_s" in entry:
            print(
                f"handover, {label}: the file in {entry['file']} is complete after "
                f"{entry['file_complete_s'] * 1e3:.0f} ms"
            )
    for label, entry in sections.get("expandable", {}).items():
        if "seconds" not in entry:
            print(f"expandable segments, {label}: {entry.get('error', entry)}")
        else:
            print(f"expandable segments, {label}: works; in a segment that can grow: {entry['expandable']}")
    for name, job in report["jobs"].items():
        if job.get("note"):
            print(f"{name}: {job['note']}")
    for name, section in sections.items():
        if "error" in section:
            print(f"section {name} failed: {section['error'].strip().splitlines()[-1]}")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", default=[], choices=SECTIONS, help="sections to leave out")
    parser.add_argument(
        "--repeats", type=int, default=10, metavar="N", help="syncs of which the median counts (default: 10)"
    )
    parser.add_argument("--cycles", type=int, default=200, metavar="N", help="syncs after which memory is compared")
    parser.add_argument(
        "--host-gib", type=float, default=3.0, help="weights that go through host memory (default: 3 GiB)"
    )
    parser.add_argument("--seconds", type=float, default=130.0, help="after which nothing new begins (default: 130)")
    parser.add_argument("--tiny", action="store_true", help="small weights on a CPU, through shared memory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.job:
        do_job(options, options.job, options.ends)
        return 0
    if not options.tiny and not torch.cuda.is_available():
        print("weight_transfer.py needs a CUDA device, or --tiny to be tried on a CPU", file=sys.stderr)
        return 64
    ends = time.time() + options.seconds
    kept = [name for name in SECTIONS if name not in options.skip]
    report: dict[str, Any] = {"jobs": {}}
    # The short job first: whether memory that can grow can be shared is what the design waits for.
    jobs = {
        "expandable segments": ([name for name in kept if name == "expandable"], "expandable_segments:True"),
        "usual memory": ([name for name in kept if name != "expandable"], ""),
    }
    for name, (sections, setting) in jobs.items():
        if sections:
            environment = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
            share_of_time = ends if name == "usual memory" else min(ends, time.time() + 0.4 * options.seconds)
            report["jobs"][name] = run_job(options, sections, environment, share_of_time)
            write_json(options.out, report)
    show(report)
    failed = [
        job for job in report["jobs"].values() if job["note"] or any("error" in s for s in job["sections"].values())
    ]
    return 1 if failed or not report["jobs"] else 0


if __name__ == "__main__":
    sys.exit(main())
