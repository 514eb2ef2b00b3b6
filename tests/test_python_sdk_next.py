"""Test `crow acp` with the next official Python SDK, which has its own environment beside that of the current one."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
from crow_core.testing import Reply, ScriptedServer

pytestmark = pytest.mark.anyio

CANDIDATE = Path(__file__).parent / "python" / "candidate.py"
CANDIDATE_2 = CANDIDATE.with_name("candidate_v2.py")


async def run(script: Path, folder: Path, python: str) -> Any:
    """Run a client on `crow acp`, whose model calls a tool, then hangs. Return what the client prints."""
    use = Reply("Look.", tool_calls=[{"name": "terminal", "arguments": {"command": "touch made"}}])
    async with ScriptedServer([use, Reply("Done."), Reply("hang", hang=True)]) as server:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "CROW_HOME": str(folder / "crow"),
            "CROW_SANDBOX": "off",
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "key",
            "CROW_MODEL": "scripted",
        }
        command = [python, script, folder, sys.executable, "-m", "crow_cli", "acp"]
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_client_of_the_second_version_prompts_cancels_and_resumes(tmp_path: Path, next_sdk: str) -> None:
    found = await run(CANDIDATE_2, tmp_path, next_sdk)
    assert (found["agent"], found["turn"], found["cancelled"]) == ("crow", "end_turn", "cancelled")
    assert found["commands"] == ["touch made"]
    assert (tmp_path / "made").exists()
    assert found["listed"]
    messages = [kind for kind in found["replayed"] if kind.endswith("_message")]
    assert messages == ["user_message", "agent_message", "agent_message", "user_message", "agent_message"]


async def test_client_prompts_cancels_and_loads(tmp_path: Path, next_sdk: str) -> None:
    found = await run(CANDIDATE, tmp_path, next_sdk)
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
        "agent_thought_chunk:Interrupted here.\n",
    ]
