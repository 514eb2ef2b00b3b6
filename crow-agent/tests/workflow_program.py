"""A program with one workflow: `python workflow_program.py MOMENT`. At that moment it kills itself; `-` is none.

It prints the result. Each run of a tool or a step appends a line to the file `effects`, each model call one to `calls`.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from crow_agent import Agent, tool
from crow_agent.workflows import approve, list_waiting, open_workflows, step, workflow
from crow_core.testing import Reply, ScriptedModel

moment = sys.argv[1]


def die(now: str) -> None:
    """Kill this process if its moment has come."""
    if now == moment:
        os.kill(os.getpid(), signal.SIGKILL)


def append(file: str, line: str) -> None:
    with Path(file).open("a") as opened:
        opened.write(f"{line}\n")


@tool
def note(text: str) -> str:
    """Write a note."""
    append("effects", f"note {text}")
    die("note")
    return "noted"


@tool(idempotent=True)
def put(text: str) -> str:
    """Put a note in its place."""
    append("effects", f"put {text}")
    die("put")
    return "put"


@step
async def publish(text: str) -> str:
    append("effects", f"publish {text}")
    die("publish")
    return f"published {text}"


def answer(request: dict[str, Any]) -> Reply:
    """Call `note` in the first turn and `put` in the second, and say so."""
    roles = [message["role"] for message in request["messages"]]
    turn, last = roles.count("user"), request["messages"][-1]
    append("calls", f"{turn} {last['role']}")
    if last["role"] == "tool":
        return Reply(f"Turn {turn}: {last['content']}")
    call: Any = {"name": ("note", "put")[turn - 1], "arguments": {"text": f"turn {turn}"}}
    return Reply(tool_calls=[call])


agent = Agent(ScriptedModel(answer), tools=[note, put], store=os.environ.get("STORE") or True)


@workflow(version="1")
async def release(version: str) -> list[str]:
    session = await agent.session()
    die("session")
    plan = await session.prompt(f"Plan {version}.")
    die("planned")
    said = await publish(plan.text)
    if await approve(said, timeout="3d"):
        done = await session.prompt("Do it.")
        die("done")
        return [session.id, plan.text, said, done.text]
    return []


async def main() -> None:
    async with agent, open_workflows([release], url=os.environ.get("STORE", "")):
        handle = await release.start("1.2", id="rel-1.2")
        result = asyncio.ensure_future(handle.result())
        while not result.done() and not await list_waiting("rel-1.2", url=os.environ.get("STORE", "")):
            await asyncio.wait([result], timeout=0.02)
        die("waiting")
        if not result.done():
            await handle.approve()
        print(json.dumps(await result))


asyncio.run(main())
