"""A program that drops an agent without closing it reads nothing of asyncio's, and keeps nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, gc, sys
from crow_agent import Agent
from crow_agent.unclosed import OPEN
from crow_core.testing import Reply, ScriptedModel

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

def make() -> Agent:
    return Agent(ScriptedModel(lambda request: Reply("Hello.")), tools=TOOLS, store=False)

async def ask() -> None:
    print((await make().prompt("hi")).text)

async def ask_in_a_session() -> None:
    session = await make().session()
    print((await session.prompt("hi")).text)

async def stop_listening() -> None:
    async for _ in make().stream("hi"):
        print("Hello.")
        break

async def main() -> None:
    for _ in range(2):
        await USE()
        gc.collect()
    async with asyncio.timeout(60):
        while OPEN and USE is ask:
            gc.collect()
            await asyncio.sleep(0)

USE, TOOLS = locals()[sys.argv[1]], [add] if sys.argv[2] == "function" else ["builtin"]
if sys.argv[3] == "run":
    asyncio.run(main())
else:
    asyncio.new_event_loop().run_until_complete(main())
"""


@pytest.mark.parametrize(
    ("use", "tools", "loop"),
    [
        ("ask", "function", "run"),
        ("ask", "builtin", "run"),
        ("ask", "function", "loop that is left open"),
        ("ask_in_a_session", "function", "run"),
        ("stop_listening", "builtin", "run"),
    ],
)
def test_dropped_agent_is_closed_and_nothing_is_printed(home: Path, use: str, tools: str, loop: str) -> None:
    words = [sys.executable, "-c", PROGRAM, use, tools, loop]
    done = subprocess.run(words, cwd=home, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello.\nHello.\n", "")
