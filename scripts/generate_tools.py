"""Write crow-mcp-server's tools.json: what its `tools/list` answers, for hosts that do not want to load FastMCP yet."""

import asyncio
import json
from pathlib import Path
from typing import Any

from crow_mcp_server import create_server
from fastmcp import Client

TARGET = Path(__file__).parent.parent / "crow-mcp-server/src/crow_mcp_server/tools.json"
KEYS = ("name", "description", "inputSchema", "outputSchema", "annotations", "_meta")


async def listed() -> list[dict[str, Any]]:
    """The tools as a client sees them, sorted by name."""
    async with Client(create_server()) as client:
        found = await client.list_tools()
    dumped = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in found]
    return [{key: tool[key] for key in KEYS if key in tool} for tool in sorted(dumped, key=lambda tool: tool["name"])]


def render(tools: list[dict[str, Any]]) -> str:
    """Compact and sorted, so that equal tools are equal bytes."""
    return json.dumps(tools, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(asyncio.run(listed())), encoding="utf-8")
