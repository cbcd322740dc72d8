"""The schema of pipeline.yaml: from labelled traces to a canary, one section per stage."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, matching
from posttrain.config.data import PairRulesConfig, TraceColumnsConfig, TraceFiltersConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Cron = Annotated[
    str,
    matching(
        r"\s*(@(hourly|daily|weekly|monthly|yearly)|\S+(\s+\S+){4})\s*",
        "five fields as in cron (minute hour day month weekday) are expected, or @daily and the like",
    ),
]
RegistryName = Annotated[
    str,
    matching(
        rf"(?!.*\.history$){_NAME.pattern}", "letters, digits, '.', '_' and '-' are accepted, not beginning with a sign"
    ),
]


class PipelineSettings(Section):
    name: RegistryName = Field(description="Name of the model in the registry; also shown in reports.")
    folder: str = Field(description="Folder of the pipeline: iterations, reports, KPI.")
    start_from: Literal["production", "base"] = Field(
        default="production",
        description="Model that a new iteration trains: the one in production (base_model while there is none), or "
        "base_model.",
    )
    gpu_hour_price: NonNegativeFloat | None = Field(
        default=None, description="Price of one GPU (or machine) for one hour, in any currency; null shows no cost."
    )

    cluster_profile: str | None = Field(
        default=None,
        description="Cluster profile (docs/launch.md) of the machines that train: time and cost of a training are "
        "predicted for them, and its prices are used; null predicts from an earlier iteration only.",
    )


class DemoSection(Section):
    """The demo's world, made before anything else: a small model, traces and problems. For trying a pipeline out."""

    folder: str = Field(description="Folder for model/, traces.jsonl and unseen.jsonl.")
    seed: NonNegativeInt = Field(default=1, description="Another seed makes another model and other problems.")
    sft_steps: PositiveInt = Field(default=400, description="Steps of supervised training that teach the format.")
    num_prompts: Annotated[int, Field(ge=1, le=2250)] = Field(
        default=1000, description="Prompts in the traces, of 2,250; more of them are new data."
    )
    answers_per_prompt: Annotated[int, Field(ge=2)] = Field(default=8, description="Answers to each prompt.")


class TracesSection(Section):
    path: str | list[str] = Field(
        min_length=1, description="Labelled traces: files, folders, patterns or URLs, Parquet or jsonl(.gz)."
    )
    columns: TraceColumnsConfig = Field(default_factory=TraceColumnsConfig, description="Which column means what.")
    filters: TraceFiltersConfig = Field(default_factory=TraceFiltersConfig, description="Which traces are used.")
    broken_files: Literal["error", "skip"] = Field(
        default="error",
        description="What a cut-off or damaged file does: ends the pipeline, or is used as far as it goes.",
    )


class DatasetSection(Section):
    kind: Literal["auto", "pairs", "groups", "prompts"] = Field(
        default="auto",
        description="What the traces become: pairs (DPO), groups of recorded answers or prompts with reference "
        "answers (GRPO); auto is pairs for DPO and groups for GRPO.",
    )
    pairs: PairRulesConfig = Field(default_factory=PairRulesConfig, description="How traces become pairs.")


class TrainSection(Section):
    algorithm: Literal["grpo", "dpo"] = Field(description="Algorithm: grpo or dpo.")
    config: str | None = Field(default=None, description="Config file of the run; null is the built-in defaults.")
    overrides: list[str] = Field(
        default_factory=list, description="Settings over the file, as on the command line: key=value."
    )
    checkpoint: Literal["newest", "best"] = Field(
        default="newest", description="Which checkpoint goes on: the newest, or the best by checkpointing.metric_name."
    )
    on_doctor_error: Literal["continue", "stop"] = Field(
        default="continue",
        description="What an error that the doctor found in the training does: it is recorded, or the pipeline stops.",
    )


