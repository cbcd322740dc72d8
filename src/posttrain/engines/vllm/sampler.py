"""vLLM as the engine of a training run, in a separate process and Python environment. Implements `roles.RankEngine`.

Weights are pushed in buckets with a digest, under their names in the model's files, over CUDA IPC or through files in
shared memory. For adapted models only the adapters are pushed. Every sample is a request with its own seed, a function
of (seed, step, draw, sample); its log-probabilities are vLLM's, close to the trainer's and not equal.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from posttrain.config import PolicyConfig
from posttrain.config.policy import GenerationConfig
from posttrain.engines.vllm.process import Deadlines, VllmError, VllmProcess
from posttrain.engines.vllm.requests import LengthLimit, allowed_rank, sample_request, sampling_arguments, vllm_options
from posttrain.engines.vllm.side.posttrain_weights import digest, handle_of, layout, lots_of, padded, views
from posttrain.engines.weights import MEMORY_FOLDER, reserve_file
from posttrain.errors import StopRequested
from posttrain.models.hub import processor_files
from posttrain.models.loading import resolve_device
from posttrain.models.lora import is_adapted
from posttrain.policy.checkpoint.files import is_stored_otherwise, named_adapters, named_weights
from posttrain.policy.experts import adapters_by_file, stacked_experts
from posttrain.policy.head import without_adapter_wrapper
from posttrain.policy.runtime import shareable_memory
from posttrain.roles import Progress
from posttrain.types import (
    Completion,
    NoiseKey,
    OpenAnswer,
    OpenGroup,
    Quota,
    Sampling,
    Task,
    Unfinished,
    completions_of,
)

_GPU_BUCKET_BYTES, _FILE_BUCKET_BYTES = 1 << 30, 256 << 20
_PEFT = "base_model.model."
_STACKED_ADAPTERS = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe")  # families whose adapters vLLM loads as peft saves them


class VllmSampler:
    """`model` is the trained model, on `device`; its tensors are read whenever weights are pushed. vLLM is on the same
    GPU; if the model is in host memory, on the GPUs of this process."""

    shares_tensors = False

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig, device: torch.device
    ) -> None:
        assert policy.generation is not None
        self._model, self._tokenizer, self._device = model, tokenizer, device
        self._longest = LengthLimit("policy.max_total_sequence_length", policy.max_total_sequence_length)
        self._is_adapted = is_adapted(model)
        self._records_routes = policy.router_replay.enabled
        self._converts = is_stored_otherwise(without_adapter_wrapper(model), dict(base_weights(model)))
        empty = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in base_weights(model))
        self._shapes = {name: list(tensor.shape) for name, tensor in self._as_in_files(empty)}
        self.version: int | None = None  # of the weights that vLLM holds
        self.should_stop: Callable[[], bool] = lambda: False  # checked at every heartbeat; True ends the call
        self._is_ready = True  # ready to sample; otherwise its memory must be restored first
        self._is_awake = True
        self._num_adapters = 0
        self._shares_gpu = device.type == "cuda"
        self._on_gpu = self._shares_gpu or resolve_device(policy.device).type == "cuda"
        # Else a folder on disk: containers often have little or no shared memory.
        usable = os.access(MEMORY_FOLDER, os.W_OK)
        usable = usable and shutil.disk_usage(MEMORY_FOLDER).free > 4 * _FILE_BUCKET_BYTES
        self._folder = Path(tempfile.mkdtemp(prefix="posttrain-weights-", dir=MEMORY_FOLDER if usable else None))
        vllm = policy.generation.vllm_cfg
        assert vllm.python is not None, "refused when the config is loaded"
        with tempfile.TemporaryDirectory(prefix="posttrain-model-") as folder:
            self._save_model(Path(folder), Path(policy.model_name))
            self.process = VllmProcess(
                vllm.python,
                self._options(policy, policy.generation) | {"model": folder},
                _environment(policy, policy.generation, device.index or 0 if self._on_gpu else None),
                Deadlines(vllm.start_timeout_s, vllm.timeout_s),
                self._folder,
            )
        self.release()

    def _save_model(self, folder: Path, source: Path) -> None:
        """The model folder that vLLM loads. Weights are pushed later, except base weights under adapters, which never
        change: for these it is the run's initial model, or a copy.
        """
        files = list(source.glob("*.safetensors*")) if self._is_adapted and source.is_dir() else []
        weights = {}
        if self._is_adapted and not files:
            weights = {
                name: tensor.cpu().contiguous() for name, tensor in self._as_in_files(_whole(base_weights(self._model)))
            }
        # Not with save_pretrained, which writes on the first rank only: every rank has its own vLLM.
        base = without_adapter_wrapper(self._model)
        base.config.architectures = base.config.architectures or [type(base).__name__]
        for config in (base.config, base.generation_config):
            config.save_pretrained(folder)
        if weights:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if base.config.get_text_config() is not base.config:
            files += processor_files(str(source))
        for file in files:
            (folder / file.name).symlink_to(file.absolute())
        self._tokenizer.save_pretrained(folder)

    def _options(self, policy: PolicyConfig, generation: GenerationConfig) -> dict[str, object]:
        section = generation.vllm_cfg
        extra = {"disable_log_stats": True, **generation.vllm_kwargs}
        if not self._on_gpu:
            extra.setdefault("enforce_eager", True)  # compiling takes minutes and gains little
        if section.tensor_parallel_size > 1:
            extra.setdefault("distributed_executor_backend", "mp")  # Ray would start workers on GPUs of others
        own: dict[str, object] = {
            "load_format": section.load_format or ("auto" if self._is_adapted else "dummy"),
            "max_model_len": section.max_model_len or self._longest.num_tokens,
            "weight_transfer_config": {"backend": "posttrain"},
            "worker_extension_cls": "posttrain_receiver.WorkerExtension",
            "enable_sleep_mode": self._shares_gpu,
        }
        if self._records_routes:
            own["enable_return_routed_experts"] = True
        if self._is_adapted:
            settings: Any = self._model.peft_config["default"]  # type: ignore[index]
            rank = max([settings.r, *settings.rank_pattern.values()])
            own |= {"enable_lora": True, "max_lora_rank": allowed_rank(rank), "max_loras": 1}
        return {**vllm_options(section, extra, section.precision or policy.precision), **own}

    # -- weights -------------------------------------------------------------------------------------------------------

    def take_weights(self, version: int) -> None:
        """Push the trainer's current weights to vLLM. Collective on sharded ranks."""
        self._free_cached_memory()
        self.version = None
        if self._is_adapted:
            self._push_adapter()
        else:
            self._is_ready, self._is_awake = False, True
            self.process.call("begin_update", shapes=self._shapes)
            send = self._send_memory if self._device.type == "cuda" else self._send_files
            send(version, self._as_in_files(_whole(base_weights(self._model))))
            wrong = self.process.call("end_update", version=version)
            if wrong is not None:
                raise VllmError(f"vLLM has not taken over the weights of version {version}: {wrong}")
        self.version = version

    def _as_in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """In the layout of the model's files, which is vLLM's: of stacked experts one tensor for each."""
        from transformers.core_model_loading import revert_weight_conversion

        base = without_adapter_wrapper(self._model)
        for name, tensor in weights:
            found = {name: tensor}
            yield from (revert_weight_conversion(base, found) if self._converts else found).items()

    def _send_files(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        for index, lot in enumerate(lots_of(weights, _FILE_BUCKET_BYTES)):
            bucket = layout(version, index, lot)
            file = self._folder / f"bucket-{index}"
            bucket.file = str(file)
            reserve_file(file, bucket.size)
            flat = torch.from_file(bucket.file, shared=True, size=bucket.size, dtype=torch.uint8)
            for (_, tensor), (_, view) in zip(lot, views(bucket, flat), strict=True):
                view.copy_(tensor)
            bucket.digest = digest(flat)
            self.process.call("bucket", bucket=dataclasses.asdict(bucket))
            file.unlink()  # its memory stays until the receiver releases it

    def _send_memory(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        largest = max(padded(tensor.nbytes) for _, tensor in base_weights(self._model))
        with shareable_memory():
            memory = torch.empty(max(_GPU_BUCKET_BYTES, largest), dtype=torch.uint8, device=self._device)
        handle = handle_of(memory)
        for index, lot in enumerate(lots_of(weights, _GPU_BUCKET_BYTES)):
            bucket = layout(version, index, lot)
            bucket.handle = handle
            for (_, tensor), (_, view) in zip(lot, views(bucket, memory), strict=True):
                view.copy_(tensor)
            bucket.digest = digest(memory[: bucket.size])  # waits for the copies
            self.process.call("bucket", bucket=dataclasses.asdict(bucket))
        del memory
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def _push_adapter(self) -> None:
        self._num_adapters += 1
        folder = self._folder / f"adapter-{self._num_adapters}"
        folder.mkdir()
        adapters = {name: tensor.contiguous().cpu() for name, tensor in _whole(named_adapters(self._model).items())}
        base = without_adapter_wrapper(self._model)
        if stacked_experts(base) and not str(base.config.get_text_config().model_type).startswith(_STACKED_ADAPTERS):
            plain = {name.removeprefix(_PEFT): tensor for name, tensor in adapters.items()}
            adapters = {_PEFT + name: tensor for name, tensor in adapters_by_file(base, plain).items()}
        save_file(adapters, folder / "adapter_model.safetensors")
        self._model.peft_config["default"].save_pretrained(str(folder))  # type: ignore[index, union-attr]
        self.process.call("adapter", folder=str(folder), number=self._num_adapters)
        shutil.rmtree(self._folder / f"adapter-{self._num_adapters - 1}", ignore_errors=True)

    @property
    def has_weights(self) -> bool:
        return self.version is not None

    def forget_weights(self) -> None:
        self.version = None

    # -- memory --------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Free its GPU memory for training. Base weights under adapters move to host memory; others are dropped."""
        if not (self._shares_gpu and self._is_awake):
            return
        self.process.call("sleep", level=1 if self._is_adapted else 2)
        self._is_awake = self._is_ready = False
        if not self._is_adapted:
            self.version = None

    make_room = release

    def _free_cached_memory(self) -> None:
        """Memory that torch has cached, for vLLM."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.process.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def keep_prefixes(self, wanted: bool) -> None:
        """vLLM has a cache of its own, which is emptied when it takes weights (`enable_prefix_caching`)."""

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        groups = [OpenGroup(task, key.step, (Unfinished(),) * num_samples) for task in tasks]
        return completions_of(self.sample_round(groups, sampling, key.seed, None, progress))

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        answers: list[list[OpenAnswer]] = [list(group.answers) for group in groups]
        places = [
            (at, sample)
            for at, group in enumerate(groups)
            for sample, answer in enumerate(group.answers)
            if isinstance(answer, Unfinished)
        ]
        requests = []
        for at, sample in places:
            begun = groups[at].answers[sample].token_ids
            request = sample_request(groups[at].task, sample, groups[at].born, seed, sampling, self._longest, begun)
            requests.append(request)
        born = [group.born for group in groups]

        def is_over() -> bool:
            whole = [all(answer.is_finished for answer in group) for group in answers]
            return quota is not None and quota.is_met(born, whole)

        if not requests or is_over():
            return list(groups)
        assert self.has_weights, "weights are pushed before answers are sampled"
        if not self._is_ready:
            self._free_cached_memory()
            self.process.call("resume")
            self._is_ready = self._is_awake = True
        shared = sampling_arguments(sampling) | {"detokenize": bool(sampling.stop_strings)}  # text is decoded here
        sampled = self.process.stream("generate", requests=requests, sampling=shared, asks=quota is not None)
        while sampled.rest is None:
            finished = sampled.next_finished()
            if self.should_stop():
                raise StopRequested
            for place, *answer in finished:
                at, sample = places[place]
                answers[at][sample] = self._completion(answers[at][sample], *answer)
            if progress is not None and finished:
                progress(len(finished))
            if quota is not None and finished:
                sampled.go_on(not is_over())
        for place, token_ids, logprobs in sampled.rest:
            at, sample = places[place]
            before = answers[at][sample]
            assert isinstance(before, Unfinished)
            answers[at][sample] = Unfinished(
                (*before.token_ids, *token_ids), (*before.logprobs, *logprobs), before.versions
            )
        return [dataclasses.replace(group, answers=tuple(found)) for group, found in zip(groups, answers, strict=True)]

    def _completion(
        self, before: OpenAnswer, token_ids: list[int], logprobs: list[float], reason: object, routes: list[Any] | None
    ) -> Completion:
        assert isinstance(before, Unfinished)
        if reason not in ("stop", "length"):
            raise VllmError(f"vLLM ended an answer with {reason!r}")
        if any(map(math.isnan, logprobs)):
            raise FloatingPointError("vLLM's log-probabilities are NaN: the weights of the model have diverged")
        if self._records_routes and routes is None:
            raise VllmError("vLLM did not return the experts of an answer, which policy.router_replay.enabled asks for")
        ids = (*before.token_ids, *token_ids)
        return Completion(
            token_ids=ids,
            logprobs=(*before.logprobs, *logprobs),
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason=reason,
            versions=before.versions,
            routed_experts=None if routes is None else _unpacked(*routes),
        )


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's weights, without adapters, by their names in the model's files."""
    for name, tensor in named_weights(model).items():
        if is_adapted(model):
            if ".lora_" in name:
                continue
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        yield name, tensor


def _whole(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields one tensor at a time: a sharded tensor is gathered only while it is used."""
    for name, tensor in weights:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _unpacked(shape: list[int], dtype: str, content: str) -> Tensor:
    """Experts that vLLM chose: [tokens of prompt and answer but the last, layers, experts of a token]."""
    experts = np.frombuffer(base64.b64decode(content), dtype=dtype).reshape(shape)
    return torch.from_numpy(experts.astype(np.int16))


def _environment(policy: PolicyConfig, generation: GenerationConfig, first_gpu: int | None) -> dict[str, str]:
    """`first_gpu` of this process that vLLM may use; None: it runs on the CPU."""
    found = dict(generation.vllm_cfg.env_vars or {})
    if first_gpu is None or policy.deterministic:
        # A scheduler in a second process would start before it has received all requests.
        found.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if first_gpu is None:
        threads = str(policy.num_threads or torch.get_num_threads())
        usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        return {**usual, **found}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    own = devices[first_gpu : first_gpu + generation.vllm_cfg.tensor_parallel_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own), **found}
