"""An agent of ACP version 2, a draft, made with the next official Python SDK. It repeats prompts; those that begin with
"Count" run until they are cancelled.

Usage: python agent_v2.py, in an environment with that SDK.
"""

import asyncio
from typing import Any
from uuid import uuid4

from acp.experimental import v2
from acp.experimental.v2 import schema


class Counter(v2.Agent):
    def __init__(self) -> None:
        self.sessions: dict[str, tuple[str, list[Any]]] = {}
        self.running: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def on_connect(self, conn: Any) -> None:
        self.client = conn

    async def initialize(self, protocol_version: int, info: Any, capabilities: Any = None, **kwargs: Any) -> Any:
        return schema.InitializeResponse(
            protocol_version=2,
            info=schema.Implementation(name="counter", version="2"),
            capabilities=schema.AgentCapabilities(session=schema.SessionCapabilities()),
        )

    async def new_session(self, cwd: str, **kwargs: Any) -> Any:
        id = str(uuid4())
        self.sessions[id] = cwd, []
        return schema.NewSessionResponse(session_id=id)

    async def list_sessions(self, cwd: str | None = None, **kwargs: Any) -> Any:
        found = [(id, folder) for id, (folder, _) in self.sessions.items() if cwd in (None, folder)]
        return schema.ListSessionsResponse(sessions=[schema.SessionInfo(session_id=id, cwd=at) for id, at in found])

    async def resume_session(self, session_id: str, cwd: str, replay_from: Any = None, **kwargs: Any) -> Any:
        for update in self.sessions[session_id][1] if replay_from else []:
            await self.client.session_update(session_id=session_id, update=update)
        return schema.ResumeSessionResponse()

    async def close_session(self, session_id: str, **kwargs: Any) -> Any:
        await self.cancel_session(session_id)
        return schema.CloseSessionResponse()

    async def prompt(self, session_id: str, prompt: Any, **kwargs: Any) -> Any:
        id = str(uuid4())
        task = asyncio.create_task(self.turn(session_id, id, prompt, self.sessions[session_id][1]))
        self.tasks.add(task)
        return schema.PromptResponse(message_id=id)

    async def turn(self, session: str, id: str, prompt: Any, shown: list[Any]) -> None:
        shown.append(schema.UserMessageUpdate(session_update="user_message", message_id=id, content=prompt))
        await self.client.session_update(session_id=session, update=shown[-1])
        running = schema.RunningSessionStateUpdate(session_update="state_update", state="running")
        await self.client.session_update(session_id=session, update=running)
        said = schema.AgentMessageUpdate(session_update="agent_message", message_id=str(uuid4()), content=prompt[:1])
        shown.append(said)
        await self.client.session_update(session_id=session, update=said)
        if prompt[0].text.startswith("Count"):
            self.running.add(session)
        else:
            await self.end(session, "end_turn")

    async def end(self, session: str, reason: str) -> None:
        idle = schema.IdleSessionStateUpdate(session_update="state_update", state="idle", stop_reason=reason)
        await self.client.session_update(session_id=session, update=idle)

    async def cancel_session(self, session_id: str, **kwargs: Any) -> None:
        if session_id in self.running:
            self.running.discard(session_id)
            await self.end(session_id, "cancelled")


asyncio.run(v2.run_agent(Counter()))
