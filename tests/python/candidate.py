"""Run an agent with the next official Python SDK as the client, and print what the client got as a JSON object.

Usage: python candidate.py FOLDER COMMAND ARGUMENT..., in an environment with that SDK.
"""

import asyncio
import json
import os
import sys
from typing import Any

import acp
from acp import schema


class Client(acp.Client):
    """A client that allows each permission and records the updates."""

    def __init__(self) -> None:
        self.updates: list[str] = []
        self.permissions = 0
        self.started = asyncio.Event()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **kwargs: Any
    ) -> acp.RequestPermissionResponse:
        self.permissions += 1
        option_id = next(option.option_id for option in options if option.kind == "allow_once")
        return acp.RequestPermissionResponse(outcome=schema.AllowedOutcome(option_id=option_id, outcome="selected"))

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        text = getattr(getattr(update, "content", None), "text", "")
        status = getattr(update, "status", None)
        self.updates.append(":".join(str(part) for part in (update.session_update, status or text) if part))
        if "hang" in text:
            self.started.set()


async def main(folder: str, command: str, *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = {}
    prompt = [schema.TextContentBlock(type="text", text="go")]
    client = Client()
    async with acp.spawn_agent_process(client, command, *arguments, env=dict(os.environ)) as (crow, _):
        initialized = await crow.initialize(protocol_version=1)
        report["agent"] = initialized.agent_info.name
        session = await crow.new_session(cwd=folder, mcp_servers=[])
        report["turn"] = (await crow.prompt(session_id=session.session_id, prompt=prompt)).stop_reason
        turn = asyncio.ensure_future(crow.prompt(session_id=session.session_id, prompt=prompt))
        await client.started.wait()
        await crow.cancel(session_id=session.session_id)
        report["cancelled"] = (await turn).stop_reason
        report["permissions"], report["updates"] = client.permissions, client.updates
    again = Client()
    async with acp.spawn_agent_process(again, command, *arguments, env=dict(os.environ)) as (crow, _):
        await crow.initialize(protocol_version=1)
        await crow.load_session(session_id=session.session_id, cwd=folder, mcp_servers=[])
        report["loaded"] = list(again.updates)
        listed = await crow.list_sessions(cwd=folder)
        report["listed"] = [info.session_id for info in listed.sessions] == [session.session_id]
    return report


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
