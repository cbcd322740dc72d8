"""evaluate: runs every evaluation of the config on the candidate and on the model that it is compared with.

Answers are stored in FOLDER/evaluations under a hash of everything that decides them, so later iterations reuse them.
Metrics, thresholds and prices do not change answers: summaries are computed again from the stored answers. An
evaluation that was killed resumes with the remaining problems.

gate: promote, reject, or more samples needed, from the evaluations alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.apps.ship.pipeline.iteration_models import locate, model_identity
from posttrain.apps.ship.pipeline.records import StageOutcome, StageRecord, relative
from posttrain.apps.ship.pipeline.stage import Stage, StageContext, about
from posttrain.config import LoadedConfig, load_config
from posttrain.config.changes import same_but_for_the_version
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.gate import GateConfig
from posttrain.config.loader import load_standalone
from posttrain.config.named_files import files_named_in
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.roles import Progress

EVALUATIONS = "evaluations"
OWN_KEYS = ("generation.model_name", "eval.save_path")
PLACEHOLDER = "chosen-by-the-pipeline"  # the model; also the tokenizer, unless the config names another one
KL = "kl_from_base"
GATE_FILE, GATE_PAGE = "gate.json", "gate.html"
KL_INPUTS = ".kl_inputs"  # next to kl.json: its base model and answers


class Evaluate(Stage):
    name = "evaluate"
    reads = ("convert",)
    version = 2
    resumes = True

    def check(self, config: PipelineConfig) -> None:
        for name in config.evaluate:
            load_evaluation(config, name)

    def inputs(self, context: StageContext) -> JsonObject:
        config, incumbent = context.config, context.iteration.incumbent
        settings: JsonObject = {}
        for name in config.evaluate:
            flat = load_evaluation(config, name).flat()
            own = {key for key, value in flat.items() if key in OWN_KEYS or value == PLACEHOLDER}
            settings |= {f"{name}.{key}": value for key, value in flat.items() if key not in own}
        drift = measures_drift(config)
        models = {"incumbent": None if incumbent is None else incumbent.identity}
        if drift:
            models["base"] = model_identity(config.base_model)
        files = context.hashes.of_named(files_named_in(settings))
        return {"settings": {**settings, "drift": drift}, "files": files, "models": models}

    def same_settings(self, config: PipelineConfig, old: JsonMapping, new: JsonMapping) -> bool:
        def own(settings: JsonMapping, name: str) -> JsonObject:
            return {
                key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")
            }

        if {key.partition(".")[0] for key in old} - {*config.evaluate, "drift"} or old.get("drift") != new.get("drift"):
            return False
        return all(
            same_but_for_the_version(own(old, name), own(new, name), load_evaluation(config, name))
            for name in config.evaluate
        )

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        from posttrain.apps.evaluate.results import SUMMARY_FILE

        values, drift = record.outcome.values, measures_drift(config)
        for side in ("candidate", "incumbent"):
            for name, relative_path in (values[side] or {}).items():
                path = record.folder / relative_path
                if not (path / SUMMARY_FILE).is_file():
                    return str(path / SUMMARY_FILE)
                if values["judged"][f"{side}/{name}"] != digest(_judged(path, drift=name in drift)):
                    # The folder was summarised with other settings since.
                    return f"the summary of {name} with these settings"
        return None

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        from posttrain.apps.evaluate.comparison import compare, comparison_page
        from posttrain.apps.evaluate.results import read_evaluation

        incumbent = context.iteration.incumbent
        candidate = _measure(context, "the candidate", str(context.before["convert"].path("model")))
        others = None
        if incumbent is not None:
            others = _measure(context, incumbent.text, locate(incumbent, context.config))
        report = None
        if others is not None:
            for name in candidate:
                report = report or f"compare-{name}.html"
                compared = compare(read_evaluation(others[name]), read_evaluation(candidate[name]), None)
                durable.write_text(folder / f"compare-{name}.html", comparison_page(compared))
        return _outcome(context, folder, candidate, others, report)


def _measure(context: StageContext, who: str, model: str) -> dict[str, Path]:
    drift = measures_drift(context.config)
    found = {}
    for name in context.config.evaluate:
        context.say(f"          {name}: {who}")
        found[name] = _evaluate(context, name, model, drift=name in drift)
    return found


def load_evaluation(config: PipelineConfig, name: str, model: str = PLACEHOLDER) -> LoadedConfig[EvalRunConfig]:
    section = config.evaluate[name]
    for text in section.overrides:
        if text.lstrip("+~").partition("=")[0].strip() in OWN_KEYS:
            raise InputError(f"evaluate.{name}.overrides: `{text}`: the pipeline sets this itself")
    path = None if section.config is None else Path(section.config)
    with about(f"evaluate.{name}"):
        loaded = load_config("eval", path, [*section.overrides, f"generation.model_name={model}"])
    if loaded.config.server_url is not None:
        raise InputError(f"evaluate.{name}: generation.openai_cfg names a server; the pipeline evaluates its own model")
    return loaded


def check_problems(config: PipelineConfig, waiting: Collection[str] = ()) -> None:
    """InputError for problems that cannot be read, or a judge that does not exist, before the training is spent.
    `waiting` are settings that name files which the demo has not made yet."""
    from posttrain.apps.evaluate.build import EvaluationBuild

    for name in config.evaluate:
        if any(setting.startswith(f"evaluate.{name}.") for setting in waiting):
            continue
        build = EvaluationBuild(load_evaluation(config, name), say=lambda _: None)
        with about(f"evaluate.{name}"):
            build.check_problems_and_judge()


def measures_drift(config: PipelineConfig) -> list[str]:
    """The evaluations for which the gate needs the distance from the base model."""
    checks = load_gate(config).checks.values()
    return sorted({check.evaluation for check in checks if check.metric == KL})


def _evaluate(context: StageContext, name: str, model: str, *, drift: bool) -> Path:
    """The folder of the finished evaluation."""
    from posttrain.apps.evaluate.build import EvaluationBuild

    config = context.config
    loaded = load_evaluation(config, name, model)
    build = EvaluationBuild(loaded, context.say)
    folder = context.home / EVALUATIONS / f"{name}-{digest(build.identity())[:12]}"
    loaded.config.eval.save_path = str(folder)
    build.execute(_beating(context), retry_unscored=context.iteration.redone.get("evaluate", 0) > 0)
    if drift:
        _measure_drift(context, loaded, folder, model)
    return folder


def _measure_drift(context: StageContext, loaded: LoadedConfig[EvalRunConfig], folder: Path, model: str) -> None:
    """Measured once per answers and base model."""
    from posttrain.apps.ship.gate.divergence import KL_FILE, answers_digest

    base = model_identity(context.config.base_model)
    generation = loaded.config.generation
    inputs, file = digest([base, answers_digest(folder), generation.precision]), folder / KL_INPUTS
    if (folder / KL_FILE).is_file() and file.is_file() and file.read_text() == inputs:
        return
    from posttrain.apps.ship.gate.measure_divergence import measure_divergence

    measure_divergence(
        folder,
        context.config.base_model,
        model=model,
        precision=generation.precision,
        device=generation.device,
        show_progress=_beating(context),
    )
    durable.write_text(file, inputs)


def _beating(context: StageContext) -> Callable[[str, int], Any]:
    """The progress bar, which also records the time of this attempt."""

    @contextmanager
    def show(label: str, total: int) -> Iterator[Progress]:
        with context.show_progress(label, total) as advance:

            def advance_and_beat(count: int) -> None:
                advance(count)
                context.heartbeat()

            yield advance_and_beat

    return show


def _outcome(
    context: StageContext, folder: Path, candidate: dict[str, Path], others: dict[str, Path] | None, report: str | None
) -> StageOutcome:
    from posttrain.apps.evaluate.results import PROBLEMS_FILE, SUMMARY_FILE, read_summary

    first = next(iter(candidate))
    ours = read_summary(candidate[first])
    theirs = None if others is None else read_summary(others[first])
    interval = ours.intervals.get(ours.metric)
    drift, judged, answers = measures_drift(context.config), {}, {}
    for side, folders in (("candidate", candidate), ("incumbent", others or {})):
        for name, path in folders.items():
            judged[f"{side}/{name}"] = digest(_judged(path, drift=name in drift))
            answers[f"{side}/{name}"] = context.hashes.of(path / PROBLEMS_FILE)
    score = "none" if ours.score is None else f"{ours.score:.4f}"
    against = ""
    if theirs is not None and theirs.score is not None and context.iteration.incumbent is not None:
        against = f" against {theirs.score:.4f} of {context.iteration.incumbent.text}"
    return StageOutcome(
        digest=digest([answers, judged]),
        headline=f"{first}: {ours.metric} {score}{against}, {ours.counts.problems:,} problems",
        values={
            "candidate": {name: relative(path, folder) for name, path in candidate.items()},
            "incumbent": None if others is None else {name: relative(path, folder) for name, path in others.items()},
            "metric": ours.metric,
            "score": ours.score,
            "interval": None if interval is None else [interval.low, interval.high],
            "incumbent_score": None if theirs is None else theirs.score,
            "judged": judged,
            "num_devices": max(load_evaluation(context.config, name).config.num_devices for name in candidate),
        },
        report=report or relative(candidate[first] / SUMMARY_FILE, folder),
    )


def _judged(folder: Path, *, drift: bool) -> JsonObject:
    """What a gate may read, besides the answers."""
    from posttrain.apps.evaluate.results import read_summary
    from posttrain.apps.ship.gate.divergence import KL_FILE

    summary, kl = read_summary(folder), folder / KL_FILE
    return {
        "metrics": dict(summary.metrics),
        "pass_threshold": summary.pass_threshold,
        "cost": [summary.cost, summary.cost_per_answer],
        "kl": kl.read_text(encoding="utf-8") if drift and kl.is_file() else None,
    }


class Gate(Stage):
    name = "gate"
    reads = ("evaluate",)
    outputs = ("file",)
    version = 2  # raised when the rules change, so that verdicts are computed again

    def check(self, config: PipelineConfig) -> None:
        from posttrain.apps.ship.gate.measures import check_before_measuring
        from posttrain.apps.ship.gate.statistics import special_functions

        special_functions()
        for name, check in load_gate(config).checks.items():
            where = f"gate: {config.gate.config}: checks.{name}"
            if check.evaluation not in config.evaluate:
                raise InputError(
                    f"{where}.evaluation is {check.evaluation!r}, and `evaluate` has {', '.join(config.evaluate)}"
                )
            measured = load_evaluation(config, check.evaluation).config.eval
            check_before_measuring(
                check, where, num_samples=measured.num_tests_per_prompt, has_price=measured.gpu_hour_price is not None
            )

    def inputs(self, context: StageContext) -> JsonObject:
        return {"settings": load_gate(context.config).model_dump()}

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        from posttrain.apps.evaluate.results import read_evaluation
        from posttrain.apps.ship.gate import judge
        from posttrain.apps.ship.gate.report import WORDS, as_html, as_json

        config, measured = load_gate(context.config), context.before["evaluate"]
        values = measured.outcome.values
        candidate = {name: read_evaluation(measured.folder / path) for name, path in values["candidate"].items()}
        incumbent = values["incumbent"]
        production = incumbent and {name: read_evaluation(measured.folder / path) for name, path in incumbent.items()}
        result = judge(config, candidate, production)
        report = as_json(result, config, candidate, production)
        durable.write_text(folder / GATE_FILE, json.dumps(report, indent=2) + "\n")
        durable.write_text(folder / GATE_PAGE, as_html(report, result))
        reasons = "; ".join(result.reasons[:2])
        return StageOutcome(
            digest=digest([result.verdict, [asdict(rule) for rule in result.rules]]),
            headline=f"{WORDS[result.verdict]}{f': {reasons}' if reasons else ''}",
            values={
                "file": GATE_FILE,
                "verdict": result.verdict,
                "reasons": result.reasons,
                "needed_problems": result.needed_problems,
            },
            report=GATE_PAGE,
        )


def load_gate(config: PipelineConfig) -> GateConfig:
    with about("gate"):
        return load_standalone(GateConfig, Path(config.gate.config), config.gate.overrides)


def verdict_of(context: StageContext) -> str | None:
    """The gate's verdict in this iteration; None if there is none yet."""
    record = context.before.get("gate")
    return None if record is None else str(record.outcome.values["verdict"])
