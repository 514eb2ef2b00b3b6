"""What the terminal adds to a command, in a warm session, over bash alone; and what a gigabyte of output costs.

uv run benchmarks/terminal.py
"""

import asyncio
import resource
import subprocess
import sys
from statistics import median
from time import perf_counter
from typing import Any

from crow_mcp_server import create_server
from fastmcp import Client


async def main() -> None:
    async with Client(create_server()) as client:
        print(f"{'bash -c true':50} {bare():8.2f} ms")
        print(f"{'terminal: true':50} {await timed(client, command='true'):8.2f} ms")
        print(f"{'the same in a session that is open':50} {await timed(client, command='true', session='a'):8.2f} ms")
        print(f"{'file_editor: view, for comparison':50} {await viewed(client):8.2f} ms")
        before, begun = peak(), perf_counter()
        await client.call_tool_mcp("terminal", {"command": "yes | head -c 1000000000"})
        print(f"{'a gigabyte of output':50} {perf_counter() - begun:8.2f} s, {peak() - before} MB more memory")


def bare() -> float:
    times: list[float] = []
    for _ in range(50):
        begun = perf_counter()
        subprocess.run(["bash", "-c", "true"], check=True)
        times.append(perf_counter() - begun)
    return median(times) * 1e3


async def timed(client: Client[Any], tool: str = "terminal", **arguments: str) -> float:
    times: list[float] = []
    for _ in range(50):
        begun = perf_counter()
        await client.call_tool_mcp(tool, arguments)
        times.append(perf_counter() - begun)
    return median(times) * 1e3


async def viewed(client: Client[Any]) -> float:
    return await timed(client, "file_editor", command="view", path="justfile")


def peak() -> int:
    """Of memory, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) // 2**20


if __name__ == "__main__":
    asyncio.run(main())
