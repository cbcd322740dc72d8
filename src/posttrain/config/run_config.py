"""What the config of every kind of run has: `checkpointing`, `logger`, `cluster`, `doctor`, and what must agree.

The kinds are in `grpo_run.py`, `dpo.py`, `evaluation.py` and `runs.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from posttrain.config.base import (
    IsSetByUser,
    NonNegativeInt,
    OpenSection,
    PositiveFloat,
    PositiveInt,
    Section,
    matching,
    setting,
)
from posttrain.config.data import DataConfig, EnvironmentConfig
from posttrain.config.placement import ENGINE, REFERENCE, GroupRequest, Placement, place, placement_problems
from posttrain.config.policy import ColocatedModelConfig, PolicyConfig

Metric = Annotated[
    str, matching(r"(val|train):\S+", "must be `val:` or `train:` followed by a metric, e.g. val:accuracy, or null")
]
Duration = Annotated[
    str, matching(r"\d+:[0-2]?\d:[0-5]?\d:[0-5]?\d", "must be days:hours:minutes:seconds, e.g. 00:03:45:00")
]


class CheckpointingConfig(Section):
    enabled: bool = setting(True, "Saves checkpoints; resuming from ones that exist does not depend on it.")
    checkpoint_dir: str = setting(
        ..., "Folder of the checkpoints; also the run folder unless logger.log_dir is set.", min_length=1
    )
    metric_name: Metric | None = setting(None, "Metric that ranks checkpoints, e.g. val:accuracy; null ranks by age.")
    higher_is_better: bool = setting(True, "Whether larger values of the metric are better.")
    keep_top_k: PositiveInt | None = setting(3, "Checkpoints to keep, best first, and the latest; null keeps all.")
    save_period: PositiveInt = setting(10, "Steps between checkpoints.")
    checkpoint_must_save_by: Duration | None = setting(
        None, "Time after which the run saves and ends, as days:hours:minutes:seconds; null is never."
    )
    save_consolidated: bool | Literal["auto"] = setting(
        "auto",
        "Adds to each checkpoint a converted and verified model, LoRA merged: step_N/hf; auto does where it costs at "
        "most 2 % of the time.",
    )
    save_optimizer: bool = setting(True, "Saves the optimizer too; without it a run cannot be continued exactly.")
    async_save: bool | Literal["auto"] = setting(
        "auto", "Writes checkpoints in the background from a copy in CPU memory; auto does on a GPU, where that fits."
    )

    @property
    def must_save_by_s(self) -> float | None:
        """The deadline in seconds from the start of training."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class WandbConfig(OpenSection):
    """Other keys, such as tags and group, are arguments of `wandb.init`."""

    project: str = setting("posttrain", "Project of Weights & Biases.", min_length=1)
    name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    entity: str | None = setting(None, "User or team that owns the project; null is your default.")
    mode: Literal["online", "offline"] | None = setting(
        None, "offline writes files for `wandb sync`; null is WANDB_MODE, or online."
    )


class MlflowConfig(Section):
    experiment_name: str = setting("posttrain", "Experiment of MLflow.", min_length=1)
    run_name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    tracking_uri: str | None = setting(None, "Server, or sqlite:///file.db; null is MLFLOW_TRACKING_URI.")


class TrackioConfig(Section):
    project: str = setting("posttrain", "Project of Trackio.", min_length=1)
    name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    space_id: str | None = setting(None, "Hugging Face Space to log to; null is the local database.")
    server_url: str | None = setting(None, "Trackio server of your own; null is the local database.")


class SwanlabConfig(OpenSection):
    """Other keys, such as tags and workspace, are arguments of `swanlab.init`."""

    project: str = setting("posttrain", "Project of SwanLab.", min_length=1)
    name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    mode: Literal["online", "local", "offline"] | None = setting(
        None, "local and offline write files only; null is SWANLAB_MODE, or online."
    )


class GpuMonitoringConfig(Section):
    collection_interval: PositiveFloat = setting(10.0, "Seconds between two looks at the GPUs.")


