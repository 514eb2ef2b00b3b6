"""How late updates are while many sessions stream at once, from the model's socket to the client's.

Run with `uv run python benchmarks/serve.py`. Three processes: a model that sends every session's reply in chunks, at a
steady pace, each with the time in it; crow, behind a WebSocket or on standard streams; and the client, this process.
Crow stores what it says, as always. One short turn comes before, so that all it needs is loaded, unless with `--cold`.

On two cores with a load of 0.5 to 2.6 beside it, most late in the first second and in the rest: standard streams 62 to
87 and 64 to 75 ms, cold 61 to 75 and 67 to 78 ms; 100 connections 61 to 97 and 83 to 89 ms.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

from crow_core.acp.remote_agent import connect
from crow_core.acp.transports import Transport, spawn

STAMP = re.compile(rb'"text":"<(\d+\.\d+)>')
CHUNK = '{{"choices":[{{"index":0,"delta":{{"content":"<{:.6f}> word"}}}}]}}'
END = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
TOO_LATE = 0.25  # seconds


async def model(pace: float) -> None:
    """Serve chat completions until killed: as many words as it is asked for. Says its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        words = re.search(rb"Say (\d+) words", await reader.readexactly(int(length[1]) if length else 0))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        start = monotonic()
        with suppress(ConnectionError):
            for number in range(int(words[1]) if words else 0):
                await asyncio.sleep(start + number * pace - monotonic())
                writer.write(f"data: {CHUNK.format(monotonic())}\n\n".encode())
                await writer.drain()
            writer.write(END.encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Client:
    """Counts what comes, and how late."""

    def __init__(self, wire: Transport) -> None:
        self.wire = wire
        self.late: list[tuple[float, float]] = []
        """When an update was sent by the model, and how much later it came."""
        self.ids = 0
        self.waiting: dict[int, asyncio.Future[dict[str, str]]] = {}
        self.reading = asyncio.ensure_future(self.read())

    async def read(self) -> None:
        while line := await self.wire.readline():
            if stamp := STAMP.search(line):
                sent = float(stamp[1])
                self.late.append((sent, monotonic() - sent))
            elif b'"id":' in line and b'"result":' in line:
                message = json.loads(line)
                self.waiting.pop(message["id"]).set_result(message["result"])

    async def ask(self, method: str, params: object) -> dict[str, str]:
        self.ids = id = self.ids + 1
        self.waiting[id] = asyncio.get_running_loop().create_future()
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        self.wire.write(json.dumps(request).encode() + b"\n")
        return await self.waiting[id]

    async def hear(self, words: int, cwd: str) -> None:
        """One new session's reply."""
        session = (await self.ask("session/new", {"cwd": cwd, "mcpServers": []}))["sessionId"]
        prompt = [{"type": "text", "text": f"Say {words} words."}]
        await self.ask("session/prompt", {"sessionId": session, "prompt": prompt})


@asynccontextmanager
async def agent(env: dict[str, str], connections: int) -> AsyncGenerator[tuple[int, list[Transport]]]:
    """Crow's process id, and the ways to it: its standard streams if there are to be no connections."""
    crow = (sys.executable, "-m", "crow_cli")
    if not connections:
        child = await spawn(crow[0], [*crow[1:], "acp"], env)
        yield child.process.pid, [child]
        await child.close()
        return
    options = ("--port", "0", "--max-connections", str(connections))
    process = await asyncio.create_subprocess_exec(*crow, "serve", *options, stdout=PIPE, env=env)
    assert process.stdout
    url, *_, token = (await process.stdout.readline()).decode().split()
    wires = [await connect(url, token) for _ in range(connections)]
    yield process.pid, list[Transport](wires)
    await asyncio.gather(*(wire.close() for wire in wires))
    process.terminate()
    await process.wait()


def seconds(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(env: dict[str, str], connections: int, sessions: int, words: int, cold: bool, cwd: str) -> None:
    async with agent(env, connections) as (pid, wires):
        clients = [Client(wire) for wire in wires]
        for client in clients:
            await client.ask("initialize", {"protocolVersion": 1})
        if not cold:
            await clients[0].hear(10, cwd)
            clients[0].late.clear()
        began, cpu = monotonic(), seconds(pid)
        await asyncio.gather(*(clients[number % len(clients)].hear(words, cwd) for number in range(sessions)))
        took, cpu = monotonic() - began, seconds(pid) - cpu
        for client in clients:
            client.reading.cancel()
    late = [one for client in clients for one in client.late]
    if len(late) != sessions * words:
        raise SystemExit(f"{len(late)} updates came instead of {sessions * words}")
    start = min(sent for sent, _ in late) + 1
    way = f"{connections} connections" if connections else "standard streams"
    print(f"{way}, {len(late) / took:.0f} updates/s, crow took {cpu / took:.0%} of a core")
    print("    the first second", summary([by for sent, by in late if sent < start]))
    print("    the rest        ", summary([by for sent, by in late if sent >= start]))


def summary(late: list[float]) -> str:
    late.sort()
    p50, p99, most = (late[int((len(late) - 1) * share)] * 1000 for share in (0.5, 0.99, 1))
    over = sum(one > TOO_LATE for one in late)
    return f"late by {p50:4.0f} ms (median), {p99:4.0f} ms (p99), {most:4.0f} ms (most); {over} by more than 250 ms"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--rate", type=float, default=50, help="chunks a second and session")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, nargs="*", default=[0, 1, 10, 100], help="0: standard streams")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--model", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        await model(1 / args.rate)
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--model", "--rate", str(args.rate)), stdout=PIPE
    )
    assert process.stdout
    port = (await process.stdout.readline()).decode().strip()
    print(f"{args.sessions} sessions at {args.rate:.0f} chunks a second each; load average {os.getloadavg()[0]:.1f}")
    try:
        for connections in args.connections:
            with tempfile.TemporaryDirectory() as home:
                env = os.environ | {"CROW_HOME": f"{home}/crow", "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1"}
                env |= {"OPENAI_API_KEY": "key", "CROW_MODEL": "timed"}
                await measure(env, connections, args.sessions, int(args.rate * args.seconds), args.cold, home)
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(main())
