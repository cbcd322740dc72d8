"""Everything a person sees of a run: its folder of plain files, the console, the HTML report."""

from posttrain.reporting.recorder import RunRecorder

__all__ = ["RunRecorder"]
