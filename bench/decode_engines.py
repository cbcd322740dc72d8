"""The engines of `decode.py` that run `transformers` modules: posttrain's own, `generate`, and continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from decode_job import DecodeJob, Engine, Sampled, timed
from profiling import cost_table, largest_costs
from shapes import PAD, open_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from workloads import Workload

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.errors import InputError
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.parallel.fsdp import shard, whole_parameters
from posttrain.types import Completion, NoiseKey, Sampling, Task

NATIVE, GENERATE, CONTINUOUS = "native", "generate", "continuous"
_PROFILED_TOKENS = 16


class NativeSampling:
    """posttrain's engine. A prompt is computed once for all its samples."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, settings: NativeSettings) -> None:
        tokenizer.decode = lambda *_, **__: ""  # no engine turns tokens into text here
        self.engine = NativeEngine(model, tokenizer, settings)
        self.num_calls = 0

    def release(self) -> None:
        self.engine.release()

    def sample(self, prompts: Sequence[Sequence[int]], work: Workload) -> Callable[[], Sampled]:
        tasks = [
            Task(draw, f"bench:{draw}", "", tuple(prompt), max_new_tokens=limit)
            for draw, (prompt, limit) in enumerate(zip(prompts, work.limits, strict=True))
        ]
        sampling = Sampling(max_new_tokens=work.longest, ignore_eos=True)
        # Calls with the same key would sample the same tokens.
        self.num_calls += 1
        key = NoiseKey(seed=0, step=self.num_calls)
        with whole_parameters(self.engine.model):
            groups = self.engine.generate(tasks, work.num_samples, sampling, key)
        return lambda: _of_completions([completion for group in groups for completion in group])


def _of_completions(completions: Sequence[Completion]) -> Sampled:
    logprobs = [logprob for completion in completions for logprob in completion.logprobs]
    return Sampled(
        [len(completion.token_ids) for completion in completions],
        [len(completion.logprobs) for completion in completions],
        sum(logprobs) / max(len(logprobs), 1),
    )


def native_settings(job: DecodeJob) -> NativeSettings:
    """Sizes for the workload; options of the command line take precedence."""
    known = NativeSettings.model_fields
    if unknown := sorted(set(job.native) - set(known)):
        raise InputError(f"--native {', '.join(unknown)}: the native engine has {', '.join(known)}")
    room = {"max_batch_size": job.max_batch_size, "max_total_tokens": job.longest}
    return NativeSettings(**{**room, **job.native})


