"""One rank's trainer: owns the model, the frozen reference and the optimizer.

Ranks that share a process group call the same methods in the same order with equally many micro-batches; an empty one
is run on a dummy sequence, because every rank takes part in every collective.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.config import PolicyConfig
from posttrain.errors import InputError
from posttrain.models.attention_interface import attention_context
from posttrain.models.loading import (
    DTYPES,
    checked_config,
    flops_per_token,
    load_model,
    load_tokenizer,
    resolve_device,
)
from posttrain.models.lora import add_lora, is_adapted, without_adapters
from posttrain.models.vision import add_tower, tower_of
from posttrain.policy.checkpoint import files
from posttrain.policy.checkpoint.files import base_config
from posttrain.policy.checkpoint.writer import CheckpointWriter
from posttrain.policy.experts import compute_adapters_by_rows
from posttrain.policy.fused.fp8 import Fp8Weights, fp8_obstacle, fp8_products
from posttrain.policy.fused.layers import fuse_layers
from posttrain.policy.head import Head, without_adapter_wrapper
from posttrain.policy.logprobs import TeacherStates, Teaching, TokenLogprobs
from posttrain.policy.memory.peak_memory import should_checkpoint
from posttrain.policy.model_support import check_length, observe_layers, refusing_errors, turn_off_noise
from posttrain.policy.objectives import Distillation
from posttrain.policy.objectives.reduce import combine_metrics
from posttrain.policy.optimizer import make_optimizer
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer
from posttrain.policy.packed import PackedRow
from posttrain.policy.parallel.context import RowGroup
from posttrain.policy.parallel.experts import FIELD as EXPERT_FIELD
from posttrain.policy.parallel.experts import ExpertGroup
from posttrain.policy.parallel.fsdp import any_rank, reshard, shard, whole_parameters
from posttrain.policy.parallel.mesh import Mesh
from posttrain.policy.parallel.tensor import ENGINE_FIELD, FIELD, ROWS_FIELD, same_states, split_over_ranks
from posttrain.policy.parallel.tensor_group import group_of
from posttrain.policy.reference_cache import model_fingerprint
from posttrain.policy.reward_head import SequenceScores, TokenValues, load_reward_model, padding_for_scores, use_padding
from posttrain.policy.routing import TrainedRouters
from posttrain.policy.runtime import (
    PeakMemory,
    deterministic_algorithms,
    enable_expandable_segments,
    evaluation_mode,
    prepare_determinism,
)
from posttrain.roles import Objective, Progress
from posttrain.types import TokenBatch

CALLS_PER_AGREEMENT = 16  # tokens between two stop votes of ranks that share layers
Forward = TokenLogprobs | SequenceScores  # a packed row in, one number per response token out
Root = TypeVar("Root", bound=TokenLogprobs | SequenceScores | TeacherStates)


@dataclass(frozen=True)
class RankSetup:
    """What a rank needs to build its trainer and its engine. Picklable."""

    policy: PolicyConfig
    seed: int
    needs_reference: bool
    chat_template: str | None = None  # the one that the data was formatted with: saved with the checkpoints
    trains: bool = True  # False: no optimizer, for sampling and evaluation only
    in_host_memory: bool = False  # the weights of an engine whose vLLM needs all memory of several GPUs
    reward_model: bool = False  # a score for each answer, instead of a log-probability for each token
    answer_ends: tuple[int, ...] = ()  # tokens that an answer may end with
    teacher: str | None = None  # the model that the policy learns from, by distillation
    critic: PolicyConfig | None = None  # of a second model, which estimates the return from each token on
    is_critic: bool = False  # this is that model
    is_reference: bool = False  # this is the frozen reference, on devices of its own
    tells_whole_groups: bool = False  # while others are sampled: models on other devices score them

    def for_critic(self) -> RankSetup | None:
        """Of the critic beside this policy."""
        if self.critic is None:
            return None
        beside = replace(self, needs_reference=False, teacher=None, critic=None)
        return replace(beside, policy=self.critic, reward_model=True, is_critic=True)

    def for_sampling(self, layer_shares: int, *, in_host_memory: bool = False) -> RankSetup:
        """Of an engine on devices of its own, this many of which share its layers. Its model is not trained."""
        alone: dict[str, int | None] = dict.fromkeys(("dp_replicate_size", "expert_parallel_size"))
        alone |= {"tensor_parallel_size": layer_shares, "context_parallel_size": 1}
        parallel = self.policy.dtensor_cfg.model_copy(update=alone)
        policy = self.policy.model_copy(update={"dtensor_cfg": parallel})
        beside = replace(self, needs_reference=False, teacher=None, critic=None)
        return replace(beside, policy=policy, trains=False, in_host_memory=in_host_memory)

    def for_reference(self) -> RankSetup:
        """Of the frozen reference on devices of its own, which share its layers as the policy's do."""
        alone = self.for_sampling(self.policy.dtensor_cfg.tensor_parallel_size).without_vllm()
        parallel = alone.policy.dtensor_cfg
        base = parallel.lora_cfg.model_copy(update={"enabled": False})
        policy = alone.policy.model_copy(update={"dtensor_cfg": parallel.model_copy(update={"lora_cfg": base})})
        return replace(alone, policy=policy, is_reference=True)

    def without_vllm(self) -> RankSetup:
        """Of a rank that does not sample, because engines on devices of their own do."""
        if self.policy.generation is None:
            return self
        generation = self.policy.generation.model_copy(update={"backend": "native"})
        return replace(self, policy=self.policy.model_copy(update={"generation": generation}))


