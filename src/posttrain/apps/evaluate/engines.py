"""The engines of an evaluation: one in this process, or one on each GPU of the cluster, which share the problems.

Each engine has the whole model and is independent of the others. Sampling noise is keyed by problem and sample, so answers
do not depend on how many engines there are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.config import EvalRunConfig
from posttrain.config.evaluation import EvalGenerationConfig
from posttrain.models.accepted_names import ResolvedModel
from posttrain.orchestration.launch import RankLayout, start_workers
from posttrain.orchestration.workers import WorkerGroup
from posttrain.roles import Engine


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
    make = vllm_engine if generation.backend == "vllm" else native_engine
    return start_workers(
        partial(make, _with_absolute_paths(reference), generation), layout, config.cluster.launcher, quiet=True
    )


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

    length = generation.vllm_cfg.max_model_len
    assert length is not None, "the built-in default sets it"
    return VllmEngine(
        reference.model,
        reference.tokenizer,
        max_model_len=length,
        adapter=reference.adapter,
        adapter_rank=_adapter_rank(reference),
        **vllm_options(generation.vllm_cfg, generation.vllm_kwargs, vllm_precision(generation)),
    )


def vllm_precision(generation: EvalGenerationConfig) -> str:
    return generation.precision if generation.precision != "auto" else generation.vllm_cfg.precision or "auto"


def native_precision(generation: EvalGenerationConfig) -> str:
    """NeMo RL's files set the precision under `vllm_cfg`; float32 there holds for every engine."""
    if generation.precision == "auto" and generation.vllm_cfg.precision == "float32":
        return "float32"
    return generation.precision


def _adapter_rank(reference: ResolvedModel) -> int:
    from posttrain.files.json_files import read_json

    return int(read_json(reference.adapter / "adapter_config.json").get("r", 16)) if reference.adapter else 16


def _with_absolute_paths(reference: ResolvedModel) -> ResolvedModel:
    """Engines elsewhere have another working directory."""

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if Path(name).exists() else name

    adapter = reference.adapter and reference.adapter.absolute()
    return replace(reference, model=absolute(reference.model), tokenizer=absolute(reference.tokenizer), adapter=adapter)
