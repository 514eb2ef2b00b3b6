"""The tool definitions, read from the file that scripts/generate_tools.py writes."""

import json
import os
from collections.abc import Mapping
from typing import Any

from crow_mcp_server.web.search_settings import has_search_provider


def tools(env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the server's answer to `tools/list`, one dict per tool with MCP's keys, without importing FastMCP.

    With `env`, leave out `web_search` if these variables configure no provider. `_meta` has two more tables for
    `crow_mcp_server.arguments`: `crow/arguments` and `crow/replaces`.
    """
    with open(os.path.join(os.path.dirname(__file__), "tools.json"), encoding="utf-8") as file:
        listed: list[dict[str, Any]] = json.load(file)
    searches = env is None or has_search_provider(env)
    return [tool for tool in listed if searches or tool["name"] != "web_search"]
