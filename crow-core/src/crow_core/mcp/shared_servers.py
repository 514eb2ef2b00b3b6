"""The servers that several sessions of an event loop use."""

import asyncio
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary, WeakValueDictionary

from crow_core.mcp.running_calls import ASKING
from crow_core.mcp.server import Server

SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Hashable, Server]] = WeakKeyDictionary()
"""The servers that sessions of an event loop may share, by their definitions."""


def share_server(definition: Hashable, make: Callable[[], Server], *, must_name_calls: bool = False) -> Server:
    """Return the server with this definition that other sessions of the event loop use, or make it.

    `must_name_calls` refuses a server whose questions may reach the wrong session.
    """
    loop = asyncio.get_running_loop()
    if definition in ASKING.get(loop, ()):
        return make()
    servers = SHARED.setdefault(loop, WeakValueDictionary())
    server = servers.get(definition)
    if server is None or server.closed or (must_name_calls and not server.names_calls):
        servers[definition] = server = make()
        server.calls.definition = definition
    return server
