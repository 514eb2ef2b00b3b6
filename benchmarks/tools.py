"""Compare the tools with what they are built on: a view with an empty FastMCP tool, grep with rg, and the start of the
server with that of an empty one.

uv run benchmarks/tools.py
"""

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter
from typing import Any

from crow_mcp_server.terminal.processes import SERVER_ENVIRONMENT

os.environ.update(SERVER_ENVIRONMENT)

import anyio
from crow_mcp_server import create_server
from crow_mcp_server.search.ripgrep import find_program
from fastmcp import Client, FastMCP

SOURCE = sysconfig.get_path("stdlib")
PATTERNS = ("ThreadPoolExecutor", "def __init__", "nowhere to be found")
BARE = "from fastmcp import FastMCP; FastMCP('bare').run(transport='stdio', show_banner=False)"
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "b", "version": "1"}},
}


def report(what: str, ours: float, theirs: float) -> None:
    """Print our time and the other one, given in seconds, in milliseconds."""
    print(f"{what:44} {ours * 1e3:9.2f} ms {theirs * 1e3:9.2f} ms {ours / theirs:6.2f} ×")


async def measure(run: Callable[[], Awaitable[Any] | None], times: int) -> float:
    """Return the median time of some runs in seconds."""
    seconds: list[float] = []
    for _ in range(times):
        start = perf_counter()
        if (result := run()) is not None:
            await result
        seconds.append(perf_counter() - start)
    return median(seconds)


async def compare_view() -> None:
    bare = FastMCP("bare")

    @bare.tool
    def nothing(path: str) -> str:
        return path

    with tempfile.TemporaryDirectory() as folder:
        await anyio.Path(folder, "a.py").write_text("print(6 * 7)\n" * 40)
        meta = {"crow/cwd": folder}
        async with Client(create_server()) as ours, Client(bare) as theirs:
            arguments = {"command": "view", "path": "a.py"}
            report(
                "file_editor view | an empty tool",
                await measure(lambda: ours.call_tool_mcp("file_editor", arguments, meta=meta), 500),
                await measure(lambda: theirs.call_tool_mcp("nothing", {"path": "a.py"}, meta=meta), 500),
            )


async def compare_grep() -> None:
    meta = {"crow/cwd": SOURCE}
    async with Client(create_server()) as client:
        for pattern in PATTERNS:

            def rg(pattern: str = pattern) -> None:
                command = [find_program(), "--sort", "path", "--line-number", pattern, SOURCE]
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)

            report(
                f"grep {pattern!r} | rg",
                await measure(lambda p=pattern: client.call_tool_mcp("grep", {"pattern": p}, meta=meta), 9),
                await measure(rg, 9),
            )


async def compare_start() -> None:
    def initialize(*command: str) -> None:
        with subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as server:
            assert server.stdin
            assert server.stdout
            server.stdin.write(json.dumps(HELLO).encode() + b"\n")
            server.stdin.flush()
            server.stdout.readline()
            server.kill()

    report(
        "initialize answered | an empty server",
        await measure(lambda: initialize("-m", "crow_mcp_server"), 9),
        await measure(lambda: initialize("-c", BARE), 9),
    )


async def main() -> None:
    await compare_view()
    await compare_grep()
    await compare_start()


if __name__ == "__main__":
    asyncio.run(main())
