"""The stages of a pipeline, one file each."""

from posttrain.apps.ship.pipeline.stage import Stage, StageContext
from posttrain.apps.ship.pipeline.stages.canary import CanaryStage
from posttrain.apps.ship.pipeline.stages.convert import ConvertStage
from posttrain.apps.ship.pipeline.stages.dataset import DatasetStage
from posttrain.apps.ship.pipeline.stages.evaluate import EvaluateStage
from posttrain.apps.ship.pipeline.stages.gate import GateStage
from posttrain.apps.ship.pipeline.stages.registry import RegistryStage
from posttrain.apps.ship.pipeline.stages.traces import TracesStage
from posttrain.apps.ship.pipeline.stages.train import TrainStage

ALL_STAGES: tuple[Stage, ...] = (
    TracesStage(),
    DatasetStage(),
    TrainStage(),
    ConvertStage(),
    EvaluateStage(),
    GateStage(),
    RegistryStage(),
    CanaryStage(),
)

__all__ = ["ALL_STAGES", "Stage", "StageContext"]