@dataclass(frozen=True)
class ModelFacts:
    """Model properties that the driver reports without loading the model."""

    flops_per_token: float  # of training
    num_parameters: int
    device: str
    device_name: str
    num_trained: int  # parameters that are not frozen


class PolicyTrainer:
    def __init__(self, setup: RankSetup) -> None:
        config = self.config = setup.policy
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        if config.deterministic:
            prepare_determinism()
        self.device = _this_rank(resolve_device("cpu" if setup.in_host_memory else config.device))
        self.mesh = Mesh.over(dist.get_world_size() if dist.is_initialized() else 1, config.dtensor_cfg)
        self._axes = self.mesh.axes(self.device, offloads=config.dtensor_cfg.cpu_offload and setup.trains)
        if not setup.trains:
            self._axes = replace(self._axes, parameters=None)  # nothing to spread: each holds what it computes with
        self.peak_memory = PeakMemory(self.device)
        self.temperature = config.generation.temperature if config.generation else 1.0
        if self.temperature == 0:
            self.temperature = 1.0  # greedy sampling has no temperature for training
        self.tokenizer = load_tokenizer(config.tokenizer.name)
        self.tokenizer.chat_template = setup.chat_template
        self.model = self._load_model(setup)
        self._scores_answers, self._trains, self._is_critic = setup.reward_model, setup.trains, setup.is_critic
        self._in_fp8 = config.fp8 and (setup.trains or setup.is_reference)
        if self._recomputes_activations(setup):
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        has_copy = setup.needs_reference and not config.dtensor_cfg.lora_cfg.enabled
        frozen = copy.deepcopy(self.model).requires_grad_(False).eval() if has_copy else None
        if frozen is not None and (tower := tower_of(self.model)) is not None:
            add_tower(frozen, tower.tokens, like=tower)
        self.reference = None if frozen is None else self._shardable(self._root(frozen))
        self.teacher: TeacherStates | None = None
        if setup.teacher is not None:
            device = torch.device("cpu") if self.mesh.tp > 1 else self.device
            teacher = load_model(setup.teacher, DTYPES[config.precision], device, field="teacher.model_name")
            self.teacher = self._shardable(TeacherStates(teacher.requires_grad_(False).eval()))
        self._experts: ExpertGroup | None = None  # of the model that is trained
        self.forward = self._shardable(self._root(self.model))
        if setup.is_reference:
            self.reference = self.forward
        self._routers = TrainedRouters(self.model, self.device)
        if config.router_replay.enabled:
            self._routers.check_replay(base_config(self.model).get_text_config().model_type)
        self._refuse_unsupported()
        self.optimizer: MixedPrecisionOptimizer | None = None
        if setup.trains:
            # A run has replaced `auto`, which depends on its number of steps.
            schedule = None if config.scheduler == "auto" else config.scheduler
            hosted = config.dtensor_cfg.cpu_offload
            self.optimizer = make_optimizer(self.model, config.optimizer, schedule, setup.seed, in_host_memory=hosted)
        self._name = files.CRITIC if setup.is_critic else files.POLICY
        self.checkpoints = CheckpointWriter(self.model, self.tokenizer, self.optimizer, self.device, self._name)
        if self.optimizer is not None:
            self.optimizer.before_change = self.checkpoints.wait_until_copied

    def _load_model(self, setup: RankSetup) -> nn.Module:
        """The model with its adapters, if it has any."""
        config, dtype = setup.policy, DTYPES[setup.policy.precision]
        # A model that is split over ranks may be too large for one device.
        device = torch.device("cpu") if self.mesh.tp > 1 or self.mesh.ep > 1 else self.device
        if setup.reward_model:
            padding = padding_for_scores(self.tokenizer, setup.answer_ends)
            use_padding(self.tokenizer, padding)
            model = load_reward_model(
                config.model_name,
                dtype,
                device,
                config.hf_config_overrides,
                seed=setup.seed,
                pad_token_id=padding,
                starts_at_zero=setup.is_critic,
                field="value.model_name" if setup.is_critic else "policy.model_name",
            )
        else:
            trains_tower = config.vision.train_tower
            model = load_model(config.model_name, dtype, device, config.hf_config_overrides, trains_tower=trains_tower)
        if setup.trains:
            turn_off_noise(model, config.hf_config_overrides)
        lora = config.dtensor_cfg.lora_cfg
        if not lora.enabled:
            return model
        task_type = "SEQ_CLS" if setup.reward_model else "CAUSAL_LM"
        return add_lora(model, lora, setup.seed, task_type=task_type, adapts_tower=config.vision.train_tower)

    def _recomputes_activations(self, setup: RankSetup) -> bool:
        configured = setup.policy.dtensor_cfg.activation_checkpointing
        if configured != "auto" or self.device.type != "cuda":
            return configured is True
        return setup.trains and should_checkpoint(
            base_config(self.model).to_dict(),
            setup.policy,
            # Policy and critic have half of it each.
            memory_bytes=torch.cuda.get_device_properties(self.device).total_memory
            // (2 if setup.is_critic or setup.critic is not None else 1),
            has_reference=setup.needs_reference,
            ranks=self.mesh.size,
            scores_answers=setup.reward_model,
            teacher=checked_config(setup.teacher, "teacher.model_name").to_dict() if setup.teacher else None,
        )

    def _root(self, model: nn.Module) -> Forward:
        if self._is_critic:
            return TokenValues(model)
        return SequenceScores(model) if self._scores_answers else TokenLogprobs(model, self.config.logprob_chunk_size)

    def _shardable(self, root: Root) -> Root:
        model = root.model
        mesh, layers_mesh = self._axes.parameters, self._axes.layers
        offloads = self.config.dtensor_cfg.cpu_offload
        compute_adapters_by_rows(model)
        experts: list[nn.Module] = []
        experts_mesh = None if isinstance(root, TeacherStates) else self._axes.experts  # a teacher may have none
        if experts_mesh is not None or layers_mesh is not None:
            field = (FIELD if self._trains else ENGINE_FIELD) if layers_mesh is not None else EXPERT_FIELD
            splits_rows = self.config.dtensor_cfg.sequence_parallel and self._trains
            with same_states(root.head, field, splits_rows=splits_rows):
                if experts_mesh is not None:
                    self._experts = ExpertGroup(experts_mesh)
                    experts = self._experts.split(model, root.head, self.device)
                if layers_mesh is not None:
                    split_over_ranks(model, root.head, layers_mesh, self.device, field, splits_rows=splits_rows)
        num_fused = fuse_layers(root.head.decoder, may_join=mesh is None and layers_mesh is None)
        if self._in_fp8:
            self._refuse_fp8(root.head, num_fused)
        if mesh is not None:
            shard(root, list(root.head.layers), mesh, experts, self._axes.expert_parameters, offloads=offloads)
            # FSDP requires the first forward pass to enter at the root; the engine enters at the decoder. The root's
            # own parameters stay whole after a pass, and the optimizer must get the sharded ones.
            with refusing_errors(base_config(model)):
                self._score(root, [None])
            reshard(root)
        return root

    def _refuse_fp8(self, head: Head, num_fused: int) -> None:
        obstacle = fp8_obstacle(
            self.device,
            next(head.decoder.parameters()).dtype,
            model_type=head.decoder.config.model_type,
            layers=list(head.layers),
            num_fused=num_fused,
            is_sharded=self.mesh.size > 1,
        )
        if obstacle is not None:
            raise InputError(f"policy.fp8 = true: {obstacle}; set policy.fp8=false")

    def _refuse_unsupported(self) -> None:
        """Models that the packed forward pass would compute wrongly: recurrent layers, unknown changes of logits."""
        config = base_config(self.model)
        with (
            torch.no_grad(), evaluation_mode(self.model), whole_parameters(self.forward), refusing_errors(config)
        ):  # fmt: skip
            self.shapes = observe_layers(without_adapter_wrapper(self.model), self.forward.head)
            check_length(config.get_text_config(), self.config.max_total_sequence_length)

    def facts(self) -> ModelFacts:
        return ModelFacts(
            flops_per_token=flops_per_token(self.model),
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            device=self.device.type,
            device_name=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            num_trained=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )

    # -- training ------------------------------------------------------------------------------------------------------

    def update(
        self, parts: Sequence[TokenBatch | None], objective: Objective, seed: int, progress: Progress | None = None
    ) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches. Returns its share of the metrics and the gradient norm."""
        assert self.optimizer is not None
        metrics: list[Mapping[str, Tensor]] = []
        with self._phase("training"):
            self.optimizer.forget_gradients()  # of an update that failed
            torch.manual_seed(seed)  # dropout is a function of the step, not of what ran before
            self.model.train()
            with self._products_in_fp8(self.forward, gradients=True):
                for part in self._in_order(parts, self.forward):
                    metrics.append(self._backward(part, objective))
                    self.optimizer.collect_gradients()
                    if progress is not None:
                        progress(1)
            learning_rate = self.optimizer.learning_rate
            norm, taken = self.optimizer.step(self.config.max_grad_norm)
            found = combine_metrics([_to_floats(m) for m in metrics]) | self._routers.take()
        found |= {"grad_norm": norm, "update_skipped": float(not taken), "lr": learning_rate}
        return found | self.peak_memory.take()

    def _backward(self, part: TokenBatch | None, objective: Objective) -> Mapping[str, Tensor]:
        """Both passes of one micro-batch; nothing of its graph is left afterwards."""
        with (
            self._row(part, self.forward) as row,
            self._routers.row(part, row, trains=True, replays=not self._is_critic),
        ):
            logprobs, part = self._compared(row, part, objective)
            if part is None:
                loss = logprobs.sum() * 0.0
                metrics: Mapping[str, Tensor] = {"loss": torch.zeros_like(loss)}
            else:
                loss, metrics = objective(logprobs, part)
            # FSDP averages gradients over ranks; the loss is a sum over them.
            (loss * self.mesh.num_shards).backward()
        return metrics

    def _compared(
        self, row: PackedRow, part: TokenBatch | None, objective: Objective
    ) -> tuple[Tensor, TokenBatch | None]:
        """The policy's values of the row; and the micro-batch, with the teacher's columns if the objective has any."""
        if not isinstance(objective, Distillation):
            return self.forward(row, self.temperature), part
        assert self.teacher is not None, "this trainer was built without a teacher"
        with torch.no_grad():
            hidden = self.teacher(row)
        teaching = Teaching(hidden, self.teacher.head, objective.against)
        logprobs, compared, estimate = self.forward(row, self.temperature, teaching)
        return logprobs, part and part.with_columns(compared=compared, divergence_estimate=estimate)

    @torch.no_grad()
    def evaluate(
        self, parts: Sequence[TokenBatch | None], objective: Objective, progress: Progress | None = None
    ) -> dict[str, float]:
        self.model.eval()
        metrics = []
        with deterministic_algorithms(self.config.deterministic), self._products_in_fp8(self.forward):
            for part in self._in_order(parts, self.forward):
                with self._row(part, self.forward) as row:
                    logprobs, part = self._compared(row, part, objective)
                if part is not None:
                    metrics.append(_to_floats(objective(logprobs, part)[1]))
                if progress is not None:
                    progress(1)
        return combine_metrics(metrics)

    def end_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.end_step()

    def logprobs(self, parts: Sequence[TokenBatch | None]) -> list[Tensor | None]:
        """Log-probabilities of each micro-batch's response tokens under the policy as it is now."""
        self.model.eval()
        return self._score(self.forward, parts, replays=not self._is_critic)

    def reference_logprobs(self, parts: Sequence[TokenBatch | None]) -> list[Tensor | None]:
        """The same under the frozen reference: the base model under the adapters, or the copy made at the start."""
        if self.reference is not None:
            return self._score(self.reference, parts)
        assert is_adapted(self.model), "this trainer was built without a reference"
        self.model.eval()
        with without_adapters(self.model):
            return self._score(self.forward, parts)

    def reference_fingerprint(self) -> str:
        """A digest of everything that determines `reference_logprobs`, whatever the number of ranks; on rank 0."""
        model = self.model if self.reference is None else self.reference.model
        settings = {**base_config(self.model).to_dict(), **({"fp8": True} if self._in_fp8 else {})}
        if (images := self.forward.head.image_tokens) is not None:
            settings["image_processor"] = images.processor.to_dict()
        return model_fingerprint(model, settings, self.temperature)

    @torch.no_grad()
    def _score(
        self, forward: Forward | TeacherStates, parts: Sequence[TokenBatch | None], *, replays: bool = False
    ) -> list[Tensor | None]:
        """With `replays`, tokens go to the experts that their sampler chose; the reference has routers of its own."""
        scores: list[Tensor | None] = []
        with self._phase("logprobs"), self._products_in_fp8(forward):
            for part in self._in_order(parts, forward):
                with self._row(part, forward) as row:
                    choice = self._routers.row(part, row, trains=False, replays=True) if replays else nullcontext()
                    with choice:
                        logprobs = forward(row, self.temperature)
                scores.append(None if part is None else logprobs.cpu())
        return scores

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A phase of training whose memory is measured."""
        with self.peak_memory.during(name), deterministic_algorithms(self.config.deterministic):
            yield

    @contextmanager
    def _products_in_fp8(self, forward: Forward | TeacherStates, *, gradients: bool = False) -> Iterator[None]:
        """With `policy.fp8` inside: quantised now, released at the end: optimizer steps and engines need memory."""
        copies = None
        if self._in_fp8:
            decoder: Any = forward.head.decoder
            copies = Fp8Weights(decoder.layers, gradients=gradients)
            copies.refresh()
        with fp8_products(copies):
            yield

    def _in_order(
        self, parts: Sequence[TokenBatch | None], forward: Forward | TeacherStates
    ) -> Sequence[TokenBatch | None]:
        """The parts, whose images are prepared ahead of the passes over them."""
        if (tower := forward.head.tower) is not None:
            tower.prepare(image for part in parts if part for own in part.prompt_images for image in own)
        return parts

    @contextmanager
    def _row(self, part: TokenBatch | None, forward: Forward | TeacherStates) -> Iterator[PackedRow]:
        """The packed row, with its attention in force: backward passes belong inside too."""
        batch = _DUMMY if part is None else part
        group = group_of(forward.head.layers[0]) if self.config.dtensor_cfg.sequence_parallel and self._trains else None
        if batch.prompt_images and (self._axes.rows is not None or group is not None):
            field = ROWS_FIELD if group is not None else "policy.dtensor_cfg.context_parallel_size"
            raise InputError(f"{field}: rows with images are not split over ranks")
        row = PackedRow.build(
            batch, self.device, reads_own_token=forward.reads_own_token, image_tokens=forward.head.image_tokens
        )
        if (rows := self._axes.rows) is not None:
            row = RowGroup(rows).own_part(row)
        split = nullcontext() if group is None else group.split_rows(row.input_ids.shape[-1])
        with attention_context(row.attention), split:
            yield row

    # -- sampling ------------------------------------------------------------------------------------------------------

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The model for sampling: parameters unsharded on every rank, and peak memory measured."""
        passes = nullcontext() if self._experts is None else self._experts.different_passes()
        with self.peak_memory.during("sampling"), whole_parameters(self.forward), passes:
            yield

    def agreed(self, is_so: Callable[[], bool]) -> Callable[[], bool]:
        """`is_so`, on all ranks that share this one's layers at the same call: they run one schedule while sampling."""
        layers = self._axes.layers
        if layers is None:
            return is_so
        group = layers.get_group()
        num_calls = 0

        def is_so_everywhere() -> bool:
            nonlocal num_calls
            num_calls += 1
            return not num_calls % CALLS_PER_AGREEMENT and any_rank(is_so(), group)

        return is_so_everywhere

    def load(self, folder: Path) -> None:
        reshard(self.forward)
        files.load(folder, self.model, self.tokenizer, self.optimizer, self._name)
        if (tower := self.forward.head.tower) is not None:
            tower.forget()


def _this_rank(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    enable_expandable_segments()
    # Small batches, as in decoding, are split along the inner dimension; adding the parts up in bf16 would make the
    # sampler's numbers differ from the trainer's.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def _to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """One transfer for all of them."""
    values = torch.stack([value.float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


_DUMMY = TokenBatch(
    prompts=(torch.zeros(1, dtype=torch.long),),
    responses=(torch.zeros(2, dtype=torch.long),),
    prompt_of=(0,),
    columns={"mask": torch.zeros(2)},
    num_tokens=1.0,
    num_sequences=1.0,
    num_computed_tokens=1.0,
)
