"""Compare the CPU time of a streamed chunk over WebSocket and over streamable HTTP, in the server's process.

Run with `uv run python benchmarks/transports.py`. The client is another process, so that its time does not count. The
rounds of both transports alternate; compare the ratio. `--pace` is the time between two chunks in milliseconds, 0 for a
model that does not wait.
"""

import argparse
import asyncio
import json
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from statistics import median
from time import process_time
from typing import Any

from crow_core.acp.access_token import AccessPolicy
from crow_core.acp.remote_agent import connect
from crow_core.acp.websocket import WebSocketServer
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.messages.message import Delta

ROUNDS = 9
TOKEN = "a-token-of-32-characters-or-so.~"


class Talker:
    """A model that says words."""

    name = "talker"
    window: int | None = None

    def __init__(self, chunks: int, pace: float) -> None:
        self._chunks, self._pace = chunks, pace

    async def stream(self, request: Any) -> AsyncIterator[Delta]:
        for _ in range(self._chunks):
            yield {"content": " word"}
            if self._pace:
                await asyncio.sleep(self._pace)
        yield {"finish_reason": "stop"}


async def prompt(url: str) -> None:
    """Be the client: prompt whenever a line comes on standard input, and say when the turn has ended."""
    wire = await connect(url, TOKEN)
    id = 0

    async def ask(method: str, params: Any) -> Any:
        nonlocal id
        id += 1
        wire.write(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n")
        mark = b'"id":%d,' % id
        while mark not in (line := await wire.readline())[:40]:
            pass
        return json.loads(line)["result"]

    await ask("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
    session = (await ask("session/new", {"cwd": "/", "mcpServers": []}))["sessionId"]
    while await asyncio.to_thread(sys.stdin.readline):
        await ask("session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": "go"}]})
        print("done", flush=True)
    await wire.close()


async def main(chunks: int, pace: float) -> None:
    crow = Crow(Talker(chunks, pace))
    policy = AccessPolicy(TOKEN, {"127.0.0.1"})
    server = WebSocketServer(policy, lambda wire: AcpAgent(wire, crow).serve(), 8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.listen(listener)
        port = listener.getsockname()[1]
        clients: dict[str, asyncio.subprocess.Process] = {}
        costs: dict[str, list[float]] = {"ws": [], "http": []}
        for scheme in costs:
            command = (sys.executable, __file__, "--client", f"{scheme}://127.0.0.1:{port}/acp")
            clients[scheme] = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        for number in range(ROUNDS + 1):
            for scheme in sorted(costs, reverse=bool(number % 2)):
                client = clients[scheme]
                assert client.stdin
                assert client.stdout
                started = process_time()
                client.stdin.write(b"go\n")
                assert await client.stdout.readline() == b"done\n"
                costs[scheme].append((process_time() - started) / chunks * 1e6)
        for client in clients.values():
            await client.communicate(b"")
        await server.close()
    await crow.shut_down()
    websocket, http = (times[1:] for times in costs.values())  # the first round is a warm-up
    ratio = median(two / one for one, two in zip(websocket, http, strict=True))
    least = f"WebSocket {min(websocket):.1f}, HTTP {min(http):.1f} µs a chunk of CPU at least"
    sys.stdout.write(f"{chunks} chunks, {pace * 1000:g} ms apart: {least}; median of the ratios {ratio:.2f}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--chunks", type=int, default=3000)
    parser.add_argument("--pace", type=float, default=0)
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(prompt(arguments.client))
    else:
        asyncio.run(main(arguments.chunks, arguments.pace / 1000))
