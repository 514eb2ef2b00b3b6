"""Write crow-mcp-server's tools.json, the answer to `tools/list`, for hosts that do not load FastMCP."""

import asyncio
import json
from pathlib import Path
from typing import Any

from crow_mcp_server import create_server
from fastmcp import Client

TARGET = Path(__file__).parent.parent / "crow-mcp-server/src/crow_mcp_server/tools.json"
KEYS = ("name", "description", "inputSchema", "outputSchema", "annotations", "_meta")


async def list_tools() -> list[dict[str, Any]]:
    """Return the tools as a client receives them, sorted by name."""
    async with Client(create_server()) as client:
        tools = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in await client.list_tools()]
    return [{key: tool[key] for key in KEYS if key in tool} for tool in sorted(tools, key=lambda tool: tool["name"])]


def render(tools: list[dict[str, Any]]) -> str:
    """Return compact JSON with sorted keys, so that equal tools give equal bytes."""
    return json.dumps(tools, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(asyncio.run(list_tools())), encoding="utf-8")
