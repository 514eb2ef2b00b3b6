"""Workflows for `crow worker`: each has two prompts with two tool calls each, and a step.

`EFFECTS` names the file to which each run of a tool appends a line, and each model call that has its result. `START` is
a number of workflows to start: `python worker_program.py` does.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from crow_agent import Agent, tool
from crow_agent.workflows import open_workflows, step, workflow
from crow_core.testing import Reply, ScriptedModel

PACE = float(os.environ.get("PACE", "0.05"))


def append(line: str) -> None:
    """Append a line to the file of effects, with the time and the process."""
    with Path(os.environ["EFFECTS"]).open("a") as opened:
        opened.write(f"{time.time():.3f} {os.getpid()} {line}\n")


@tool
async def note(text: str) -> str:
    """Write a note."""
    append(f"note {text}")
    await asyncio.sleep(PACE)
    return "noted"


@tool(idempotent=True)
async def put(text: str) -> str:
    """Put a note in its place."""
    append(f"put {text}")
    await asyncio.sleep(PACE)
    return "put"


def answer(request: dict[str, Any]) -> Reply:
    """Call `note`, then `put`, then say so; in each turn."""
    messages = request["messages"]
    start = max(at for at, message in enumerate(messages) if message["role"] == "user")
    done = sum(message["role"] == "tool" for message in messages[start:])
    asked = str(messages[start]["content"])
    if done and messages[-1]["content"] in ("noted", "put"):  # it is stored, and the call has not been interrupted
        append(f"stored-{('note', 'put')[done - 1]} {asked}")
    if done == 2:
        return Reply(f"{asked}: done", pace=0.005)
    call: Any = {"name": ("note", "put")[done], "arguments": {"text": asked}}
    return Reply("Well.", tool_calls=[call])


agent = Agent(ScriptedModel(answer), tools=[note, put])


@step
async def publish(text: str) -> str:
    append(f"step {text}")
    return text


@workflow(queue="jobs", version="1")
async def job(name: str) -> list[str]:
    session = await agent.session()
    texts = [(await session.prompt(f"{name}.{n}")).text for n in range(2)]
    append(f"end {await publish(name)}")
    return texts


async def main() -> None:
    """Put workflows into the queue, and leave them to the workers."""
    async with open_workflows([job], listen=[]):
        for n in range(int(os.environ["START"])):
            await job.start(f"w{n}", id=f"w{n}")


if __name__ == "__main__":
    asyncio.run(main())
