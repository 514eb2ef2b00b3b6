"""Agent Plugins in the commands that list what crow would use."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_agent.settings.plugins import MCP_SCHEMA, PLUGIN_SCHEMA

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio


async def test_commands_show_from_which_plugin_something_comes(machine: "Machine"):
    plugins = Path(machine.env["CROW_HOME"], "plugins")
    skill = plugins / "reports/skills/summarize/SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: summarize\ndescription: Be brief.\n---\n")
    servers = {"docs": {"type": "streamable-http", "url": "https://docs.example/mcp"}}
    (plugins / "reports/plugin.json").write_text(json.dumps({"$schema": PLUGIN_SCHEMA, "name": "reports"}))
    (plugins / "reports/mcp.json").write_text(json.dumps({"$schema": MCP_SCHEMA, "mcpServers": servers}))
    (plugins / "broken").mkdir()
    (plugins / "broken/plugin.json").write_text("{")
    status = await machine.crow("status")
    assert "reports: skill summarize, server reports.docs, " in status.out
    assert "broken/plugin.json is not valid JSON: " in status.out
    (listed,) = json.loads((await machine.crow("mcp", "list", "--json")).out)
    assert (listed["name"], listed["from"]) == ("reports.docs", str(plugins / "reports/mcp.json"))
    (found,) = json.loads((await machine.crow("skills", "list", "--json")).out)
    assert (found["name"], found["origin"]) == ("summarize", "plugin reports")
