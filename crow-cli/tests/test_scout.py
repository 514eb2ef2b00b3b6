"""Inspect Scout reads the sessions that `crow sessions export --format atif` writes."""

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

PYTHON = os.environ.get("CROW_TEST_SCOUT", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(  # even under CROW_TEST_ALL: a machine with Python 3.11 alone cannot install it
        not PYTHON,
        reason="Inspect Scout is large, and reads ATIF with a newer Python only; CROW_TEST_SCOUT names a Python with "
        "inspect-scout and harbor.",
    ),
]

READ = """
import asyncio, json, sys
from inspect_scout.sources import atif

async def read():
    found = []
    async for transcript in atif(sys.argv[1]):
        messages = [
            {"role": message.role, "text": message.text, "calls": [
                [call.function, call.arguments] for call in getattr(message, "tool_calls", None) or []
            ]}
            for message in transcript.messages
        ]
        found.append({"agent": transcript.agent, "model": transcript.model, "messages": messages})
    print(json.dumps(found))

asyncio.run(read())
"""


async def test_scout_reads_a_session_that_crow_has_exported(machine: "Machine") -> None:
    call: Any = {"name": "terminal", "arguments": {"command": "echo milk"}}
    async with ScriptedServer([Reply("I look.", tool_calls=[call]), Reply("The notes say: milk.")]) as model:
        machine.ask(model.url)
        done = await machine.crow("run", "--mode", "yolo", "--output-format", "json", "What do the notes say?")
    session = json.loads(done.out)["session_id"]
    (folder := machine.home / "exported").mkdir()
    await machine.crow("sessions", "export", session, "--format", "atif", "-o", str(folder / "trajectory.json"))
    scout = await asyncio.create_subprocess_exec(PYTHON, "-c", READ, str(folder), stdout=asyncio.subprocess.PIPE)
    out, _ = await scout.communicate()
    (transcript,) = json.loads(out)
    assert (transcript["agent"], transcript["model"]) == ("crow", "scripted")
    system, user, asking, result, answer = transcript["messages"]
    assert (system["role"], user["text"]) == ("system", "What do the notes say?")
    assert (asking["text"], asking["calls"]) == ("I look.", [["terminal", {"command": "echo milk"}]])
    assert "milk" in result["text"]
    assert answer["text"] == "The notes say: milk."
