"""The MCP server: a list of tools, each added by the module it lives in."""

from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mcp_types
from fastmcp import FastMCP
from fastmcp.exceptions import ValidationError
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import ToolResult
from pydantic import ValidationError as PydanticValidationError

from crow_mcp_server import file_editor, glob, grep, terminal, tree
from crow_mcp_server.host import Host
from crow_mcp_server.refusal import Refusal
from crow_mcp_server.roots import AskForRoots
from crow_mcp_server.workspace import Workspace, local_workspace

TOOLS = (file_editor, terminal, grep, glob, tree)
"""Modules with `add(server: FastMCP, host: Host)`."""


def create_server(
    workspace_for: Callable[[dict[str, Any]], Workspace] = local_workspace,
    hidden_env: Collection[str] = (),
    state: Path | None = None,
) -> FastMCP:
    """The server with all its tools; one serves any number of sessions.

    `workspace_for` turns the `_meta` of a call into the workspace it works on. `hidden_env` names environment variables
    that commands never see. `state` is a folder for what shall outlive the process: the way back from edits.
    """
    server = FastMCP("crow", version=version("crow-mcp-server"), middleware=[AskForRoots(), PlainErrors()])
    host = Host(workspace_for, hidden_env, state)
    for tool in TOOLS:
        tool.add(server, host)
    return server


class PlainErrors(Middleware):
    """Says what is wrong with a call's arguments in a line a model can act on."""

    async def on_call_tool(
        self,
        context: MiddlewareContext[mcp_types.CallToolRequestParams],
        call_next: CallNext[mcp_types.CallToolRequestParams, ToolResult],
    ) -> ToolResult:
        try:
            return await call_next(context)
        except ValidationError as error:
            cause = error.__cause__
            if not isinstance(cause, PydanticValidationError):
                raise
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors(include_url=False)
            )
            raise Refusal(
                f"{context.message.name} was not run. {wrong}. Correct the arguments and call again."
            ) from None
