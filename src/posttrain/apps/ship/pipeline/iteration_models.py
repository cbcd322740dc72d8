"""The models of an iteration: the one it trains, and the one its result is compared with."""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.ship.pipeline.records import ModelChoice
from posttrain.apps.ship.pipeline.stage import about
from posttrain.apps.ship.registry.artifacts import content_digest
from posttrain.apps.ship.registry.registry import Registry
from posttrain.apps.ship.registry.store import DATABASE
from posttrain.apps.ship.registry.version import ModelVersion
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError


def registry_of(config: PipelineConfig) -> Registry:
    return Registry(config.registry.location)


def place_in_registry(config: PipelineConfig) -> dict[str, str]:
    """The registry and the model's name in it, which version numbers belong to."""
    location = registry_of(config).location
    return {"name": config.pipeline.name, "location": str(location.folder or location.text)}


def versions_of(config: PipelineConfig) -> list[ModelVersion]:
    """All versions of the pipeline's model; none while there is no registry, or nothing of this name in it."""
    registry = registry_of(config)
    folder = registry.location.folder
    if folder is not None and not (folder / DATABASE).exists():
        return []
    name = config.pipeline.name
    return registry.versions(name) if registry.has(name) else []


def choose_models(config: PipelineConfig) -> tuple[ModelChoice, str, ModelChoice | None]:
    """What a new iteration starts from, why, and what it is compared with."""
    production = next((version for version in versions_of(config) if version.stage == "production"), None)
    with about("base_model"):
        base = ModelChoice(config.base_model, model_identity(config.base_model))
    current = None
    if production is not None:
        current = ModelChoice(production.reference, content_digest(production.files), production.version)
    incumbent = current or (base if config.gate.without_production == "base" else None)
    if config.pipeline.start_from == "base":
        return base, "pipeline.start_from is base", incumbent
    if current is None:
        return base, "nothing is in production yet", incumbent
    return current, "it is in production", incumbent


def locate(choice: ModelChoice, config: PipelineConfig) -> str:
    """A folder or hub name that can be loaded. Files of a registered version are compared with their checksums."""
    if choice.version is not None:
        return str(registry_of(config).resolve(config.pipeline.name, choice.version).path)
    if model_identity(choice.text) != choice.identity:
        raise InputError(
            f"base_model: {choice.text} holds another model than when this iteration began; restore the old one, or "
            "start again with --new-iteration"
        )
    return choice.text


def trainable_folder(choice: ModelChoice, config: PipelineConfig) -> tuple[str, str]:
    """(weights, tokenizer) to start training from."""
    from posttrain.models.accepted_names import resolve_model

    found = resolve_model(locate(choice, config))
    if found.adapter is not None:
        raise InputError(
            f"{choice.text} is a LoRA adapter, and training starts from full models; convert it with --merge-lora, and "
            "set convert.merge_lora: true"
        )
    return found.model, found.tokenizer if Path(found.tokenizer).exists() else found.model


def model_identity(reference: str) -> str:
    """The fingerprint of a local model's files; for a hub name, the name."""
    from posttrain.models.accepted_names import model_fingerprint, resolve_model

    found = resolve_model(reference)
    return model_fingerprint(found) or found.model
