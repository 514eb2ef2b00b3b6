"""The client's roots (MCP `roots/list`), requested as the negotiated protocol version wants it."""

from urllib.parse import urlsplit
from urllib.request import url2pathname  # pyright: ignore[reportDeprecated] - Path.from_uri needs Python 3.13

import mcp_types
from fastmcp import Context
from fastmcp.exceptions import FastMCPError
from fastmcp.resources.base import InputRequiredResourceResult, ResourceResult
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from crow_mcp_server.refusal import ToolRefusal

ROOTS_TIMEOUT = 10.0  # seconds a client has to list its roots
ROOTS_KEY = "roots"


class RootsNeeded(FastMCPError):
    """Ends a request that the client must repeat with its roots."""

    request = mcp_types.InputRequiredResult(input_requests={ROOTS_KEY: mcp_types.ListRootsRequest()})


class ResourceRoots(Middleware):
    """Converts RootsNeeded of a resource to the protocol's "input required" result."""

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
    """Return the paths of the client's roots; empty if the client does not support roots.

    Raises ToolRefusal when the client does not list them, RootsNeeded when it must repeat the call with them.
    """
    session = context.session
    if session.client_capabilities is None or session.client_capabilities.roots is None:
        return []
    if session.protocol_version in MODERN_PROTOCOL_VERSIONS:
        answer = (context.input_responses or {}).get(ROOTS_KEY)
        if answer is None:
            raise RootsNeeded
    else:
        try:
            answer = await session.send_request(mcp_types.ListRootsRequest(), mcp_types.ListRootsResult, ROOTS_TIMEOUT)
        except MCPError as error:
            raise ToolRefusal(
                f"The client did not list its roots: {error}. Nothing was done. "
                "The person who runs this server can name the folder with --root."
            ) from None
    if not isinstance(answer, mcp_types.ListRootsResult):
        raise ToolRefusal("The client answered the request for its roots with something else. Nothing was done.")
    return [
        url2pathname(urlsplit(str(root.uri)).path)  # pyright: ignore[reportDeprecated]
        for root in answer.roots
    ]
