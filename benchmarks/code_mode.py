"""Count the requests and tokens that code mode saves on twenty tasks, with a hundred tools of an MCP server.

Run with `uv run python benchmarks/code_mode.py`. Each task is done in three ways: by tool calls, by tool calls through
`tool_search`, and by one program. All have the same tools. The model is scripted and makes no mistakes in any way, so
this counts what each way needs at least. Tokens are estimated: four characters of JSON each.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.code_mode import code_mode
from crow_extensions.tool_search import tool_search
from fastmcp import FastMCP

TOOLS = 100
CUSTOMERS = ["ada", "alan", "barbara", "claude", "edsger", "grace", "john", "ken"]

Call = tuple[str, dict[str, Any]]


@dataclass
class Task:
    """A task: the calls that do it, in steps of calls that can be made at once, and the program that does it."""

    name: str
    steps: Sequence[Sequence[Call]]
    code: str


def make_shop() -> FastMCP:
    """Make a server with orders of customers, and with many tools that no task needs."""
    server = FastMCP("shop")

    @server.tool
    def list_customers() -> list[str]:
        """List the names of all customers."""
        return CUSTOMERS

    @server.tool
    def list_orders(customer: str, limit: int = 20) -> list[dict[str, Any]]:
        """List the orders of a customer, the latest first."""
        return [
            {"id": f"{customer}-{number}", "price": number * 7 % 50, "status": "late" if number % 5 == 0 else "sent"}
            for number in range(1, limit + 1)
        ]

    @server.tool
    def find_order(order: str) -> dict[str, Any]:
        """Return all that is known of an order: its items, its address, its history."""
        items = [{"item": f"thing {number}", "count": number, "weight": number * 1.5} for number in range(1, 9)]
        return {"id": order, "items": items, "address": "12 Long Street", "history": ["ordered", "paid", "packed"]}

    @server.tool
    def refund_order(order: str) -> str:
        """Give the money for an order back."""
        return f"refunded {order}"

    @server.tool
    def send_message(customer: str, text: str) -> str:
        """Send a customer a message."""
        return f"sent to {customer}: {text}"

    for number in range(TOOLS - 5):
        add_unused_tool(server, number)
    return server


def add_unused_tool(server: FastMCP, number: int) -> None:
    """Add a tool of ordinary size that no task needs."""

    @server.tool(name=f"report_{number}")
    def report(region: str, since: str, until: str, group_by: str = "day", limit: int = 100) -> str:
        """Make a report of the sales of a region between two days, grouped by day, week, customer or item."""
        return f"report {number} of {region}"


def orders_of(names: Sequence[str]) -> list[Call]:
    return [("list_orders", {"customer": name}) for name in names]


def make_tasks() -> list[Task]:
    """Make twenty tasks: five kinds, each for four numbers of things."""
    tasks: list[Task] = []
    for size in (2, 4, 6, 8):
        names = CUSTOMERS[:size]
        late = [f"{name}-5" for name in names]
        tasks += [
            Task(
                f"sum the prices of the orders of {size} customers",
                [orders_of(names)],
                f"sum(order['price'] for name in {names} for order in shop_list_orders(customer=name))",
            ),
            Task(
                f"refund the first late order of {size} customers",
                [orders_of(names), [("refund_order", {"order": order}) for order in late]],
                f"for name in {names}:\n"
                "    late = [each for each in shop_list_orders(customer=name) if each['status'] == 'late']\n"
                "    print(shop_refund_order(order=late[0]['id']))",
            ),
            Task(
                f"weigh the late orders of {size} customers",
                [orders_of(names), [("find_order", {"order": order}) for order in late]],
                f"for name in {names}:\n"
                "    late = [each for each in shop_list_orders(customer=name) if each['status'] == 'late'][:1]\n"
                "    for order in late:\n"
                "        items = shop_find_order(order=order['id'])['items']\n"
                "        print(name, sum(item['weight'] * item['count'] for item in items))",
            ),
            Task(
                f"write to {size} customers who have a late order",
                [
                    [("list_customers", {})],
                    orders_of(names),
                    [("send_message", {"customer": name, "text": "Your order is late."}) for name in names],
                ],
                f"for name in shop_list_customers()[:{size}]:\n"
                "    if any(order['status'] == 'late' for order in shop_list_orders(customer=name)):\n"
                "        shop_send_message(customer=name, text='Your order is late.')",
            ),
            Task(
                f"follow {size} orders, each found by the one before",
                [[("find_order", {"order": f"ada-{number}"})] for number in range(1, size + 1)],
                f"for number in range(1, {size + 1}):\n"
                "    order = shop_find_order(order=f'ada-{number}')\n"
                "print(order['history'][-1])",
            ),
        ]
    return tasks


def script_calls(task: Task, through: Callable[[Call], Call]) -> list[Reply]:
    """Script a model that makes the calls of a task, one reply a step."""
    replies: list[Reply] = []
    for step in task.steps:
        calls = [through((f"shop_{name}", arguments)) for name, arguments in step]
        replies.append(Reply(tool_calls=[Use(name=name, arguments=arguments) for name, arguments in calls]))
    return [*replies, Reply("Done.")]


def search_first(task: Task) -> list[Reply]:
    """Script a model that finds its tools with `tool_search`, and calls them with `call_tool`."""
    words = " ".join(dict.fromkeys(name.replace("_", " ") for step in task.steps for name, _ in step))
    search = Reply(tool_calls=[Use(name="tool_search", arguments={"query": words})])
    return [search, *script_calls(task, lambda call: ("call_tool", {"name": call[0], "arguments": call[1]}))]


def script_program(task: Task) -> list[Reply]:
    """Script a model that writes a program for a task."""
    return [Reply(tool_calls=[Use(name="run_program", arguments={"code": task.code})]), Reply("Done.")]


async def measure(task: Task, script: Callable[[Task], list[Reply]], prepare: Callable[[Crow], Crow]) -> list[int]:
    """Return the number of requests of a task, and the estimated tokens that they send and receive."""
    replies = script(task)
    model, shop = ScriptedModel(replies), make_shop()
    crow = prepare(Crow(model, servers=[Server("shop", lambda: shop, shared=True)]))
    crow.servers_wait = 60.0
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, f"Please {task.name}.")
    results = [message for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    failed = [result["content"] for result in results if "Traceback" in str(result["content"])]
    assert not failed, failed
    assert len(model.requests) == len(replies)
    sent = sum(len(json.dumps(request)) for request in model.requests)
    written = sum(len(json.dumps([*reply.tool_calls])) for reply in replies)
    return [len(model.requests), sent // 4, written // 4]


WAYS: dict[str, tuple[Callable[[Task], list[Reply]], Callable[[Crow], Crow]]] = {
    "all tools in each request": (lambda task: script_calls(task, lambda call: call), lambda crow: crow),
    "tool_search": (search_first, lambda crow: crow.use(tool_search)),
    "code mode": (script_program, lambda crow: crow.use(code_mode)),
}


async def main() -> None:
    tasks = make_tasks()
    print(f"{len(tasks)} tasks, {TOOLS} tools; tokens are estimated\n")
    print(f"{'':26} {'requests':>9} {'sent':>11} {'written':>9}")
    totals: dict[str, list[int]] = {}
    for way, (script, prepare) in WAYS.items():
        counts = [await measure(task, script, prepare) for task in tasks]
        totals[way] = [sum(column) for column in zip(*counts, strict=True)]
        requests, sent, written = totals[way]
        print(f"{way:26} {requests:9,} {sent:11,} {written:9,}")
    ours = totals["code mode"]
    for way in WAYS:
        if way != "code mode":
            ratios = [theirs / mine for theirs, mine in zip(totals[way], ours, strict=True)]
            print(f"\n{way} / code mode: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    asyncio.run(main())
