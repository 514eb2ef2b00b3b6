"""Run an agent with the client of the next official Python SDK, in an environment that has it.

Usage: python candidate.py FOLDER COMMAND ARGUMENT...; prints the results as one JSON object.
"""

import asyncio
import json
import os
import sys
from typing import Any

import acp
from acp import schema


class Client(acp.Client):
    """Gives every permission and records the updates."""

    def __init__(self) -> None:
        self.updates: list[str] = []
        self.asked = 0
        self.begun = asyncio.Event()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **kwargs: Any
    ) -> acp.RequestPermissionResponse:
        self.asked += 1
        chosen = next(option.option_id for option in options if option.kind == "allow_once")
        return acp.RequestPermissionResponse(outcome=schema.AllowedOutcome(option_id=chosen, outcome="selected"))

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        text = getattr(getattr(update, "content", None), "text", "")
        status = getattr(update, "status", None)
        self.updates.append(":".join(str(part) for part in (update.session_update, status or text) if part))
        if "hang" in text:
            self.begun.set()


async def main(folder: str, command: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    said = [schema.TextContentBlock(type="text", text="go")]
    client = Client()
    async with acp.spawn_agent_process(client, command, *arguments, env=dict(os.environ)) as (crow, _):
        initialized = await crow.initialize(protocol_version=1)
        found["agent"] = initialized.agent_info.name
        session = await crow.new_session(cwd=folder, mcp_servers=[])
        found["turn"] = (await crow.prompt(session_id=session.session_id, prompt=said)).stop_reason
        turn = asyncio.ensure_future(crow.prompt(session_id=session.session_id, prompt=said))
        await client.begun.wait()
        await crow.cancel(session_id=session.session_id)
        found["cancelled"] = (await turn).stop_reason
        found["asked"], found["updates"] = client.asked, client.updates
    again = Client()
    async with acp.spawn_agent_process(again, command, *arguments, env=dict(os.environ)) as (crow, _):
        await crow.initialize(protocol_version=1)
        await crow.load_session(session_id=session.session_id, cwd=folder, mcp_servers=[])
        found["loaded"] = list(again.updates)
        listed = await crow.list_sessions(cwd=folder)
        found["listed"] = [info.session_id for info in listed.sessions] == [session.session_id]
    return found


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
