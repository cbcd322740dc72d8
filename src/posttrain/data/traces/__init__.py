"""Labelled traces: recorded answers with rewards, read as groups of one prompt or as preference pairs.

Two functions are what training uses: `iter_trace_groups` (GRPO from recorded groups) and `iter_pair_rows` (DPO). Both
stream: memory does not grow with the files. Nothing in this package imports torch.
"""

from posttrain.data.traces.reading import iter_pair_rows, iter_trace_groups
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import PairRules, Trace, TraceColumns, TraceFilters, TraceGroup
