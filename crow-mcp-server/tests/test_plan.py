"""The tool `plan`."""

import pytest
from crow_mcp_server import create_server
from fastmcp import Client

pytestmark = pytest.mark.anyio

ENTRIES = [
    {"content": "read", "status": "completed", "priority": "high"},
    {"content": "write", "status": "in_progress"},
    {"content": "test", "status": "pending"},
]


async def test_a_plan_is_shown_as_a_list_and_told_to_the_host():
    async with Client(create_server()) as client:
        result = await client.call_tool_mcp("plan", {"entries": ENTRIES})
    assert result.content[0].text == "1 of 3 steps completed.\n[x] read\n[>] write\n[ ] test"
    whole = [{"priority": "medium", **entry} for entry in ENTRIES]
    assert result.structured_content == {"entries": whole, "completed": 1}
    assert result.meta["crow/plan"] == whole


async def test_a_plan_may_be_emptied():
    async with Client(create_server()) as client:
        result = await client.call_tool_mcp("plan", {"entries": []})
    assert result.content[0].text == "0 of 0 steps completed."


@pytest.mark.parametrize(
    "entry", [{"content": "read"}, {"content": "", "status": "pending"}, {"content": "x", "status": "done"}, "read"]
)
async def test_what_is_no_plan_is_refused_with_what_is_wrong(entry: object):
    async with Client(create_server()) as client:
        result = await client.call_tool_mcp("plan", {"entries": [entry]})
    assert result.is_error
    assert result.content[0].text.startswith("plan was not run. entries.0")
