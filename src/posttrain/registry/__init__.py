"""Model versions with lineage and stages, kept by MLflow. Importing this package does not import MLflow."""

from posttrain.registry.errors import RegistryBusy, RegistryConflict, RegistryError
from posttrain.registry.lineage import Lineage, gather_lineage
from posttrain.registry.registry import Registry
from posttrain.registry.resolve import is_registry_reference, resolve_version
from posttrain.registry.stages import Entry, Stage
from posttrain.registry.version import ModelVersion

__all__ = [
    "Entry",
    "Lineage",
    "ModelVersion",
    "Registry",
    "RegistryBusy",
    "RegistryConflict",
    "RegistryError",
    "Stage",
    "gather_lineage",
    "is_registry_reference",
    "resolve_version",
]
