"""Tools of an MCP server: `env.<name>.turns: mcp`, `turns_kwargs: {command: [python, server.py]}` or `{url: ...}`.

The client is the package `mcp`. With `per: rollout` each rollout that calls a tool has a server process, or an HTTP
session, of its own; `per: worker` shares one, for servers that keep nothing between calls. A call that the server
answers with an error is one that the model may correct; a server that dies, hangs or breaks the protocol leaves the
rollout unscored.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from posttrain.environments.item import WORKER_MARK, BadSetup, Unscored
from posttrain.environments.turns.interface import EndReason, Turn, TurnTask
from posttrain.environments.turns.replay import History, LiveStates
from posttrain.environments.turns.tools import ToolCall, ToolEnvironment, ToolError
from posttrain.files.json_files import JsonMapping, JsonObject

if TYPE_CHECKING:
    from mcp import Client

_INVALID_PARAMS = -32602  # of JSON-RPC: the server refuses these arguments, or knows no such tool
_CLOSE_LIMIT_S = 2.0
_MAX_PAGES = 100  # of the list of tools


class McpTools(ToolEnvironment):
    """`tools` names those that the model gets, null is all; `describe: false` keeps them out of the prompt."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        per: Literal["rollout", "worker"] = "rollout",
        tools: Sequence[str] | None = None,
        describe: bool = True,
        max_open: int = 32,
    ) -> None:
        if (command is None) == (url is None):
            raise ValueError("either command (a list of words that starts a server) or url is needed")
        if command is not None and (isinstance(command, str) or not command):
            raise ValueError(f"command is {command!r}: a list of words such as [python, server.py] is needed")
        if url is not None and (env or not str(url).startswith(("http://", "https://"))):
            problem = "env is for a server that command starts" if env else f"url is {url!r}: http://… is needed"
            raise ValueError(problem)
        if per not in ("rollout", "worker"):
            raise ValueError(f"per is {per!r}: rollout or worker is needed")
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}: at least 1 is needed")
        _require_package()
        self._target: Any = url
        if command is not None:
            from mcp import StdioServerParameters

            # mcp hands on PATH, HOME and the like only. By the mark a server that outlives its worker is found.
            given = {
                **{key: str(value) for key, value in (env or {}).items()},
                WORKER_MARK: os.environ.get(WORKER_MARK, ""),
            }
            self._target = StdioServerParameters(command=str(command[0]), args=[*map(str, command[1:])], env=given)
        self._loop = asyncio.Runner()
        self._shared: _Session | None = None
        self._states = LiveStates(lambda start: self._session(), max_open)
        offered = self._first_listing(str(url or " ".join(map(str, command or ()))))
        if tools is not None and (unknown := sorted(set(tools) - set(offered))):
            raise ValueError(f"tools: the server has no {', '.join(unknown)}; it has {', '.join(offered)}")
        self._offered = {name: tool for name, tool in offered.items() if tools is None or name in tools}
        self.tools = tuple(self._offered.values()) if describe else ()
        self._shares = per == "worker"

    def reset(self, task: TurnTask) -> History:
        return History()

    def step(self, state: History, response: str) -> Turn:
        turn = super().step(state, response)
        if turn.done:
            self._states.release(state)
        return turn

    def end(self, state: History, reason: EndReason) -> float:
        self._states.release(state)
        return 0.0

    def call(self, state: History, name: str, arguments: JsonMapping) -> str:
        action = {"name": name, "arguments": dict(arguments)}
        result = self._call_shared(action) if self._shares else self._states.act(state, action)
        if result["is_error"]:
            raise ToolError(result["text"])
        return str(result["text"])

    def _problem(self, call: ToolCall) -> str:
        """Arguments are the server's to check: its schemas may be of any kind."""
        if call.name in self._offered:
            return ""
        return f"there is no tool {call.name[:40]!r}; there is {', '.join(self._offered)}"

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _session(self) -> _Session:
        return _Session(self._loop, self._target, 0.6 * self.call_limit_s)

    def _call_shared(self, action: JsonMapping) -> JsonObject:
        self._shared = self._shared or self._session()
        try:
            return self._shared.act(action)
        except BaseException:
            self._shared.close()
            self._shared = None
            raise

    def _first_listing(self, shown: str) -> dict[str, JsonMapping]:
        """The server's tools in OpenAI's format, from a session that shows that it can be reached."""
        try:
            session = self._session()
            try:
                return session.tools()
            finally:
                session.close()
        except Unscored as error:
            raise BadSetup(f"the MCP server `{shown}` cannot be used: {error}") from error