class ConvertSection(Section):
    merge_lora: bool = Field(
        default=True, description="Merges a LoRA adapter into the model; an adapter alone cannot be trained further."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Number format of the weights; null is as saved."
    )
    verify: bool = Field(default=True, description="Compares the converted model's logits with its source's.")


class EvaluationSection(Section):
    config: str | None = Field(
        default=None, description="Config file of the evaluation; null is the built-in defaults."
    )
    overrides: list[str] = Field(
        default_factory=list, description="Settings over the file, as on the command line: key=value."
    )


class GateSection(Section):
    config: str = Field(description="gate.yaml: what a candidate has to show.")
    overrides: list[str] = Field(default_factory=list, description="Settings over the file: key=value.")
    without_production: Literal["base", "skip"] = Field(
        default="base", description="While nothing is in production: compare with base_model, or skip what compares."
    )


class RegistrySection(Section):
    location: str | None = Field(
        default=None, description="Folder or MLflow URI; null is POSTTRAIN_REGISTRY, or else ./registry."
    )


class CanarySection(Section):
    share: Fraction = Field(default=0.1, description="Share of the users, or of requests, that the canary answers.")
    max_error_rate: Fraction = Field(
        default=0.05, description="Share of failed answers above which all traffic goes back to production."
    )
    min_requests: Annotated[int, Field(ge=1, le=200)] = Field(
        default=20, description="Answers before the share of failures is judged."
    )
    max_kpi_drop: NonNegativeFloat | None = Field(
        default=None, description="Mean score of /v1/feedback that it may lie below production's; null does not look."
    )
    min_feedback: Annotated[int, Field(ge=2)] = Field(
        default=30, description="Scores of both versions before their means are compared."
    )


class PipelineConfig(Section):
    pipeline: PipelineSettings = Field(description="What holds for all stages.")
    schedule: Cron | None = Field(
        default=None,
        description="When to run, as cron writes it; posttrain starts nothing by itself: the cluster does.",
    )
    demo: DemoSection | None = Field(default=None, description="Makes the demo's model and data first; null does not.")
    base_model: str = Field(description="Model that everything starts from: a folder, a checkpoint or a hub name.")
    traces: TracesSection = Field(description="Where the labelled traces are.")
    dataset: DatasetSection = Field(default_factory=DatasetSection, description="What they become.")
    train: TrainSection = Field(description="How the model is trained.")
    convert: ConvertSection = Field(default_factory=ConvertSection, description="Checkpoint to Hugging Face folder.")
    evaluate: dict[str, EvaluationSection] = Field(
        description="Evaluations by name; the first one's score is the KPI, and the gate's checks name them."
    )
    gate: GateSection = Field(description="Who decides.")
    registry: RegistrySection = Field(default_factory=RegistrySection, description="Where versions are kept.")
    canary: CanarySection = Field(default_factory=CanarySection, description="How traffic is split.")

    @field_validator("evaluate")
    @classmethod
    def _measures_something(cls, evaluations: dict[str, EvaluationSection]) -> dict[str, EvaluationSection]:
        if not evaluations:
            raise ValueError("is empty: without an evaluation nothing can be decided")
        for name in evaluations:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a folder; letters, digits, '.', '_' and '-' are accepted")
        return evaluations

    @model_validator(mode="after")
    def _data_fits_algorithm(self) -> PipelineConfig:
        kinds = ("auto", "pairs") if self.train.algorithm == "dpo" else ("auto", "groups", "prompts")
        if self.dataset.kind not in kinds:
            raise ValueError(
                f"dataset.kind is {self.dataset.kind} and train.algorithm is {self.train.algorithm}, which takes "
                f"{' or '.join(kinds)}"
            )
        return self

    @property
    def dataset_kind(self) -> Literal["pairs", "groups", "prompts"]:
        if self.dataset.kind == "auto":
            return "pairs" if self.train.algorithm == "dpo" else "groups"
        return self.dataset.kind