class _KeepLogprobs(LogitsProcessor):
    """Remembers the log-probability of each drawn token: `generate` can only keep the scores of the whole
    vocabulary.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.drawn: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.take(input_ids[:, -1])
        self.last = scores.float().log_softmax(-1)
        return scores

    def take(self, tokens: Tensor) -> None:
        if self.last is not None:
            self.drawn.append(self.last.gather(1, tokens[:, None]).squeeze(1))
            self.last = None


class GenerateSampling:
    """`model.generate` on batches of rows. A batch runs until its longest row is done; what is beyond a row's limit is
    lost.
    """

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.model.config.use_cache = True
        self.model.generation_config.eos_token_id = None  # `generate` takes from it what the call leaves out

    def sample(self, prompts: Sequence[Sequence[int]], work: Workload) -> Callable[[], Sampled]:
        group = work.num_samples
        per_call = max(1, self.batch // group)
        lengths: list[int] = []
        kept: list[Tensor] = []
        for start in range(0, len(prompts), per_call):
            rows, limits = prompts[start : start + per_call], work.limits[start : start + per_call]
            logprobs = self._call(rows, max(limits), group)
            for row, limit in enumerate(limit for limit in limits for _ in range(group)):
                kept.append(logprobs[row, :limit])
                lengths.append(len(kept[-1]))
        return lambda: Sampled(lengths, lengths, float(torch.cat(kept).mean()))

    @torch.no_grad()
    def _call(self, rows: Sequence[Sequence[int]], num_new: int, group: int) -> Tensor:
        ids = torch.tensor(rows, device=self.model.device)
        logprobs = _KeepLogprobs()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList([logprobs]),
            generation_config=_plain_sampling(num_new, num_return_sequences=group),
        )
        logprobs.take(out[:, -1])
        assert out.shape[1] == ids.shape[1] + num_new, "every row has the length asked for"
        return torch.stack(logprobs.drawn, dim=1)


def _plain_sampling(num_new: int, **options: Any) -> GenerationConfig:
    # top_k would default to 50; with eos None only the length ends a row.
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=PAD,
        **options,
    )


class ContinuousSampling:
    """`transformers`' continuous batching. Each sample is a request of its own; equal prompts may share
    their blocks.
    """

    def __init__(self, model: PreTrainedModel, job: DecodeJob) -> None:
        from transformers import ContinuousBatchingConfig

        works = job.works
        options: dict[str, Any] = {"return_logprobs": True}
        if job.device == "cpu":  # where it would take nine tenths of the machine's memory
            options |= {"num_blocks": 4 * max(work.num_sequences for work in works), "max_batch_tokens": 256}
        self._running = model.continuous_batching_context_manager(
            generation_config=_plain_sampling(max(work.longest for work in works)),
            continuous_batching_config=ContinuousBatchingConfig(**options),
        )
        self.manager = self._running.__enter__()
        self.num_requests = 0

    def close(self) -> None:
        self._running.__exit__(None, None, None)

    def sample(self, prompts: Sequence[Sequence[int]], work: Workload) -> Callable[[], Sampled]:
        names = []
        for index, prompt in enumerate(prompts):
            for _ in range(work.num_samples):
                names.append(f"sample-{self.num_requests}")
                self.num_requests += 1
                self.manager.add_request(list(prompt), request_id=names[-1], max_new_tokens=work.limits[index])
        finished: dict[str, Any] = {}
        while len(finished) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished[result.request_id] = result
            elif result is None and not self.manager.is_running():
                raise RuntimeError("the thread of transformers' continuous batching ended")
        return lambda: _of_requests([finished[name] for name in names])


def _of_requests(outputs: Sequence[Any]) -> Sampled:
    logprobs = [logprob for output in outputs for logprob in output.logprobs]
    return Sampled(
        [len(output.generated_tokens) for output in outputs],
        [len(output.logprobs) for output in outputs],
        sum(logprobs) / max(len(logprobs), 1),
    )


def _sharded(model: PreTrainedModel, device: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    fuse_layers(model.get_decoder(), may_join=False)  # as a trainer does, before sharding
    shard(model, list(model.model.layers), init_device_mesh(device, (1,)))
    model._get_fsdp_state()._lazy_init()  # what a first forward pass does


def measure(job: DecodeJob) -> dict[str, Any]:
    """One of the engines of this file, in this process."""
    attention = {} if job.engine == NATIVE else {"attention": "sdpa"}
    model, tokenizer = open_model(job.model, job.device, job.torch_dtype, job.seed, **attention)
    if job.sharded:
        _sharded(model, job.device)
    build: Callable[[], Engine]
    if job.engine == NATIVE:
        build = lambda: NativeSampling(model, tokenizer, native_settings(job))  # noqa: E731
    elif job.engine == GENERATE:
        build = lambda: GenerateSampling(model, job.generate_batch)  # noqa: E731
    else:
        build = lambda: ContinuousSampling(model, job)  # noqa: E731
    result, engine = timed(job, build)
    if isinstance(engine, ContinuousSampling):
        engine.close()
    if job.profile:
        work = job.works[0]
        costs, busy = largest_costs(lambda: engine.sample(job.prompts(work), work.cut_to(_PROFILED_TOKENS)), job.device)
        result["profile"] = {"busy": busy, "costs": [vars(cost) for cost in costs]}
        result["profile_text"] = cost_table(costs, busy, job.device)
    return result
