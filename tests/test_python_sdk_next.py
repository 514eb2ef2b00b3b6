"""Test `crow acp` with the next official Python SDK, which has its own environment beside that of the current one."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from crow_core.testing import Reply, ScriptedServer

pytestmark = pytest.mark.anyio

CANDIDATE = Path(__file__).parent / "python" / "candidate.py"


async def test_client_prompts_cancels_and_loads(tmp_path: Path, next_sdk: str) -> None:
    use = Reply("Look.", tool_calls=[{"name": "terminal", "arguments": {"command": "touch made"}}])
    async with ScriptedServer([use, Reply("Done."), Reply("hang", hang=True)]) as server:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "CROW_HOME": str(tmp_path / "crow"),
            "CROW_SANDBOX": "off",
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "key",
            "CROW_MODEL": "scripted",
        }
        command = [next_sdk, CANDIDATE, tmp_path, sys.executable, "-m", "crow_cli", "acp"]
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(out)
    assert (found["agent"], found["turn"], found["cancelled"]) == ("crow", "end_turn", "cancelled")
    assert found["permissions"] == 1
    assert (tmp_path / "made").exists()
    states = [update for update in found["updates"] if update.startswith("tool_call")]
    assert states == ["tool_call:pending", "tool_call_update:in_progress", "tool_call_update:completed"]
    assert found["listed"]
    assert found["loaded"] == [
        "user_message_chunk:go",
        "agent_message_chunk:Look.",
        "tool_call:pending",
        "tool_call_update:completed",
        "agent_message_chunk:Done.",
        "user_message_chunk:go",
        "agent_message_chunk:hang",
    ]
