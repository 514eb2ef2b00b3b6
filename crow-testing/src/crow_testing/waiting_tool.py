"""A tool that runs until a test lets it end."""

import asyncio

from crow_core.mcp.server import Server
from fastmcp import FastMCP


class WaitingTool:
    """The tool `work` of an MCP server `demo`. A call sets `started`, and waits for `go_on`."""

    def __init__(self) -> None:
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        server = FastMCP("demo")

        @server.tool
        async def work() -> str:
            self.started.set()
            await self.go_on.wait()
            return "worked"

        self.server = Server("demo", lambda: server, shared=True)
