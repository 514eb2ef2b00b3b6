"""Measure the cost of MCP: a turn with a tool call, ten slow servers, five hundred tools.

Run with `uv run python benchmarks/mcp_servers.py`. Processor time is that of this process alone: the servers and the
model's endpoint are others. Compare the ratios: absolute times are the machine's.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from statistics import median
from time import perf_counter, process_time
from typing import Any

from crow_core.acp.schema import McpServer
from crow_core.app import Crow
from crow_core.mcp.sdk_import import import_sdk
from crow_core.mcp.server import Server
from crow_core.models.chat_model import ChatModel
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import to_deltas
from crow_testing.servers import make_faulty_server

TURNS = 200
ROUNDS = 5
SLEEPS = [0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 1.25, 1.5, 1.75, 2.0]
"""Seconds that each of the ten servers sleeps before it listens."""

ENDPOINT = """
import asyncio
from crow_core.testing import Reply, ScriptedServer

async def main():
    async with ScriptedServer(lambda request: Reply("Hello.")) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
"""A model endpoint that runs in a process of its own."""


class Fixed:
    """A model that answers a user message with one reply and a tool result with another, at hardly any cost."""

    name, window = "fixed", None

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked = 0

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        self.asked += 1
        answered = request["messages"][-1]["role"] == "tool"
        for delta in to_deltas(Reply("Done.") if answered else self.reply, self.asked):
            yield delta
        yield {"finish_reason": "stop" if answered or not self.reply.tool_calls else "tool_calls", "usage": None}


def server(name: str, sleep: float = 0.0) -> McpServer:
    """Return a server over stdio whose tool `pid` answers at once."""
    good = make_faulty_server("hangs in a call", name)  # the fault shows in its other tool
    if not sleep:
        return good
    args = ["-c", f'sleep {sleep}; exec "$0" "$@"', str(good.command), *(good.args or ())]
    return McpServer(name=name, command="/bin/sh", args=args, env=[])


async def turns(servers: list[McpServer], reply: Reply) -> float:
    """Return the processor seconds of a turn with `reply` as its first reply."""

    async with connect(Crow(Fixed(reply))) as editor:
        session = await editor.new_session("/", servers)
        await editor.prompt(session.session_id, "warm up")
        costs: list[float] = []
        for _ in range(TURNS):
            begun = process_time()
            await editor.prompt(session.session_id, "go")
            costs.append(process_time() - begun)
    return median(costs)


async def starts() -> tuple[float, float]:
    """Return the seconds until a session with ten servers can be used, and until all its servers can."""
    async with connect(crow := Crow(ScriptedModel([]))) as editor:
        begun = perf_counter()
        await editor.new_session("/", [server(f"s{number}", sleep) for number, sleep in enumerate(SLEEPS)])
        usable = perf_counter() - begun
        (session,) = crow.sessions.values()
        await asyncio.gather(*(each.list() for each in session.toolbox.servers))
        return usable, perf_counter() - begun


async def request_cost(url: str, tools: int) -> float:
    """Return the processor seconds of a turn that is one request with this many tools."""
    schema = {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": f"The {name} of the thing."} for name in ("path", "name", "mode")
        },
        "required": ["path"],
    }
    definitions = [
        {"name": f"tool_{number}", "description": "Does a thing with a file. " * 4, "inputSchema": schema}
        for number in range(tools)
    ]
    crow = Crow(
        ChatModel(name="scripted", base_url=url), servers=[Server("many", None, definitions=definitions, shared=True)]
    )
    async with connect(crow) as editor:
        costs: list[float] = []
        for _ in range(30):
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "warm up")
            begun = process_time()
            await editor.prompt(session.session_id, "go")
            costs.append(process_time() - begun)
    return median(costs)


async def main() -> None:
    import_sdk()
    call = Reply(tool_calls=[{"name": "s_pid", "arguments": {}}])
    plain, tool = [], []
    for _ in range(ROUNDS):
        plain.append(await turns([server("s")], Reply("Done.")))
        tool.append(await turns([server("s")], call))
    print(f"{'a turn without a tool':44} {median(plain) * 1e3:7.2f} ms CPU")
    print(f"{'a turn with a call over stdio':44} {median(tool) * 1e3:7.2f} ms CPU")
    usable, ready = await starts()
    print(f"{'ten servers: session usable':44} {usable * 1e3:7.0f} ms")
    print(f"{f'ten servers: all ready, the slowest in {max(SLEEPS)} s':44} {ready * 1e3:7.0f} ms")
    endpoint = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDPOINT, stdout=asyncio.subprocess.PIPE)
    assert endpoint.stdout
    url = (await endpoint.stdout.readline()).decode().strip()
    few, many = [], []
    for _ in range(ROUNDS):
        few.append(await request_cost(url, 5))
        many.append(await request_cost(url, 500))
    endpoint.kill()
    await endpoint.communicate()
    print(f"{'a request with 5 tools':44} {median(few) * 1e3:7.2f} ms CPU")
    print(f"{'a request with 500 tools':44} {median(many) * 1e3:7.2f} ms CPU")


if __name__ == "__main__":
    asyncio.run(main())