class _Session:
    """A connection with its server process, if it has one. The loop runs during calls only."""

    def __init__(self, loop: asyncio.Runner, target: Any, limit_s: float) -> None:
        self._loop, self._limit_s = loop, limit_s
        self._closing = asyncio.Event()
        self._client: Client
        try:
            self._loop.run(self._open(target))
        except BaseException as error:
            self.close()
            raise _unscored(error, f"it did not answer within {limit_s:g} s", "it cannot be reached") from error

    async def _open(self, target: Any) -> None:
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # One task enters and leaves the client's context, as anyio demands.
        self._task = asyncio.create_task(self._hold(target, ready))
        self._client = await asyncio.wait_for(ready, self._limit_s)

    async def _hold(self, target: Any, ready: asyncio.Future[Client]) -> None:
        from mcp import Client

        try:
            async with Client(target, read_timeout_seconds=self._limit_s) as client:
                ready.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def tools(self) -> dict[str, JsonMapping]:
        try:
            return self._loop.run(self._tools())
        except Exception as error:
            raise _unscored(error, "it did not list its tools in time", "it cannot list its tools") from error

    async def _tools(self) -> dict[str, JsonMapping]:
        found: dict[str, JsonMapping] = {}
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                found[tool.name] = {"type": "function", "function": function}
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    def act(self, action: JsonMapping) -> JsonObject:
        from mcp import MCPError

        name = action["name"]
        call = self._client.call_tool(name, dict(action["arguments"]))
        try:
            result = self._loop.run(asyncio.wait_for(call, self._limit_s))
        except MCPError as error:
            if error.error.code == _INVALID_PARAMS:
                return {"text": error.error.message, "is_error": True}
            raise _unscored(error, "", f"the MCP server failed in the tool {name!r}") from error
        except Exception as error:
            limit = f"the tool {name!r} of the MCP server did not answer within {self._limit_s:g} s"
            raise _unscored(error, limit, f"the MCP server failed in the tool {name!r}") from error
        texts = [part.text if part.type == "text" else f"[{part.type}: not shown]" for part in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content)]
        return {"text": "\n".join(texts), "is_error": bool(result.is_error)}

    @property
    def is_open(self) -> bool:
        return not self._task.done()

    def close(self) -> None:
        async def ended() -> None:
            self._closing.set()
            await asyncio.wait([self._task], timeout=_CLOSE_LIMIT_S)
            self._task.cancel()  # it kills a server that does not end by itself
            await asyncio.wait([self._task], timeout=_CLOSE_LIMIT_S)

        with suppress(Exception):
            self._loop.run(ended())


def _unscored(error: BaseException, at_limit: str, otherwise: str) -> Unscored:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Unscored):
        return error
    if isinstance(error, TimeoutError):
        return Unscored(at_limit)
    return Unscored(f"{otherwise}: {' '.join(f'{type(error).__name__}: {error}'.split())}")


def _require_package() -> None:
    try:
        found = version("mcp")
    except PackageNotFoundError:
        found = None
    if found is None or found.partition(".")[0] != "2":
        has = "which is not installed" if found is None else f"and {found} is installed"
        raise BadSetup(f"turns: mcp needs the package mcp 2, {has}: pip install 'posttrain[mcp]'")
