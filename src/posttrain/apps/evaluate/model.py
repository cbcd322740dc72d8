"""The model under evaluation: a server, or engines, one in this process or one on each GPU of the cluster, which share
the problems.

Each engine has the whole model and is independent of the others. Sampling noise is keyed by problem and sample, so
answers do not depend on how many engines there are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from posttrain.apps.evaluate.identity import files_digest
from posttrain.apps.evaluate.server import OpenAiServer
from posttrain.config import EvalRunConfig
from posttrain.config.evaluation import EvalGenerationConfig
from posttrain.data.chat import ChatFormat
from posttrain.models.accepted_names import (
    ModelReferenceError,
    ResolvedModel,
    model_fingerprint,
    resolve_registered_model,
)
from posttrain.models.hub import why_unavailable
from posttrain.orchestration.sharded import ShardedEngine
from posttrain.orchestration.workers import RankLayout, WorkerGroup, start_workers
from posttrain.roles import Engine


@dataclass
class EvaluatedModel:
    config: EvalRunConfig
    say: Callable[[str], None]

    @cached_property
    def reference(self) -> ResolvedModel | None:
        """The model, unless it is on a server."""
        is_served = self.config.server_url is not None
        return None if is_served else resolve_registered_model(self.config.generation.model_name)

    @cached_property
    def server(self) -> OpenAiServer | None:
        """The server, if the model is one. The name of its model is requested from it, unless the config has it."""
        url = self.config.server_url
        return None if url is None else OpenAiServer(url, self.config.generation.openai_cfg)

    @cached_property
    def fingerprint(self) -> str | None:
        """Of the weights, where they are local; a hub name or a server is identified by its name."""
        return None if self.reference is None else model_fingerprint(self.reference, self.say)

    @cached_property
    def device(self) -> str:
        if self.config.server_url is not None:
            return "server"
        if self.config.generation.backend == "vllm":
            return "cuda"
        if self.config.num_engines > 1 and self.config.generation.device == "cuda":
            return "cuda"  # of the nodes; this machine may have none
        from posttrain.models.loading import resolve_device

        return resolve_device(self.config.generation.device).type

    def check(self) -> None:
        """InputError if the model is not available, or the server does not answer."""
        _ = self.server
        if self.reference is not None and (reason := why_unavailable(self.reference.model)) is not None:
            raise ModelReferenceError(f"generation.model_name: {reason}")

    def identity(self) -> dict[str, object]:
        """What determines its answers, besides sampling."""
        generation, tokenizer = self.config.generation, self.config.tokenizer
        named = generation.model_name if self.fingerprint is None else None
        openai = generation.openai_cfg
        return {
            "model": named if self.server is None else self.server.model,
            "model_fingerprint": self.fingerprint,
            "server": self.server and [self.server.url, openai.api, openai.extra_body],
            "engine": self._engine(),
            "tokenizer": None
            if self._own_tokenizer is None
            else [self._own_tokenizer, files_digest({"tokenizer": {"name": self._own_tokenizer}})],
            "chat_template": [
                tokenizer.chat_template,
                tokenizer.chat_template_kwargs,
                files_digest(tokenizer.chat_template),
            ],
            "max_model_len": generation.vllm_cfg.max_model_len,
        }

    def _engine(self) -> list[object]:
        generation, vllm = self.config.generation, self.config.generation.vllm_cfg
        if self.server is not None:
            return ["openai_url"]
        if generation.backend == "vllm":
            numbers = [vllm_precision(generation), vllm.kv_cache_dtype, vllm.load_format or "auto"]
            return ["vllm", *numbers, generation.vllm_kwargs, files_digest(generation.vllm_kwargs)]
        return ["native", self.device, native_precision(generation)]

    @property
    def _own_tokenizer(self) -> str | None:
        """The tokenizer that the config names, if it is not the model's."""
        name = self.config.tokenizer.name
        return name if name != self.config.generation.model_name else None

    def start(self, cleanup: ExitStack) -> tuple[Engine, ChatFormat | None]:
        """The engine and how prompts are written for it; a server writes them itself."""
        if self.server is not None:
            return self.server, None
        from posttrain.models.loading import expand_images_for, load_tokenizer

        assert self.reference is not None
        own, written = self._own_tokenizer, self.config.tokenizer
        tokenizer = (
            load_tokenizer(self.reference.tokenizer, "generation.model_name")
            if own is None
            else load_tokenizer(own, "tokenizer.name")
        )
        chat = ChatFormat(tokenizer, written.chat_template, written.chat_template_kwargs)
        chat.image_tokens = expand_images_for(self.reference.model, tokenizer, "generation.model_name")
        workers = start_engines(self.config, self.reference)
        cleanup.callback(workers.close)
        if self.config.num_engines > 1:
            self.say(f"{self.config.num_engines} engines share the problems")
        return ShardedEngine(workers), chat


def start_engines(config: EvalRunConfig, reference: ResolvedModel) -> WorkerGroup:
    generation = config.generation
    layout = RankLayout(
        config.cluster.num_nodes,
        config.engines_per_node,
        gpus_per_rank=config.gpus_per_engine,
        device="cuda" if generation.backend == "vllm" else generation.device,
        num_threads=generation.num_threads,
        is_process_group=False,
    )
    if generation.backend == "vllm" and layout.num_ranks > 1:
        # In an actor vLLM would ask Ray for GPUs that the actor holds already.
        kwargs = {"distributed_executor_backend": "mp", **generation.vllm_kwargs}
        generation = generation.model_copy(update={"vllm_kwargs": kwargs})
    # Engines elsewhere have another working directory.
    model, tokenizer = (
        str(Path(name).absolute()) if Path(name).exists() else name for name in (reference.model, reference.tokenizer)
    )
    adapter = reference.adapter and reference.adapter.absolute()
    reference = replace(reference, model=model, tokenizer=tokenizer, adapter=adapter)
    make = vllm_engine if generation.backend == "vllm" else native_engine
    return start_workers(partial(make, reference, generation), layout, config.cluster.launcher, quiet=True)


def native_engine(reference: ResolvedModel, generation: EvalGenerationConfig) -> Engine:
    if generation.num_threads is not None:
        import torch

        torch.set_num_threads(generation.num_threads)
    from posttrain.engines.choose_engine import load_for_sampling

    engine, _ = load_for_sampling(
        reference,
        precision=native_precision(generation),
        device=generation.device,
        max_total_tokens=generation.vllm_cfg.max_model_len,
        native=generation.native_cfg,
    )
    return engine


def vllm_engine(reference: ResolvedModel, generation: EvalGenerationConfig) -> Engine:
    from posttrain.engines.vllm import VllmEngine, vllm_options
    from posttrain.files.json_files import read_json

    adapter = read_json(reference.adapter / "adapter_config.json") if reference.adapter else {}
    length = generation.vllm_cfg.max_model_len
    assert length is not None, "the built-in default sets it"
    return VllmEngine(
        reference.model,
        reference.tokenizer,
        max_model_len=length,
        adapter=reference.adapter,
        adapter_rank=int(adapter.get("r", 16)),
        **vllm_options(generation.vllm_cfg, generation.vllm_kwargs, vllm_precision(generation)),
    )


def vllm_precision(generation: EvalGenerationConfig) -> str:
    return generation.precision if generation.precision != "auto" else generation.vllm_cfg.precision or "auto"


def native_precision(generation: EvalGenerationConfig) -> str:
    """NeMo RL's files set the precision under `vllm_cfg`; float32 there holds for every engine."""
    if generation.precision == "auto" and generation.vllm_cfg.precision == "float32":
        return "float32"
    return generation.precision
