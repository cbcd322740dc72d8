"""evaluate: the candidate, and the model that it is compared with, on every evaluation that the file names.

Answers are kept in FOLDER/evaluations, named by everything that decides them: what one iteration has measured, of whichever
model, the next one does not measure again. An evaluation that was killed goes on with the problems that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.checkpointing import durable
from posttrain.config import LoadedConfig, load_config
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.named_files import files_named_in
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
from posttrain.pipeline.content import digest, model_identity
from posttrain.pipeline.models import locate
from posttrain.pipeline.records import Outcome, PipelineError, StageName, StageRecord, about, relative
from posttrain.pipeline.stage import StageContext
from posttrain.pipeline.stages.gate import load_gate
from posttrain.roles import Progress

EVALUATIONS = "evaluations"
OWN_KEYS = ("generation.model_name", "tokenizer.name", "eval.save_path")
PLACEHOLDER = "chosen-by-the-pipeline"
KL = "kl_from_base"


class EvaluateStage:
    name: StageName = "evaluate"
    version = 1
    reads: tuple[StageName, ...] = ("convert",)
    goes_on = True

    def check(self, config: PipelineConfig) -> None:
        for name in config.evaluate:
            load_evaluation(config, name, PLACEHOLDER)

    def inputs(self, context: StageContext) -> dict[str, Any]:
        config, incumbent = context.config, context.iteration.incumbent
        settings: dict[str, Any] = {}
        for name in config.evaluate:
            flat = load_evaluation(config, name, PLACEHOLDER).flat()
            settings |= {f"{name}.{key}": value for key, value in flat.items() if not key.startswith(OWN_KEYS)}
        drift = measures_drift(config)
        models = {"incumbent": None if incumbent is None else incumbent.identity}
        if drift:
            models["base"] = model_identity(config.base_model)
        files = {str(file): context.hashes.of(file) for file in files_named_in(settings)}
        return {"settings": {**settings, "drift": drift}, "files": files, "models": models}

    def skip(self, context: StageContext) -> str | None:
        return None

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        folders = [*record.outcome.values["candidate"].values(), *(record.outcome.values["incumbent"] or {}).values()]
        paths = (record.folder / folder / "summary.json" for folder in folders)
        return next((str(path) for path in paths if not path.is_file()), None)

    def work(self, context: StageContext, folder: Path) -> Outcome:
        incumbent = context.iteration.incumbent
        candidate = self._measure(context, "the candidate", str(context.before["convert"].path("model")))
        others = None
        if incumbent is not None:
            others = self._measure(context, incumbent.text, locate(incumbent, context.config))
        report = None
        if others is not None:
            for name in candidate:
                report = report or f"compare-{name}.html"
                _write_comparison(others[name], candidate[name], folder / f"compare-{name}.html")
        return _outcome(context, folder, candidate, others, report)

    def _measure(self, context: StageContext, who: str, model: str) -> dict[str, Path]:
        drift = measures_drift(context.config)
        found = {}
        for name in context.config.evaluate:
            context.say(f"          {name}: {who}")
            found[name] = _evaluate(context, name, model, drift=name in drift)
        return found


def load_evaluation(config: PipelineConfig, name: str, model: str) -> LoadedConfig[EvalRunConfig]:
    section = config.evaluate[name]
    for text in section.overrides:
        if text.lstrip("+~").partition("=")[0].strip() in OWN_KEYS[::2]:
            raise PipelineError(f"evaluate.{name}.overrides: `{text}`: the pipeline sets this itself")
    path = None if section.config is None else Path(section.config)
    try:
        return load_config("eval", path, [*section.overrides, f"generation.model_name={model}"])
    except InputError as error:
        raise about(f"evaluate.{name}", error) from error


def measures_drift(config: PipelineConfig) -> list[str]:
    """The evaluations of which the gate wants to know the distance from the base model."""
    checks = load_gate(config).checks.values()
    return sorted({check.evaluation for check in checks if check.metric == KL})


def _evaluate(context: StageContext, name: str, model: str, *, drift: bool) -> Path:
    """The folder of the finished evaluation."""
    from posttrain.build.evaluation import EvaluationBuild
    from posttrain.evaluation.gate.divergence import KL_FILE
    from posttrain.evaluation.results import SUMMARY_FILE

    config = context.config
    loaded = load_evaluation(config, name, model)
    if loaded.config.server_url is not None:
        raise PipelineError(
            f"evaluate.{name}: generation.openai_cfg names a server; the pipeline evaluates its own model"
        )
    build = EvaluationBuild(loaded, context.say)
    base = model_identity(config.base_model) if drift else None
    identity = digest([build.identity(), loaded.config.eval.model_dump(exclude={"save_path"}), base])
    folder = context.home / EVALUATIONS / f"{name}-{identity[:12]}"
    asked_again = context.iteration.redone.get("evaluate", 0) > 0
    if asked_again or not (folder / SUMMARY_FILE).is_file():
        loaded.config.eval.save_path = str(folder)
        build.execute(_beating(context), retry_unscored=asked_again)
    if drift and (asked_again or not (folder / KL_FILE).is_file()):
        _measure_drift(context, loaded, folder, model)
    return folder


def _measure_drift(context: StageContext, loaded: LoadedConfig[EvalRunConfig], folder: Path, model: str) -> None:
    from posttrain.evaluation.gate.measure_divergence import measure_divergence

    generation = loaded.config.generation
    measure_divergence(
        folder,
        context.config.base_model,
        model=model,
        precision=generation.precision,
        device=generation.device,
        show_progress=_beating(context),
    )


def _beating(context: StageContext) -> Callable[[str, int], Any]:
    """The progress bar, which also keeps the time of this attempt."""

    @contextmanager
    def show(label: str, total: int) -> Iterator[Progress]:
        with context.show_progress(label, total) as advance:

            def advance_and_beat(count: int) -> None:
                advance(count)
                context.heartbeat()

            yield advance_and_beat

    return show


def _write_comparison(first: Path, second: Path, file: Path) -> None:
    from posttrain.evaluation.comparison import compare
    from posttrain.evaluation.comparison_html import render
    from posttrain.evaluation.results import read_evaluation

    durable.write_text(file, render(compare(read_evaluation(first), read_evaluation(second), None)))


def _outcome(
    context: StageContext, folder: Path, candidate: dict[str, Path], others: dict[str, Path] | None, report: str | None
) -> Outcome:
    from posttrain.evaluation.results import PROBLEMS_FILE, SUMMARY_FILE, read_summary

    first = next(iter(candidate))
    ours = read_summary(candidate[first])
    theirs = None if others is None else read_summary(others[first])
    interval = ours.intervals.get(ours.metric)
    contents = {
        f"{side}/{name}": [context.hashes.of(path / PROBLEMS_FILE), dict(read_summary(path).metrics)]
        for side, folders in (("candidate", candidate), ("incumbent", others or {}))
        for name, path in folders.items()
    }
    score = "none" if ours.score is None else f"{ours.score:.4f}"
    against = "" if theirs is None or theirs.score is None else f" against {theirs.score:.4f} of {_who(context)}"
    return Outcome(
        digest=digest(contents),
        headline=f"{first}: {ours.metric} {score}{against}, {ours.counts.problems:,} problems",
        values={
            "candidate": {name: relative(path, folder) for name, path in candidate.items()},
            "incumbent": None if others is None else {name: relative(path, folder) for name, path in others.items()},
            "metric": ours.metric,
            "score": ours.score,
            "interval": None if interval is None else [interval.low, interval.high],
            "incumbent_score": None if theirs is None else theirs.score,
        },
        report=report or relative(candidate[first] / SUMMARY_FILE, folder),
    )


def _who(context: StageContext) -> str:
    assert context.iteration.incumbent is not None
    return context.iteration.incumbent.text
