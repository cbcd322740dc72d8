"""The stages of a pipeline: a table of commands, in the order in which they run, and one file for each."""

from posttrain.apps.ship.pipeline.stage import Stage
from posttrain.apps.ship.pipeline.stages import canary, convert, dataset, evaluate, gate, registry, traces, train

ALL_STAGES: tuple[Stage, ...] = (
    Stage("traces", traces.inputs, traces.work, outputs=("statistics",), check=traces.check),
    Stage("dataset", dataset.inputs, dataset.work, reads=("traces",), outputs=("file",)),
    Stage(
        "train",
        train.inputs,
        train.work,
        reads=("dataset",),
        outputs=("checkpoint",),
        resumes=True,
        check=train.check,
        same_settings=train.same_settings,
    ),
    Stage("convert", convert.inputs, convert.work, reads=("train",), outputs=("model",)),
    Stage(
        "evaluate",
        evaluate.inputs,
        evaluate.work,
        reads=("convert",),
        version=2,
        resumes=True,
        check=evaluate.check,
        missing=evaluate.missing,
        same_settings=evaluate.same_settings,
    ),
    # The version is raised when the rules change, so that verdicts are computed again.
    Stage("gate", gate.inputs, gate.work, reads=("evaluate",), outputs=("file",), version=2, check=gate.check),
    Stage(
        "registry",
        registry.inputs,
        registry.work,
        reads=registry.READS,
        check=registry.check,
        skip=registry.skip,
        missing=registry.missing,
    ),
    Stage(
        "canary",
        canary.inputs,
        canary.work,
        reads=("gate", "registry"),
        outputs=("file",),
        check=canary.check,
        skip=canary.skip,
        missing=canary.missing,
    ),
)
