"""An MCP server with two tools: a calculator and a memory. `examples/configs/grpo_mcp.yaml` starts it.

pip install 'posttrain[mcp]', then `python examples/mcp_calculator.py` serves on standard input and output, and
`python examples/mcp_calculator.py 8765` on http://127.0.0.1:8765/mcp.
"""

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from posttrain.environments.turns import calculator

server = MCPServer("calculator")
remembered: list[str] = []  # of one rollout: each has a server of its own


@server.tool()
def calculate(expression: str) -> str:
    """Works out an arithmetic expression with + - * / ** and parentheses."""
    try:
        result = calculator.shown(calculator.evaluate(expression))
    except Exception as error:
        raise ToolError(str(error)) from error  # the model reads the text of a ToolError only
    remembered.append(f"{expression} = {result}")
    return result


@server.tool()
def recall() -> str:
    """Lists what has been worked out so far."""
    return "\n".join(remembered) or "nothing yet"


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
