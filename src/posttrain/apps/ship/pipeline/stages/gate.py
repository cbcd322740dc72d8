"""gate: promote, reject, or more samples needed, from the evaluations alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from posttrain.apps.ship.pipeline.records import StageOutcome, about
from posttrain.apps.ship.pipeline.stage import StageContext
from posttrain.config.gate import GateConfig
from posttrain.config.loader import load_standalone
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject

GATE_FILE, GATE_PAGE = "gate.json", "gate.html"
WORDS = {"promote": "promote", "reject": "reject", "needs_more_samples": "needs more samples"}


def load_gate(config: PipelineConfig) -> GateConfig:
    try:
        return load_standalone(GateConfig, Path(config.gate.config), config.gate.overrides)
    except InputError as error:
        raise about("gate", error) from error


def verdict_of(context: StageContext) -> str | None:
    """The gate's verdict in this iteration; None if there is none yet."""
    record = context.before.get("gate")
    return None if record is None else str(record.outcome.values["verdict"])


def check(config: PipelineConfig) -> None:
    from posttrain.apps.ship.gate.measures import check_before_measuring
    from posttrain.apps.ship.gate.statistics import special_functions
    from posttrain.apps.ship.pipeline.stages.evaluate import load_evaluation

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


def inputs(context: StageContext) -> JsonObject:
    return {"settings": load_gate(context.config).model_dump()}


def work(context: StageContext, folder: Path) -> StageOutcome:
    from posttrain.apps.evaluate.results import read_evaluation
    from posttrain.apps.ship.gate import judge
    from posttrain.apps.ship.gate.report import as_html, as_json

    config, measured = load_gate(context.config), context.before["evaluate"]
    values = measured.outcome.values
    candidate = {name: read_evaluation(measured.folder / path) for name, path in values["candidate"].items()}
    incumbent = values["incumbent"]
    production = None
    if incumbent is not None:
        production = {name: read_evaluation(measured.folder / path) for name, path in incumbent.items()}
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
