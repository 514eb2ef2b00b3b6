"""What our tools cost beside what they stand on: a view beside a bare FastMCP tool, grep beside rg, the start of the
server beside that of an empty one.

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
    """Milliseconds, ours and those of what we stand on."""
    print(f"{what:44} {ours * 1e3:9.2f} ms {theirs * 1e3:9.2f} ms {ours / theirs:6.2f} ×")


async def timed(call: Callable[[], Awaitable[Any] | None], times: int) -> float:
    """The median of some calls, in seconds."""
    took: list[float] = []
    for _ in range(times):
        begun = perf_counter()
        if (result := call()) is not None:
            await result
        took.append(perf_counter() - begun)
    return median(took)


async def view() -> None:
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
                "file_editor view | a tool that does nothing",
                await timed(lambda: ours.call_tool_mcp("file_editor", arguments, meta=meta), 500),
                await timed(lambda: theirs.call_tool_mcp("nothing", {"path": "a.py"}, meta=meta), 500),
            )


async def grep() -> None:
    meta = {"crow/cwd": SOURCE}
    async with Client(create_server()) as client:
        for pattern in PATTERNS:

            def rg(pattern: str = pattern) -> None:
                command = [find_program(), "--sort", "path", "--line-number", pattern, SOURCE]
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)

            report(
                f"grep {pattern!r} | rg",
                await timed(lambda p=pattern: client.call_tool_mcp("grep", {"pattern": p}, meta=meta), 9),
                await timed(rg, 9),
            )


async def start() -> None:
    def answered(*command: str) -> None:
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
        await timed(lambda: answered("-m", "crow_mcp_server"), 9),
        await timed(lambda: answered("-c", BARE), 9),
    )


async def main() -> None:
    await view()
    await grep()
    await start()


if __name__ == "__main__":
    asyncio.run(main())
