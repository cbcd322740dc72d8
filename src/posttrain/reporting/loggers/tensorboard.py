"""TensorBoard: one event file in `loggers/tensorboard`, written anew at every start from `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers.sink import TABLE, TABLE_COLUMNS, LoggedStep, RecordedRun

TOOL = "tensorboard"


class TensorboardSink:
    def open(self, run: RecordedRun) -> int | None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.place(TOOL)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        self._text("run", f"{run.title}\n\n`{run.folder}`", 0)
        return None

    def send(self, steps: Sequence[LoggedStep]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for one in steps:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in one.values.items()]
            self._add(Summary(value=values), one.step)
            if one.answers:
                self._text(TABLE, _markdown(one.answers), one.step)
        self._writer.flush()

    def alert(self, finding: Finding) -> None:
        self._text(f"doctor/{finding.rule}", finding.line, finding.step)
        self._writer.flush()

    def close(self, *, is_finished: bool) -> None:
        self._writer.close()

    def _add(self, summary: object, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=plugin, tensor=tensor)]), step)


def _markdown(rows: Sequence[Sequence[object]]) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(TABLE_COLUMNS), line(["---"] * len(TABLE_COLUMNS)), *map(line, rows)])
