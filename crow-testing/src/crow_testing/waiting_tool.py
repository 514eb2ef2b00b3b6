"""A tool that runs until a test lets it end."""

import asyncio

from crow_core.mcp.server import Server
from fastmcp import FastMCP


class WaitingTool:
    """The tool `work` of an MCP server. A call sets `started`, and waits for `go_on`."""

    def __init__(self, server_name: str = "demo") -> None:
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        server = FastMCP(server_name)

        @server.tool
        async def work() -> str:
            self.started.set()
            await self.go_on.wait()
            return "worked"

        self.server = Server(server_name, lambda: server, shared=True)
