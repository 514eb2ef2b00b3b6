"""The MCP server; each tool's module registers its tool."""

import os
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mcp_types
from fastmcp import FastMCP
from fastmcp.exceptions import ValidationError
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import ToolResult
from pydantic import ValidationError as PydanticValidationError

from crow_mcp_server import ask_user, plan, resources
from crow_mcp_server.files import file_editor
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.roots import RootsMiddleware
from crow_mcp_server.search import glob, grep, tree
from crow_mcp_server.terminal import terminal
from crow_mcp_server.tool_options import ToolOptions
from crow_mcp_server.web import fetch, web_search
from crow_mcp_server.web.search_results import PROVIDER_KEYS
from crow_mcp_server.workspace import Workspace, local_workspace

TOOLS = (ask_user, fetch, file_editor, glob, grep, plan, terminal, tree, web_search)
"""Modules with `register(server, options)`; the module's name is the tool's name."""


def create_server(
    workspace_for: Callable[[dict[str, Any]], Workspace] = local_workspace,
    hidden_env: Collection[str] = (),
    *,
    only: Collection[str] | None = None,
    allow_hosts: Collection[str] = (),
    ignore_robots: bool = False,
    stay_on_host: bool = False,
    env: Mapping[str, str] = os.environ,
    state: Path | None = None,
) -> FastMCP:
    """Return the server with all tools, or `only` those named. One server serves any number of sessions.

    ToolOptions describes the other arguments. Commands do not see the search providers' keys either.
    """
    server = FastMCP(
        "crow", version=version("crow-mcp-server"), middleware=[RootsMiddleware(), ArgumentErrorMiddleware()]
    )
    hidden = {*hidden_env, *PROVIDER_KEYS}
    options = ToolOptions(workspace_for, hidden, allow_hosts, ignore_robots, stay_on_host, env, state)
    for tool in TOOLS:
        if only is None or tool.__name__.rpartition(".")[2] in only:
            tool.register(server, options)
    if only is None or "file_editor" in only:
        resources.register(server, options)
    return server


class ArgumentErrorMiddleware(Middleware):
    """Converts pydantic's error about a tool call's arguments to one line for the model."""

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
            raise ToolRefusal(
                f"{context.message.name} was not run. {wrong}. Correct the arguments and call again."
            ) from None