class LoggerConfig(Section):
    log_dir: str | None = setting(None, "Run folder: metrics, rollouts, report; null is checkpointing.checkpoint_dir.")
    token_data_period: NonNegativeInt = setting(
        10, "GRPO: steps between files with the log-probabilities of tokens; 0 writes none."
    )
    token_data_groups: PositiveInt = setting(4, "Groups of a step whose tokens are in such a file.")
    num_val_samples_to_print: NonNegativeInt = setting(0, "Validation samples shown on the console.")
    num_rollouts_to_log: NonNegativeInt = setting(8, "Answers of each step that trackers get as a table; 0 is none.")
    monitor_gpus: bool = setting(True, "Adds utilisation, memory and power of this machine's GPUs to the metrics.")
    gpu_monitoring: GpuMonitoringConfig = setting(GpuMonitoringConfig, "How often the GPUs are looked at.")
    tensorboard_enabled: bool = setting(False, "Writes event files to loggers/tensorboard.")
    wandb_enabled: bool = setting(False, "Logs to Weights & Biases.")
    mlflow_enabled: bool = setting(False, "Logs to MLflow.")
    trackio_enabled: bool = setting(False, "Logs to Trackio.")
    swanlab_enabled: bool = setting(False, "Logs to SwanLab.")
    wandb: WandbConfig = setting(WandbConfig, "Weights & Biases.")
    mlflow: MlflowConfig = setting(MlflowConfig, "MLflow.")
    trackio: TrackioConfig = setting(TrackioConfig, "Trackio.")
    swanlab: SwanlabConfig = setting(SwanlabConfig, "SwanLab.")


class ClusterConfig(Section):
    num_nodes: PositiveInt = setting(1, "Machines.", le=10_000)
    gpus_per_node: PositiveInt = setting(1, "GPUs, or CPU workers where there are none, on each machine.", le=1_000)
    launcher: Literal["auto", "local", "ray"] = setting(
        "auto", "Who runs the workers: auto is one local process for one worker, else Ray."
    )
    max_restarts: NonNegativeInt = setting(
        0, "Automatic restarts from the newest checkpoint after a lost rank or machine."
    )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.gpus_per_node


class DoctorConfig(Section):
    on_error: Literal["warn", "stop"] = setting(
        "warn", "What an error of the doctor does: a line on the console, or the run saves and stops."
    )
    kl_period: NonNegativeInt | Literal["auto"] = setting(
        "auto",
        "GRPO without KL penalty: steps between estimates of the KL; 0 is never, auto 10 with LoRA and 0 without.",
    )


class ScheduleConfig(Section):
    """What the section of every algorithm has: how long a run goes on, and when it validates."""

    max_num_epochs: PositiveInt = setting(1, "Passes over the data after which the run ends.")
    max_num_steps: PositiveInt = setting(1_000_000, "Steps after which the run ends, if the epochs have not ended it.")
    val_period: int = setting(10, "Steps between validations; 0 or less turns periodic validation off.")
    val_at_start: bool = setting(False, "Validates a fresh run before its first step.")
    val_at_end: bool = setting(False, "Validates after the last step.")
    seed: NonNegativeInt = setting(42, "Seed of data order, sampling noise and initialisation.")


class SupervisedConfig(ScheduleConfig):
    """Of an algorithm that samples nothing. A row is a pair, a labelled answer or an example."""

    max_num_steps: PositiveInt = setting(60, "Optimizer steps after which the run ends.")
    val_batches: int = setting(8, "Batches used by a validation; 0 or less uses the whole set.")
    val_global_batch_size: PositiveInt = setting(32, "Rows in one validation batch.")
    val_at_start: bool = setting(True, "Validates a fresh run before its first step.")


@dataclass(frozen=True)
class StepSizes:
    """What one step of a run takes. A row of the data is a prompt, a pair, a labelled answer or an example."""

    num_rows: int
    num_answers_per_row: int = 1
    num_answers_per_unit: int = 1  # 2 where batch sizes of the config count pairs
    num_sampled_per_row: int = 0  # of the answers, those that the model gives in this step
    num_updates: int = 1
    num_scorings: int = 0  # passes over all answers without gradients: by the reference, by the policy
    caches_reference: bool = False  # from the second epoch on
    may_sample_again: bool = False  # until enough groups have a signal
    max_turns: int = 1


