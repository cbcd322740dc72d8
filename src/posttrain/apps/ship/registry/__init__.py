"""Model versions with lineage and stages, stored by MLflow. Importing this package does not import MLflow.

Importing it makes `registry:NAME@production` a name of a model (`models/accepted_names.py`).
"""

from posttrain.apps.ship.registry.lineage import Lineage, gather_lineage
from posttrain.apps.ship.registry.registry import Registry, resolve_version
from posttrain.apps.ship.registry.stages import HistoryEntry, Stage
from posttrain.apps.ship.registry.version import ModelVersion
from posttrain.errors import RegistryBusy, RegistryConflict, RegistryError
from posttrain.models.accepted_names import connect_registry

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
