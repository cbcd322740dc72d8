"""Multi-turn environments: the interface, and two built-in implementations.

Everything here runs in worker processes, one call at a time, and imports no torch. `pool.py` is the driver's side of
it.
"""

from posttrain.environments.turns.interface import Observation, Turn, TurnEnvironment, TurnTask
from posttrain.environments.turns.tools import MalformedCall, ToolCall, ToolEnvironment, ToolError, parse_tool_calls

__all__ = [
    "MalformedCall",
    "Observation",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "Turn",
    "TurnEnvironment",
    "TurnTask",
    "parse_tool_calls",
]
