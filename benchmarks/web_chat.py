"""Measure a chat of `crow web`: a stream of 200 tokens a second to some tabs.

    uv run benchmarks/web_chat.py [--tabs 3] [--seconds 20]

Prints the share of a core that `crow web` takes, the kilobytes a second that a tab gets, and the memory. The agent and
the model run in other processes.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx2
import psutil
from crow_core.testing import Reply, ScriptedServer
from websockets.asyncio.client import ClientConnection, connect

PIECE = "Some words of an answer, **bold** ones and `code`, in a paragraph. "
PARAGRAPH = PIECE * 4 + "\n\n- an item\n- another\n\n```python\ndef f(x):\n    return x + 1\n```\n\n"


class Tab:
    """A page that counts what it receives."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.session, self.phase = socket, "", ""
        self.number, self.bytes, self.batches = 0, 0, 0

    async def act(self, do: str, **fields: Any) -> None:
        self.number += 1
        await self.socket.send(json.dumps({"do": do, "number": self.number, **fields}))

    async def receive(self) -> None:
        text = await self.socket.recv()
        self.bytes, self.batches = self.bytes + len(text.encode() if isinstance(text, str) else text), self.batches + 1
        batch = json.loads(text)
        self.session, self.phase = batch.get("@session", self.session), batch.get("@phase", self.phase)


async def stream(address: str, cookie: str, process: psutil.Process, tabs: int) -> None:
    """Let an answer stream to some tabs, and print what it took."""
    options: Any = {"additional_headers": {"Cookie": cookie}, "origin": address, "proxy": None, "max_size": None}
    live = address.replace("http", "ws", 1) + "/live"
    async with connect(live, **options) as first:
        tab = Tab(first)
        await tab.act("open")
        while tab.phase != "ready":
            await tab.receive()
        others = [Tab(await connect(f"{live}/{tab.session}", **options)) for _ in range(tabs - 1)]
        reading = [asyncio.create_task(read(other)) for other in others]
        await tab.act("prompt", text="Go")
        while tab.phase != "working":
            await tab.receive()
        before, begun, used = tab.bytes, perf_counter(), sum(process.cpu_times()[:2])
        batches = tab.batches
        while tab.phase == "working":
            await tab.receive()
        seconds = perf_counter() - begun
        share = (sum(process.cpu_times()[:2]) - used) / seconds
        print(
            f"{tabs} tabs: {share:6.1%} of a core, {(tab.bytes - before) / seconds / 1000:5.1f} kB/s of text a tab, "
            f"{(tab.batches - batches) / seconds:4.1f} batches a second, {process.memory_info().rss / 2**20:5.0f} MiB"
        )
        for task in reading:
            task.cancel()
        for other in others:
            await other.socket.close()


async def read(tab: Tab) -> None:
    while True:
        await tab.receive()


async def measure(env: Mapping[str, str], most: int) -> None:
    command = [sys.executable, "-m", "crow_cli", "web", "--no-open", "--cwd", env["HOME"]]
    started = await asyncio.create_subprocess_exec(*command, env=env, stdout=PIPE)
    assert started.stdout
    try:
        first = (await started.stdout.readline()).decode().strip()
        address = first.partition("/?")[0]
        async with httpx2.AsyncClient() as client:
            cookie = (await client.get(first)).headers["set-cookie"].partition(";")[0]
        process = psutil.Process(started.pid)
        for tabs in range(1, most + 1):
            await stream(address, cookie, process, tabs)
    finally:
        started.terminate()
        await started.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tabs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args()
    text = PARAGRAPH * (args.seconds * 200 * 4 // len(PARAGRAPH))
    with tempfile.TemporaryDirectory() as folder:
        async with ScriptedServer(lambda request: Reply(text, pace=0.005)) as server:
            env = {**os.environ, "CROW_HOME": str(Path(folder, "crow")), "HOME": folder}
            env |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none", "CROW_MODEL": "scripted"}
            await measure(env, args.tabs)


if __name__ == "__main__":
    asyncio.run(main())
