"""The MCP server; each tool's module registers its tool."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mcp_types
from crow_system.arguments import fit_arguments, to_key
from fastmcp import FastMCP
from fastmcp.exceptions import NotFoundError, ValidationError
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import InputRequiredToolResult, ToolResult
from pydantic import ValidationError as PydanticValidationError

from crow_mcp_server import ask_user, plan
from crow_mcp_server import workspace_resources as resources
from crow_mcp_server.definitions import tools
from crow_mcp_server.files import file_editor
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.roots import ResourceRoots, RootsNeeded
from crow_mcp_server.search import glob, grep, tree
from crow_mcp_server.terminal import terminal
from crow_mcp_server.tool_options import ToolOptions
from crow_mcp_server.web import fetch, web_search
from crow_mcp_server.web.search_settings import PROVIDER_KEYS
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
    skills: Sequence[Path] = (),
) -> FastMCP:
    """Return the server with all tools that can work, or `only` those named. One server serves any number of sessions.

    `skills` are folders whose subfolders with a SKILL.md are served as skills (SEP-2640). ToolOptions describes the
    other arguments. Commands do not see the search providers' keys either.
    """
    named = {tool["name"] for tool in tools(env)} if only is None else only
    offered = {name: tool for tool in TOOLS if (name := tool.__name__.rpartition(".")[2]) in named}
    server = FastMCP(
        "crow",
        version=version("crow-mcp-server"),
        middleware=[ResourceRoots(), ToolCalls(offered)],
    )
    hidden = {*hidden_env, *PROVIDER_KEYS}
    options = ToolOptions(workspace_for, hidden, allow_hosts, ignore_robots, stay_on_host, env, state)
    for tool in offered.values():
        tool.register(server, options)
    if "file_editor" in offered:
        resources.register(server, options)
    if skills:  # imported here because few servers have skills
        from fastmcp.server.providers.skills import SkillsDirectoryProvider
        from fastmcp.skills.extension import SkillsExtension

        provider = SkillsDirectoryProvider([*skills], reload=True, experimental_skills=True)
        server.add_provider(provider)
        server.add_extension(SkillsExtension(providers=[provider]))
    return server


class ToolCalls(Middleware):
    """Converts the arguments of tool calls to those of the schemas, and refuses those that do not fit in one line.

    Converts RootsNeeded to the protocol's "input required" result.
    """

    def __init__(self, offered: Collection[str]) -> None:
        self._tools = {tool["name"]: tool for tool in tools() if tool["name"] in offered}

    async def on_call_tool(
        self,
        context: MiddlewareContext[mcp_types.CallToolRequestParams],
        call_next: CallNext[mcp_types.CallToolRequestParams, ToolResult],
    ) -> ToolResult:
        name = context.message.name
        if known := self._tools.get(name):
            arguments = context.message.arguments or {}
            try:
                arguments = fit_arguments(arguments, known["inputSchema"], known["_meta"]["crow/arguments"])
            except ValueError as error:
                raise ToolRefusal(f"{name} was not run. {error} Correct the arguments and call again.") from None
            context = context.copy(message=context.message.model_copy(update={"arguments": arguments}))
        try:
            return await call_next(context)
        except RootsNeeded as needed:
            return InputRequiredToolResult(needed.request)
        except NotFoundError:
            raise ToolRefusal(self._describe_missing(name)) from None
        except ValidationError as error:
            cause = error.__cause__
            if not isinstance(cause, PydanticValidationError):
                raise
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors(include_url=False)
            )
            raise ToolRefusal(f"{name} was not run. {wrong}. Correct the arguments and call again.") from None

    def _describe_missing(self, name: str) -> str:
        """Return the answer to a call of a tool that does not exist."""
        key = to_key(name)
        ours = next((tool for tool in self._tools.values() if key in tool["_meta"]["crow/replaces"]), None)
        instead = (
            f" Use {ours['name']}, whose arguments are: {', '.join(ours['inputSchema']['properties'])}." if ours else ""
        )
        return f"There is no tool {name!r}.{instead} The tools are: {', '.join(self._tools)}."
