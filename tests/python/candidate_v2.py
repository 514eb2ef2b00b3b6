"""Run an agent with the next official Python SDK as a client of ACP version 2, and print what it got as a JSON object.

Usage: python candidate_v2.py FOLDER COMMAND ARGUMENT..., in an environment with that SDK.
"""

import asyncio
import json
import os
import sys
from typing import Any

from acp.experimental import v2
from acp.experimental.v2 import schema


class Client(v2.Client):
    """A client that allows each permission and records the updates."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[Any] = []
        self.ends: asyncio.Queue[Any] = asyncio.Queue()

    async def request_permission(self, **params: Any) -> schema.RequestPermissionResponse:
        self.questions.append(params.get("subject"))
        option_id = next(option.option_id for option in params["options"] if option.kind == "allow_once")
        outcome = schema.SelectedPermissionOutcomeVariant(option_id=option_id, outcome="selected")
        return schema.RequestPermissionResponse(outcome=outcome)

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        self.updates.append(update)
        if getattr(update, "stop_reason", None):
            await self.ends.put(update.stop_reason)


async def main(folder: str, command: str, *arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        command, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    client = Client()
    crow = v2.connect_to_agent(client, process.stdin, process.stdout)
    info = schema.Implementation(name="candidate", version="0")
    initialized = await crow.initialize(protocol_version=2, info=info)
    session = await crow.new_session(cwd=folder)
    prompt = [schema.TextContentBlock(type="text", text="go")]
    await crow.prompt(session_id=session.session_id, prompt=prompt)
    turn = await client.ends.get()
    await crow.prompt(session_id=session.session_id, prompt=prompt)
    while not any("text='hang'" in str(update) for update in client.updates):
        await asyncio.sleep(0.01)
    await crow.cancel_session(session_id=session.session_id)
    cancelled = await client.ends.get()
    live = len(client.updates)
    start = schema.ReplayFromStartVariant(type="start")
    await crow.resume_session(session_id=session.session_id, cwd=folder, replay_from=start)
    listed = await crow.list_sessions(cwd=folder)
    report = {
        "agent": initialized.info.name,
        "turn": turn,
        "cancelled": cancelled,
        "commands": [getattr(subject, "command", "") for subject in client.questions],
        "replayed": [update.session_update for update in client.updates[live:]],
        "listed": [info.session_id for info in listed.sessions] == [session.session_id],
    }
    await crow.close()
    process.stdin.close()
    await process.wait()
    return report


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
