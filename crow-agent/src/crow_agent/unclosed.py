"""Connections of agents that a program drops without closing them.

asyncio keeps no task alive by itself. Without this module, the garbage collector would take the tasks of such a
connection in the middle of their work. The event loop would then print "Task was destroyed but it is pending".
"""

import asyncio
import weakref
from contextlib import AsyncExitStack

OPEN: dict[AsyncExitStack, asyncio.AbstractEventLoop] = {}
"""The open connections, each with its event loop. It keeps their tasks alive."""
CLOSING: set["asyncio.Task[None]"] = set()
"""The tasks that close connections of dropped agents."""


def close_when_dropped(owner: object, stack: AsyncExitStack) -> None:
    """Keep a connection until `close` has closed it, which happens in any case once its owner is garbage.

    A connection whose event loop has ended is forgotten: the end of the loop has closed it.
    """
    for each in [each for each, loop in OPEN.items() if loop.is_closed()]:
        del OPEN[each]
    OPEN[stack] = asyncio.get_running_loop()
    weakref.finalize(owner, close_soon, weakref.ref(stack)).atexit = False


async def close(stack: AsyncExitStack) -> None:
    """Close a connection."""
    try:
        await stack.aclose()
    finally:
        OPEN.pop(stack, None)


def close_soon(reference: "weakref.ref[AsyncExitStack]") -> None:
    """Close a connection in its event loop. The garbage collector calls it, in any thread."""
    stack = reference()
    if stack is None or (loop := OPEN.get(stack)) is None or loop.is_closed():
        return

    def start() -> None:
        task = loop.create_task(close(stack))
        CLOSING.add(task)
        task.add_done_callback(CLOSING.discard)

    loop.call_soon_threadsafe(start)
