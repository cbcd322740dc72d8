"""The stages of a pipeline, one file each."""

from posttrain.pipeline.stage import Stage, StageContext
from posttrain.pipeline.stages.canary import CanaryStage
from posttrain.pipeline.stages.convert import ConvertStage
from posttrain.pipeline.stages.dataset import DatasetStage
from posttrain.pipeline.stages.evaluate import EvaluateStage
from posttrain.pipeline.stages.gate import GateStage
from posttrain.pipeline.stages.registry import RegistryStage
from posttrain.pipeline.stages.traces import TracesStage
from posttrain.pipeline.stages.train import TrainStage

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
