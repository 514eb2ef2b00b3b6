"""Write crow-mcp-server's tools.json: the answer to `tools/list`, and what the tools accept beside their schemas."""

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

from crow_mcp_server import create_server
from fastmcp import Client

PACKAGE = Path(__file__).parent.parent / "crow-mcp-server"
TARGET = PACKAGE / "src/crow_mcp_server/tools.json"
KEYS = ("name", "description", "inputSchema", "outputSchema", "annotations", "_meta")


async def list_tools() -> list[dict[str, Any]]:
    """Return the tools as a client receives them, sorted by name, with the synonyms of their arguments in `_meta`."""
    async with Client(create_server(env={"SEARXNG_URL": "http://localhost"})) as client:
        tools = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in await client.list_tools()]
    synonyms = tomllib.loads((PACKAGE / "synonyms.toml").read_text(encoding="utf-8"))
    common = synonyms.pop("common")
    for tool in tools:
        table = synonyms[tool["name"]]
        tool["_meta"] |= {"crow/replaces": table.pop("replaces")}
        tool["_meta"] |= {"crow/arguments": table | {"ignored": common["ignored"] | table.get("ignored", {})}}
    return [{key: tool[key] for key in KEYS if key in tool} for tool in sorted(tools, key=lambda tool: tool["name"])]


def render(tools: list[dict[str, Any]]) -> str:
    """Return compact JSON. The arguments are in the order of the tool's signature: a model writes them so."""
    return json.dumps(tools, ensure_ascii=False, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(asyncio.run(list_tools())), encoding="utf-8")
