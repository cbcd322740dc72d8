"""The schema of pipeline.yaml: from labelled traces to a canary, one section per stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from posttrain.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, matching, setting
from posttrain.config.data import PairRulesConfig, TraceColumnsConfig, TraceFiltersConfig

_DATASETS: dict[str, tuple[Literal["pairs", "groups", "prompts"], ...]] = {"dpo": ("pairs",), "distill": ("prompts",)}
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
Cron = Annotated[
    str,
    matching(
        r"\s*(@(hourly|daily|weekly|monthly|yearly)|\S+(\s+\S+){4})\s*",
        "five fields as in cron (minute hour day month weekday) are expected, or @daily and the like",
    ),
]
EvaluationName = Annotated[str, matching(_NAME, "cannot name a folder; letters, digits, '.', '_' and '-' are accepted")]
RegistryName = Annotated[
    str,
    matching(rf"(?!.*\.history$){_NAME}", "letters, digits, '.', '_' and '-' are accepted, not beginning with a sign"),
]


class PipelineSettings(Section):
    name: RegistryName = setting(..., "Name of the model in the registry; also shown in reports.")
    folder: str = setting(..., "Folder of the pipeline: iterations, reports, KPI.")
    start_from: Literal["production", "base"] = setting(
        "production",
        "Model that a new iteration trains: the one in production (base_model while there is none), or base_model.",
    )
    gpu_hour_price: NonNegativeFloat | None = setting(
        None, "Price of one GPU (or machine) for one hour, in any currency; null shows no cost."
    )

    cluster_profile: str | None = setting(
        None,
        "Cluster profile (docs/launch.md) of the machines that train: time and cost of a training are predicted for "
        "them, and its prices are used; null predicts from an earlier iteration only.",
    )


class DemoSection(Section):
    """The demo's world, made before anything else: a small model, traces and problems. For trying a pipeline out."""

    folder: str = setting(..., "Folder for model/, traces.jsonl and unseen.jsonl.")
    seed: NonNegativeInt = setting(1, "Another seed makes another model and other problems.")
    sft_steps: PositiveInt = setting(400, "Steps of supervised training that teach the format.")
    num_prompts: int = setting(1000, "Prompts in the traces, of 2,250; more of them are new data.", ge=1, le=2250)
    answers_per_prompt: int = setting(8, "Answers to each prompt.", ge=2)


class TracesSection(Section):
    path: str | list[str] = setting(..., "Labelled traces, Parquet or jsonl(.gz): files, folders, URLs.", min_length=1)
    columns: TraceColumnsConfig = setting(TraceColumnsConfig, "Which column means what.")
    filters: TraceFiltersConfig = setting(TraceFiltersConfig, "Which traces are used.")
    broken_files: Literal["error", "skip"] = setting(
        "error", "What a cut-off or damaged file does: ends the pipeline, or is used as far as it goes."
    )


class DatasetSection(Section):
    kind: Literal["auto", "pairs", "groups", "prompts"] = setting(
        "auto",
        "What the traces become: pairs (DPO), groups of recorded answers or prompts with reference answers (GRPO); "
        "auto is pairs for dpo, prompts for distill, and groups else.",
    )
    pairs: PairRulesConfig = setting(PairRulesConfig, "How traces become pairs.")


class TrainSection(Section):
    algorithm: Literal["grpo", "ppo", "distill", "dpo"] = setting(
        ..., "Algorithm: grpo, ppo, distill (prompts and a teacher in overrides) or dpo."
    )
    config: str | None = setting(None, "Config file of the run; null is the built-in defaults.")
    overrides: list[str] = setting(list, "Settings over the file, as on the command line: key=value.")
    checkpoint: Literal["newest", "best"] = setting(
        "newest", "Checkpoint passed to the next stage: the newest, or the best by checkpointing.metric_name."
    )
    on_doctor_error: Literal["continue", "stop"] = setting(
        "continue", "What an error that the doctor found in the training does: it is recorded, or the pipeline stops."
    )


class ConvertSection(Section):
    merge_lora: bool = setting(True, "Merges a LoRA adapter into the model; an adapter alone cannot be trained on.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None, "Format of the weights; null is as saved.")
    verify: bool = setting(True, "Compares the converted model's logits with its source's.")


class EvaluationSection(Section):
    config: str | None = setting(None, "Config file of the evaluation; null is the built-in defaults.")
    overrides: list[str] = setting(list, "Settings over the file, as on the command line: key=value.")


class GateSection(Section):
    config: str = setting(..., "gate.yaml: what a candidate has to show.")
    overrides: list[str] = setting(list, "Settings over the file: key=value.")
    without_production: Literal["base", "skip"] = setting(
        "base", "While nothing is in production: compare with base_model, or skip what compares."
    )


class RegistrySection(Section):
    location: str | None = setting(None, "Folder or MLflow URI; null is POSTTRAIN_REGISTRY, or else ./registry.")


class CanarySection(Section):
    share: Fraction = setting(0.1, "Share of the users, or of requests, that the canary answers.")
    max_error_rate: Fraction = setting(0.05, "Share of failed answers above which all traffic goes back to production.")
    min_requests: int = setting(20, "Answers before the share of failures is judged.", ge=1, le=200)
    max_kpi_drop: NonNegativeFloat | None = setting(
        None, "Largest drop of the mean score of /v1/feedback below production's; null disables the check."
    )
    min_feedback: int = setting(30, "Scores of both versions before their means are compared.", ge=2)


class PipelineConfig(Section):
    pipeline: PipelineSettings = setting(..., "What holds for all stages.")
    schedule: Cron | None = setting(
        None, "Cron expression for the scheduler of your cluster; posttrain does not start runs itself."
    )
    demo: DemoSection | None = setting(None, "Makes the demo's model and data first; null does not.")
    base_model: str = setting(..., "Model that everything starts from: a folder, a checkpoint or a hub name.")
    traces: TracesSection = setting(..., "Where the labelled traces are.")
    dataset: DatasetSection = setting(DatasetSection, "What they become.")
    train: TrainSection = setting(..., "How the model is trained.")
    convert: ConvertSection = setting(ConvertSection, "Checkpoint to Hugging Face folder.")
    evaluate: dict[EvaluationName, EvaluationSection] = setting(
        ..., "Evaluations by name; the first one's score is the KPI, and the gate's checks name them.", min_length=1
    )
    gate: GateSection = setting(..., "Who decides.")
    registry: RegistrySection = setting(RegistrySection, "Where versions are kept.")
    canary: CanarySection = setting(CanarySection, "How traffic is split.")

    @model_validator(mode="after")
    def _data_fits_algorithm(self) -> PipelineConfig:
        kinds = _DATASETS.get(self.train.algorithm, ("groups", "prompts"))
        if self.dataset.kind not in ("auto", *kinds):
            raise ValueError(
                f"dataset.kind is {self.dataset.kind} and train.algorithm is {self.train.algorithm}, which takes "
                f"{' or '.join(('auto', *kinds))}"
            )
        return self

    @property
    def dataset_kind(self) -> Literal["pairs", "groups", "prompts"]:
        if self.dataset.kind == "auto":
            return _DATASETS.get(self.train.algorithm, ("groups",))[0]
        return self.dataset.kind
