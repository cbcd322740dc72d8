"""train: trains on the dataset in a child process, which resumes from its newest checkpoint. convert: the checkpoint
as a Hugging Face folder, compared with its source.
"""

from __future__ import annotations

import math
from pathlib import Path

from posttrain.apps.ship.pipeline.iteration_models import trainable_folder
from posttrain.apps.ship.pipeline.predicted_cost import predict, predicted_cost, profile_of
from posttrain.apps.ship.pipeline.records import StageOutcome, read_iterations
from posttrain.apps.ship.pipeline.stage import Stage, StageContext, Stop, about
from posttrain.apps.ship.pipeline.training_process import run_training
from posttrain.checkpointing import CheckpointStore
from posttrain.config import LoadedConfig, RunConfig, load_config
from posttrain.config.changes import same_but_for_the_version
from posttrain.config.named_files import files_named_in
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import STOPPED_UNSAVED, ExitCode, InputError
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.reporting.examination import errors_of_model

DATASETS = {"pairs": "PreferenceDataset", "groups": "TraceGroups", "prompts": "ResponseDataset"}
# Set by the pipeline; values in the run's own config are ignored.
OWN_KEYS = ("policy.model_name", "data.train", "checkpointing.checkpoint_dir", "logger.log_dir")
PLACEHOLDER = "chosen-by-the-pipeline"
RUN_FOLDER, MODEL_FOLDER = "run", "model"
_HELD = "another process is training in this folder; see above. When it has ended, {again}"
_ENDINGS: dict[int, str] = {
    ExitCode.ERROR_FOUND: "stopped by the doctor, saved; see the finding above. Then {again}",
    ExitCode.SAVED: "stopped, saved; {again}",
    ExitCode.INTERRUPTED: "stopped, saved; {again}",
    ExitCode.STORAGE_FAILED: "the storage failed; see the error above. When it is fixed, {again}",
    ExitCode.NO_PROGRESS: "no rollout could be scored, so nothing was learnt; see the reasons above and fix the reward",
    ExitCode.FOLDER_HELD: _HELD,
    ExitCode.SUPERSEDED: _HELD,
    ExitCode.BAD_INPUT: "`posttrain {algorithm}` refused its input; see the error above",
}
LAST_STEPS = 10  # steps in the mean that is an iteration's training metric


class Train(Stage):
    name = "train"
    reads = ("dataset",)
    outputs = ("checkpoint",)
    resumes = True

    def check(self, config: PipelineConfig) -> None:
        loaded = load_training(config)
        if not loaded.config.checkpointing.enabled:
            raise InputError("train: checkpointing.enabled is false: there would be nothing to convert")
        profile_of(config.pipeline)
        if config.train.checkpoint == "best" and loaded.config.checkpointing.metric_name is None:
            raise InputError(
                "train.checkpoint is best, and checkpointing.metric_name is null: name the metric that decides, or "
                "take newest"
            )

    def inputs(self, context: StageContext) -> JsonObject:
        config = context.config
        loaded = load_training(config)
        settings = {key: value for key, value in loaded.flat().items() if not key.startswith(OWN_KEYS)}
        files = context.hashes.of_named(files_named_in(settings))
        chosen = {"algorithm": config.train.algorithm, "checkpoint": config.train.checkpoint}
        return {
            "settings": {**chosen, **settings},
            "files": files,
            "models": {"start": context.iteration.start.identity},
        }

    def same_settings(self, config: PipelineConfig, old: JsonMapping, new: JsonMapping) -> bool:
        return same_but_for_the_version(old, new, load_training(config))

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        from posttrain.models.accepted_names import TOKENIZER, WEIGHTS, folder_fingerprint

        config, algorithm = context.config, context.config.train.algorithm
        run = folder / RUN_FOLDER
        model, tokenizer = trainable_folder(context.iteration.start, config)
        data = str(context.before["dataset"].path("file"))
        loaded = load_training(config, model=model, tokenizer=tokenizer, data=data, folder=str(run))
        for warning in loaded.warnings:
            context.say(f"warning: train: {warning}")
        file = folder / "train.yaml"
        text, credentials = loaded.to_yaml_and_credentials()
        durable.write_text(file, text)
        prediction = predict(loaded.config, config.pipeline, self._earlier_run(context))
        if (expected := predicted_cost(prediction)) is not None:
            context.say(f"train: predicted {expected.text}")
        code = run_training(
            algorithm,
            file,
            quiet=context.quiet,
            lock=context.lock,
            heartbeat=context.heartbeat,
            variables=credentials,
        )
        if code:
            raise Stop(*_ended(code, algorithm))
        checkpoint = choose_checkpoint(run, loaded, config.train.checkpoint)
        step = int(checkpoint.name.removeprefix("step_"))
        errors = errors_of_model(str(checkpoint))
        for error in errors:
            context.say(f"warning: train: doctor: {error.line}")
        if errors and config.train.on_doctor_error == "stop":
            raise Stop(ExitCode.ERROR_FOUND, f"train: the doctor found {errors[0].line}; train.on_doctor_error is stop")
        metric, value, seconds = _training_metric(run)
        shown = "" if value is None else f"; {metric} {value:.4g} over the last steps"
        sick = f"; doctor: {', '.join(error.rule for error in errors)}" if errors else ""
        return StageOutcome(
            digest=folder_fingerprint(*(path for name in (WEIGHTS, TOKENIZER) if (path := checkpoint / name).is_dir())),
            headline=f"{algorithm.upper()} of {context.iteration.start.text}, checkpoint at step {step}{shown}{sick}",
            values={
                "checkpoint": f"{RUN_FOLDER}/{checkpoint.name}",
                "step": step,
                "metric": metric,
                "value": value,
                "logged_seconds": seconds,
                "doctor_errors": [error.rule for error in errors],
                "num_devices": loaded.config.cluster.num_workers,
                **prediction,
            },
            report=f"{RUN_FOLDER}/report.html",
        )

    def _earlier_run(self, context: StageContext) -> Path | None:
        """The newest run with these settings, from whichever data and model: its steps take as long."""
        settings = _without_length(self.inputs(context)["settings"])
        for iteration in reversed(read_iterations(context.home)):
            record = iteration.record("train")
            if record is None or _without_length(record.inputs["settings"]) != settings:
                continue
            if (record.folder / RUN_FOLDER).is_dir():
                return record.folder / RUN_FOLDER
        return None


