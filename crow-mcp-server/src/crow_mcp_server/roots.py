"""The folders that a client opens to the server, in MCP's words its roots, asked for in either era of the protocol."""

from urllib.parse import urlsplit
from urllib.request import url2pathname

import mcp_types
from fastmcp import Context
from fastmcp.exceptions import FastMCPError
from fastmcp.resources.base import InputRequiredResourceResult, ResourceResult
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import InputRequiredToolResult, ToolResult
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from crow_mcp_server.refusal import ToolRefusal

ROOTS_TIMEOUT = 10.0  # seconds a client has to tell its roots
ROOTS_KEY = "roots"


class RootsNeeded(FastMCPError):
    """Ends a call that the client shall make again, telling its roots."""

    request = mcp_types.InputRequiredResult(input_requests={ROOTS_KEY: mcp_types.ListRootsRequest()})


class RootsMiddleware(Middleware):
    """Turns `RootsNeeded` into the protocol's word for it."""

    async def on_call_tool(
        self,
        context: MiddlewareContext[mcp_types.CallToolRequestParams],
        call_next: CallNext[mcp_types.CallToolRequestParams, ToolResult],
    ) -> ToolResult:
        try:
            return await call_next(context)
        except RootsNeeded as needed:
            return InputRequiredToolResult(needed.request)

    async def on_read_resource(
        self,
        context: MiddlewareContext[mcp_types.ReadResourceRequestParams],
        call_next: CallNext[mcp_types.ReadResourceRequestParams, ResourceResult],
    ) -> ResourceResult:
        try:
            return await call_next(context)
        except RootsNeeded as needed:
            return InputRequiredResourceResult(needed.request)


async def request_roots(context: Context) -> list[str]:
    """The folders that the client opens, none when it has no word for that.

    Raises Refusal when it does not tell them, RootsNeeded when the call has to be made again with them.
    """
    session = context.session
    if session.client_capabilities is None or session.client_capabilities.roots is None:
        return []
    if session.protocol_version in MODERN_PROTOCOL_VERSIONS:
        told = (context.input_responses or {}).get(ROOTS_KEY)
        if told is None:
            raise RootsNeeded
    else:
        try:
            told = await session.send_request(mcp_types.ListRootsRequest(), mcp_types.ListRootsResult, ROOTS_TIMEOUT)
        except MCPError as error:
            raise ToolRefusal(
                f"The client has roots, and did not tell them: {error}. Nothing was done. "
                "Whoever runs this server can name the folder with --root."
            ) from None
    if not isinstance(told, mcp_types.ListRootsResult):
        raise ToolRefusal("The client answered the question for its roots with something else. Nothing was done.")
    return [url2pathname(urlsplit(str(root.uri)).path) for root in told.roots]
