"""The process of another agent."""

import asyncio
import os
import sys

import pytest
from crow_core.acp.agent_process import start_agent_process


@pytest.mark.anyio
@pytest.mark.parametrize("steps", [1, 2, 20])
async def test_cancelled_close_of_an_agent_leaves_no_task(steps: int):
    """The event loop may end right after the cancel, as when a tool that owns the agent is cancelled."""
    before = asyncio.all_tasks()
    process = await start_agent_process([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    closing = asyncio.ensure_future(process.close())
    for _ in range(steps):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert process.exit_code is not None
    assert [task for task in asyncio.all_tasks() - before if "stderr" in repr(task)] == []
