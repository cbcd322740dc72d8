"""convert: the checkpoint as a Hugging Face folder, compared with its source."""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.ship.pipeline.records import StageOutcome
from posttrain.apps.ship.pipeline.stage import StageContext
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject

MODEL_FOLDER = "model"


def inputs(context: StageContext) -> JsonObject:
    return {"settings": context.config.convert.model_dump()}


def work(context: StageContext, folder: Path) -> StageOutcome:
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
    verified = "not verified" if check is None else f"logits equal the source's within {check.max_difference:.2g}"
    what = "adapter" if done.is_adapter else "model"
    return StageOutcome(
        digest=digest([context.before["train"].outcome.digest, settings.model_dump()]),
        headline=f"{what} of {done.num_bytes / 1e6:,.1f} MB; {verified}",
        values={"model": MODEL_FOLDER, "num_bytes": done.num_bytes},
        report=f"{MODEL_FOLDER}/README.md",
    )
