"""Compare the CPU time of a streamed chunk in both versions of ACP, from the model to the line that is sent.

Run with `uv run python benchmarks/versions.py`. The rounds of two clients alternate in one process, and no socket is
measured. Compare the ratios: the absolute times depend on the machine. The ratio of two clients of version 1 shows how
far a ratio is off by chance.
"""

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator
from itertools import product
from statistics import median
from time import process_time
from typing import Any

from crow_core.acp.transports import MemoryTransport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.messages.message import Delta

CHUNKS = 4_000
ROUNDS = 15
INFO = {"name": "bench", "version": "1"}
INITIALIZE: dict[int, dict[str, Any]] = {
    1: {"protocolVersion": 1, "clientInfo": INFO, "clientCapabilities": {}},
    2: {"protocolVersion": 2, "info": INFO, "capabilities": {}},
}


class Talker:
    """A model that says words, in one kind of chunks."""

    name = "talker"
    window: int | None = None

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def stream(self, request: Any) -> AsyncIterator[Delta]:
        for _ in range(CHUNKS):
            yield {self._kind: " word"}
        yield {"content": "."}
        yield {"finish_reason": "stop"}


class Client:
    """A client that reads lines without decoding those of chunks."""

    def __init__(self, version: int, kind: str) -> None:
        self.wire, theirs = memory_pair()
        self.crow = Crow(Talker(kind))
        self.serving = asyncio.ensure_future(AcpAgent(theirs, self.crow).serve())
        self.version = version
        self.costs: list[float] = []
        self.session = ""

    async def open(self) -> None:
        await ask(self.wire, 1, "initialize", INITIALIZE[self.version])
        opened = await ask(self.wire, 2, "session/new", {"cwd": "/", "mcpServers": []})
        self.session = opened["result"]["sessionId"]

    async def measure(self) -> None:
        prompt = {"sessionId": self.session, "prompt": [{"type": "text", "text": "go"}]}
        send(self.wire, 3, "session/prompt", prompt)
        chunks = 0
        gc.collect()
        started = process_time()
        while True:
            line = await self.wire.readline()
            chunks += b"_chunk" in line
            if b'"stopReason"' in line:
                break
        self.costs.append((process_time() - started) / chunks * 1e6)


def send(wire: MemoryTransport, id: int, method: str, params: Any) -> None:
    wire.write(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n")


async def ask(wire: MemoryTransport, id: int, method: str, params: Any) -> Any:
    send(wire, id, method, params)
    while (message := json.loads(await wire.readline())).get("id") != id:
        pass
    return message


async def main() -> None:
    for kind, version in product(("content", "reasoning_content"), (1, 2)):
        clients = [Client(1, kind), Client(version, kind)]
        for client in clients:
            await client.open()
            await client.measure()  # a warm-up
            client.costs.clear()
        for number in range(ROUNDS):
            for client in clients if number % 2 else clients[::-1]:
                await client.measure()
        first, second = ([*client.costs] for client in clients)
        ratio = median(two / one for one, two in zip(first, second, strict=True))
        least = f"{min(first):5.2f} and {min(second):5.2f} µs a chunk"
        sys.stdout.write(
            f"{kind:18} versions 1 and {version}: {least}, ratio of the least {min(second) / min(first):.3f}, "
            f"median of the ratios {ratio:.3f}\n"
        )
        for client in clients:
            await client.wire.close()
            await client.serving
            await client.crow.shut_down()


if __name__ == "__main__":
    asyncio.run(main())
