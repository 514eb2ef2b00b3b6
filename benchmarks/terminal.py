"""Measure the time that `terminal` adds to a command of bash, and the time and memory for a gigabyte of output.

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
        print(f"{'bash -c true':50} {measure_bash():8.2f} ms")
        print(f"{'terminal: true':50} {await measure(client, command='true'):8.2f} ms")
        print(f"{'terminal: true, in an open session':50} {await measure(client, command='true', session='a'):8.2f} ms")
        view = await measure(client, "file_editor", command="view", path="justfile")
        print(f"{'file_editor: view, for comparison':50} {view:8.2f} ms")
        before, start = get_peak_memory(), perf_counter()
        await client.call_tool_mcp("terminal", {"command": "yes | head -c 1000000000"})
        seconds, megabytes = perf_counter() - start, get_peak_memory() - before
        print(f"{'a gigabyte of output':50} {seconds:8.2f} s, {megabytes} MB more memory")


def measure_bash() -> float:
    """Return the median time of `bash -c true` in milliseconds."""
    times: list[float] = []
    for _ in range(50):
        start = perf_counter()
        subprocess.run(["bash", "-c", "true"], check=True)
        times.append(perf_counter() - start)
    return median(times) * 1e3


async def measure(client: Client[Any], tool: str = "terminal", **arguments: str) -> float:
    """Return the median time of a tool call in milliseconds."""
    times: list[float] = []
    for _ in range(50):
        start = perf_counter()
        await client.call_tool_mcp(tool, arguments)
        times.append(perf_counter() - start)
    return median(times) * 1e3


def get_peak_memory() -> int:
    """Return this process's peak memory in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) // 2**20


if __name__ == "__main__":
    asyncio.run(main())
