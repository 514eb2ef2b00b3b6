"""A program that only imports the SDK loads little of it."""

import subprocess
import sys

LATER = (
    "crow_core.app",
    "crow_core.session.session",
    "crow_core.mcp.server",
    "crow_agent.app",
    "httpx2",
    "fastmcp",
    "pydantic",
)
"""Modules that are loaded when an agent starts, or a tool is called."""


def test_import_of_the_sdk_loads_no_agent_yet() -> None:
    program = f"""
import sys
from crow_agent import Agent, tool

@tool
async def population(city: str) -> int:
    "Say how many people live in a city."

print([name for name in {LATER} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
