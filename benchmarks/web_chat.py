"""Measure a chat of `crow web`: a stream of 200 tokens a second to some tabs.

    uv run benchmarks/web_chat.py [--tabs 3] [--seconds 20]
    uv run benchmarks/web_chat.py --agent 5

Prints the share of a core that `crow web` takes, the kilobytes a second that a tab gets, and the memory. The agent and
the model run in other processes.

With `--agent N`, prints the seconds of the stream and the agent's processor time (`crow serve`) in N pairs of runs,
each with its own ratio: with a client that drops all updates, and with `crow web --connect` and a page. Both count
from the prompt to the end of the turn, and both are processes of their own, as waking one takes the agent time.

On an idle machine with two cores, a tab took 3.7 % of a core and three 4.0 %, with 69 MiB and 4.3 kB/s a tab. Ten pairs
of 8 seconds gave the agent -5.0 to +17.9 % of processor time, median +0.8 %. The page showed the end 0.2 s later.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx2
import psutil
from crow_core.testing import Reply, ScriptedServer
from crow_terminal.agent_connections import AgentAddress
from crow_terminal.agent_connections import connect as connect_agent
from crow_terminal.chat_client import ChatClient
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


async def stream(address: str, cookie: str, process: psutil.Process, tabs: int) -> tuple[float, float]:
    """Let an answer stream to some tabs, print what it took, and return its seconds and those of the processor."""
    options: Any = {"additional_headers": {"Cookie": cookie}, "origin": address, "proxy": None, "max_size": None}
    live = address.replace("http", "ws", 1) + "/live"
    async with connect(live, **options) as first:
        tab = Tab(first)
        await tab.act("open")
        while tab.phase != "ready":
            await tab.receive()
        others = [Tab(await connect(f"{live}/{tab.session}", **options)) for _ in range(tabs - 1)]
        reading = [asyncio.create_task(read(other)) for other in others]
        begun, used, before, batches = perf_counter(), sum(process.cpu_times()[:2]), tab.bytes, tab.batches
        await tab.act("prompt", text="Go")
        while tab.phase == "ready":
            await tab.receive()
        while tab.phase == "working":
            await tab.receive()
        seconds = perf_counter() - begun
        used = sum(process.cpu_times()[:2]) - used
        print(
            f"{tabs} tabs: {used / seconds:6.1%} of a core, {process.memory_info().rss / 2**20:5.0f} MiB, "
            f"{(tab.bytes - before) / seconds / 1000:5.1f} kB/s of text a tab, "
            f"{(tab.batches - batches) / seconds:4.1f} batches a second"
        )
        for task in reading:
            task.cancel()
        for other in others:
            await other.socket.close()
    return seconds, used


async def read(tab: Tab) -> None:
    while True:
        await tab.receive()


@asynccontextmanager
async def run(env: Mapping[str, str], *words: str) -> AsyncGenerator[tuple[str, psutil.Process]]:
    """Run a command of crow while the block runs; give its first line."""
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", "crow_cli", *words, env=env, stdout=PIPE)
    assert started.stdout
    try:
        yield (await started.stdout.readline()).decode().strip(), psutil.Process(started.pid)
    finally:
        started.terminate()
        await started.wait()


async def enter(first: str) -> tuple[str, str]:
    """Return the address of `crow web` and the cookie for it."""
    async with httpx2.AsyncClient() as client:
        cookie = (await client.get(first)).headers["set-cookie"].partition(";")[0]
    return first.partition("/?")[0], cookie


async def measure(env: Mapping[str, str], most: int) -> None:
    async with run(env, "web", "--no-open", "--cwd", env["HOME"]) as (first, process):
        address, cookie = await enter(first)
        for tabs in range(1, most + 1):
            await stream(address, cookie, process, tabs)


async def measure_agent(env: Mapping[str, str], pairs: int) -> None:
    """Print what a page costs the agent."""
    async with run(env, "serve", "--port", "0") as (line, agent):
        url, token = line.split()[0], line.split()[-1]
        ratios: list[tuple[float, float]] = []
        await start_client(url, token, env["HOME"], agent)  # loads what the first turn needs
        for number in range(pairs):
            bare = with_page = (0.0, 0.0)
            for has_page in (False, True) if number % 2 else (True, False):
                if has_page:
                    options = ("--no-open", "--cwd", env["HOME"], "--connect", url)
                    async with run({**env, "CROW_TOKEN": token}, "web", *options) as (first, _):
                        with_page = await stream(*await enter(first), agent, 1)
                else:
                    bare = await start_client(url, token, env["HOME"], agent)
            seconds, used = with_page[0] / bare[0], with_page[1] / bare[1]
            ratios.append((seconds, used))
            print(
                f"without a page {bare[0]:.2f} s, {bare[1]:.2f} s of the processor; "
                f"with one {with_page[0]:.2f} s, {with_page[1]:.2f} s: {seconds - 1:+.1%}, {used - 1:+.1%}"
            )
        print(f"median {median(each for each, _ in ratios) - 1:+.1%}, {median(each for _, each in ratios) - 1:+.1%}")


async def start_client(url: str, token: str, folder: str, agent: psutil.Process) -> tuple[float, float]:
    """Do `talk` in a process of its own, as a page has one: to wake another process takes the agent time."""
    words = [__file__, "--client", url, token, folder, str(agent.pid)]
    started = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
    seconds, used = (await started.communicate())[0].split()
    return float(seconds), float(used)


async def talk(url: str, token: str, folder: str, agent: psutil.Process) -> tuple[float, float]:
    """Let the answer stream to a client that drops it, and return its seconds and those of the agent's processor."""
    link = await connect_agent(AgentAddress(url, url=url, token=token), folder)
    client = ChatClient(link.transport, lambda update: None, lambda id, request: None, lambda id: None, {})
    async with client.serving():
        await client.start()
        session = (await client.new_session(folder)).session_id
        begun, before = perf_counter(), sum(agent.cpu_times()[:2])
        await client.prompt(session, "Go")
        return perf_counter() - begun, sum(agent.cpu_times()[:2]) - before


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tabs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--agent", type=int, default=0, metavar="N")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        url, token, folder, process = args.client
        print(*await talk(url, token, folder, psutil.Process(int(process))))
        return
    text = PARAGRAPH * (args.seconds * 200 * 4 // len(PARAGRAPH))
    with tempfile.TemporaryDirectory() as folder:
        async with ScriptedServer(lambda request: Reply(text, pace=0.005)) as server:
            env = {**os.environ, "CROW_HOME": str(Path(folder, "crow")), "HOME": folder}
            env |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none", "CROW_MODEL": "scripted"}
            await (measure_agent(env, args.agent) if args.agent else measure(env, args.tabs))


if __name__ == "__main__":
    asyncio.run(main())
