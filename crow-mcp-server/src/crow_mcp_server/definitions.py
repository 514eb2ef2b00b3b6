"""The tool definitions, read from the file that scripts/generate_tools.py writes."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from crow_mcp_server.web.search_settings import has_search_provider

POWERSHELL_DESCRIPTION = """\
Run a PowerShell command; returns what it prints, and its exit code unless 0. Each command starts in the same folder, \
with the same variables. There is no input: pass flags such as -y or -m. A command that takes longer than wait \
continues in a session: session alone shows new output; keys "kill" ends it."""
POWERSHELL_META = {"crow/shell": "powershell"}


def tools(env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the server's answer to `tools/list`, one dict per tool with MCP's keys, without importing FastMCP.

    With `env`, leave out `web_search` if these variables configure no provider. `_meta` has two more tables for
    `crow_system.arguments`: `crow/arguments` and `crow/replaces`.
    """
    with open(os.path.join(os.path.dirname(__file__), "tools.json"), encoding="utf-8") as file:
        listed: list[dict[str, Any]] = json.load(file)
    for tool in listed:
        if tool["name"] == "terminal" and sys.platform == "win32":  # the file says what holds for a POSIX shell
            tool["description"] = POWERSHELL_DESCRIPTION
            tool["_meta"] |= POWERSHELL_META
    searches = env is None or has_search_provider(env)
    return [tool for tool in listed if searches or tool["name"] != "web_search"]
