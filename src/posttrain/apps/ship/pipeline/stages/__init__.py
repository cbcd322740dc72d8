"""The stages of a pipeline, in the order in which they run."""

from posttrain.apps.ship.pipeline.stage import Stage
from posttrain.apps.ship.pipeline.stages.data import Dataset, Traces
from posttrain.apps.ship.pipeline.stages.evaluate import Evaluate, Gate
from posttrain.apps.ship.pipeline.stages.registry import CanaryStage, Register
from posttrain.apps.ship.pipeline.stages.train import Convert, Train

ALL_STAGES: tuple[Stage, ...] = (
    Traces(),
    Dataset(),
    Train(),
    Convert(),
    Evaluate(),
    Gate(),
    Register(),
    CanaryStage(),
)
