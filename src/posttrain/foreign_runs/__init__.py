"""Runs of other systems, with the metrics under our names, so that the doctor can look at them. Read only."""

from posttrain.foreign_runs.detect import open_foreign_run
from posttrain.foreign_runs.run import ForeignRun

__all__ = ["ForeignRun", "open_foreign_run"]
