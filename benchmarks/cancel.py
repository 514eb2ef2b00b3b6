"""How soon a cancelled turn is answered, and how soon nothing is left of what it ran.

Run with `uv run python benchmarks/cancel.py`. A real `crow acp`, which stores what it says, is cancelled again and
again: while a reply streams, alone and beside 99 others at 50 chunks a second each, and while a command runs that has
left children behind, one of them deaf to SIGTERM and one in a session of its own.

On two cores with a load of 2.6 beside it, median and most: in a reply 6 and 24 ms, beside 99 others 12 and 52 ms; in a
command 8 and 15 ms, its processes gone after 12 and 25 ms.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import serve
from crow_core.acp.transports import Transport, spawn
from crow_core.testing import Reply, ScriptedServer

SLEEP = f"sleep {1_000_000 + os.getpid()}"
"""What the command leaves running; there is no other of that length."""
COMMAND = f"{SLEEP} & setsid {SLEEP} & sh -c 'trap \"\" TERM; echo started; {SLEEP}; true'"
PROCESSES = 3


class Client(serve.Client):
    """Hears of one session, also among many."""

    def __init__(self, wire: Transport) -> None:
        super().__init__(wire)
        self.watched = b""
        self.heard = asyncio.Event()

    async def read(self) -> None:
        while line := await self.wire.readline():
            if b'"method":"session/update"' not in line:
                message = json.loads(line)
                self.waiting.pop(message["id"]).set_result(message["result"])
            elif self.watched in line and b'_chunk"' in line:
                self.heard.set()

    async def open(self, cwd: str) -> str:
        session = (await self.ask("session/new", {"cwd": cwd, "mcpServers": []}))["sessionId"]
        await self.ask("session/set_mode", {"sessionId": session, "modeId": "yolo"})
        return session

    def say(self, session: str, text: str) -> "asyncio.Future[dict[str, str]]":
        prompt = [{"type": "text", "text": text}]
        return asyncio.ensure_future(self.ask("session/prompt", {"sessionId": session, "prompt": prompt}))

    async def cancel(self, session: str, turn: "asyncio.Future[dict[str, str]]") -> float:
        """Seconds until the turn was answered."""
        began = monotonic()
        notification = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session}}
        self.wire.write(json.dumps(notification).encode() + b"\n")
        if (answer := await turn)["stopReason"] != "cancelled":
            raise SystemExit(f"The turn was not cancelled: {answer}")
        return monotonic() - began


@asynccontextmanager
async def agent(url: str) -> AsyncGenerator[tuple[Client, int, str]]:
    """A client of a new `crow acp`, its process id, and a folder."""
    with tempfile.TemporaryDirectory() as home:
        env = os.environ | {"CROW_HOME": f"{home}/crow", "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key"}
        crow = await spawn(sys.executable, ["-m", "crow_cli", "acp"], env | {"CROW_MODEL": "timed"})
        client = Client(crow)
        await client.ask("initialize", {"protocolVersion": 1})
        yield client, crow.process.pid, home
        await crow.close()
        client.reading.cancel()


async def in_streams(url: str, others: int, times: int) -> None:
    """Cancel a reply at its first words, beside so many others."""
    async with agent(url) as (client, _, home):
        turns = [client.say(await client.open(home), "Say 1000000 words.") for _ in range(others)]
        session = await client.open(home)
        client.watched, took = session.encode(), list[float]()
        for _ in range(times):
            turn = client.say(session, "Say 1000000 words.")
            client.heard.clear()
            await client.heard.wait()
            took.append(await client.cancel(session, turn))
        for turn in turns:
            turn.cancel()
    print(f"in a reply, beside {others} others: answered", summary(took))


async def in_commands(times: int) -> None:
    """Cancel a command that has started others."""

    def script(request: dict[str, Any]) -> Reply:
        return Reply(tool_calls=[{"name": "terminal", "arguments": {"command": COMMAND}}])

    answered, gone = list[float](), list[float]()
    async with ScriptedServer(script) as server, agent(server.url) as (client, _, home):
        session = await client.open(home)
        for _ in range(times):
            turn = client.say(session, "go")
            await until(PROCESSES)
            began = monotonic()
            answered.append(await client.cancel(session, turn))
            await until(0)
            gone.append(monotonic() - began)
    print("in a command: answered", summary(answered))
    print("    its processes gone", summary(gone))


async def until(count: int) -> None:
    """Wait until so many of the command's processes run."""
    while running() != count:
        await asyncio.sleep(0.005)


def running() -> int:
    name = SLEEP.replace(" ", "\0").encode() + b"\0"
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            found += (process / "cmdline").read_bytes() == name
    return found


def summary(took: Sequence[float]) -> str:
    ordered = sorted(took)
    p50, p99, most = (ordered[int((len(took) - 1) * share)] * 1000 for share in (0.5, 0.99, 1))
    return f"after {p50:.0f} ms (median), {p99:.0f} ms (p99), {most:.0f} ms (most) of {len(took)} times"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--others", type=int, nargs="*", default=[0, 99])
    args = parser.parse_args()
    model = await asyncio.create_subprocess_exec(sys.executable, serve.__file__, "--model", stdout=PIPE)
    assert model.stdout
    url = f"http://127.0.0.1:{(await model.stdout.readline()).decode().strip()}/v1"
    print(f"load average {os.getloadavg()[0]:.1f}")
    try:
        for others in args.others:
            await in_streams(url, others, args.times)
    finally:
        model.kill()
        await model.wait()
    await in_commands(args.times)


if __name__ == "__main__":
    asyncio.run(main())
