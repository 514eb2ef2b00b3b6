"""An MCP server on the low-level server of the official Python SDK."""

import asyncio
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server


async def main() -> None:
    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        schema = {"type": "object", "properties": {"times": {"type": "integer"}}, "required": ["times"]}
        return types.ListToolsResult(tools=[types.Tool(name="sing", description="Sing.", input_schema=schema)])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        song = "caw " * (params.arguments or {})["times"]
        return types.CallToolResult(content=[types.TextContent(type="text", text=song.strip())])

    server = Server("birds", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
