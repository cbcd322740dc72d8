"""Multi-turn environments: the interface, and two built-in implementations.

Everything here runs in worker processes, one call at a time, and imports no torch. `pool.py` is the driver's side of it.
"""

from posttrain.environments.turns.interface import Observation, Turn, TurnEnvironment, TurnTask
from posttrain.environments.turns.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from posttrain.environments.turns.tools import ToolEnvironment, ToolError

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
