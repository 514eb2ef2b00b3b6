"""A program that runs turns with keys: `python keyed_program.py KEY…`. In that of the last key it kills itself.

The key names the moment; with a further argument `-`, it does not. It prints a line of JSON for each result. Each run
of a tool appends a line to the file `effects`.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from crow_agent import Agent, AgentSession, tool
from crow_core.acp.schema import SessionUpdate, ToolCallUpdate
from crow_core.app import Crow
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, marker_kind
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel
from crow_extensions.steering import STEERING
from crow_persistence.extension import SqlStore

*keys, moment = sys.argv[1:]
keys += [moment] if moment != "-" else []
running: list[str] = []
"""The keys of the turns so far; the last one runs."""
apps: list[Crow] = []
sessions: list[AgentSession] = []
steers: list["asyncio.Task[bool]"] = []


async def steer(words: str) -> bool:
    """Give words to the running turn."""
    return await sessions[-1].steer(words)


def die(now: str) -> None:
    """Kill this process if its moment has come."""
    if now == moment and running[-1:] == [moment]:
        os.kill(os.getpid(), signal.SIGKILL)


def run(name: str, text: str) -> str:
    with Path("effects").open("a") as file:
        file.write(f"{name} {text}\n")
    die(name)
    return "done"


@tool
async def note(text: str) -> str:
    """Write a note."""
    if text in ("steered", "joined"):
        session = apps[-1].sessions["work"]
        steers.append(asyncio.ensure_future(steer("Rather in blue.")))
        while not session.state[STEERING].waiting:
            await asyncio.sleep(0)
    return run("note", text)


@tool(idempotent=True)
def put(text: str) -> str:
    """Put a note in its place."""
    return run("put", text)


class DyingStore(SqlStore):
    """Kills the process at the third draft of a process; the first is stored."""

    drafts = 0

    async def write_draft(self, session: Session, reply: Message) -> None:
        await super().write_draft(session, reply)
        self.drafts += 1
        if self.drafts == 3:
            die("draft")


def kill(crow: Crow) -> None:
    """Kill the process at the moments that hooks and the store see."""
    apps.append(crow)
    assert isinstance(crow.store, SqlStore)
    crow.store = DyingStore(crow.store.commits, crow.sessions)

    @crow.message
    def message(session: Session, entry: Message) -> None:  # it is not stored yet
        die("steered" if entry.get("crow", {}).get("steer") else marker_kind(entry) or entry.get("role", ""))

    @crow.before_tool
    def decided(session: Session, tool_call: ToolCall) -> None:
        die("before_tool")


def answer(request: dict[str, Any]) -> Reply:
    """Call both tools, one after the other, then say so."""
    turn = request["messages"][max(at for at, message in enumerate(request["messages"]) if "Work on" in str(message)) :]
    steps = sum(message["role"] == "assistant" for message in turn)
    joined = sum("in blue" in str(message["content"]) for message in turn)
    if joined:
        die("joined")
    if steps == 2:
        results = " / ".join(str(message["content"]) for message in turn if message["role"] == "tool")
        return Reply(f"Done: {results}{' in blue' * joined}")
    call: Any = {"name": ("note", "put")[steps], "arguments": {"text": running[-1]}}
    if moment == "draft":
        return Reply("and so on " * 100, tool_calls=[call], pace=0.01)
    return Reply("Well.", tool_calls=[call])


def look(update: SessionUpdate) -> None:
    if isinstance(update, ToolCallUpdate) and update.status == "completed":
        die("result")


async def main() -> None:
    store: Any = os.environ.get("STORE") or True
    async with Agent(ScriptedModel(answer), tools=[note, put], extensions=[kill], store=store) as agent:
        session = await agent.session("work", create=True)
        sessions.append(session)
        for key in keys:
            running.append(key)
            result = await session.prompt(f"Work on {key}.", key=key, on_update=look)
            usage = result.usage.total_tokens if result.usage else 0
            calls = [(call.name, call.status) for call in result.tool_calls]
            print(json.dumps([result.text, result.stop_reason, calls, usage]), flush=True)


asyncio.run(main())