class RunConfig(Section):
    """What every run has."""

    kind: ClassVar[str]

    preset: str | None = setting(
        None, "Settings of another system to start from; `posttrain config presets` lists all."
    )
    policy: PolicyConfig = setting(..., "The model that is trained.")
    data: DataConfig = setting(..., "What it is trained on.")
    env: dict[str, EnvironmentConfig] = setting(dict, "Judges of answers, by name.")
    checkpointing: CheckpointingConfig = setting(..., "What is saved, and when.")
    logger: LoggerConfig = setting(LoggerConfig, "Where metrics go.")
    doctor: DoctorConfig = setting(DoctorConfig, "Problems found during the run.")
    cluster: ClusterConfig = setting(ClusterConfig, "Machines.")

    @property
    def called(self) -> str:
        """The command that starts it: its kind, or a variant of that."""
        return self.kind

    @property
    def group_requests(self) -> list[GroupRequest]:
        """Worker groups on GPUs of their own, in the order in which they follow the policy on the machines."""
        found, generation, reference = [], self.policy.generation, self.policy.reference.colocated
        if generation is not None and not generation.colocated.enabled:
            found.append(
                GroupRequest(
                    ENGINE,
                    "policy.generation.colocated",
                    generation.colocated.resources,
                    switch="policy.generation.colocated.enabled = false",
                    size=self.gpus_per_engine,
                    size_field="policy.generation.vllm_cfg.tensor_parallel_size",
                    per_actor=self.gpus_per_engine if self.vllm_spans_gpus else 1,
                )
            )
        if not reference.enabled:
            found.append(self._beside(REFERENCE, "policy.reference.colocated", reference))
        return found

    def _beside(self, name: str, field: str, section: ColocatedModelConfig) -> GroupRequest:
        """A model whose layers are shared as the policy's are."""
        size, size_field = self.policy.dtensor_cfg.tensor_parallel_size, "policy.dtensor_cfg.tensor_parallel_size"
        switch = f"{field}.enabled = false"
        return GroupRequest(name, field, section.resources, switch=switch, size=size, size_field=size_field)

    @property
    def placement(self) -> Placement:
        return place(self.group_requests, self.cluster.num_nodes, self.cluster.gpus_per_node)

    @property
    def num_engines(self) -> int:
        """On GPUs that only sample. 0: those that train sample too."""
        return self.num_engine_gpus // self.gpus_per_engine

    @property
    def gpus_per_engine(self) -> int:
        """That share the layers of an engine which only samples."""
        generation = self.policy.generation
        if generation is None or generation.colocated.enabled:
            return 1
        return generation.vllm_cfg.tensor_parallel_size

    @property
    def vllm_spans_gpus(self) -> bool:
        """Each engine which only samples is a vLLM that splits its layers itself."""
        return self.gpus_per_engine > 1 and self.policy.generation is not None and self.policy.generation.uses_vllm

    @property
    def num_engine_gpus(self) -> int:
        """GPUs that only sample."""
        group = self.placement.group(ENGINE)
        return 0 if group is None else len(group.machines)

    @property
    def num_ranks(self) -> int:
        """GPUs that train."""
        return len(self.placement.ranks)

    @property
    def schedule(self) -> ScheduleConfig:
        """The algorithm's own section."""
        section: ScheduleConfig = getattr(self, self.kind)
        return section

    @property
    def scores_answers(self) -> bool:
        """Whether a scoring layer is trained: a number per answer in place of log-probabilities per token."""
        return self.policy.reward_model_cfg.enabled

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the starting policy is kept."""
        return False

    @property
    def teacher_name(self) -> str | None:
        """The model that the policy is distilled from."""
        return None

    @property
    def critic(self) -> PolicyConfig | None:
        """Of a second model that is trained beside the policy."""
        return None

    def step_sizes(self) -> StepSizes:
        return StepSizes(self.policy.train_global_batch_size)

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        yield from self.scoring_layer_problems()
        if not self.data.train_sets():
            yield "data.train is empty: set data.train.dataset_name (and data.train.data_path for rows of your own)"
        for where, sets in self.data.sets_by_key().items():
            if any(not entry.dataset_name and not entry.data_path for entry in sets):
                yield f"{where}: a dataset needs `dataset_name` or `data_path`"
        yield from [*self._placement_problems()] or self._parallel_problems()
        if self.policy.fp8 and self.num_ranks > 1:
            yield f"policy.fp8 trains on one GPU, and this run on {self.num_ranks}: set policy.fp8=false"

    def scoring_layer_problems(self) -> Iterator[str]:
        if self.scores_answers:
            yield "policy.reward_model_cfg.enabled = true trains a reward model: use `posttrain rm`, or set it to false"

    def _placement_problems(self) -> Iterator[str]:
        if self.cluster.launcher == "local" and self.cluster.num_workers > 1:
            yield (
                f"cluster.launcher = 'local' is one process, and the run has {self.cluster.num_workers} (num_nodes x "
                "gpus_per_node); set cluster.launcher=auto"
            )
        yield from placement_problems(self.group_requests, self.cluster.num_nodes, self.cluster.gpus_per_node)
        field = "policy.reference.colocated"
        if not self.policy.reference.colocated.enabled and not self.needs_reference:
            yield f"{field}.enabled = false, but this run has no reference policy: its GPUs would idle; set it to true"
        for name, number in self.policy.reference.colocated.resources:
            if self.policy.reference.colocated.enabled and number is not None:
                yield f"{field}.resources.{name} = {number}, but {field}.enabled is true; set that to false"

    def _parallel_problems(self) -> Iterator[str]:
        parallel, num_ranks, per_node = self.policy.dtensor_cfg, self.num_ranks, self.cluster.gpus_per_node
        tp, cp, replicas = (
            parallel.tensor_parallel_size,
            parallel.context_parallel_size,
            parallel.dp_replicate_size or 1,
        )
        ep = parallel.expert_parallel_size or 1
        if num_ranks % (tp * cp * replicas):
            yield (
                f"policy.dtensor_cfg: tensor_parallel_size {tp} x context_parallel_size {cp} x dp_replicate_size "
                f"{replicas} = {tp * cp * replicas} must divide the number of ranks, cluster.num_nodes x gpus_per_node"
                f"{' less what has GPUs of its own' if self.group_requests else ''} = {num_ranks}"
            )
        elif self.cluster.num_nodes > 1 and (odd := self._not_divided_by(tp)):
            own = "" if odd == per_node else f", less what has GPUs of its own = {odd}"
            yield (
                f"policy.dtensor_cfg.tensor_parallel_size = {tp} must divide cluster.gpus_per_node = {per_node}{own}: "
                "ranks that share layers exchange sums several times in each, so they are on one machine"
            )
        elif num_ranks // (tp * replicas) % ep:
            yield (
                f"policy.dtensor_cfg.expert_parallel_size = {ep} must divide the {num_ranks // (tp * replicas)} ranks "
                "that hold different shards (ranks / tensor_parallel_size / dp_replicate_size): they share the experts"
            )

    def _not_divided_by(self, size: int) -> int:
        """Ranks of a machine whose number is no multiple of `size`; 0: there is none."""
        return next((count for count in Counter(self.placement.ranks).values() if count % size), 0)

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        metric, trained = self.checkpointing.metric_name, self.data.train_sets()
        validates = self.data.validation_sets() or any(entry.split_validation_size for entry in trained)
        if metric and metric.startswith("val:") and is_set("checkpointing.metric_name") and not validates:
            yield (
                f"checkpointing.metric_name: {metric} is not measured without data.validation or "
                "split_validation_size; the newest checkpoints are kept"
            )


class SupervisedRunConfig(RunConfig):
    """A run that samples nothing: its batches are rows of the data."""

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        """A micro-batch size that was typed must divide its batch. One that was not is only an upper bound. A pack of
        pairs must hold two of the longest sequences."""
        yield from super().problems(is_set)
        is_paired = self.step_sizes().num_answers_per_unit == 2
        packing, longest = self.policy.sequence_packing, self.policy.max_total_sequence_length
        room = packing.train_mb_tokens
        if is_paired and packing.enabled and room is not None and room < 2 * longest:
            yield (
                f"policy.sequence_packing.train_mb_tokens = {room} is less than twice policy.max_total_sequence_length "
                f"= {longest}: a pack must hold both answers of a pair; set it to {2 * longest} or more"
            )
        whole, part = self.policy.train_global_batch_size, self.policy.train_micro_batch_size
        if whole % part and is_set("policy.train_micro_batch_size"):
            yield (
                f"policy.train_global_batch_size = {whole} {'pairs' if is_paired else 'examples'} is not a multiple of "
                f"policy.train_micro_batch_size = {part}: set a micro-batch that divides the batch"
            )
