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


async def test_plan_is_text_for_the_model_and_data_for_the_host():
    async with Client(create_server()) as client:
        result = await client.call_tool_mcp("plan", {"entries": ENTRIES})
    assert result.content[0].text == "1 of 3 steps completed.\n[x] read\n[>] write\n[ ] test"
    whole = [{"priority": "medium", **entry} for entry in ENTRIES]
    assert result.structured_content == {"entries": whole, "completed": 1}
    assert result.meta["crow/plan"] == whole


async def test_plan_may_be_empty():
    async with Client(create_server()) as client:
        result = await client.call_tool_mcp("plan", {"entries": []})
    assert result.content[0].text == "0 of 0 steps completed."


@pytest.mark.parametrize(
    "entry", [{"content": "read"}, {"content": "", "status": "pending"}, {"content": "x", "status": "perhaps"}, "read"]
)
async def test_invalid_plan_is_refused_with_the_reason(entry: object):
    async with Client(create_server()) as client:
        result = await client.call_tool_mcp("plan", {"entries": [entry]})
    assert result.is_error
    assert result.content[0].text.startswith("plan was not run. entries.0")
