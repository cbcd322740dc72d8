"""The native engine: samples from the very modules that are being trained. Implements `roles.Engine`.

No weight is copied, merged or changed. What a call needs beyond the weights, the KV cache above all, is made when it is
first needed. On a GPU it stays for the next call, with the recorded steps that know its addresses, until `release`: training
may want the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from posttrain.engines.native.attention import DenseDecode, PagedDecode
from posttrain.engines.native.call import GenerationCall
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.graphs import DecodeGraphs
from posttrain.engines.native.kv_cache import PagedKvCache, num_pages_for_call
from posttrain.engines.native.noise import sequence_key
from posttrain.engines.native.pages import pages_for
from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import PromptGroup, Sample, Scheduler, pages_needed
from posttrain.engines.native.stopping import StopRules
from posttrain.errors import InputError
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.runtime import evaluation_mode
from posttrain.roles import Progress
from posttrain.types import SMALLEST_TEMPERATURE, Completion, NoiseKey, Sampling, Task


class SamplingError(InputError):
    """A request that cannot be sampled."""


@dataclass(frozen=True)
class NativeSettings:
    """Sizes of the engine. None of them changes what is sampled."""

    page_size: int = 16  # tokens per page of the KV cache
    max_batch_size: int = 256  # sequences that decode together
    max_prefill_tokens: int = 8192  # prompt tokens in one forward pass
    kv_cache_gib: float | None = None  # None: what a call needs, at most 2 GiB on a CPU or what follows on a GPU
    gpu_memory_utilization: float = 0.9  # of a GPU's memory, for everything on it: weights, training's state, cache
    max_total_tokens: int = 4096  # prompt and completion together
    # Whatever was sampled before, and however much memory happens to be free, the same call computes the same bits.
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_size", "max_prefill_tokens", "max_total_tokens"):
            if getattr(self, name) < 1:
                raise SamplingError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SamplingError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: above 0 and at most 1 is accepted"
            )
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise SamplingError(f"kv_cache_gib is {self.kv_cache_gib}: a positive number, or nothing, is needed")


@dataclass
class Workspace:
    """What a call works in."""

    cache: PagedKvCache
    num_pages: int
    is_largest: bool  # memory did not allow for more
    max_length: int  # of a sequence, in tokens
    decode: DenseDecode | PagedDecode
    graphs: DecodeGraphs | None = None

    def fits(self, wanted: int, least: int, longest: int) -> bool:
        enough = self.num_pages >= wanted or (self.is_largest and self.num_pages >= least)
        return enough and longest <= self.max_length

    def begin(self, groups: Sequence[PromptGroup], num_samples: int) -> None:
        """Forget the call before: its samples had the same numbers and other pages."""
        if isinstance(self.decode, PagedDecode):
            self.decode.forget_rows()
        if self.graphs is not None:
            self.graphs.begin(groups, num_samples)


class NativeEngine:
    """`model` is a causal language model of `transformers`, loaded with `attn_implementation="posttrain"`, or a PeftModel of
    one. Adapters are active unless the caller has turned them off."""

    def __init__(self, model: nn.Module, tokenizer: Any, settings: NativeSettings | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or NativeSettings()
        # Sharded modules bring streams of their own into a recording, and their weights do not stay where they are.
        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self.forward = ForwardPass(model)
        fuse_layers(self.forward.head.decoder, may_join=not sharded)
        self._keeps_workspace = self.forward.device.type != "cpu"
        self._may_record = not sharded and self.forward.device.type == "cuda"  # tried until it fails once
        self._workspace: Workspace | None = None
        self._largest = (0, 0)  # pages and tokens of one sequence that calls have wanted so far
        self.num_preemptions = 0  # in the last call: many of them mean that the KV cache is too small
        # Ids up to the tokenizer's highest may be drawn; the rest of the output head is padding.
        self._vocab_size = min(max(tokenizer.get_vocab().values()) + 1, self.forward.head.vocab_size)

    @torch.no_grad()  # not inference_mode: its tensors could be left behind in buffers that training uses
    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
        *,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """For each task `num_samples` completions, in order. `progress` hears of finished completions.

        `limits`: the most tokens for each task, where they differ; `sampling.max_new_tokens` holds for all.
        """
        _check(sampling, num_samples)
        if limits is not None and (len(limits) != len(tasks) or min(limits, default=1) < 1):
            raise SamplingError(f"limits has {len(limits)} numbers for {len(tasks)} tasks: one of at least 1 for each")
        stop = StopRules.of(self.forward.base, self.tokenizer, sampling)
        samples = [
            Sample(group, index, sequence_key(key.seed, key.step, group.task.draw, index), scanner=stop.scanner())
            for group in [
                self._group(task, min(sampling.max_new_tokens, limit))
                for task, limit in zip(tasks, limits or [sampling.max_new_tokens] * len(tasks), strict=True)
            ]
            for index in range(group.task.first_sample, group.task.first_sample + num_samples)
        ]
        if samples:
            with evaluation_mode(self.model):
                self._run(samples, sampling, stop, progress)
        completions = [self._completion(sample) for sample in samples]
        return [completions[start : start + num_samples] for start in range(0, len(completions), num_samples)]

    def release(self) -> None:
        """Give the memory of the KV cache and of recorded steps back, for training. The next call makes them again."""
        if self._workspace is not None:
            self._workspace = None
            torch.cuda.empty_cache()  # what recordings used is of no use to anybody else until then

    @property
    def num_held_bytes(self) -> int:
        """Memory that `release` would free, but for that of recorded steps."""
        return 0 if self._workspace is None else self._workspace.cache.num_bytes

    def _group(self, task: Task, max_new_tokens: int) -> PromptGroup:
        length, limit = len(task.prompt_ids), self.settings.max_total_tokens
        if not 0 < length < limit:
            raise SamplingError(
                f"task {task.id!r} has {length} prompt tokens: between 1 and {limit - 1} fit max_total_tokens {limit}"
            )
        if not 0 <= min(task.prompt_ids) <= max(task.prompt_ids) < self.forward.head.vocab_size:
            raise SamplingError(
                f"task {task.id!r} has a token outside the model's vocabulary of {self.forward.head.vocab_size}: "
                "was it made with another tokenizer?"
            )
        return PromptGroup(task, min(max_new_tokens, limit - length))

    def _run(self, samples: list[Sample], sampling: Sampling, stop: StopRules, progress: Progress | None) -> None:
        settings = self.settings
        groups = list(dict.fromkeys(sample.group for sample in samples))
        longest = max(group.prompt_length + group.max_new_tokens for group in groups)
        self.forward.check_length(longest)
        workspace = self._workspace_for(groups, len(samples) // len(groups), longest)
        workspace.begin(groups, len(samples) // len(groups))
        scheduler = Scheduler(samples, workspace.num_pages, settings.page_size, settings.max_batch_size)
        call = GenerationCall(
            self.forward, workspace.cache, scheduler, workspace.decode, TokenSampler(sampling, self._vocab_size), stop,
            settings.max_prefill_tokens, progress, workspace.graphs,
        )  # fmt: skip
        try:
            call.run()
        except BaseException:
            self._workspace = None  # steps may still be under way in it
            raise
        self.num_preemptions = scheduler.num_preemptions
        if workspace.graphs is not None and call.graphs is None:
            self._may_record, workspace.graphs = False, None

    def _workspace_for(self, groups: Sequence[PromptGroup], num_samples: int, longest: int) -> Workspace:
        """That of the call before, if it is large enough or as large as it could be; else a new one."""
        settings, device = self.settings, self.forward.device
        wanted = _pages_wanted(groups, num_samples, settings)
        least = max(pages_needed(group, settings.page_size) for group in groups)
        held = self._workspace
        if held is not None and held.fits(wanted, least, longest):
            return held
        self.release()
        if self._keeps_workspace:
            if settings.deterministic:
                longest = settings.max_total_tokens  # how attention is divided among processors depends on it
            # Calls of many sizes take turns, a conversation's turns for instance: the largest so far fits them all.
            wanted, longest = self._largest = max(wanted, self._largest[0]), max(longest, self._largest[1])
        layers = self.forward.layers()
        num_pages = num_pages_for_call(
            layers, settings.page_size, settings.kv_cache_gib, device, wanted=wanted, least=least,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            reserve=self.forward.working_bytes(settings.max_prefill_tokens, settings.max_batch_size),
        )  # fmt: skip
        by_chance = self._keeps_workspace and settings.kv_cache_gib is None and num_pages < wanted
        if settings.deterministic and by_chance:
            raise SamplingError(
                "deterministic sampling wants room for all answers that run together, and the memory that is free allows for "
                f"{num_pages / wanted:.0%} of it: who waits for whom would depend on what else is there. Set kv_cache_gib, "
                "or lower max_batch_size"
            )
        cache = PagedKvCache(layers, num_pages + 1, settings.page_size, device)  # one that belongs to nobody
        if not self._keeps_workspace:
            return Workspace(cache, num_pages, num_pages < wanted, longest, DenseDecode(cache, longest))
        width = pages_for(longest, settings.page_size)
        decode = PagedDecode(cache, settings.max_batch_size, width, num_heads=self.forward.config.num_attention_heads)
        graphs = DecodeGraphs(self.forward, decode) if self._may_record else None
        workspace = Workspace(cache, num_pages, num_pages < wanted, width * settings.page_size, decode, graphs)
        self._workspace = workspace
        return workspace

    def _completion(self, sample: Sample) -> Completion:
        assert sample.finish_reason is not None
        return Completion(
            token_ids=tuple(sample.token_ids),
            logprobs=tuple(sample.logprobs),
            text=self.tokenizer.decode(sample.token_ids, skip_special_tokens=True),
            finish_reason=sample.finish_reason,
        )


def _pages_wanted(groups: Sequence[PromptGroup], num_samples: int, settings: NativeSettings) -> int:
    """Pages with which the largest batch that may run together never waits for one."""
    size = settings.page_size

    def own(group: PromptGroup) -> int:
        return pages_for(group.prompt_length + group.max_new_tokens, size) - group.prompt_length // size + 1

    total, slots = 0, settings.max_batch_size
    for group in sorted(groups, key=own, reverse=True):
        together = min(num_samples, slots)
        total += pages_for(group.prompt_length, size) + together * own(group)
        slots -= together
        if slots == 0:
            break
    return max(total + 1, max(pages_needed(group, size) for group in groups))


def _check(sampling: Sampling, num_samples: int) -> None:
    wrong = {
        "num_samples": (num_samples, num_samples >= 1, "at least 1"),
        "max_new_tokens": (sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        "temperature": (
            sampling.temperature,
            sampling.temperature == 0 or sampling.temperature >= SMALLEST_TEMPERATURE,
            f"0 (greedy), or at least {SMALLEST_TEMPERATURE:g},",
        ),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1 (off)"),
        "top_k": (sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        "stop_strings": (sampling.stop_strings, all(sampling.stop_strings), "strings that are not empty"),
    }
    for name, (value, fine, accepted) in wrong.items():
        if not fine:
            raise SamplingError(f"{name} is {value!r}: {accepted} is accepted")
