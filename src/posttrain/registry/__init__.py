"""Model versions with lineage and stages, stored by MLflow. Importing this package does not import MLflow.

Importing it makes `registry:NAME@production` a name of a model (`models/accepted_names.py`).
"""

from posttrain.errors import RegistryBusy, RegistryConflict, RegistryError
from posttrain.models.accepted_names import connect_registry
from posttrain.registry.lineage import Lineage, gather_lineage
from posttrain.registry.registry import Registry, resolve_version
from posttrain.registry.stages import HistoryEntry, Stage
from posttrain.registry.version import ModelVersion

__all__ = [
    "HistoryEntry",
    "Lineage",
    "ModelVersion",
    "Registry",
    "RegistryBusy",
    "RegistryConflict",
    "RegistryError",
    "Stage",
    "gather_lineage",
    "resolve_version",
]

connect_registry(lambda reference, registry: resolve_version(reference, registry=registry))