class Convert(Stage):
    name = "convert"
    reads = ("train",)
    outputs = ("model",)

    def inputs(self, context: StageContext) -> JsonObject:
        return {"settings": context.config.convert.model_dump()}

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        from posttrain.apps.export.convert import ConversionSettings, convert
        from posttrain.models.accepted_names import WEIGHTS

        settings = context.config.convert
        checkpoint = context.before["train"].path("checkpoint")
        has_adapter = (checkpoint / WEIGHTS / "adapter_config.json").is_file()
        merge = settings.merge_lora and has_adapter
        done = convert(
            str(checkpoint),
            folder / MODEL_FOLDER,
            ConversionSettings(merge_lora=merge, dtype=settings.dtype, verify=settings.verify),
            shown_as=f"{context.config.pipeline.name}, iteration {context.iteration.number}",
            say=context.say,
        )
        check = done.verification
        verified = "not verified" if check is None else str(check)
        what = "adapter" if done.is_adapter else "model"
        return StageOutcome(
            digest=digest([context.before["train"].outcome.digest, settings.model_dump()]),
            headline=f"{what} of {done.num_bytes / 1e6:,.1f} MB; {verified}",
            values={"model": MODEL_FOLDER, "num_bytes": done.num_bytes},
            report=f"{MODEL_FOLDER}/README.md",
        )


def _without_length(settings: JsonMapping) -> JsonObject:
    ends = (".max_num_steps", ".max_num_epochs")
    return {key: value for key, value in settings.items() if not key.endswith(ends)}


def load_training(
    config: PipelineConfig,
    *,
    model: str = PLACEHOLDER,
    tokenizer: str | None = None,
    data: str = PLACEHOLDER,
    folder: str = PLACEHOLDER,
) -> LoadedConfig[RunConfig]:
    """The config of the run: the file, the overrides, and on top what the pipeline sets."""
    train = config.train
    for text in train.overrides:
        key = text.lstrip("+~").partition("=")[0].strip()
        if key.startswith(OWN_KEYS):
            where = {"policy.model_name": "base_model", "data.train": "traces and dataset"}.get(key, "pipeline.folder")
            raise InputError(f"train.overrides: `{text}`: the pipeline sets {key} itself; see {where}")
    path = None if train.config is None else Path(train.config)
    quoted = data.replace("'", "''")
    own = [
        f"policy.model_name={model}",
        f"data.train={{dataset_name: {DATASETS[config.dataset_kind]}, data_path: '{quoted}'}}",
        f"checkpointing.checkpoint_dir={folder}",
        "logger.log_dir=null",
    ]
    if tokenizer is not None and tokenizer != model:
        origins = load_config(train.algorithm, path, train.overrides).origins
        if origins.get("policy.tokenizer.name", "default") == "default":
            own.append(f"policy.tokenizer.name={tokenizer}")
    with about("train"):
        return load_config(train.algorithm, path, [*train.overrides, *own])


def _ended(code: int, algorithm: str) -> tuple[int, str]:
    if code in STOPPED_UNSAVED:
        return ExitCode.SAVED, "train: stopped before there was anything to save; the same command starts it again"
    again = "the same command resumes from its newest checkpoint"
    if code in _ENDINGS:
        return code, f"train: {_ENDINGS[code].format(again=again, algorithm=algorithm)}"
    if code < 0:
        return 1, f"train: the training was killed by signal {-code}; {again}"
    return 1, f"train: the training crashed (exit code {code}), see the error above; {again}"


def choose_checkpoint(run: Path, loaded: LoadedConfig[RunConfig], which: str) -> Path:
    settings = loaded.config.checkpointing
    store = CheckpointStore(run)
    newest = store.latest()
    if newest is None:
        raise InputError(f"train: {run} has no complete checkpoint")
    if which == "newest":
        return newest
    sign = 1.0 if settings.higher_is_better else -1.0
    infos = {run / f"step_{step}": store.read_info(run / f"step_{step}") for step in store.steps()}
    values = {path: info.get(settings.metric_name or "") for path, info in infos.items()}
    ranked = {
        path: sign * value for path, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    if not ranked:
        raise InputError(
            f"train.checkpoint: best: no checkpoint in {run} has the metric {settings.metric_name} "
            "(checkpointing.metric_name); validate when saving, or take newest"
        )
    return max(ranked, key=lambda path: (ranked[path], int(path.name.removeprefix("step_"))))


def _training_metric(run: Path) -> tuple[str, float | None, float]:
    """The headline metric of the training, its mean over the last steps, and the time of all steps."""
    from posttrain.reporting.run_data import load_run

    data = load_run(run)
    key = data.headline.metric
    values = [value for value in data.series(key).values if value is not None][-LAST_STEPS:]
    mean = math.fsum(values) / len(values) if values else None
    return key.removeprefix("train/"), mean, data.logged_seconds
